package judge

import (
	"cmp"
	"fmt"
	"slices"
	"time"

	"github.com/gpu-node-agent/gpu-node-agent/health"
)

// OutageDelay is how long the source must report that no GPU is present before that counts. A host engine that started without a
// driver lists no GPU and reports no error; binding or unbinding one GPU makes DCGM report all of them as detached for a moment
// (../dcgm/OBSERVED.md#short-detach), and a driver that lists no GPU for a moment makes it report all of them as lost
// (../dcgm/OBSERVED.md#short-loss). A failing switch can also take all GPUs away for real.
//
// It is also how long before an outage a GPU may have become unreachable to be part of it, because the source asks for the states of the
// GPUs in turn, and how long before an XID 79 may have been reported to confirm it.
const OutageDelay = 10 * time.Second

// OutageFilter delays the presence of GPUs that become unreachable together, and of GPUs that only the saved state knows and the
// reading lacks: DCGM may list them some seconds late. It delays lost GPUs only if there are several: a single one is lost alone, as the
// only GPU of a node always is. A GPU with an XID 79 has fallen off the bus, so the filter does not delay it.
type OutageFilter struct {
	unreachableSince time.Time // when the delayed GPUs of an outage became unreachable; zero if there are none
	unlistedSince    time.Time // since when readings lack GPUs that this process has never measured; zero if there are none
}

// Measure judges like the function Measure, and leaves out the presence of the delayed GPUs. If no GPU is present and some are delayed,
// warning describes what the source reports. Such a reading is no evidence of a reload of the driver, and does not count as the first. A
// reading with ReadingContext.NewInventory ends all delays.
func (o *OutageFilter) Measure(
	c Config, before []health.DeviceState, r *health.Reading, rc ReadingContext, now time.Time,
) (after []health.DeviceState, warning string) {
	if rc.NewInventory {
		*o = OutageFilter{}
		return Measure(c, before, r, rc, now), ""
	}
	r, outage, warning := o.filter(before, r, now)
	if warning != "" {
		rc.FirstReading, rc.DriverReloaded = false, false
	}
	return measure(c, before, r, rc, outage), warning
}

// filter returns the reading to judge: a copy of r, in which the delayed GPUs have their last known properties, an unknown presence,
// and everything else that r has of them. outage is what r itself shows.
func (o *OutageFilter) filter(
	before []health.DeviceState, r *health.Reading, now time.Time,
) (judged *health.Reading, outage nodeOutage, warning string) {
	samples := samplesByDevice(r, now)
	since := cmp.Or(o.unreachableSince, now)
	outage = newNodeOutage(before, r, samples, since, now)
	outage.others = outage.anyPresent && !o.unreachableSince.IsZero()
	unreachable, unlisted := outage.delays(before, samples, fallenOffBus(before, r.Devices, samples, since.Add(-OutageDelay)))
	expire(&o.unreachableSince, unreachable, now)
	expire(&o.unlistedSince, unlisted, now)
	if len(unreachable)+len(unlisted) == 0 {
		return r, outage, ""
	}
	judged = new(*r)
	delay(judged, before, samples, func(d *health.Device) bool { return unreachable[d.GPU()] || unlisted[d.GPU()] }, now)
	switch {
	case len(unreachable) == 0 || outage.anyPresent:
		return judged, outage, ""
	case len(r.Devices) == 0:
		warning = fmt.Sprintf("the source lists no GPU, but %d are known", len(unreachable))
	default:
		warning = fmt.Sprintf("the source reports %d GPUs as unreachable at once", len(unreachable))
	}
	return judged, outage, fmt.Sprintf("%s; this counts after %v", warning, OutageDelay)
}

// delays returns the GPUs whose presence is delayed. fallen have fallen off the bus.
func (o nodeOutage) delays(
	before []health.DeviceState, samples map[health.DeviceID]health.Sample, fallen map[health.DeviceID]bool,
) (unreachable, unlisted map[health.DeviceID]bool) {
	unreachable, unlisted = make(map[health.DeviceID]bool), make(map[health.DeviceID]bool)
	for _, b := range before {
		id := b.Device.ID
		counts := b.Sample.Presence == health.Missing || inOutage(&b.Memory) || fallen[id] // already, or at once
		if b.Device.Kind != health.KindGPU || counts {
			continue
		}
		s, listed := samples[id]
		wasReachable := b.Sample.Presence <= health.Present
		switch {
		case listed && s.Presence <= health.Present:
		case o.anyPresent && !listed && !b.Memory.Measured:
			unlisted[id] = true
		case o.anyPresent:
			if o.others && delayed(b) {
				unreachable[id] = true
			}
		case !listed, wasReachable && (s.Presence != health.Lost || o.several):
			unreachable[id] = true
		}
	}
	return unreachable, unlisted
}

// delay replaces the devices of delayed GPUs by those before, with an unknown presence.
func delay(
	r *health.Reading, before []health.DeviceState, samples map[health.DeviceID]health.Sample, delayed func(*health.Device) bool,
	now time.Time,
) {
	listed := r.Devices
	r.Devices, r.Samples = nil, nil
	for _, d := range listed {
		if !delayed(&d) {
			r.Devices, r.Samples = append(r.Devices, d), append(r.Samples, samples[d.ID])
		}
	}
	for _, b := range before {
		if !delayed(&b.Device) {
			continue
		}
		s, listed := samples[b.Device.ID]
		if !listed {
			s = health.Sample{Device: b.Device.ID, At: now}
		}
		s.Presence = health.PresenceUnknown
		r.Devices, r.Samples = append(r.Devices, b.Device), append(r.Samples, s)
	}
}

// expire removes the delayed GPUs after OutageDelay. since is when the delay of the first began, zero if there are none.
func expire(since *time.Time, gpus map[health.DeviceID]bool, now time.Time) {
	switch {
	case len(gpus) == 0:
		*since = time.Time{}
	case since.IsZero():
		*since = now
	case now.Sub(*since) >= OutageDelay:
		clear(gpus)
	}
}

// fallenOffBus returns the GPUs with an XID 79, of any witness, in the reading or since a time.
func fallenOffBus(
	before []health.DeviceState, devices []health.Device, samples map[health.DeviceID]health.Sample, since time.Time,
) map[health.DeviceID]bool {
	all := make(map[health.DeviceID]bool)
	for i := range devices {
		if slices.ContainsFunc(samples[devices[i].ID].XIDs, func(x health.XID) bool { return x.Code == 79 }) {
			all[devices[i].GPU()] = true
		}
	}
	for _, b := range before {
		if b.XIDs.Lacks(79, samples[b.Device.ID].Rows) {
			all[b.Device.GPU()] = true
		}
		if f := b.Memory.Find(health.HasCause(health.XIDCause(79))); f != nil && !f.Last.Before(since) {
			all[b.Device.ID] = true
		}
	}
	return all
}

// nodeOutage tells whether all reachable GPUs of the node became unreachable together: in one reading, or shortly after one another,
// because the source asks for their states in turn.
type nodeOutage struct {
	now        time.Time
	since      time.Time // of the first reading without any present GPU, if there is none
	all        bool      // no GPU is present, and at least one became unreachable in this reading
	several    bool      // more than one became unreachable, in this reading or shortly before
	multiGPU   bool      // the node has more than one GPU
	anyPresent bool
	others     bool // of the GPUs that became unreachable together, some are present again and others are not
}

func newNodeOutage(
	before []health.DeviceState, r *health.Reading, samples map[health.DeviceID]health.Sample, since, now time.Time,
) nodeOutage {
	newlyUnreachable, recentlyUnreachable, gpus := 0, 0, 0
	for _, d := range before {
		if d.Device.Kind != health.KindGPU {
			continue
		}
		gpus++
		if s, listed := samples[d.Device.ID]; listed && s.Presence <= health.Present {
			continue
		}
		if d.Sample.Presence <= health.Present {
			newlyUnreachable++
		} else if f := d.Memory.Find(health.Finding.OfPresence); f != nil && since.Sub(f.Since) < OutageDelay {
			recentlyUnreachable++
		}
	}
	anyPresent := slices.ContainsFunc(r.Devices, func(d health.Device) bool {
		return d.Kind == health.KindGPU && samples[d.ID].Presence == health.Present
	})
	return nodeOutage{
		now: now, since: since, all: newlyUnreachable > 0 && !anyPresent,
		several: newlyUnreachable+recentlyUnreachable > 1, multiGPU: gpus > 1, anyPresent: anyPresent,
	}
}

// includes reports whether an unreachable device is part of the outage, and since when other GPUs are back without it. A GPU
// that the driver reports as lost is lost alone if no other GPU was lost with it, or if it stays lost for OutageDelay after the
// others came back.
func (o nodeOutage) includes(old health.DeviceState, cause string) (inOutage bool, othersBackSince time.Time) {
	f := old.Memory.Find(health.Finding.OfPresence)
	switch {
	case o.others && delayed(old):
		return true, o.now
	case f == nil:
		return o.all && (o.several || cause != health.CauseLost), time.Time{}
	case f.InOutage && o.anyPresent:
		since := f.OthersBackSince
		if since.IsZero() {
			since = o.now
		}
		return o.now.Sub(since) < OutageDelay, since
	case f.InOutage:
		return true, time.Time{}
	}
	// The other GPUs became unreachable shortly after it.
	return o.all && o.multiGPU && o.since.Sub(f.Since) < OutageDelay, time.Time{}
}

// delayed reports whether the newest reading may have delayed that a device is unreachable.
func delayed(d health.DeviceState) bool {
	return d.Sample.Presence == health.PresenceUnknown && d.Memory.Find(health.Finding.OfPresence) == nil
}

// inOutage reports whether a device became unreachable together with all GPUs of the node.
func inOutage(m *health.Memory) bool {
	f := m.Find(health.Finding.OfPresence)
	return f != nil && f.InOutage
}
