package health

import (
	"fmt"
	"time"
)

// OutageDelay is how long the source must report that all GPUs are unreachable before that counts. A host engine that started
// without a driver lists no GPU and reports no error; binding or unbinding one GPU makes DCGM report all of them as detached
// for a moment (dcgm/OBSERVED.md#short-detach). A failing switch can also take all GPUs away for real.
const OutageDelay = 10 * time.Second

// OutageFilter delays readings in which all GPUs disappear at once, and readings that lack a GPU which only the saved state
// knows: DCGM may list it some seconds late. It never delays GPUs that the driver reports as lost.
type OutageFilter struct {
	unreachableSince time.Time // the first of the readings without any GPU; zero if the last reading had one
	missingSince     time.Time // the first of the readings that lack a GPU which this process has never measured
}

// Filter returns the reading to judge: r, or a copy in which the delayed GPUs have their last known properties, an unknown
// presence, no values, and the XIDs of r. If all GPUs are delayed, warning describes what the source reports.
func (o *OutageFilter) Filter(before []DeviceState, r *Reading, now time.Time) (judged *Reading, warning string) {
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
	unreachable := make(map[DeviceID]bool) // GPUs
	unmeasured := make(map[DeviceID]bool)  // unlisted GPUs that this process has never measured
	unlisted := 0
	for _, b := range before {
		id := b.Device.ID
		if b.Device.Kind != KindGPU || b.Sample.Presence == Missing || b.Verdict.inOutage() { // counts already
			continue
		}
		switch p := samples[id].Presence; {
		case !listed[id] && !b.Verdict.measured:
			unmeasured[id] = true
			fallthrough
		case !listed[id]:
			unreachable[id] = true
			unlisted++
		case b.Sample.Presence <= Present && (p == Detached || p == Inaccessible):
			unreachable[id] = true
		}
	}
	since := &o.unreachableSince
	all := !anyPresent && len(unreachable) > 0
	if !all {
		o.unreachableSince = time.Time{}
		unreachable, since = unmeasured, &o.missingSince
	}
	if len(unreachable) == 0 {
		return r, ""
	}
	if since.IsZero() {
		*since = now
	}
	if now.Sub(*since) >= OutageDelay {
		return r, ""
	}

	judged = &Reading{Versions: r.Versions, Checks: r.Checks, Incidents: r.Incidents}
	for _, d := range r.Devices {
		if !unreachable[d.ID] && !unreachable[d.Parent] {
			judged.Devices = append(judged.Devices, d)
			judged.Samples = append(judged.Samples, samples[d.ID])
		}
	}
	for _, b := range before {
		if unreachable[b.Device.ID] || unreachable[b.Device.Parent] {
			s := samples[b.Device.ID]
			judged.Devices = append(judged.Devices, b.Device)
			judged.Samples = append(judged.Samples, Sample{Device: b.Device.ID, At: now, XIDs: s.XIDs, Past: s.Past})
		}
	}
	if !all {
		return judged, ""
	}
	warning = fmt.Sprintf("the source reports %d GPUs as unreachable at once", len(unreachable))
	switch {
	case len(r.Devices) == 0:
		warning = fmt.Sprintf("the source lists no GPU, but %d are known", len(unreachable))
	case unlisted == 0:
		warning = fmt.Sprintf("the source reports all %d GPUs as detached or inaccessible", len(unreachable))
	}
	return judged, fmt.Sprintf("%s; this counts after %v", warning, OutageDelay)
}

// nodeOutage tells whether all reachable GPUs of the node became unreachable together: in one reading, or shortly after one another,
// because the source asks for their states in turn.
type nodeOutage struct {
	now        time.Time
	all        bool // no GPU is present, and at least one became unreachable in this reading
	several    bool // more than one became unreachable, in this reading or shortly before
	multiGPU   bool // the node has more than one GPU
	anyPresent bool
}

func newNodeOutage(before []DeviceState, samples map[DeviceID]Sample, now time.Time) nodeOutage {
	newlyUnreachable, recentlyUnreachable, gpus, present := 0, 0, 0, 0
	for _, d := range before {
		if d.Device.Kind != KindGPU {
			continue
		}
		gpus++
		s, listed := samples[d.Device.ID]
		switch {
		case !listed || s.Presence > Present:
			if d.Sample.Presence <= Present {
				newlyUnreachable++
			} else if f := d.Verdict.ownFinding(Finding.ofPresence); f != nil && now.Sub(f.Since) < OutageDelay {
				recentlyUnreachable++
			}
		case s.Presence == Present:
			present++
		}
	}
	return nodeOutage{now, newlyUnreachable > 0 && present == 0, newlyUnreachable+recentlyUnreachable > 1, gpus > 1, present > 0}
}

// includes reports whether an unreachable device is part of the outage, and since when other GPUs are back without it. A GPU
// that the driver reports as lost is lost alone if no other GPU was lost with it, or if it stays lost for OutageDelay after the
// others came back.
func (o nodeOutage) includes(old Verdict, cause string) (inOutage bool, othersBackSince time.Time) {
	f := old.ownFinding(Finding.ofPresence)
	switch {
	case f == nil:
		return o.all && (o.several || cause != CauseLost), time.Time{}
	case f.InOutage && o.anyPresent:
		since := f.othersBackSince
		if since.IsZero() {
			since = o.now
		}
		return o.now.Sub(since) < OutageDelay, since
	case f.InOutage:
		return true, time.Time{}
	}
	// The other GPUs became unreachable shortly after it.
	return o.all && o.multiGPU && o.now.Sub(f.Since) < OutageDelay, time.Time{}
}

// inOutage reports whether the device became unreachable together with all GPUs of the node.
func (v Verdict) inOutage() bool {
	f := v.ownFinding(Finding.ofPresence)
	return f != nil && f.InOutage
}
