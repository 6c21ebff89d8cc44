package sim

import (
	"cmp"
	"fmt"
	"slices"
	"time"

	"github.com/gpu-node-agent/gpu-node-agent/health"
)

// PastXID is an XID that a GPU reported before the source was first opened.
type PastXID struct {
	Ago time.Duration `yaml:"ago"` // before the source was first opened
	GPU *int          `yaml:"gpu"` // index; an XID of a partitioned GPU is the GPU's
	XID *int          `yaml:"xid"`
}

// faults returns what is wrong with it. The profile is only looked at if it is known.
func (x PastXID) faults(p profile, known bool) []fault {
	var out []fault
	if x.Ago <= 0 {
		out = append(out, fault{"ago", fmt.Sprintf("%v is not before the start; use more than 0s", x.Ago)})
	}
	e := Event{GPU: x.GPU, XID: x.XID}
	switch {
	case x.GPU == nil:
		out = append(out, fault{"gpu", "is missing; say which GPU reported it"})
	case known:
		out = append(out, e.misses(p)...)
	}
	if x.XID == nil {
		return append(out, fault{"xid", "is missing; say which"})
	}
	for _, f := range e.faults() {
		if f.key == "xid" {
			out = append(out, f)
		}
	}
	return out
}

// record is what one GPU has reported. It outlives a new partition.
type record struct {
	past    []health.XID // from before the start, until it is delivered; oldest first
	pending reports      // from after the start, not delivered yet
	lastXID int          // 0: none yet
	noted   []int        // the XIDs that were ever reported, ascending: DCGM's health check forgets none
}

// note remembers an XID as the last one, and for DCGM's health check.
func (r *record) note(code int) {
	r.lastXID = code
	if i, found := slices.BinarySearch(r.noted, code); !found {
		r.noted = slices.Insert(r.noted, i, code)
	}
}

// recall gives each GPU its past. Called with mu held, when the clock starts.
func (s *Source) recall() {
	past := slices.Clone(s.cfg.Past)
	slices.SortStableFunc(past, func(a, b PastXID) int { return cmp.Compare(b.Ago, a.Ago) })
	for _, x := range past {
		g := &s.gpus[*x.GPU]
		g.note(*x.XID)
		g.past = append(g.past, health.XID{Code: *x.XID, At: s.start.Add(-x.Ago)})
	}
}
