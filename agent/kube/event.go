package kube

import (
	"fmt"
	"hash/fnv"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/health/catalog"
)

// The reasons of events.
const (
	eventUnhealthy = "GPUUnhealthy"
	eventDegraded  = "GPUDegraded"
	eventRecovered = "GPURecovered"
	eventXID       = "XID"
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

// NodeEvent is a warning about the node.
type NodeEvent struct {
	Reason, Message string
	At              time.Time
}

// event returns the event of a node. Its name is fixed: while the API server has the event, it refuses the event of another process.
func (n *NodeEvent) event(node string) event {
	key := eventKey{object: object{name: node}, reason: n.Reason}
	return warningOf(key, truncate(n.Message, maxMessage), n.At, n.At.UTC().Format(time.RFC3339))
}

// warningOf returns a warning. Its name has its object's name and a hash of its reason and an id.
func warningOf(key eventKey, message string, at time.Time, id string) event {
	h := fnv.New64a()
	_, _ = h.Write([]byte(key.reason + id)) // never fails
	return event{
		key: key, typ: corev1.EventTypeWarning, message: message, count: 1, first: at, last: at,
		name: eventNameOf(key.object.name, h.Sum64()),
	}
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

// eventsBetween returns the changes between the devices of two snapshots, for the node and for the pods that hold the device. A new device
// counts as having been healthy. If a GPU and its MIG devices have the same change, the node gets it once, and the pods of each MIG device
// get it as well.
func eventsBetween(before, after []health.DeviceState, node string, holders func(health.DeviceID) []Pod, now time.Time) []event {
	var events []event
	add := func(c health.Change, suffix string, objects ...object) {
		typ, reason, cause, message, count := eventOf(c)
		for _, o := range objects {
			if reason != "" {
				events = append(events, event{
					key: eventKey{o, reason, c.Device.ID, cause}, typ: typ, message: truncate(message, maxMessage-len(suffix)) + suffix,
					count: count, first: now, last: now,
				})
			}
		}
	}
	for _, g := range health.GroupChanges(before, after) {
		suffix := ""
		if g.Device.Kind == health.KindMIG && !g.Single() {
			suffix = fmt.Sprintf(" (and %d more MIG devices of %s)", len(g.MIGDevices)-1, g.Device.GPUName())
		}
		if !g.Inherited {
			add(g.Change, suffix, object{name: node})
		}
		if g.Device.Kind == health.KindGPU {
			// An XID of a GPU may concern the work on any of its MIG devices.
			add(g.Change, "", podsOf(holders, after, g.Device.ID, g.Kind == health.ChangeXID)...)
		}
		for _, c := range g.MIGDevices {
			add(c, "", podsOf(holders, after, c.Device.ID, false)...)
		}
	}
	return events
}

// eventOf returns the event of a change. The reason is "" if the change needs none.
func eventOf(c health.Change) (typ, reason, cause, message string, count uint64) {
	switch c.Kind {
	case health.ChangeXID:
		x := catalog.LookupXID(c.XID)
		return corev1.EventTypeWarning, eventXID, fmt.Sprint(c.XID),
			fmt.Sprintf("XID %d of %s: %s; %s", c.XID, c.Device.Name(), catalog.Describe(c.Reported()), x.Advice()), c.New
	case health.ChangeState:
		typ, reason, cause, message = stateEvent(c)
		return typ, reason, cause, message, 1
	case health.ChangeFound, health.ChangeRemoved:
	}
	return "", "", "", "", 0
}

// stateEvent returns the event of a change of a device's verdict. The reason is "" if the change needs none.
func stateEvent(c health.Change) (typ, reason, cause, message string) {
	news := c.News()
	if c.Now.State == c.Was.State && (news == nil || news.State < c.Now.State || len(c.Added()) == 0) {
		return "", "", "", ""
	}
	now := &health.DeviceState{Device: c.Device, Verdict: c.Now}
	switch {
	case c.Now.State == health.Unhealthy:
		return corev1.EventTypeWarning, eventUnhealthy, news.Cause, describe(now, news)
	case c.Now.State == health.Degraded:
		return corev1.EventTypeWarning, eventDegraded, news.Cause, describe(now, news)
	case c.Now.State == health.Healthy && c.Was.State > health.Healthy:
		return corev1.EventTypeNormal, eventRecovered, c.Was.Cause(),
			fmt.Sprintf("%s is healthy again; cleared: %s", c.Device.Name(), causes(c.Was))
	}
	return "", "", "", ""
}

// podsOf returns the pods that hold a device, each once. With migDevices, it includes the pods that hold a MIG device of it.
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
