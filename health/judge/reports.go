package judge

import (
	"maps"
	"slices"
	"time"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/health/catalog"
)

// reports is what witnesses report of a device beside its sample, and the XIDs that they owe.
type reports struct {
	raised     []health.XID // XIDs of its MIG devices that count and affect the whole GPU
	details    []health.XID // with the detail of an XID that another witness reported before
	unreported []int        // see unreportedXIDs
	xids       health.Ledger
	action     health.EventAction
}

// nodeReports are the reports by device.
type nodeReports map[health.DeviceID]reports

// take takes the XIDs of a device's sample, and returns the sample with those that count.
func (all nodeReports) take(
	d *health.Device, s health.Sample, on []health.Witness, now time.Time, shown *health.SourceProgress,
) health.Sample {
	w := all[d.ID]
	next, counted, details := w.xids.ExpireEvents(now).Take(s, on, now, shown)
	w.xids, w.details = next, append(w.details, details...)
	all[d.ID] = w
	if d.Kind == health.KindMIG {
		gpu := all[d.Parent]
		gpu.raised, gpu.details = raise(gpu.raised, counted), raise(gpu.details, details)
		all[d.Parent] = gpu
	}
	s.XIDs = counted
	return s
}

// raise adds the XIDs of a MIG device that affect the whole GPU. All compute instances of a GPU instance report the same XID, so each
// counts once.
func raise(to []health.XID, xids []health.XID) []health.XID {
	for _, x := range xids {
		x.Times = 0
		if catalog.LookupXID(x.Code).WholeGPU && !slices.Contains(to, x) {
			to = append(to, x)
		}
	}
	return to
}

// takeReports looks up which listed rows are new, pairs the XIDs of the reading, and removes the XIDs that do not count from the samples.
func (rc ReadingContext) takeReports(
	previous map[health.DeviceID]health.DeviceState, before []health.DeviceState, r *health.Reading, samples map[health.DeviceID]health.Sample,
	now time.Time,
) nodeReports {
	measures := slices.ContainsFunc(r.Samples, func(s health.Sample) bool { return len(s.Values) > 0 })
	unreported := unreportedXIDs(before)
	all := make(nodeReports, len(r.Devices))
	for i := range before { // also the devices that the reading lacks
		d := &before[i]
		all[d.Device.ID] = reports{
			xids: d.XIDs, unreported: unreported[d.Device.ID], action: d.Memory.EventAction,
		}
	}
	var shown health.SourceProgress
	for _, d := range r.Devices {
		s, w, old := samples[d.ID], all[d.ID], previous[d.ID]
		w.xids, s = rc.listRows(old, previous[d.Parent].XIDs, d, s)
		w.action.Left = max(0, w.action.Left-elapsedStep(measures, old.Sample.At, s.At))
		all[d.ID] = w
		samples[d.ID] = all.take(&d, s, rc.Witnesses, now, &shown)
	}
	for _, d := range r.Devices {
		w := all[d.ID]
		w.xids = w.xids.Pass(elapsedStep(measures, previous[d.ID].Sample.At, samples[d.ID].At), &shown)
		all[d.ID] = w
	}
	return all
}

// listRows replaces the rows of a sample by the XIDs that are new. gpu is the ledger of a MIG device's GPU before the reading.
func (rc ReadingContext) listRows(
	old health.DeviceState, gpu health.Ledger, d health.Device, s health.Sample,
) (health.Ledger, health.Sample) {
	l := old.XIDs
	if d.Kind == health.KindMIG && old.Device.ID == "" {
		l.Later = gpu.Read
	}
	l, fresh := l.List(s.Rows, s.RowsWhole, rc.XIDHistory)
	s.Rows, s.RowsWhole, s.XIDs = nil, false, slices.Concat(fresh, s.XIDs)
	if value, ok := s.Values[health.FieldXID]; ok {
		if last := l.LastXID(value); last != value {
			s.Values = maps.Clone(s.Values)
			s.Values[health.FieldXID] = last
		}
	}
	return l, s
}

// maxStep is the most that a reading adds to the time in which the source measures.
const maxStep = 2 * time.Second

// overdueAfter is how long the source may take to list the row of an XID: DCGM reads one event per second, and is polled once a second.
const overdueAfter = 3 * time.Second

// OverdueXIDs reports whether the source owes an XID for longer than that. Those from before the agent's start or a detach do not count,
// nor do those of devices that the latest reading lacks: the source lists no rows of these, and their debts do not expire.
func OverdueXIDs(devices []health.DeviceState, now time.Time) bool {
	return slices.ContainsFunc(devices, func(d health.DeviceState) bool {
		return !lackedByReading(&d) && slices.ContainsFunc(d.XIDs.Owed, func(o health.OwedXIDs) bool {
			return o.Witness == health.WitnessSource && !o.Since.IsZero() && now.Sub(o.Since) > overdueAfter
		})
	})
}

// elapsedStep returns the time that a reading adds to Ledger.measured: none if the source measures nothing, as while DCGM is blind, or if
// the device has no earlier sample.
func elapsedStep(measures bool, before, now time.Time) time.Duration {
	if !measures || before.IsZero() {
		return 0
	}
	return min(max(0, now.Sub(before)), maxStep)
}

// unreportedXIDs returns the numbers of the XIDs that the source owes, by device, so its values may be older than these XIDs. Its values
// are not older than an XID from before the agent's start or before a detach. An XID of a MIG device that affects the whole GPU is listed
// for the GPU, too.
func unreportedXIDs(before []health.DeviceState) map[health.DeviceID][]int {
	var all map[health.DeviceID][]int
	for i := range before {
		d := &before[i]
		for _, o := range d.XIDs.Owed {
			if o.Witness != health.WitnessSource || o.Newest.IsZero() {
				continue
			}
			if all == nil {
				all = make(map[health.DeviceID][]int)
			}
			all[d.Device.ID] = append(all[d.Device.ID], o.Code)
			if d.Device.Kind == health.KindMIG && catalog.LookupXID(o.Code).WholeGPU {
				all[d.Device.Parent] = append(all[d.Device.Parent], o.Code)
			}
		}
	}
	return all
}
