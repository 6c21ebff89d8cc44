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

// object is the object that an event involves: a pod, or the node if the namespace is empty.
type object struct{ namespace, name string }

// event is a change of a device, for one object. Events with the same key are repetitions of one.
type event struct {
	key         eventKey
	typ         string
	message     string
	count       uint64
	first, last time.Time
	name        string // in the API, set at the first attempt to write it: a second attempt creates no second event
}

type eventKey struct {
	object object
	reason string
	device health.DeviceID
	cause  string
}

// merge adds a repetition of the event.
func (e *event) merge(o event) {
	if o.last.After(e.last) {
		e.message, e.last = o.message, o.last
	}
	if o.first.Before(e.first) {
		e.first = o.first
	}
	if e.name == "" {
		e.name = o.name
	}
	e.count += o.count
}

// eventsBetween returns the changes between the devices of two snapshots, for the node and for the pods that hold the
// device. A new device counts as having been healthy. A finding that a MIG device inherits from its GPU goes to the pods
// of the MIG device; the node gets it once, for the GPU.
func eventsBetween(before, after []health.DeviceState, node string, holders func(health.DeviceID) []Pod, now time.Time) []event {
	var events []event
	add := func(objects []object, typ, reason string, d health.Device, cause, message string, count uint64) {
		for _, o := range objects {
			events = append(events, event{
				key: eventKey{o, reason, d.ID, cause}, typ: typ, message: truncate(message, maxMessage),
				count: count, first: now, last: now,
			})
		}
	}
	for _, c := range health.Changes(before, after) {
		switch c.Kind {
		case health.ChangeXID:
			x := health.LookupXID(c.XID)
			add(append([]object{{name: node}}, podsOf(holders, after, c.Device.ID, true)...), typeWarning, eventXID, c.Device,
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
			add(objects, typ, reason, c.Device, cause, message, 1)
		case health.ChangeFound, health.ChangeRemoved:
		}
	}
	return events
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
		return typeWarning, eventUnhealthy, cause, describe(now)
	case c.Now.State == health.Degraded:
		return typeWarning, eventDegraded, cause, describe(now)
	case c.Now.State == health.Healthy && c.Was.State > health.Healthy:
		return typeNormal, eventRecovered, c.Was.Cause(), fmt.Sprintf("%s is healthy again; cleared: %s", deviceName(c.Device), causes(c.Was))
	}
	return "", "", "", ""
}

// podsOf returns the pods that hold a device, each once. With migDevices, it includes those that hold a MIG device of it.
func podsOf(holders func(health.DeviceID) []Pod, devices []health.DeviceState, id health.DeviceID, migDevices bool) []object {
	pods := holders(id)
	for i := range devices {
		if migDevices && devices[i].Device.Parent == id {
			pods = append(slices.Clip(pods), holders(devices[i].Device.ID)...)
		}
	}
	var objects []object
	for _, p := range pods {
		if o := (object{p.Namespace, p.Name}); !slices.Contains(objects, o) {
			objects = append(objects, o)
		}
	}
	return objects
}
