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

// offersAll reports whether every device is offered to pods, so that the startup taint can be removed.
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

// startupTaintReasons returns why the configured startup taint stays; none if it can be removed, or was found absent.
func (a *Agent) startupTaintReasons() []string {
	if !startupTaintMayRemain(a.nodeConfig.Load().StartupTaint, a.nodeWriter.Status().AbsentStartupTaint) {
		return nil
	}
	return a.notOffered()
}

// startupTaintMayRemain reports whether the configured startup taint may be on the node. After a check did not find it, it is reported no
// more: devices are not offered for a moment after each change of a list that the kubelet has.
func startupTaintMayRemain(configured string, absent corev1.Taint) bool {
	t, err := node.ParseTaint(configured)
	return err == nil && !t.MatchTaint(&absent)
}

// nodeWarnings returns why the Node object and the NodeFeature are not as configured.
func nodeWarnings(s kube.NodeStatus, startupTaintReasons []string) (all []string) {
	for _, part := range []struct{ name, err string }{
		{"labels", s.LabelsErr},
		{"NodeFeature", s.FeatureErr},
		{"taints", s.TaintsErr},
		{"condition", s.ConditionErr},
		{"startup taint stays", strings.Join(startupTaintReasons, "; ")},
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

// notAudited returns why the kubelet may count other devices than the plugin offers.
func notAudited(s plugin.Status) (reasons []string) {
	devices := 0
	for _, r := range s.Resources {
		devices += r.Devices
		if r.Registered && !r.Audited { // web.NotReady has the resources that are not registered
			why := cmp.Or(s.AuditErr, "the kubelet has not listed the devices that it was sent")
			reasons = append(reasons, fmt.Sprintf("plugin %s: not audited: %s", r.Name, why))
		}
	}
	if devices == 0 {
		reasons = append(reasons, "plugin: no device is offered")
	}
	return reasons
}

// notPublished returns why the scheduler may lack devices for claims, or why the kubelet may lack the driver.
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
