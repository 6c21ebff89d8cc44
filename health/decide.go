package health

import (
	"fmt"
	"slices"
	"time"
)

// A decision is a finding that nobody measures: an operator has cordoned the GPU or has had its driver let go of, or it
// is kept free for a reset. It is made anew at every look, so it ends with its reason, whatever Config.Recovery says; it is no
// trip, and an operator's word does not end it.
func (f Finding) decision() bool {
	return f.Cause == CauseCordoned || f.Cause == CauseIsolated || f.Cause == CauseReleased
}

func (f Finding) rank() int {
	if f.decision() {
		return 1
	}
	return 0
}

// Decided reports whether what was decided about a device is the worst that is known of it.
func (v Verdict) Decided() bool { return len(v.Findings) > 0 && v.Findings[0].decision() }

func (f Finding) cordon() bool { return f.Cause == CauseCordoned }

// Decide adds the decisions to what was judged, and tells since when each verdict is what it is. If held is nil, every
// device is held. The Detachment is zero while the driver is ours.
func Decide(c Config, before, judged []DeviceState, held Held, detach Detachment, now time.Time) []DeviceState {
	was := make(map[DeviceID]Verdict, len(before))
	for _, d := range before {
		was[d.Device.ID] = d.Verdict
	}
	ofGPU := make(map[DeviceID][]Finding)
	decided := slices.Clone(judged)
	for i := range decided { // GPUs come before their MIG devices
		d := &decided[i]
		old := was[d.Device.ID]
		own := slices.DeleteFunc(slices.Clone(d.Verdict.Findings), Finding.decision)
		var made []Finding
		if word, yes := c.cordons(&d.Device); yes && !slices.ContainsFunc(ofGPU[d.Device.Parent], Finding.cordon) {
			made = append(made, old.since(Finding{
				Cause: CauseCordoned, State: Unhealthy, Reason: fmt.Sprintf("cordoned by %q in health.cordon", word),
				Action: ActionUncordon, Since: now, Last: now, Clears: ClearsItself,
			}))
		}
		if why := pendingReset(own); c.IsolatePending && d.Device.Kind == KindGPU && why != nil {
			free := !heldAtAll(held, judged, d.Device.ID)
			if free || old.Has(CauseIsolated) {
				made = append(made, old.since(isolation(*why, free, now)))
			}
		}
		if detach.withholds(*d, old) {
			made = append(made, old.since(detach.finding(now)))
		}
		ofGPU[d.Device.ID] = made
		v := d.Verdict
		v.find(inherit(append(own, made...), d.Device.Parent, ofGPU[d.Device.Parent]))
		v.Since = old.Since
		if v.State != old.State || old.Since.IsZero() {
			v.Since = now
		}
		d.Verdict = v
	}
	return decided
}

// since gives a decision the time when it was first made.
func (v Verdict) since(f Finding) Finding {
	for _, g := range v.Findings {
		if g.From == "" && g.Cause == f.Cause {
			f.Since = g.Since
		}
	}
	return f
}

// pendingReset returns the finding of a GPU that works and waits for a reset, nil if there is none.
func pendingReset(own []Finding) *Finding {
	i := slices.IndexFunc(own, func(f Finding) bool {
		waits := f.Cause == CauseRemapPending || f.Cause == CauseRetiredPending || f.Cause == CauseRecoveryAction
		return f.From == "" && f.State == Degraded && waits && !f.Last.Before(f.Reset) // a reset since then was what it waited for
	})
	if i < 0 {
		return nil
	}
	return &own[i]
}

// isolation is the finding of a GPU that is kept free for a reset. A pod that was admitted while the kubelet was
// still being told has it all the same: then the reset must wait for its end.
func isolation(why Finding, free bool, now time.Time) Finding {
	action := ActionResetGPUNow
	if !free {
		action = ActionResetGPUWhenFree
	}
	return Finding{
		Cause: CauseIsolated, State: Unhealthy, Reason: "kept free for a reset between jobs: " + why.Reason, Action: action,
		Since: now, Last: now, Clears: ClearsItself,
	}
}

// withholds tells whether a device is kept from pods for it. The driver may be gone for long after it was to be taken
// back, and a device that nobody has seen since a reset is not given out.
func (d Detachment) withholds(dev DeviceState, was Verdict) bool {
	switch {
	case d == (Detachment{}) || dev.Device.Kind != KindGPU: // MIG devices inherit it
		return false
	case !d.Over:
		return true
	}
	return was.Has(CauseReleased) && dev.Sample.Presence == PresenceUnknown
}

func (d Detachment) finding(now time.Time) Finding {
	f := Finding{
		Cause: CauseReleased, State: Unhealthy, Since: now, Last: now, Clears: ClearsItself,
		Reason: "an operator detached the driver; the agent attaches it again at " + d.Until.UTC().Format(time.RFC3339), Action: ActionAttach,
	}
	if d.Over {
		f.Reason, f.Action = "the agent is attaching the driver and has not measured the GPU since", ActionCheckSource
	}
	return f
}

// heldAtAll tells whether a pod has a GPU, or a part of it, or may have.
func heldAtAll(held Held, devices []DeviceState, gpu DeviceID) bool {
	return held == nil || held(gpu) || slices.ContainsFunc(devices, func(d DeviceState) bool {
		return d.Device.Parent == gpu && held(d.Device.ID)
	})
}

// cordons returns the word of Config.Cordon that means a device, if one does.
func (c Config) cordons(d *Device) (string, bool) {
	for _, word := range c.Cordon {
		if match, _ := d.Matches(word); match {
			return word, true
		}
	}
	return "", false
}

// UnmatchedCordons returns the words of Config.Cordon that mean none of the devices. One file may serve many nodes, so
// that is no fault.
func (c Config) UnmatchedCordons(devices []DeviceState) []string {
	var idle []string
	for _, word := range c.Cordon {
		if !slices.ContainsFunc(devices, func(d DeviceState) bool { match, _ := d.Device.Matches(word); return match }) {
			idle = append(idle, word)
		}
	}
	return idle
}
