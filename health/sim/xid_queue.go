package sim

import (
	"slices"
	"time"

	"github.com/gpu-node-agent/gpu-node-agent/health"
)

const (
	// maxQueued limits the entries of a queue. Above it, entries of the same XID merge into one with the newest time, so
	// that memory is bounded and no XID is lost.
	maxQueued = 1000

	// maxDelivered limits the XIDs of one GPU in a reading. If more are queued, the source wakes its sessions again.
	maxDelivered = 1000
)

// queuedXID is an XID that was reported a number of times and waits for a poll.
type queuedXID struct {
	code, times int
	at          time.Time // of the newest
}

// xidQueue holds the XIDs of a GPU that no poll has delivered yet, oldest first.
type xidQueue []queuedXID

func (q xidQueue) add(x queuedXID) xidQueue {
	if len(q) >= maxQueued {
		for i, old := range slices.Backward(q) {
			if old.code == x.code {
				x.times += old.times
				q = slices.Delete(q, i, i+1)
				break
			}
		}
	}
	return append(q, x)
}

// take returns the XIDs for one reading, and the rest of the queue.
func (q xidQueue) take() (xids []health.XID, rest xidQueue) {
	for i := range q {
		n := min(q[i].times, maxDelivered-len(xids))
		for range n {
			xids = append(xids, health.XID{Code: q[i].code, At: q[i].at})
		}
		if n < q[i].times {
			q[i].times -= n
			return xids, q[i:]
		}
	}
	return xids, nil
}
