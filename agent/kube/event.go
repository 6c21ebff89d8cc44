package kube

import (
	"fmt"
	"maps"
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
	old := make(map[health.DeviceID]*health.DeviceState, len(before))
	for i := range before {
		old[before[i].Device.ID] = &before[i]
	}
	var events []event
	add := func(objects []object, typ, reason string, d health.Device, cause, message string, count uint64) {
		for _, o := range objects {
			events = append(events, event{
				key: eventKey{o, reason, d.ID, cause}, typ: typ, message: truncate(message, maxMessage),
				count: count, first: now, last: now,
			})
		}
	}
	for i := range after {
		d := &after[i]
		was := old[d.Device.ID]
		if was == nil {
			was = &health.DeviceState{}
		}
		for _, code := range slices.Sorted(maps.Keys(d.XIDCounts)) {
			n := d.XIDCounts[code]
			if n <= was.XIDCounts[code] {
				continue
			}
			x := health.LookupXID(code)
			add(append([]object{{name: node}}, podsOf(holders, after, d.Device.ID, true)...), typeWarning, eventXID, d.Device,
				fmt.Sprint(code), fmt.Sprintf("XID %d of %s: %s; %s", code, deviceName(d.Device), x.Name, x.Action), n-was.XIDCounts[code])
		}
		typ, reason, cause, message := verdictChange(was, d)
		if reason == "" {
			continue
		}
		objects := podsOf(holders, after, d.Device.ID, false)
		if d.Device.Kind == health.KindGPU || !inherited(d.Verdict) && !inherited(was.Verdict) {
			objects = append([]object{{name: node}}, objects...)
		}
		add(objects, typ, reason, d.Device, cause, message, 1)
	}
	return events
}

// verdictChange returns the event for a change of a device's verdict, with reason "" if the change needs none.
func verdictChange(was, d *health.DeviceState) (typ, reason, cause, message string) {
	before, now := was.Verdict, d.Verdict
	cause = now.Cause()
	changed := now.State != before.State || !slices.ContainsFunc(before.Findings, func(f health.Finding) bool { return f.Cause == cause })
	switch {
	case now.State == health.Unhealthy && changed:
		return typeWarning, eventUnhealthy, cause, describe(d)
	case now.State == health.Degraded && changed:
		return typeWarning, eventDegraded, cause, describe(d)
	case now.State == health.Healthy && before.State > health.Healthy:
		cause = before.Cause()
		return typeNormal, eventRecovered, cause, fmt.Sprintf("%s is healthy again; cleared: %s", deviceName(d.Device), causes(before))
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
