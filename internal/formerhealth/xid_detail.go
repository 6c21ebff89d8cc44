package formerhealth

import (
	"fmt"
	"strings"
)

// Description returns the meaning of the XID with what the kernel log adds: the process, and for some XIDs the driver's
// message.
func (x XID) Description() string {
	text := LookupXID(x.Code).Name
	if e, ok := x.nvlinkDetail(); ok {
		text += ", " + e.String()
	}
	switch d := x.Detail; {
	case d.Process != "" && d.PID != 0:
		text += fmt.Sprintf(", process %s (pid %d)", d.Process, d.PID)
	case d.Process != "":
		text += ", process " + d.Process
	case d.PID != 0:
		text += fmt.Sprintf(", process %d", d.PID)
	}
	switch x.Code {
	case 94, 95: // whether the error was contained, where, and whether the driver needs a reset (RST) or a drain and a reset (D-RST)
		if x.Detail.Text != "" {
			text += ": " + x.Detail.Text
		}
	case 154: // the message repeats the meaning
		if _, change, ok := strings.Cut(x.Detail.Text, " changed "); ok {
			text += " " + change
		}
	}
	return text
}

// reason returns the reason of the XID's finding.
func (x XID) reason() string { return fmt.Sprintf("XID %d: %s", x.Code, x.Description()) }

// asksForResetSuffix follows the reason of an XID that is Unhealthy because of the driver's recovery action.
const asksForResetSuffix = "; the driver asks for a reset"

// raise makes an XID Unhealthy that the kernel log shows to need a reset. Only XIDs that follow the recovery action are
// raised: those depend on bits which the kernel log has and the source has not. A configured effect stays.
func (i XIDInfo) raise(c XIDConfig, x XID) XIDInfo {
	if e, ok := x.nvlinkDetail(); ok && e.needsReset() && c.followsRecoveryAction(x.Code) {
		i.Effect, i.Action, i.Clears = EffectUnhealthy, ActionResetGPU, ClearsGPUReset
	}
	return i
}

// enrich adds the detail of a twin to the finding from the first report of the XID. It adds and renews no finding, so a finding that a
// reset or time has ended stays ended. It changes the findings in place.
func enrich(c Config, findings []Finding, twin XID) []Finding {
	detailed, bad := xidFinding(c, twin, twin.At)
	if !bad || twin.Detail == (XIDDetail{}) {
		return findings
	}
	for i := range findings {
		f := &findings[i]
		if f.Cause != detailed.Cause || f.From != "" {
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
func addDetails(pending, twins []XID) []XID {
	for _, twin := range twins {
		for i := range pending {
			if pending[i].Code == twin.Code {
				pending[i].Detail = twin.Detail
			}
		}
	}
	return pending
}
