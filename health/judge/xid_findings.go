package judge

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/health/catalog"
)

// xidFinding returns the finding of an XID. It returns false if the XID is ignored.
func xidFinding(c Config, x health.XID, now time.Time) (health.Finding, bool) {
	info := c.XID.LookupDetailed(x)
	if info.Clears == health.ClearsRestart {
		info.Clears = health.ClearsItself // the restart of an application is not observable; a while without the XID stands for it
	}
	f := health.Finding{
		Cause: health.XIDCause(x.Code), Reason: xidReason(x), Action: info.Action,
		State: info.Effect.State(), Since: x.ReportedAt(now), Last: now, Clears: info.Clears,
	}
	return f, f.State > health.Healthy
}

// xidFindings returns the findings of XIDs.
func xidFindings(c Config, xids []health.XID, now time.Time) (findings []health.Finding) {
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
func pendingXIDs(c Config, old, gpu health.Memory, xids []health.XID, now time.Time, r reset) []health.XID {
	drains := func(f health.Finding) bool {
		return f.Cause == health.CauseRecoveryAction && f.Action == health.ActionDrainP2P
	}
	undecided := slices.ContainsFunc(old.Findings, drains) || slices.ContainsFunc(gpu.Findings, drains)
	all := slices.DeleteFunc(slices.Clone(old.PendingXIDs), func(x health.XID) bool {
		return r.follows(health.Finding{Cause: health.XIDCause(x.Code), Last: x.At}) || now.Sub(x.At) >= pendingFor && !undecided ||
			!c.XID.FollowsRecoveryAction(x.Code)
	})
	for _, x := range xids {
		if c.XID.FollowsRecoveryAction(x.Code) {
			all = slices.DeleteFunc(all, func(y health.XID) bool { return y.Code == x.Code })
			all = append(all, health.XID{Code: x.Code, At: now, Detail: x.Detail})
		}
	}
	return all
}

// escalate returns Unhealthy findings of the pending XIDs if the driver asks for a reset of the device or of its GPU: such a
// GPU does not work properly. Other recovery actions are Unhealthy without an XID.
func escalate(pending []health.XID, findings []health.Finding, gpu *health.Memory) []health.Finding {
	asksForReset := func(f health.Finding) bool {
		return f.Cause == health.CauseRecoveryAction && f.Action == health.ActionResetGPU
	}
	if len(pending) == 0 || !slices.ContainsFunc(findings, asksForReset) && !slices.ContainsFunc(gpu.Findings, asksForReset) {
		return nil
	}
	var all []health.Finding
	for _, x := range pending {
		all = append(all, health.Finding{
			Cause: health.XIDCause(x.Code), State: health.Unhealthy, Action: health.ActionResetGPU, Since: x.At, Last: x.At,
			Reason: xidReason(x) + asksForResetSuffix, Clears: health.ClearsGPUReset,
		})
	}
	return all
}

// xidReason returns the reason of an XID's finding.
func xidReason(x health.XID) string { return fmt.Sprintf("XID %d: %s", x.Code, catalog.Describe(x)) }

// asksForResetSuffix follows the reason of an XID that is Unhealthy because of the driver's recovery action.
const asksForResetSuffix = "; the driver asks for a reset"

// enrich adds the detail of a twin to the finding from the first report of the XID. It adds and renews no finding, so a finding that a
// reset or time has ended stays ended. It changes the findings in place.
func enrich(c Config, findings []health.Finding, twin health.XID) []health.Finding {
	detailed, bad := xidFinding(c, twin, twin.At)
	if !bad || twin.Detail == (health.XIDDetail{}) {
		return findings
	}
	for i := range findings {
		f := &findings[i]
		if f.Cause != detailed.Cause {
			continue
		}
		if strings.HasSuffix(f.Reason, asksForResetSuffix) {
			detailed.Reason += asksForResetSuffix
		}
		f.Reason = detailed.Reason
		if detailed.State > f.State {
			f.State, f.Action, f.Clears = detailed.State, detailed.Action, detailed.Clears
		}
	}
	return findings
}

// addDetails adds the details of twins to pending XIDs, which it changes in place.
func addDetails(pending, twins []health.XID) []health.XID {
	for _, twin := range twins {
		for i := range pending {
			if pending[i].Code == twin.Code {
				pending[i].Detail = twin.Detail
			}
		}
	}
	return pending
}
