package agent

import (
	"time"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/plugin"
)

const (
	// holdersSettle is how long the kubelet must have said who holds what before a device counts as free: a new
	// kubelet does not know all of its pods at once.
	holdersSettle = 10 * time.Second

	// holdersStale is how old its word may be. It is asked every ten seconds.
	holdersStale = 30 * time.Second
)

// holding answers the monitor whether a pod has a device. Whatever is not certain is a yes: a GPU that a pod uses
// must not be given out for a reset. The monitor asks from one goroutine at a time.
type holding struct {
	holders func() plugin.Holders
	since   time.Time // since when the kubelet has said who holds what, without a gap; zero if it does not
}

func (h *holding) held(id health.DeviceID) bool {
	now, known := time.Now(), h.holders()
	if known.Err != "" || known.By == nil || now.Sub(known.At) > holdersStale {
		h.since = time.Time{}
		return true
	}
	if h.since.IsZero() {
		h.since = now
	}
	return now.Sub(h.since) < holdersSettle || len(known.By[id]) > 0
}
