package view

import (
	"cmp"
	"slices"

	"github.com/gpu-node-agent/gpu-node-agent/health"
)

// NotOffered returns every reason why not all devices are offered to pods yet, none if they are, with the reasons for which the agent is
// unready first. It needs the snapshot, its maximum age, the plugin with its configuration, and dynamic resource allocation.
func (v *View) NotOffered() []string {
	reasons := v.unready()
	switch c := &v.PluginConfig; {
	case !c.Enabled: // another plugin offers them
		v.addNotListed(&reasons)
	case c.ServesDRA():
		v.addNotPublished(&reasons)
	default:
		v.addNotAudited(&reasons)
	}
	return reasons.Texts(Unready)
}

// StartupTaintReasons returns why the configured startup taint stays; none if it can be removed, or was found absent.
func (v *View) StartupTaintReasons() []string {
	if !v.StartupTaint {
		return nil
	}
	return v.NotOffered()
}

// addNotListed adds why another plugin has nothing to offer.
func (v *View) addNotListed(reasons *Problems) {
	reached := func(d health.DeviceState) bool {
		return d.Device.Kind == health.KindGPU && d.Sample.Presence == health.Present
	}
	if v.Snapshot == nil || !slices.ContainsFunc(v.Snapshot.Devices, reached) {
		reasons.add(PartSource, Unready, "the driver lists no GPU", "")
	}
}

// addNotAudited adds why the kubelet may count other devices than the plugin offers.
func (v *View) addNotAudited(reasons *Problems) {
	devices := 0
	for i := range v.Plugin.Resources {
		r := &v.Plugin.Resources[i]
		devices += r.Devices
		if r.Registered && !r.Audited { // unready has the resources that are not registered
			why := cmp.Or(v.Plugin.AuditErr, "the kubelet has not listed the devices that it was sent")
			reasons.add(PartPlugin, Unready, r.Name+": not audited: "+why, "")
		}
	}
	if devices == 0 {
		reasons.add(PartPlugin, Unready, "no device is offered", "")
	}
}

// addNotPublished adds why the scheduler may lack devices for claims, or why the kubelet may lack the driver.
func (v *View) addNotPublished(reasons *Problems) {
	d := &v.DRA
	if !d.Enabled || d.Handover {
		reasons.add(PartDRA, Unready, "the devices are being handed over", "")
	}
	if !d.Registered {
		reasons.add(PartDRA, Unready, "the kubelet has not accepted the driver", "")
	}
	if d.Behind || d.Published.IsZero() {
		why := cmp.Or(d.PublishErr, "the API server does not have all of them yet")
		reasons.add(PartDRA, Unready, "the devices are not published: "+why, "")
	}
	if d.Devices == 0 {
		reasons.add(PartDRA, Unready, "no device is offered", "")
	}
}
