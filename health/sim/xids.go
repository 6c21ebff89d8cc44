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
	past    []health.XIDRow // from before the start, oldest first
	queue   []health.XID    // from after the start and not delivered yet; oldest first
	lastXID int             // 0: none
}

// addPastXIDs adds the configured past XIDs to the GPUs. Open calls it with mu held when the clock starts.
func (s *Source) addPastXIDs() {
	past := slices.Clone(s.cfg.Past)
	slices.SortStableFunc(past, func(a, b PastXID) int { return cmp.Compare(b.Ago, a.Ago) })
	for _, x := range past {
		g := &s.gpus[*x.GPU]
		g.lastXID = *x.XID
		g.past = append(g.past, health.XIDRow{Code: *x.XID, At: s.start.Add(-x.Ago).UnixMicro(), Old: true})
	}
}

// maxQueued limits the XIDs of a GPU that no poll has delivered. Above it, equal ones merge, so that memory is bounded and no XID is lost.
const maxQueued = 1000

// enqueue adds an XID to a queue.
func enqueue(q []health.XID, x health.XID) []health.XID {
	if len(q) >= maxQueued {
		for i, old := range slices.Backward(q) {
			if old.Code == x.Code {
				x.Times = x.Count() + old.Count()
				q = slices.Delete(q, i, i+1)
				break
			}
		}
	}
	return append(q, x)
}
