package status

import (
	"context"
	"fmt"
	"slices"
	"strings"

	"github.com/gpu-node-agent/gpu-node-agent/health"
)

// maxEvents is how many events are remembered.
const maxEvents = 100

// Events remembers what has happened lately: it follows the snapshots and finds the differences, as the log
// does. Nobody sends it anything.
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
			if news := eventsBetween(before, s); len(news) > 0 {
				all := newestFirst(e.Latest(), news)
				e.recent.Store(&all)
			}
			before = s
		}
		select {
		case <-ctx.Done():
			return nil
		case <-changed:
		}
	}
}

// newestFirst puts news, oldest first, before what is remembered, and forgets what is too old.
func newestFirst(all, news []Event) []Event {
	news = slices.Clone(news)
	slices.Reverse(news)
	all = append(news, all...)
	return slices.Clip(all[:min(len(all), maxEvents)])
}

// eventsBetween returns what has happened between two snapshots, oldest first. Before the first there is nil.
func eventsBetween(before, after *health.Snapshot) []Event {
	var was health.Snapshot
	if before != nil {
		was = *before
	}
	var all []Event
	if src := after.Source; before == nil || src.Status != was.Source.Status || src.Kind != was.Source.Kind {
		e := Event{Time: src.Since.UTC(), Kind: "source", State: src.Status.String(), Text: "source " + src.Kind + " " + src.Status.String()}
		if before != nil {
			e.Was = was.Source.Status.String()
		}
		if src.Err != "" {
			e.Text += ": " + src.Err
		}
		all = append(all, e)
	}
	var found, gone []health.Device
	then, now := byID(was.Devices), byID(after.Devices)
	var rest []Event
	for _, c := range health.Changes(was.Devices, after.Devices) {
		e := Event{Time: after.At.UTC(), GPU: &c.Device.Index, MIG: migIndex(&c.Device), UUID: c.Device.ID}
		switch c.Kind {
		case health.ChangeFound:
			found = append(found, c.Device)
			continue
		case health.ChangeGone:
			gone = append(gone, c.Device)
			continue
		case health.ChangeXID:
			e.Kind, e.XID = "xid", c.XID
			if x := now[c.Device.ID].LastXID; x.Code == c.XID {
				e.Time = x.At.UTC()
			}
			e.Text = fmt.Sprintf("XID %d: %s", c.XID, health.LookupXID(c.XID).Name)
			if c.Count > 1 {
				e.Text += fmt.Sprintf(" (count %d)", c.Count)
			}
		case health.ChangeState:
			if shared(then[c.Device.Parent], c.Was) && shared(now[c.Device.Parent], c.Now) && c.Device.Kind == health.KindMIG {
				continue // told once, as the GPU's
			}
			if after.At.IsZero() {
				e.Time = c.Now.Since.UTC()
			}
			e.Kind, e.State, e.Was, e.Cause = "state", c.Now.State.String(), c.Was.State.String(), c.Now.Cause()
			e.Text = stateText(c)
		}
		rest = append(rest, e)
	}
	return slices.Concat(all, foundAndGone(after, found, gone), rest)
}

func byID(devices []health.DeviceState) map[health.DeviceID]*health.DeviceState {
	m := make(map[health.DeviceID]*health.DeviceState, len(devices))
	for i := range devices {
		m[devices[i].Device.ID] = &devices[i]
	}
	return m
}

// shared reports whether all that is wrong with a MIG device was inherited, or is wrong with its GPU too.
func shared(gpu *health.DeviceState, v health.Verdict) bool {
	return !slices.ContainsFunc(v.Findings, func(f health.Finding) bool {
		return f.From == "" && (gpu == nil ||
			!slices.ContainsFunc(gpu.Verdict.Findings, func(g health.Finding) bool { return g.Cause == f.Cause }))
	})
}

func stateText(c health.Change) string {
	text := c.Now.State.String()
	if c.Was.State != c.Now.State && c.Was.State != health.Unknown {
		text += ", was " + c.Was.State.String()
	}
	if len(c.Now.Findings) > 0 {
		text += ": " + c.Now.Findings[0].Cause + ": " + c.Now.Findings[0].Reason
	}
	if cleared := c.Cleared(); len(cleared) > 0 {
		text += "; cleared: " + strings.Join(cleared, ", ")
	}
	return text
}

// foundAndGone tells of devices that come and go in one event each: a start or a new partitioning has many.
func foundAndGone(after *health.Snapshot, found, gone []health.Device) []Event {
	var all []Event
	tell := func(kind, what string, devices []health.Device) {
		if len(devices) == 0 {
			return
		}
		e := Event{Time: after.At.UTC(), Kind: kind, Text: count(devices) + " " + what}
		if after.At.IsZero() {
			e.Time = after.Source.Since.UTC()
		}
		if len(devices) == 1 {
			e.GPU, e.MIG, e.UUID = &devices[0].Index, migIndex(&devices[0]), devices[0].ID
		}
		all = append(all, e)
	}
	if after.Polled() {
		tell("found", "found", found)
	} else {
		tell("found", "remembered from before the start", found)
	}
	tell("gone", "gone", gone)
	return all
}

// count is "8 GPUs, 50 MIG devices".
func count(devices []health.Device) string {
	gpus, mig := 0, 0
	for _, d := range devices {
		if d.Kind == health.KindGPU {
			gpus++
		} else {
			mig++
		}
	}
	var parts []string
	if gpus > 0 {
		parts = append(parts, plural(gpus, "GPU"))
	}
	if mig > 0 {
		parts = append(parts, plural(mig, "MIG device"))
	}
	return strings.Join(parts, ", ")
}
