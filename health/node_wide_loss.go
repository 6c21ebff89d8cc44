package health

import (
	"fmt"
	"time"
)

// AllLostDelay is how long the source must report that all GPUs are gone before that counts. A host engine that started
// without a driver lists no GPU and reports no error; binding or unbinding one GPU makes DCGM report all of them as detached
// for a moment (OBSERVED.md 11). A failing switch can also take all GPUs away for real.
const AllLostDelay = 10 * time.Second

// LossFilter delays readings in which all GPUs disappear at once, and readings that lack a GPU which only the saved state
// knows: DCGM may list it some seconds late. It never delays GPUs that the driver reports as lost.
type LossFilter struct {
	goneSince    time.Time // the first of the readings without any GPU; zero if the last reading had one
	missingSince time.Time // the first of the readings that lack a GPU which this process has never measured
}

// Filter returns the reading to judge: r, or a copy in which the delayed GPUs have their last known properties, an unknown
// presence, no values, and the XIDs of r. If all GPUs are delayed, warning says what the source reports.
func (l *LossFilter) Filter(before []DeviceState, r *Reading, now time.Time) (judged *Reading, warning string) {
	samples := make(map[DeviceID]Sample, len(r.Samples))
	for _, s := range r.Samples {
		samples[s.Device] = s
	}
	listed := make(map[DeviceID]bool, len(r.Devices))
	anyPresent := false
	for _, d := range r.Devices {
		listed[d.ID] = true
		anyPresent = anyPresent || d.Kind == KindGPU && samples[d.ID].Presence == Present
	}
	gone := make(map[DeviceID]bool)       // GPUs
	unmeasured := make(map[DeviceID]bool) // unlisted GPUs that this process has never measured
	unlisted := 0
	for _, b := range before {
		id := b.Device.ID
		if b.Device.Kind != KindGPU || b.Sample.Presence == Missing || b.Verdict.lostNodeWide() { // counts already
			continue
		}
		switch p := samples[id].Presence; {
		case !listed[id] && !b.Verdict.measured:
			unmeasured[id] = true
			fallthrough
		case !listed[id]:
			gone[id] = true
			unlisted++
		case b.Sample.Presence <= Present && (p == Detached || p == Inaccessible):
			gone[id] = true
		}
	}
	since := &l.goneSince
	all := !anyPresent && len(gone) > 0
	if !all {
		l.goneSince = time.Time{}
		gone, since = unmeasured, &l.missingSince
	}
	if len(gone) == 0 {
		return r, ""
	}
	if since.IsZero() {
		*since = now
	}
	if now.Sub(*since) >= AllLostDelay {
		return r, ""
	}

	judged = &Reading{Versions: r.Versions}
	for _, d := range r.Devices {
		if !gone[d.ID] && !gone[d.Parent] {
			judged.Devices = append(judged.Devices, d)
			judged.Samples = append(judged.Samples, samples[d.ID])
		}
	}
	for _, b := range before {
		if gone[b.Device.ID] || gone[b.Device.Parent] {
			s := samples[b.Device.ID]
			judged.Devices = append(judged.Devices, b.Device)
			judged.Samples = append(judged.Samples, Sample{Device: b.Device.ID, At: now, XIDs: s.XIDs, Past: s.Past})
		}
	}
	if !all {
		return judged, ""
	}
	warning = fmt.Sprintf("the source reports %d GPUs as gone at once", len(gone))
	switch {
	case len(r.Devices) == 0:
		warning = fmt.Sprintf("the source lists no GPU, but %d are known", len(gone))
	case unlisted == 0:
		warning = fmt.Sprintf("the source reports all %d GPUs as detached or inaccessible", len(gone))
	}
	return judged, fmt.Sprintf("%s; this counts after %v", warning, AllLostDelay)
}

// nodeWideLoss tells whether all reachable GPUs of the node went together: in one reading, or one shortly after the other,
// because the source asks for their states in turn.
type nodeWideLoss struct {
	now        time.Time
	all        bool // no GPU is present, and at least one went in this reading
	several    bool // more than one went, in this reading or shortly before
	multiGPU   bool // the node has more than one GPU
	anyPresent bool
}

func newNodeWideLoss(before []DeviceState, samples map[DeviceID]Sample, now time.Time) nodeWideLoss {
	wentNow, wentLately, gpus, present := 0, 0, 0, 0
	for _, d := range before {
		if d.Device.Kind != KindGPU {
			continue
		}
		gpus++
		s, listed := samples[d.Device.ID]
		switch {
		case !listed || s.Presence > Present:
			if d.Sample.Presence <= Present {
				wentNow++
			} else if f := d.Verdict.own(Finding.ofPresence); f != nil && now.Sub(f.Since) < AllLostDelay {
				wentLately++
			}
		case s.Presence == Present:
			present++
		}
	}
	return nodeWideLoss{now, wentNow > 0 && present == 0, wentNow+wentLately > 1, gpus > 1, present > 0}
}

// includes reports whether a device's loss is part of the node-wide one, and since when other GPUs are back without it. A GPU
// that the driver reports as lost is lost alone if no other GPU went with it, or if it stays lost for long after the others
// came back.
func (l nodeWideLoss) includes(old Verdict, cause string) (nodeWide bool, othersBackSince time.Time) {
	f := old.own(Finding.ofPresence)
	switch {
	case f == nil:
		return l.all && (l.several || cause != CauseLost), time.Time{}
	case f.NodeWide && l.anyPresent:
		since := f.othersBackSince
		if since.IsZero() {
			since = l.now
		}
		return l.now.Sub(since) < AllLostDelay, since
	case f.NodeWide:
		return true, time.Time{}
	}
	// The other GPUs went shortly after it.
	return l.all && l.multiGPU && l.now.Sub(f.Since) < AllLostDelay, time.Time{}
}

// lostNodeWide reports whether the device is gone since all GPUs of the node went together.
func (v Verdict) lostNodeWide() bool {
	f := v.own(Finding.ofPresence)
	return f != nil && f.NodeWide
}
