package agent

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"

	"github.com/gpu-node-agent/gpu-node-agent/agent/kube"
	"github.com/gpu-node-agent/gpu-node-agent/agent/node"
	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/plugin"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/dra"
)

// offersAll reports whether every device is offered to pods, so that the startup taint can go.
func (a *Agent) offersAll() bool { return len(a.notOffered()) == 0 }

// notOffered returns every reason why not all devices are offered to pods yet, none if they are.
func (a *Agent) notOffered() []string {
	reasons := a.notReady()
	switch c := a.pluginConfig.Load(); {
	case !c.Enabled: // another plugin offers them
		reasons = append(reasons, notListed(a.snapshots.Load())...)
	case c.ServesDRA():
		reasons = append(reasons, notPublished(a.dra.Status())...)
	default:
		reasons = append(reasons, notAudited(a.plugin.Status())...)
	}
	return reasons
}

// startupTaintReasons returns why the configured startup taint stays, none if it may go or was removed before.
func (a *Agent) startupTaintReasons() []string {
	if !startupTaintStays(a.nodeConfig.Load().StartupTaint, a.nodeWriter.Status().RemovedTaint) {
		return nil
	}
	return a.notOffered()
}

// startupTaintStays reports whether the configured startup taint may be on the node. Once it was removed, it stays away when devices are
// not offered for a moment, as after each change of a list that the kubelet has.
func startupTaintStays(configured string, removed corev1.Taint) bool {
	t, err := node.ParseTaint(configured)
	return err == nil && !t.MatchTaint(&removed)
}

// nodeWarnings returns what of the Node object is not as configured.
func nodeWarnings(s kube.NodeStatus, startupTaint []string) (all []string) {
	for _, part := range []struct{ name, err string }{
		{"labels", s.LabelsErr},
		{"NodeFeature", s.FeatureErr},
		{"taints", s.TaintsErr},
		{"condition", s.ConditionErr},
		{"startup taint stays", strings.Join(startupTaint, "; ")},
	} {
		if part.err != "" {
			all = append(all, "node "+part.name+": "+part.err)
		}
	}
	return all
}

// notListed returns why another plugin has nothing to offer.
func notListed(s *health.Snapshot) []string {
	if s != nil && slices.ContainsFunc(s.Devices, func(d health.DeviceState) bool {
		return d.Device.Kind == health.KindGPU && d.Sample.Presence == health.Present
	}) {
		return nil
	}
	return []string{"the driver lists no GPU"}
}

// notAudited returns why the kubelet may count other devices than the plugin has.
func notAudited(s plugin.Status) (reasons []string) {
	devices := 0
	for _, r := range s.Resources {
		devices += r.Devices
		if r.Registered && !r.Audited { // web.NotReady has those that are not registered
			why := cmp.Or(s.AuditErr, "the kubelet has not listed the devices that it was sent")
			reasons = append(reasons, fmt.Sprintf("plugin %s: not audited: %s", r.Name, why))
		}
	}
	if devices == 0 {
		reasons = append(reasons, "plugin: no device is offered")
	}
	return reasons
}

// notPublished returns why the scheduler may not have the devices for claims, or the kubelet not the driver.
func notPublished(s dra.Status) (reasons []string) {
	if !s.Enabled || s.Handover {
		reasons = append(reasons, "dra: the devices are being handed over")
	}
	if !s.Registered {
		reasons = append(reasons, "dra: the kubelet has not accepted the driver")
	}
	if s.Behind || s.Published.IsZero() {
		reasons = append(reasons, "dra: the devices are not published: "+cmp.Or(s.PublishErr, "the API server does not have all of them yet"))
	}
	if s.Devices == 0 {
		reasons = append(reasons, "dra: no device is offered")
	}
	return reasons
}
