package health

import (
	"cmp"
	"slices"
)

// inherit adds a GPU's findings to those of its MIG device. Of two of one cause the worse stands.
func inherit(own []Finding, parent DeviceID, inherited []Finding) []Finding {
	for _, f := range inherited {
		f.From = parent
		i := slices.IndexFunc(own, func(g Finding) bool { return g.Cause == f.Cause })
		if i < 0 {
			own = append(own, f)
		} else if f.State > own[i].State {
			own[i] = f
		}
	}
	return own
}

// find gives the verdict its findings, and the state that follows from them.
func (v *Verdict) find(all []Finding) {
	slices.SortStableFunc(all, func(a, b Finding) int {
		// A decision never stands before a fault: the fault is what somebody must see to.
		return cmp.Or(cmp.Compare(b.State, a.State), cmp.Compare(a.rank(), b.rank()), a.Since.Compare(b.Since), cmp.Compare(a.Cause, b.Cause))
	})
	v.Findings = all
	switch {
	case len(all) > 0:
		v.State = all[0].State
	case v.seen:
		v.State = Healthy
	default:
		v.State = Unknown
	}
}

// Has tells whether the device's own findings hold a cause.
func (v Verdict) Has(cause string) bool {
	return slices.ContainsFunc(v.Findings, func(f Finding) bool { return f.From == "" && f.Cause == cause })
}

// Cause returns the cause of the worst finding, "" if there is none.
func (v Verdict) Cause() string {
	if len(v.Findings) == 0 {
		return ""
	}
	return v.Findings[0].Cause
}

// Causes returns the causes of all findings, the worst first.
func (v Verdict) Causes() []string {
	var all []string
	for _, f := range v.Findings {
		all = append(all, f.Cause)
	}
	return all
}
