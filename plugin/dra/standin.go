package dra

import (
	"context"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/plugin"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/cdi"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/memlimits"
)

const checkpointFile = "gpu-node-agent.json"

type preparer struct {
	capabilities *health.Latest[memlimits.Capabilities]
	writer       *cdi.Writer
}

func newPreparer(o *Options, claims *health.Latest[Claims]) *preparer { return &preparer{} }
func (p *preparer) open(dir string) error                             { return nil }
func (p *preparer) needed() bool                                      { return false }
func (p *preparer) update(*plugin.Config, *health.Snapshot, *Pool)    {}
func (p *preparer) names() map[health.DeviceID]string                 { return nil }
func (p *preparer) remember(map[health.DeviceID]string) error         { return nil }
func (p *preparer) publishing() bool                                  { return false }
func (p *preparer) setPublishing(bool) error                          { return nil }
func (p *preparer) releasing(bool)                                    {}
func (p *preparer) run(ctx context.Context)                           { <-ctx.Done() }
func (p *preparer) client(kubernetes.Interface)                       {}
func (p *preparer) status(*Status)                                    {}
func (p *preparer) PrepareResourceClaims(ctx context.Context, claims []*resourceapi.ResourceClaim) (map[types.UID]kubeletplugin.PrepareResult, error) {
	return nil, nil
}
func (p *preparer) UnprepareResourceClaims(ctx context.Context, claims []kubeletplugin.NamespacedObject) (map[types.UID]error, error) {
	return nil, nil
}

var _ = time.Second
