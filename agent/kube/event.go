package kube

import (
	"fmt"
	"slices"
	"time"

	"github.com/gpu-node-agent/gpu-node-agent/health"
)

// The reasons of events, and their types.
const (
	eventUnhealthy = "GPUUnhealthy"
	eventDegraded  = "GPUDegraded"
	eventRecovered = "GPURecovered"
	eventXID       = "XID"

	typeNormal  = "Normal"
	typeWarning = "Warning"
)

// object is what an event is about: a pod, or the node if there is no namespace.
type object struct{ namespace, name string }

// happening is something that an event tells. Those with the same key are one that happened again.
type happening struct {
	key         happeningKey
	typ         string
	message     string
	count       uint64
	first, last time.Time
	name        string // of the event, once there was an attempt to write it: a second one makes no second event
}

type happeningKey struct {
	object object
	reason string
	device health.DeviceID
	cause  string
}

// happenings returns what has happened between two snapshots' devices, for the node and for the pods that
// hold the device. A device that was not there before counts as having been healthy. What a MIG device
// has from its GPU is told to its own pods, and to the node once, as the GPU's.
func happenings(before, after []health.DeviceState, node string, holders func(health.DeviceID) []Pod, now time.Time) []happening {
	var all []happening
	tell := func(objects []object, typ, reason string, d health.Device, cause, message string, count uint64) {
		for _, o := range objects {
			all = append(all, happening{
				key: happeningKey{o, reason, d.ID, cause}, typ: typ, message: cut(message, maxMessage),
				count: count, first: now, last: now,
			})
		}
	}
	for _, c := range health.Changes(before, after) {
		switch c.Kind {
		case health.ChangeXID:
			x := health.LookupXID(c.XID)
			tell(append([]object{{name: node}}, podsOf(holders, after, c.Device.ID, true)...), typeWarning, eventXID, c.Device,
				fmt.Sprint(c.XID), fmt.Sprintf("XID %d of %s: %s; %s", c.XID, deviceName(c.Device), x.Name, x.Action.Advice()), c.New)
		case health.ChangeState:
			typ, reason, cause, message := stateEvent(c)
			if reason == "" {
				continue
			}
			objects := podsOf(holders, after, c.Device.ID, false)
			if c.Device.Kind == health.KindGPU || !inherited(c.Now) && !inherited(c.Was) {
				objects = append([]object{{name: node}}, objects...)
			}
			tell(objects, typ, reason, c.Device, cause, message, 1)
		case health.ChangeFound, health.ChangeGone:
		}
	}
	return all
}

// stateEvent returns the event of a change of a device's verdict. The reason is "" if the change needs none.
func stateEvent(c health.Change) (typ, reason, cause, message string) {
	cause = c.Now.Cause()
	if c.Now.State == c.Was.State && slices.Contains(c.Was.Causes(), cause) {
		return "", "", "", ""
	}
	now := &health.DeviceState{Device: c.Device, Verdict: c.Now}
	switch {
	case c.Now.State == health.Unhealthy:
		return typeWarning, eventUnhealthy, cause, sentence(now)
	case c.Now.State == health.Degraded:
		return typeWarning, eventDegraded, cause, sentence(now)
	case c.Now.State == health.Healthy && c.Was.State > health.Healthy:
		return typeNormal, eventRecovered, c.Was.Cause(), fmt.Sprintf("%s is healthy again; cleared: %s", deviceName(c.Device), causes(c.Was))
	}
	return "", "", "", ""
}

// podsOf returns the pods that hold a device, each once, and with parts those that hold a part of it.
func podsOf(holders func(health.DeviceID) []Pod, devices []health.DeviceState, id health.DeviceID, parts bool) []object {
	pods := holders(id)
	for i := range devices {
		if parts && devices[i].Device.Parent == id {
			pods = append(slices.Clip(pods), holders(devices[i].Device.ID)...)
		}
	}
	var all []object
	for _, p := range pods {
		if o := (object{p.Namespace, p.Name}); !slices.Contains(all, o) {
			all = append(all, o)
		}
	}
	return all
}
