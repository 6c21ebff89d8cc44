package health

import (
	"maps"
	"slices"
	"time"
)

// reports is what witnesses report of a device beside its sample, and the XIDs that they owe.
type reports struct {
	raised     []XID // XIDs of its MIG devices that count and affect the whole GPU
	details    []XID // with the detail of an XID that another witness reported before
	unreported []int // see unreportedXIDs
	xids       Ledger
	action     eventAction
}

// nodeReports are the reports by device.
type nodeReports map[DeviceID]reports

// take takes the XIDs of a device's sample, and returns the sample with those that count.
func (all nodeReports) take(d *Device, s Sample, on []Witness, now time.Time, shown *sourceProgress) Sample {
	w := all[d.ID]
	next, counted, details := w.xids.expireEvents(now).take(s, on, now, shown)
	w.xids, w.details = next, append(w.details, details...)
	all[d.ID] = w
	if d.Kind == KindMIG {
		gpu := all[d.Parent]
		gpu.raised, gpu.details = raise(gpu.raised, counted), raise(gpu.details, details)
		all[d.Parent] = gpu
	}
	s.XIDs = counted
	return s
}

// raise adds the XIDs of a MIG device that affect the whole GPU. All compute instances of a GPU instance report the same XID, so each
// counts once.
func raise(to []XID, xids []XID) []XID {
	for _, x := range xids {
		x.Times = 0
		if LookupXID(x.Code).WholeGPU && !slices.Contains(to, x) {
			to = append(to, x)
		}
	}
	return to
}

// takeReports looks up which listed rows are new, pairs the XIDs of the reading, and removes the XIDs that do not count from the samples.
func (rc ReadingContext) takeReports(
	previous map[DeviceID]DeviceState, before []DeviceState, r *Reading, samples map[DeviceID]Sample, now time.Time,
) nodeReports {
	measures := slices.ContainsFunc(r.Samples, func(s Sample) bool { return len(s.Values) > 0 })
	unreported := unreportedXIDs(before)
	all := make(nodeReports, len(r.Devices))
	for i := range before { // also the devices that the reading lacks
		d := &before[i]
		all[d.Device.ID] = reports{
			xids: d.XIDs, unreported: unreported[d.Device.ID], action: d.Memory.eventAction,
		}
	}
	var shown sourceProgress
	for _, d := range r.Devices {
		s, w, old := samples[d.ID], all[d.ID], previous[d.ID]
		w.xids, s = rc.listRows(old, previous[d.Parent].XIDs, d, s)
		w.action.left = max(0, w.action.left-elapsedStep(measures, old.Sample.At, s.At))
		all[d.ID] = w
		samples[d.ID] = all.take(&d, s, rc.Witnesses, now, &shown)
	}
	for _, d := range r.Devices {
		w := all[d.ID]
		w.xids = w.xids.pass(elapsedStep(measures, previous[d.ID].Sample.At, samples[d.ID].At), &shown)
		all[d.ID] = w
	}
	return all
}

// listRows replaces the rows of a sample by the XIDs that are new. gpu is the ledger of a MIG device's GPU before the reading.
func (rc ReadingContext) listRows(old DeviceState, gpu Ledger, d Device, s Sample) (Ledger, Sample) {
	l := old.XIDs
	if d.Kind == KindMIG && old.Device.ID == "" {
		l.Later = gpu.Read
	}
	l, fresh := l.list(s.Rows, s.RowsWhole, rc.XIDHistory)
	s.Rows, s.RowsWhole, s.XIDs = nil, false, slices.Concat(fresh, s.XIDs)
	if value, ok := s.Values[FieldXID]; ok {
		if last := l.lastXID(value); last != value {
			s.Values = maps.Clone(s.Values)
			s.Values[FieldXID] = last
		}
	}
	return l, s
}
