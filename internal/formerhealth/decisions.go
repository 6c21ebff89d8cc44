package formerhealth

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"
)

// decision reports whether the finding is decided, not measured: the device is cordoned, its driver is detached, or it is kept
// free for a reset. Each poll decides again, so a decision ends with its reason in every recovery mode. It does not count as a
// trip, and an operator cannot clear it.
func (f Finding) decision() bool {
	return f.Cause == CauseCordoned || f.Cause == CauseIsolated || f.Cause == CauseReleased
}

// addedByDecide reports whether Decide adds the finding, and not Judge.
func (f Finding) addedByDecide() bool { return f.decision() || f.OfMPS() }

// rank orders findings of one severity: faults of the device, then faults of its MPS daemon, which often follow from them, then decisions.
func (f Finding) rank() int {
	switch {
	case f.decision():
		return 2
	case f.OfMPS():
		return 1
	}
	return 0
}

// DecisionContext is what decides about devices beside their verdicts.
type DecisionContext struct {
	Held   Held       // if nil, every device counts as held
	Detach Detachment // zero while the driver is attached
	MPS    MPSState
}

// Decide adds the decisions, and the state and findings of MPS daemons, to judged devices. It sets since when each state lasts.
func Decide(c Config, before, judged []DeviceState, dc DecisionContext, now time.Time) []DeviceState {
	old := make(map[DeviceID]Verdict, len(before))
	for _, d := range before {
		old[d.Device.ID] = d.Verdict
	}
	ofGPU := make(map[DeviceID][]Finding)
	decided := slices.Clone(judged)
	for i := range decided { // GPUs come before their MIG devices
		d := &decided[i]
		d.MPS = dc.MPS.Daemons[d.Device.ID]
		old := old[d.Device.ID]
		findings := slices.DeleteFunc(slices.Clone(d.Verdict.Findings), Finding.addedByDecide)
		dated := func(f Finding) Finding {
			f.Since, f.Last = now, now
			if g := old.ownFinding(hasCause(f.Cause)); g != nil {
				f.Since = g.Since
			}
			return f
		}
		if f, bad := d.MPS.finding(); bad {
			findings = append(findings, dated(f))
		}
		var decisions []Finding // MIG devices inherit them
		add := func(f Finding) {
			f.State, f.Clears = Unhealthy, ClearsItself
			decisions = append(decisions, dated(f))
		}
		if ref, ok := c.cordonOf(&d.Device); ok && !slices.ContainsFunc(ofGPU[d.Device.Parent], hasCause(CauseCordoned)) {
			add(Finding{Cause: CauseCordoned, Reason: fmt.Sprintf("cordoned by %q in health.cordon", ref), Action: ActionUncordon})
		}
		if pending := pendingReset(findings); c.IsolatePending && d.Device.Kind == KindGPU && pending != nil {
			free := !gpuHeld(dc.Held, judged, d.Device.ID)
			if free || old.Has(CauseIsolated) {
				add(isolation(*pending, free))
			}
		}
		if dc.Detach.withholds(*d, old) {
			add(dc.Detach.finding())
		}
		ofGPU[d.Device.ID] = decisions
		v := d.Verdict
		v.setFindings(inherit(append(findings, decisions...), d.Device.Parent, ofGPU[d.Device.Parent]))
		v.Since = old.Since
		if v.State != old.State || old.Since.IsZero() {
			v.Since = now
		}
		d.Verdict = v
	}
	return decided
}

// pendingReset returns the finding of a GPU that works and waits for a reset, nil if there is none.
func pendingReset(findings []Finding) *Finding {
	return Verdict{Findings: findings}.ownFinding(func(f Finding) bool {
		waits := f.Cause == CauseRemapPending || f.Cause == CauseRetiredPending || f.Cause == CauseRecoveryAction
		return f.State == Degraded && waits && !f.Last.Before(f.Reset) // a reset after Last was the awaited one
	})
}

// isolation returns the finding of a GPU that is kept free for a reset. A pod that the kubelet admitted before it received the
// isolation still gets the GPU; the reset must then wait until the pod ends.
func isolation(pending Finding, free bool) Finding {
	f := Finding{Cause: CauseIsolated, Reason: "kept free for a reset between jobs: " + pending.Reason, Action: ActionResetGPUWhenFree}
	if free {
		f.Action = ActionResetGPUNow
	}
	return f
}

// withholds reports whether the detachment keeps a device from pods. Attaching may take long, so a GPU stays withheld after
// the end of the detachment until it is measured again.
func (d Detachment) withholds(dev DeviceState, old Verdict) bool {
	switch {
	case d == (Detachment{}) || dev.Device.Kind != KindGPU: // MIG devices inherit the finding
		return false
	case !d.Over:
		return true
	}
	return old.Has(CauseReleased) && dev.Sample.Presence == PresenceUnknown
}

func (d Detachment) finding() Finding {
	if d.Over {
		return Finding{
			Cause: CauseReleased, Reason: "the agent is attaching the driver and has not measured the GPU since", Action: ActionCheckSource,
		}
	}
	return Finding{
		Cause: CauseReleased, Action: ActionAttach,
		Reason: "an operator detached the driver; the agent attaches it again at " + d.Until.UTC().Format(time.RFC3339),
	}
}

// gpuHeld reports whether a pod holds a GPU or one of its MIG devices, or may hold it.
func gpuHeld(held Held, devices []DeviceState, gpu DeviceID) bool {
	return held == nil || held(gpu) || slices.ContainsFunc(devices, func(d DeviceState) bool {
		return d.Device.Parent == gpu && held(d.Device.ID)
	})
}

// cordonOf returns the reference in Config.Cordon that matches a device.
func (c Config) cordonOf(d *Device) (ref string, ok bool) {
	for _, ref := range c.Cordon {
		if match, _ := c.bindings.Match(KeyCordon, ref, d); match {
			return ref, true
		}
	}
	return "", false
}

// UnmatchedCordons returns the references in Config.Cordon that match no device.
func (c Config) UnmatchedCordons(b Bindings, devices []DeviceState) []UnmatchedRefs {
	return b.Unmatched(KeyCordon, KeyCordon, c.Cordon, devices)
}

// UnmatchedRefs holds the device references of one key that match no device of a node. They are not errors, because one configuration
// may serve many nodes.
type UnmatchedRefs struct {
	Key  string
	Refs []string
}

// Unmatched returns the device references of a key that match no device, nil if there is none. Entries that are no device references,
// such as models, may match none. name is the key with the positions of lists.
func (b Bindings) Unmatched(key, name string, entries []string, devices []DeviceState) []UnmatchedRefs {
	refs := slices.DeleteFunc(slices.Clone(entries), func(ref string) bool {
		_, isRef := (&Device{}).Matches(ref)
		return !isRef || slices.ContainsFunc(devices, func(d DeviceState) bool { match, _ := b.Match(key, ref, &d.Device); return match })
	})
	if len(refs) == 0 {
		return nil
	}
	return []UnmatchedRefs{{name, refs}}
}

// String returns a text like: health.cordon: no device of this node matches "9", "GPU-1".
func (u UnmatchedRefs) String() string {
	quoted := make([]string, len(u.Refs))
	for i, ref := range u.Refs {
		quoted[i] = strconv.Quote(ref)
	}
	return u.Key + ": no device of this node matches " + strings.Join(quoted, ", ")
}
