package health

import (
	"slices"
	"strconv"
	"time"
)

// xidPrefix begins the cause of every finding of an XID.
const xidPrefix = "xid-"

func xidCause(code int) string { return xidPrefix + strconv.Itoa(code) }

// LastXID returns the XID of the device's newest own finding of an XID, 0 if there is none.
func (v Verdict) LastXID() (code int) {
	var last time.Time
	for _, f := range v.Findings {
		if xid, ok := XIDOfCause(f.Cause); ok && f.From == "" && !f.Last.Before(last) {
			code, last = xid, f.Last
		}
	}
	return code
}

// reportedAt returns when an XID was reported, on the sample's clock. The driver's clock may differ or may have been set.
// DCGM keeps XIDs for ten minutes, so a time outside of them is replaced by now.
func reportedAt(x XID, now time.Time) time.Time {
	if age := now.Sub(x.At); age < 0 || age > 10*time.Minute {
		return now
	}
	return x.At
}

// xidFinding returns the finding of an XID. It returns false if the XID is ignored.
func xidFinding(c Config, x XID, now time.Time) (Finding, bool) {
	info := c.XID.Lookup(x.Code).raise(c.XID, x)
	if info.Clears == ClearsRestart {
		info.Clears = ClearsItself // the restart of an application is not observable; a while without the XID stands for it
	}
	f := Finding{
		Cause: xidCause(x.Code), Reason: x.reason(), Action: info.Action,
		State: info.Effect.state(), Since: reportedAt(x, now), Last: now, Clears: info.Clears,
	}
	return f, f.State > Healthy
}

// xidFindings returns the findings of XIDs.
func xidFindings(c Config, xids []XID, now time.Time) (findings []Finding) {
	for _, x := range xids {
		if f, bad := xidFinding(c, x, now); bad {
			findings = append(findings, f)
		}
	}
	return findings
}

// pendingFor is how long after an XID the driver's recovery action may decide its severity. The driver sets the action at
// once; the engine and the polls add some seconds.
const pendingFor = time.Minute

// pendingXIDs returns the recent XIDs whose severity the recovery action decides. A reset ends them. While the driver asks to
// drain peer-to-peer work it has not decided, so they stay.
func pendingXIDs(c Config, old, gpu Memory, xids []XID, now time.Time, r reset) []XID {
	drains := func(f Finding) bool { return f.Cause == CauseRecoveryAction && f.Action == ActionDrainP2P }
	undecided := slices.ContainsFunc(old.Findings, drains) || slices.ContainsFunc(gpu.Findings, drains)
	all := slices.DeleteFunc(slices.Clone(old.PendingXIDs), func(x XID) bool {
		return r.follows(Finding{Cause: xidCause(x.Code), Last: x.At}) || now.Sub(x.At) >= pendingFor && !undecided ||
			!c.XID.followsRecoveryAction(x.Code)
	})
	for _, x := range xids {
		if c.XID.followsRecoveryAction(x.Code) {
			all = slices.DeleteFunc(all, func(y XID) bool { return y.Code == x.Code })
			all = append(all, XID{Code: x.Code, At: now, Detail: x.Detail})
		}
	}
	return all
}

// escalate returns Unhealthy findings of the pending XIDs if the driver asks for a reset of the device or of its GPU: such a
// GPU does not work properly. Other recovery actions are Unhealthy without an XID.
func escalate(pending []XID, findings []Finding, gpu *Memory) []Finding {
	asksForReset := func(f Finding) bool { return f.Cause == CauseRecoveryAction && f.Action == ActionResetGPU }
	if len(pending) == 0 || !slices.ContainsFunc(findings, asksForReset) && !slices.ContainsFunc(gpu.Findings, asksForReset) {
		return nil
	}
	var all []Finding
	for _, x := range pending {
		all = append(all, Finding{
			Cause: xidCause(x.Code), State: Unhealthy, Action: ActionResetGPU, Since: x.At, Last: x.At, Clears: ClearsGPUReset,
			Reason: x.reason() + asksForResetSuffix,
		})
	}
	return all
}
