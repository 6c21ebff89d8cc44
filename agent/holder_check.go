package agent

import (
	"time"

	"github.com/gpu-node-agent/gpu-node-agent/agent/operator"
	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/plugin"
)

const (
	// holdersSettle is how long the kubelet must have said who holds what before a device counts as free: a new
	// kubelet does not know all of its pods at once.
	holdersSettle = 10 * time.Second

	// holdersUnasked is how long nobody may have asked here: what was between two questions is not known. The
	// monitor asks while a GPU waits for a reset, at every poll, which are at most a minute apart.
	holdersUnasked = 2 * time.Minute
)

// holding answers the monitor whether a pod has a device. Whatever is not certain is a yes: a GPU that a pod uses
// must not be given out for a reset. The monitor asks from one goroutine at a time.
type holding struct {
	holders func() plugin.Holders
	hurry   func()    // has the kubelet asked soon: a pod that waits takes a free GPU within seconds
	since   time.Time // since when the kubelet has said who holds what, without a gap; zero if it does not
	asked   time.Time // when it was looked at last
}

func (h *holding) held(id health.DeviceID) bool {
	now, known := time.Now(), h.holders()
	if now.Sub(h.asked) > holdersUnasked {
		h.since = time.Time{}
	}
	h.asked = now
	h.hurry()
	if known.Err != "" || known.By == nil || now.Sub(known.At) > operator.MaxHoldersAge {
		h.since = time.Time{}
		return true
	}
	if h.since.IsZero() {
		h.since = now
	}
	return now.Sub(h.since) < holdersSettle || len(known.By[id]) > 0
}
