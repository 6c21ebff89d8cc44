package judge

import (
	"cmp"
	"slices"
	"time"

	"github.com/gpu-node-agent/gpu-node-agent/health"
)

// sortFindings sorts findings: worst first; of equal severity, the strongest action first. A fault comes before a decision of the same
// severity, because the fault needs the attention.
func sortFindings(findings []health.Finding) {
	slices.SortStableFunc(findings, func(a, b health.Finding) int {
		return cmp.Or(cmp.Compare(b.State, a.State), cmp.Compare(rank(a), rank(b)), a.Action.Compare(b.Action), a.Since.Compare(b.Since),
			cmp.Compare(a.Cause, b.Cause))
	})
}

// inherit adds a GPU's findings to its MIG device's. Of two findings with one cause the worse remains.
func inherit(findings []health.Finding, parent health.DeviceID, inherited []health.Finding) []health.Finding {
	for _, f := range inherited {
		f.From = parent
		i := slices.IndexFunc(findings, health.HasCause(f.Cause))
		if i < 0 {
			findings = append(findings, f)
		} else if f.State > findings[i].State {
			findings[i] = f
		}
	}
	return findings
}

// merge adds a finding, or renews the finding with the same cause and keeps its beginning.
func merge(findings []health.Finding, f health.Finding) []health.Finding {
	i := slices.IndexFunc(findings, health.HasCause(f.Cause))
	if i < 0 {
		return append(findings, f)
	}
	if f.State < findings[i].State { // a WARN does not prove that the FAIL is over
		if f.Cause == health.CauseRecoveryAction { // but the driver asks for one action at a time
			findings[i].Reason, findings[i].Action = f.Reason, f.Action
		}
		return findings
	}
	f.Since, f.Reset = findings[i].Since, findings[i].Reset
	if f.Clears == health.ClearsGPUReset {
		f.Reset = time.Time{} // the fault recurred, so the reset did not cure it
	}
	findings[i] = f
	return findings
}

// mergeAll merges findings in turn.
func mergeAll(findings, added []health.Finding) []health.Finding {
	for _, f := range added {
		findings = merge(findings, f)
	}
	return findings
}

// rank orders findings of one severity. Faults of the device are equal.
func rank(f health.Finding) health.Family { return max(f.Family(), health.FamilyIncident) }
