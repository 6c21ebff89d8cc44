//go:build cgo && linux

package dcgm

import (
	"time"

	"github.com/gpu-node-agent/gpu-node-agent/health"
)

// maxSampleSkew is how much older than its predecessor the newest sample may be, because it is another GPU's or another
// field's. If it is older still, the engine's clock was set back.
const maxSampleSkew = 5 * time.Second

// history outlives sessions and belongs to one session at a time. It holds the last complete inventory of each GPU, and what the engine's
// clock has shown.
type history struct {
	gpus map[health.DeviceID]*entityValues // as of the last complete inventory of each; a blank is as before

	firstSample  int64 // the engine's time at the first poll of this process; 0 if unknown, or if its clock was set back
	newestSample int64 // the engine's time at the last poll
	maxSample    int64 // the maximum of newestSample
}

func newHistory() *history { return &history{gpus: map[health.DeviceID]*entityValues{}} }

// updateClock takes the time of the engine's newest sample, 0 if there is none.
func (h *history) updateClock(at int64) {
	switch {
	case at == 0:
		return
	case h.newestSample == 0:
		h.firstSample = at
	case at < h.newestSample-maxSampleSkew.Microseconds():
		h.firstSample = 0 // after a step back, times no longer tell what happened before the start
	}
	h.newestSample, h.maxSample = at, max(h.maxSample, at)
}

// steppedBack reports whether the engine's clock is behind what it has shown before.
func (h *history) steppedBack() bool {
	return h.newestSample < h.maxSample-maxSampleSkew.Microseconds()
}
