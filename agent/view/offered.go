package view

import (
	"cmp"
	"slices"

	"github.com/gpu-node-agent/gpu-node-agent/health"
)

// NotOffered returns every reason why not all devices are offered to pods yet, none if they are. It needs the snapshot, its maximum age,
// the plugin with its configuration, and dynamic resource allocation.
func (v *View) NotOffered() []string { return append(v.unready().Texts(Unready), v.notOffered()...) }

// StartupTaintReasons returns why the configured startup taint stays; none if it can be removed, or was found absent.
func (v *View) StartupTaintReasons() []string {
	if !v.StartupTaint {
		return nil
	}
	return v.NotOffered()
}

// notOffered returns the reasons for which the agent is not unready.
func (v *View) notOffered() []string {
	switch c := &v.PluginConfig; {
	case !c.Enabled: // another plugin offers them
		return v.notListed()
	case c.ServesDRA():
		return v.notPublished()
	}
	return v.notAudited()
}

// notListed returns why another plugin has nothing to offer.
func (v *View) notListed() []string {
	reached := func(d health.DeviceState) bool {
		return d.Device.Kind == health.KindGPU && d.Sample.Presence == health.Present
	}
	if v.Snapshot == nil || !slices.ContainsFunc(v.Snapshot.Devices, reached) {
		return []string{"source: the driver lists no GPU"}
	}
	return nil
}

// notAudited returns why the kubelet may count other devices than the plugin offers.
func (v *View) notAudited() (reasons []string) {
	devices := 0
	for i := range v.Plugin.Resources {
		r := &v.Plugin.Resources[i]
		devices += r.Devices
		if r.Registered && !r.Audited { // unready has the resources that are not registered
			why := cmp.Or(v.Plugin.AuditErr, "the kubelet has not listed the devices that it was sent")
			reasons = append(reasons, "plugin: "+r.Name+": not audited: "+why)
		}
	}
	if devices == 0 {
		reasons = append(reasons, "plugin: no device is offered")
	}
	return reasons
}

// notPublished returns why the scheduler may lack devices for claims, or why the kubelet may lack the driver.
func (v *View) notPublished() (reasons []string) {
	d := &v.DRA
	if !d.Enabled || d.Handover {
		reasons = append(reasons, "dra: the devices are being handed over")
	}
	if !d.Registered {
		reasons = append(reasons, "dra: the kubelet has not accepted the driver")
	}
	if d.Behind || d.Published.IsZero() {
		reasons = append(reasons, "dra: the devices are not published: "+cmp.Or(d.PublishErr, "the API server does not have all of them yet"))
	}
	if d.Devices == 0 {
		reasons = append(reasons, "dra: no device is offered")
	}
	return reasons
}
