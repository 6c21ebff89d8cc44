package plugin

import (
	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/podresources"
)

// Handover is whether an API that does not serve the node's devices has released them, so that another may serve them. Pods of two APIs
// could get one device twice, because neither the kubelet nor the scheduler compares them.
type Handover struct {
	Released bool
	Reason   string // why not; empty if it has
}

// SetDRA sets where the plugin finds whether dynamic resource allocation has released the devices. Call it before Run. Without it, it has.
func (p *Plugin) SetDRA(released *health.Latest[Handover]) { p.dra = released }

// Released holds whether the plugin has released the devices: with plugin.api dra, when no pod holds a device that it allocated and the
// kubelet lists none.
func (p *Plugin) Released() *health.Latest[Handover] { return &p.released }

// SetClaims sets how the devices of claims are found in the kubelet's pod resources. Call it before Run. Without it, claims have none.
func (p *Plugin) SetClaims(resolve podresources.ClaimResolver) { p.claims = resolve }
