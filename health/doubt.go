package health

import (
	"fmt"
	"time"
)

// DoubtDelay is how long the source must say that all GPUs are gone before it is believed. An engine that was started
// without a driver lists no GPU and reports no error; binding or unbinding one GPU makes DCGM call all of them detached
// for a moment (dcgm/OBSERVED.md#short-detach). A switch can take all of them in earnest.
const DoubtDelay = 10 * time.Second

// Doubt keeps readings that make all GPUs go at once from being believed for a while, and those that lack a GPU which only
// the state file knows: DCGM may name it some seconds late. A GPU that the driver calls lost is never doubted.
type Doubt struct {
	since  time.Time // of the first reading without any GPU; zero if the last one had one
	unread time.Time // of the first reading that lacks a GPU which no reading of this process has had
}

// Check returns the reading to judge: r, or one in which the GPUs in doubt are as they were known last, with presence
// unknown, no values, and the XIDs of r. If all are in doubt, why says what the source claims.
func (d *Doubt) Check(before []DeviceState, r *Reading, now time.Time) (judged *Reading, why string) {
	samples := make(map[DeviceID]Sample, len(r.Samples))
	for _, s := range r.Samples {
		samples[s.Device] = s
	}
	listed := make(map[DeviceID]bool, len(r.Devices))
	present := 0
	for _, v := range r.Devices {
		listed[v.ID] = true
		if v.Kind == KindGPU && samples[v.ID].Presence == Present {
			present++
		}
	}
	gone := make(map[DeviceID]bool)   // GPUs
	unread := make(map[DeviceID]bool) // GPUs that are not listed either, and were not in this process
	unlisted := 0
	for _, b := range before {
		id := b.Device.ID
		if b.Device.Kind != KindGPU || b.Sample.Presence == Missing || b.Verdict.goneInCommon() { // that is believed already
			continue
		}
		switch p := samples[id].Presence; {
		case !listed[id] && !b.Verdict.seen:
			unread[id] = true
			fallthrough
		case !listed[id]:
			gone[id] = true
			unlisted++
		case b.Sample.Presence <= Present && (p == Detached || p == Inaccessible):
			gone[id] = true
		}
	}
	since := &d.since
	all := present == 0 && len(gone) > 0
	if !all {
		d.since = time.Time{}
		gone, since = unread, &d.unread
	}
	if len(gone) == 0 {
		return r, ""
	}
	if since.IsZero() {
		*since = now
	}
	if now.Sub(*since) >= DoubtDelay {
		return r, ""
	}

	judged = &Reading{Versions: r.Versions}
	for _, v := range r.Devices {
		if !gone[v.ID] && !gone[v.Parent] {
			judged.Devices = append(judged.Devices, v)
			judged.Samples = append(judged.Samples, samples[v.ID])
		}
	}
	for _, b := range before {
		if gone[b.Device.ID] || gone[b.Device.Parent] {
			is := samples[b.Device.ID]
			judged.Devices = append(judged.Devices, b.Device)
			judged.Samples = append(judged.Samples, Sample{Device: b.Device.ID, At: now, XIDs: is.XIDs, Past: is.Past})
		}
	}
	if !all {
		return judged, ""
	}
	why = fmt.Sprintf("%d GPUs are said to be gone at once, which is believed after %v", len(gone), DoubtDelay)
	switch {
	case len(r.Devices) == 0:
		why = fmt.Sprintf("the source lists no GPU, though %d are known; it is believed after %v", len(gone), DoubtDelay)
	case unlisted == 0:
		why = fmt.Sprintf("the source calls all %d GPUs detached or inaccessible; it is believed after %v", len(gone), DoubtDelay)
	}
	return judged, why
}
