package plugin

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/deviceid"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/podresources"
)

// OtherPlugins returns the number of devices of this node that the kubelet may allocate under resources that are not ours, by resource. It
// asks no other plugin: a second ListAndWatch takes health events of NVIDIA's plugin from the kubelet, and restarts GKE's. The snapshot may
// be nil: then UUIDs count, and every ID of a resource below nvidia.com/.
func (c Config) OtherPlugins(allocatable map[string][]string, ours func(resource string) bool, snap *health.Snapshot) map[string]int {
	others := make(map[string]int)
	var isDevice podresources.Resolver
	for resource, ids := range allocatable {
		if ours(resource) {
			continue
		}
		if isDevice == nil {
			isDevice = newResolver(c, snap)
		}
		devices := make(map[health.DeviceID]bool)
		for _, id := range ids {
			device, ok := isDevice(resource, id)
			if !ok && snap == nil && strings.HasPrefix(resource, "nvidia.com/") {
				device, ok = deviceid.Parse(id).Device(), true
			}
			if ok {
				devices[device] = true
			}
		}
		if len(devices) > 0 {
			others[resource] = len(devices)
		}
	}
	return others
}

// CanServe reports whether the plugin may serve a resource, on a node with the devices for it.
func (c Config) CanServe(resource string) bool {
	return slices.Contains(c.resourceNames(), resource) || c.MIGStrategy == MIGMixed && strings.HasPrefix(resource, c.migPrefix())
}

// OtherPlugins returns the number of devices of this node that other device plugins serve, by resource, as of the kubelet's last answer;
// none while plugin.enabled is false or another agent serves. It may be called from any goroutine.
func (p *Plugin) OtherPlugins() map[string]int {
	cfg, answer := p.cfg.Load(), p.pods.Allocatable.Load()
	if cfg == nil || !cfg.Enabled || answer == nil || answer.Err != "" {
		return nil
	}
	if lock := p.lock.In(cfg.KubeletDir); !lock.Held {
		return nil
	}
	var ours []string
	for _, r := range p.layouts.current().resources {
		ours = append(ours, r.Name)
	}
	p.mu.Lock()
	stoppedAt := p.stoppedAt
	for _, r := range p.running {
		ours = append(ours, r.resource)
	}
	p.mu.Unlock()
	if answer.At.Before(stoppedAt.Add(p.timing.settle)) { // it may have our own
		return nil
	}
	return cfg.OtherPlugins(answer.IDs, func(resource string) bool { return slices.Contains(ours, resource) }, p.snapshots.Load())
}

// OtherPluginTexts describes other plugins, see Status.OtherPlugins.
func OtherPluginTexts(others map[string]int) (texts []string) {
	for _, resource := range slices.Sorted(maps.Keys(others)) {
		texts = append(texts, fmt.Sprintf(
			"another device plugin serves %d devices of this node as %s, so both can give them to pods; remove it from this node, "+
				"or set plugin.enabled to false", others[resource], resource))
	}
	return texts
}
