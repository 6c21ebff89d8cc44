package sim

import (
	"slices"
	"time"

	"github.com/gpu-node-agent/gpu-node-agent/health"
)

const (
	// maxPending is how many reports of one GPU wait one by one. From there on those of one number are one
	// entry: none is lost and memory is bounded, but the older ones of them get the time of the newest.
	maxPending = 1000

	// maxTaken is how many XIDs of one GPU a reading has at most. What is left makes the next poll worth making.
	maxTaken = 1000
)

// report is an XID that waits for somebody to poll, or several of one number.
type report struct {
	code, times int
	at          time.Time // of the newest
}

// reports are what one GPU has not delivered yet, oldest first.
type reports []report

func (rs reports) add(r report) reports {
	if len(rs) >= maxPending {
		for i, old := range slices.Backward(rs) {
			if old.code == r.code {
				r.times += old.times
				rs = slices.Delete(rs, i, i+1)
				break
			}
		}
	}
	return append(rs, r)
}

// take returns what a reading has, and what is left.
func (rs reports) take() (taken []health.XID, left reports) {
	for i := range rs {
		n := min(rs[i].times, maxTaken-len(taken))
		for range n {
			taken = append(taken, health.XID{Code: rs[i].code, At: rs[i].at})
		}
		if n < rs[i].times {
			rs[i].times -= n
			return taken, rs[i:]
		}
	}
	return taken, nil
}
