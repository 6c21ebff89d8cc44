package status

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/health/catalog"
	"github.com/gpu-node-agent/gpu-node-agent/health/wait"
)

// maxEvents is the number of recent events that are stored.
const maxEvents = 100

// Events stores recent events. It derives them from the differences between snapshots.
type Events struct {
	recent health.Latest[[]Event] // the newest first
}

// Latest returns the recent events, the newest first.
func (e *Events) Latest() []Event {
	if l := e.recent.Load(); l != nil {
		return *l
	}
	return nil
}

// Follow records events until ctx ends.
func (e *Events) Follow(ctx context.Context, snapshots *health.Latest[health.Snapshot]) error {
	var before *health.Snapshot
	for {
		s, changed := snapshots.Watch()
		if s != nil {
			if added := eventsBetween(before, s); len(added) > 0 {
				all := prependEvents(e.Latest(), added)
				e.recent.Store(&all)
			}
			before = s
		}
		if !wait.For(ctx, changed) {
			return nil
		}
	}
}

// prependEvents puts added events, oldest first, before the stored ones, newest first, and drops the oldest. A late detail of
// an XID replaces the text of its event.
func prependEvents(stored, added []Event) []Event {
	stored = slices.Clone(stored)
	added = slices.DeleteFunc(slices.Clone(added), func(e Event) bool {
		i := slices.IndexFunc(stored, func(s Event) bool { return e.late && s.Kind == e.Kind && s.XID == e.XID && s.UUID == e.UUID })
		if i >= 0 {
			stored[i].Text = e.Text
		}
		return i >= 0
	})
	slices.Reverse(added)
	all := append(added, stored...)
	return slices.Clip(all[:min(len(all), maxEvents)])
}

// eventsBetween returns the events between two snapshots, oldest first. before is nil for the first snapshot.
func eventsBetween(before, after *health.Snapshot) []Event {
	var previous []health.DeviceState
	if before != nil {
		previous = before.Devices
	}
	source := sourceEvents(before, after)
	var found, removed []health.Device
	devicesAfter := byID(after.Devices)
	var changes []Event
	for _, c := range health.GroupChanges(previous, after.Devices) {
		e := Event{Time: after.At.UTC(), GPU: gpuIndex(&c.Device), MIG: migIndex(&c.Device), UUID: c.Device.ID}
		if !c.Single() {
			e.MIG, e.UUID = nil, c.Device.GPU()
		}
		switch c.Kind {
		case health.ChangeFound:
			found = append(found, changedDevices(&c)...)
			continue
		case health.ChangeRemoved:
			removed = append(removed, changedDevices(&c)...)
			continue
		case health.ChangeXID:
			e.Kind, e.XID = "xid", c.XID
			d := devicesAfter[c.Device.ID]
			if d.XIDs.Last == c.XID {
				e.Time = d.XIDs.Newest().At.UTC()
			}
			e.Source = xidSource(d.XIDs.Codes[c.XID].Newest.Witness, after.Source.Kind)
			e.Text = fmt.Sprintf("XID %d: %s", c.XID, catalog.Describe(c.Reported()))
			e.late = c.New == 0
			if c.Count > 1 {
				e.Text += fmt.Sprintf(" (count %d)", c.Count)
			}
		case health.ChangeState:
			if c.Inherited {
				continue // the GPU's event covers it
			}
			e.Time = changeTime(after.At, c.Now).UTC()
			e.Kind, e.State, e.Was, e.Cause = "state", c.Now.State.String(), c.Was.State.String(), ""
			if f := c.News(); f != nil {
				e.Cause = f.Cause
			}
			e.Text = stateText(c.Change)
		}
		if c.Device.Kind == health.KindMIG && !c.Single() {
			e.Text += " (" + Plural(len(c.MIGDevices), "MIG device") + ")"
		}
		changes = append(changes, e)
	}
	return slices.Concat(source, inventoryEvents(after, found, removed), changes)
}

// sourceEvents returns the events of the source, of DCGM's health checks and of the event sources.
func sourceEvents(before, after *health.Snapshot) []Event {
	var previous health.Source
	if before != nil {
		previous = before.Source
	}
	var all []Event
	if now := after.Source; before == nil || now.Status != previous.Status || now.Kind != previous.Kind {
		e := Event{Time: now.Since.UTC(), Kind: "source", State: now.Status.String(), Text: "source " + now.Kind + " " + now.Status.String()}
		if before != nil {
			e.Was = previous.Status.String()
		}
		if now.Err != "" {
			e.Text += ": " + now.Err
		}
		all = append(all, e)
	}
	checks, was := after.Source.Checks, previous.Checks
	if down := health.ChecksDown; checks.Status != was.Status &&
		(checks.Status == down || was.Status == down && checks.Status != health.ChecksUnknown) {
		e := Event{
			Time: checks.Since.UTC(), Kind: "checks", State: checks.Status.String(), Was: was.Status.String(),
			Text: "health checks " + checks.Status.String(),
		}
		if checks.Err != "" {
			e.Text += ": " + checks.Err
		}
		all = append(all, e)
	}
	return append(all, eventSourceEvents(previous.Events, after.Source.Events)...)
}

// eventSourceEvents returns an event for each event source that has gone up or down.
func eventSourceEvents(before, after []health.EventSourceState) []Event {
	var all []Event
	for _, now := range after {
		was := health.EventSourceState{Witness: now.Witness}
		if i := slices.IndexFunc(before, func(s health.EventSourceState) bool { return s.Witness == now.Witness }); i >= 0 {
			was = before[i]
		}
		if now.Status == was.Status || now.Status != health.EventsUp && now.Status != health.EventsDown {
			continue
		}
		e := Event{
			Time: now.Since.UTC(), Kind: "event-source", State: now.Status.String(), Was: was.Status.String(),
			Text: "XIDs from " + now.Witness.String() + " " + now.Status.String(),
		}
		if now.Err != "" {
			e.Text += ": " + now.Err
		}
		all = append(all, e)
	}
	return all
}

func byID(devices []health.DeviceState) map[health.DeviceID]*health.DeviceState {
	m := make(map[health.DeviceID]*health.DeviceState, len(devices))
	for i := range devices {
		m[devices[i].Device.ID] = &devices[i]
	}
	return m
}

// changeTime returns the time of a change of a verdict: the time of the last poll, unless an XID was judged after it.
func changeTime(polled time.Time, now health.Verdict) time.Time {
	latest := polled
	if now.Since.After(latest) {
		latest = now.Since
	}
	for _, f := range now.Findings {
		if f.Since.After(latest) {
			latest = f.Since
		}
	}
	return latest
}

// changedDevices returns the devices of a group.
func changedDevices(c *health.ChangeGroup) (devices []health.Device) {
	if c.Device.Kind == health.KindGPU {
		devices = append(devices, c.Device)
	}
	for _, m := range c.MIGDevices {
		devices = append(devices, m.Device)
	}
	return devices
}

func stateText(c health.Change) string {
	text := c.Now.State.String()
	if c.Was.State != c.Now.State && c.Was.State != health.Unknown {
		text += ", was " + c.Was.State.String()
	}
	if f := c.News(); f != nil {
		text += ": " + f.Cause + ": " + f.Reason
	}
	if cleared := c.Cleared(); len(cleared) > 0 {
		text += "; cleared: " + strings.Join(cleared, ", ")
	}
	return text
}

// inventoryEvents returns one event for all found devices and one for all removed ones: a start or a new partitioning has many.
func inventoryEvents(after *health.Snapshot, found, removed []health.Device) []Event {
	var all []Event
	add := func(kind, verb string, devices []health.Device) {
		if len(devices) == 0 {
			return
		}
		e := Event{Time: after.At.UTC(), Kind: kind, Text: deviceCount(devices) + " " + verb}
		if after.At.IsZero() {
			e.Time = after.Source.Since.UTC()
		}
		if len(devices) == 1 {
			e.GPU, e.MIG, e.UUID = gpuIndex(&devices[0]), migIndex(&devices[0]), devices[0].ID
		}
		all = append(all, e)
	}
	if after.Polled() {
		add("found", "found", found)
	} else {
		add("found", "restored from the state file", found)
	}
	add("gone", "removed", removed)
	return all
}

// deviceCount returns a text like "8 GPUs, 50 MIG devices".
func deviceCount(devices []health.Device) string {
	count := make(map[health.Kind]int)
	for _, d := range devices {
		count[d.Kind]++
	}
	var parts []string
	if n := count[health.KindGPU]; n > 0 {
		parts = append(parts, Plural(n, "GPU"))
	}
	if n := count[health.KindMIG]; n > 0 {
		parts = append(parts, Plural(n, "MIG device"))
	}
	return strings.Join(parts, ", ")
}
