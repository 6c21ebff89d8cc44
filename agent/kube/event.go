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
	known := make(map[health.DeviceID]*health.DeviceState, len(before))
	for i := range before {
		known[before[i].Device.ID] = &before[i]
	}
	var all []happening
	tell := func(objects []object, typ, reason string, d health.Device, cause, message string, count uint64) {
		for _, o := range objects {
			all = append(all, happening{
				key: happeningKey{o, reason, d.ID, cause}, typ: typ, message: cut(message, maxMessage),
				count: count, first: now, last: now,
			})
		}
	}
	for i := range after {
		d := &after[i]
		was := known[d.Device.ID]
		if was == nil {
			was = &health.DeviceState{}
		}
		for _, code := range slices.Sorted(maps.Keys(d.XIDCounts)) {
			n := d.XIDCounts[code]
			if n <= was.XIDCounts[code] {
				continue
			}
			x := health.LookupXID(code)
			tell(append([]object{{name: node}}, podsOf(holders, after, d.Device.ID, true)...), typeWarning, eventXID, d.Device,
				fmt.Sprint(code), fmt.Sprintf("XID %d of %s: %s; %s", code, deviceName(d.Device), x.Name, x.Action), n-was.XIDCounts[code])
		}
		typ, reason, cause, message := change(was, d)
		if reason == "" {
			continue
		}
		objects := podsOf(holders, after, d.Device.ID, false)
		if d.Device.Kind == health.KindGPU || !inherited(d.Verdict) && !inherited(was.Verdict) {
			objects = append([]object{{name: node}}, objects...)
		}
		tell(objects, typ, reason, d.Device, cause, message, 1)
	}
	return all
}

// change tells how a device's verdict has changed, reason "" if it has not in a way that is worth telling.
func change(was, d *health.DeviceState) (typ, reason, cause, message string) {
	before, now := was.Verdict, d.Verdict
	cause = now.Cause()
	news := now.State != before.State || !slices.ContainsFunc(before.Findings, func(f health.Finding) bool { return f.Cause == cause })
	switch {
	case now.State == health.Unhealthy && news:
		return typeWarning, eventUnhealthy, cause, sentence(d)
	case now.State == health.Degraded && news:
		return typeWarning, eventDegraded, cause, sentence(d)
	case now.State == health.Healthy && before.State > health.Healthy:
		cause = before.Cause()
		return typeNormal, eventRecovered, cause, fmt.Sprintf("%s is healthy again; cleared: %s", deviceName(d.Device), causes(before))
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
