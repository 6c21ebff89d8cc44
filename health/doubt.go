package health

import (
	"fmt"
	"time"
)

// doubtFor is how long the source must say that all GPUs are gone before it is believed. An engine that was started
// without a driver lists no GPU and reports no error; binding or unbinding one GPU makes DCGM call all of them detached
// for a moment (OBSERVED.md 11). A switch can take all of them in earnest.
const doubtFor = 10 * time.Second

// doubt keeps readings that make all GPUs go at once from being believed for a while. A GPU that the driver calls lost
// is never doubted.
type doubt struct {
	since time.Time // of the first such reading; zero if the last one was none
}

// check returns the reading to judge: r, or as long as r is in doubt one in which the GPUs in question are as they were
// known last, with presence unknown and the XIDs of r. Then why says what the source claims.
func (d *doubt) check(before []DeviceState, r *Reading, now time.Time) (judged *Reading, why string) {
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
	gone := make(map[DeviceID]bool) // GPUs
	unlisted := 0
	for _, b := range before {
		id := b.Device.ID
		if b.Device.Kind != KindGPU || b.Sample.Presence > Present {
			continue
		}
		switch p := samples[id].Presence; {
		case !listed[id]:
			gone[id] = true
			unlisted++
		case p == Detached || p == Inaccessible:
			gone[id] = true
		}
	}
	if present > 0 || len(gone) == 0 {
		d.since = time.Time{}
		return r, ""
	}
	if d.since.IsZero() {
		d.since = now
	}
	if now.Sub(d.since) >= doubtFor {
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
			s, is := b.Sample, samples[b.Device.ID]
			s.Device, s.At, s.Presence, s.XIDs, s.Past, s.Checked = b.Device.ID, now, PresenceUnknown, is.XIDs, is.Past, false
			judged.Devices = append(judged.Devices, b.Device)
			judged.Samples = append(judged.Samples, s)
		}
	}
	why = fmt.Sprintf("%d GPUs are said to be gone at once, which is believed after %v", len(gone), doubtFor)
	switch {
	case len(r.Devices) == 0:
		why = fmt.Sprintf("the source lists no GPU, though %d are known; it is believed after %v", len(gone), doubtFor)
	case unlisted == 0:
		why = fmt.Sprintf("the source calls all %d GPUs detached or inaccessible; it is believed after %v", len(gone), doubtFor)
	}
	return judged, why
}
