package health

import (
	"maps"
	"slices"
	"time"
)

// eventsOnly returns an events reading of the devices before, with what event sources report and nothing else.
func eventsOnly(before []DeviceState, r *Reading, now time.Time) *Reading {
	only := &Reading{Devices: make([]Device, len(before)), Samples: make([]Sample, len(before))}
	index := make(map[DeviceID]int, len(before))
	for i := range before {
		id := before[i].Device.ID
		only.Devices[i], only.Samples[i], index[id] = before[i].Device, Sample{Device: id, At: now}, i
	}
	for _, s := range r.Samples {
		i, exists := index[s.Device]
		if !exists {
			continue
		}
		only.Samples[i].At, only.Samples[i].XIDs = s.At, s.XIDs
		if v, ok := s.Values[FieldRecoveryAction]; ok {
			only.Samples[i].Values = map[Field]float64{FieldRecoveryAction: v}
		}
	}
	return only
}

// reports is what a reading's witnesses report of a device beside its sample, and the XIDs that they owe.
type reports struct {
	raised     []XID // XIDs of its MIG devices that count and affect the whole GPU
	details    []XID // with the detail of an XID that another witness reported before
	unreported []int // see unreportedXIDs
	xids       Ledger
	action     eventAction
}

// takeReports looks up which listed rows are new, pairs the XIDs of the reading, and removes the XIDs that do not count from the samples.
func (rc ReadingContext) takeReports(
	previous map[DeviceID]DeviceState, before []DeviceState, r *Reading, samples map[DeviceID]Sample, now time.Time,
) map[DeviceID]reports {
	measures := slices.ContainsFunc(r.Samples, func(s Sample) bool { return len(s.Values) > 0 })
	unreported := unreportedXIDs(before)
	all := make(map[DeviceID]reports, len(r.Devices))
	for i := range before { // also the devices that the reading lacks
		d := &before[i]
		all[d.Device.ID] = reports{
			xids: d.XIDs, unreported: unreported[d.Device.ID], action: d.Memory.eventAction,
		}
	}
	raise := func(to []XID, xids []XID) []XID {
		for _, x := range xids {
			// All compute instances of a GPU instance report the same XID, so each counts once.
			x.Times = 0
			if LookupXID(x.Code).WholeGPU && !slices.Contains(to, x) {
				to = append(to, x)
			}
		}
		return to
	}
	var shown sourceProgress
	for _, d := range r.Devices {
		s, w, old := samples[d.ID], all[d.ID], previous[d.ID]
		if rc.Events {
			if _, ok := s.Values[FieldRecoveryAction]; ok {
				w.action = eventAction{s.At, awaitAction}
			}
		} else {
			old.XIDs, s = rc.listRows(old, previous[d.Parent].XIDs, d, s)
			w.action.left = max(0, w.action.left-elapsedStep(measures, old.Sample.At, s.At))
		}
		next, counted, details := old.XIDs.expireEvents(now).take(s, rc.Witnesses, now, &shown)
		w.xids = next
		s.XIDs, w.details = counted, append(w.details, details...)
		samples[d.ID], all[d.ID] = s, w
		if d.Kind == KindMIG {
			gpu := all[d.Parent]
			gpu.raised, gpu.details = raise(gpu.raised, counted), raise(gpu.details, details)
			all[d.Parent] = gpu
		}
	}
	if rc.Events {
		return all
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
