package health

import (
	"slices"
	"strings"
	"time"
)

// Memorable tells whether something of the device is worth keeping over a restart.
func (d DeviceState) Memorable() bool {
	return len(d.Verdict.Findings) > 0 || len(d.Verdict.Trips) > 0 || len(d.Verdict.Follow) > 0 || len(d.Seen) > 0
}

// Stable returns the verdict without what changes with every poll though nothing happens.
func (v Verdict) Stable() Verdict {
	v.suspect, v.seen = nil, false
	v.Findings = slices.Clone(v.Findings)
	for i := range v.Findings {
		if v.Findings[i].condition() {
			v.Findings[i].Last, v.Findings[i].Reason = time.Time{}, ""
		}
	}
	return v
}

// Restored returns the verdict of another process with its times on the clock of now.
func (v Verdict) Restored(now time.Time) Verdict {
	v.Findings, v.Trips, v.Follow = slices.Clone(v.Findings), slices.Clone(v.Trips), slices.Clone(v.Follow)
	v.Since = Rebase(v.Since, now)
	for i := range v.Follow {
		v.Follow[i].At = Rebase(v.Follow[i].At, now)
	}
	for i := range v.Trips {
		v.Trips[i] = Rebase(v.Trips[i], now)
	}
	for i := range v.Findings {
		f := &v.Findings[i]
		f.Since, f.Last, f.Reset = Rebase(f.Since, now), Rebase(f.Last, now), Rebase(f.Reset, now)
		f.unseen(now)
	}
	v.unexplained = v.faulty(CauseRecoveryAction) // if the driver wants a reset
	return v
}

// Rebase returns a time of another process as an age on the clock of now. What is ahead of now is now; zero stays zero.
func Rebase(t, now time.Time) time.Time {
	if t.IsZero() {
		return t
	}
	return now.Add(-max(0, now.Sub(t)))
}

// Unmeasured returns the devices so that nothing that was measured before counts: not for how long a condition is gone, how
// often a fault was seen, or that a device is there.
func Unmeasured(devices []DeviceState, now time.Time) []DeviceState {
	devices = slices.Clone(devices)
	for i := range devices {
		devices[i].Sample.Presence = PresenceUnknown
		v := &devices[i].Verdict
		v.suspect, v.Findings = nil, slices.Clone(v.Findings)
		for j := range v.Findings {
			v.Findings[j].unseen(now)
		}
	}
	return devices
}

// unseen begins the time of a condition anew: nobody has looked until now, and for how long it has been gone is not
// known.
func (f *Finding) unseen(now time.Time) {
	if f.condition() {
		if f.Last.Before(f.Reset) {
			f.Reset = now // the reset was seen already, and is not to be seen twice
		}
		f.Last = now
	}
}

// condition tells of a finding that is renewed by each poll while it stands; an XID is not.
func (f Finding) condition() bool {
	return f.Clears == ClearsItself && !f.ofXID()
}

func (f Finding) ofXID() bool { return strings.HasPrefix(f.Cause, xidPrefix) }
