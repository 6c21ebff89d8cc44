package sim

import (
	"cmp"
	"slices"
	"time"

	"github.com/gpu-node-agent/gpu-node-agent/health"
)

// PastXID is an XID that a GPU reported before the source was first opened.
type PastXID struct {
	Ago time.Duration `yaml:"ago"` // before the first Open
	GPU *int          `yaml:"gpu"` // index; a partitioned GPU reports it, not its MIG devices
	XID *int          `yaml:"xid"`
}

// validate returns all errors; p is nil if the profile is invalid.
func (x PastXID) validate(p *profile) (errs []error) {
	if x.Ago <= 0 {
		errs = append(errs, keyErrorf("ago", "%v is not before the start; use more than 0s", x.Ago))
	}
	e := Event{GPU: x.GPU, XID: x.XID}
	if x.GPU == nil {
		errs = append(errs, keyErrorf("gpu", "is missing; use the index of a GPU"))
	} else if p != nil {
		errs = append(errs, e.validateFor(p)...)
	}
	if x.XID == nil {
		errs = append(errs, keyErrorf("xid", "is missing; use the number of an XID"))
	} else if err := effectOf("xid").check("xid", *x.XID); err != nil {
		errs = append(errs, err)
	}
	return errs
}

// xidRecord holds the XIDs that a GPU has reported. It survives repartitioning.
type xidRecord struct {
	past    []health.XID // from before the start and not delivered yet; oldest first
	queue   xidQueue     // from after the start and not delivered yet
	lastXID int          // 0: none
}

// addPastXIDs adds the configured past XIDs to the GPUs. Open calls it with mu held when the clock starts.
func (s *Source) addPastXIDs() {
	past := slices.Clone(s.cfg.Past)
	slices.SortStableFunc(past, func(a, b PastXID) int { return cmp.Compare(b.Ago, a.Ago) })
	for _, x := range past {
		g := &s.gpus[*x.GPU]
		g.lastXID = *x.XID
		g.past = append(g.past, health.XID{Code: *x.XID, At: s.start.Add(-x.Ago)})
	}
}

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
