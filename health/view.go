package health

import (
	"cmp"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"
)

// Decisions returns the decisions about the device that continue in the next process. A detach is saved apart: see Detachment.
func (v Verdict) Decisions() []Finding {
	return slices.DeleteFunc(slices.Clone(v.Findings), func(f Finding) bool {
		return f.From != "" || !f.decision() || f.Cause == CauseReleased
	})
}

// ViewContext is what a device's verdict depends on beside its memory.
type ViewContext struct {
	Held   Held // if nil, every device counts as held
	Detach Detachment
	MPS    MPSState
}

// View returns the devices with their verdicts: the findings of each, of its GPU and of its MPS daemon, and what is decided about it. A
// decision, and since when a state lasts, continue from the verdict of the view before.
func View(c Config, devices []DeviceState, vc ViewContext, now time.Time) []DeviceState {
	ofGPU := make(map[DeviceID][]Finding)
	view := slices.Clone(devices)
	for i := range view { // GPUs come before their MIG devices
		d := &view[i]
		d.MPS = vc.MPS.Daemons[d.Device.ID]
		own, inherited, old := d.Memory.Findings, ofGPU[d.Device.Parent], d.Verdict
		add := func(f Finding) Finding {
			f.State, f.Clears, f.Since, f.Last = Unhealthy, ClearsItself, now, now
			if g := old.ownFinding(hasCause(f.Cause)); g != nil {
				f.Since = g.Since
			}
			return f
		}
		var decisions []Finding
		if ref, ok := c.cordonOf(&d.Device); ok && !slices.ContainsFunc(inherited, hasCause(CauseCordoned)) {
			decisions = append(decisions, add(Finding{
				Cause: CauseCordoned, Reason: fmt.Sprintf("cordoned by %q in health.cordon", ref), Action: ActionUncordon,
			}))
		}
		if pending := d.Memory.pendingReset(); c.IsolatePending && d.Device.Kind == KindGPU && pending != nil {
			free := !gpuHeld(vc.Held, devices, d.Device.ID)
			if free || old.Has(CauseIsolated) {
				decisions = append(decisions, add(isolation(*pending, free)))
			}
		}
		if d.Device.Kind == KindGPU && (vc.Detach.InForce() || d.Unread) { // MIG devices inherit the finding
			decisions = append(decisions, add(vc.Detach.finding()))
		}
		ofGPU[d.Device.ID] = slices.Concat(own, decisions)
		findings := slices.Concat(own, decisions)
		if f, bad := d.MPS.finding(); bad { // MIG devices do not inherit it
			findings = append(findings, add(f))
		}
		d.Verdict = newVerdict(inherit(findings, d.Device.Parent, inherited), d.Memory.measured, old, now)
		if vc.Detach.Undecided {
			before := old
			d.Verdict.before = cmp.Or(old.before, &before)
		} else if b := old.before; b != nil && b.State == d.Verdict.State && !b.Since.IsZero() {
			d.Verdict.Since = b.Since
		}
	}
	return view
}

// newVerdict returns the verdict of findings.
func newVerdict(findings []Finding, measured bool, old Verdict, now time.Time) Verdict {
	sortFindings(findings)
	v := Verdict{Findings: findings, Since: old.Since}
	switch {
	case len(findings) > 0:
		v.State = findings[0].State
	case measured:
		v.State = Healthy
	}
	if v.State != old.State || old.Since.IsZero() {
		v.Since = now
	}
	return v
}

// pendingReset returns the finding of a GPU that works and waits for a reset, nil if there is none.
func (m *Memory) pendingReset() *Finding {
	return m.find(func(f Finding) bool {
		// A reset after Last was the awaited one.
		return f.State == Degraded && causeOf(f.Cause).waitsForReset && !f.Last.Before(f.Reset)
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

// finding returns why a GPU is withheld. Attaching may take long, so a GPU stays withheld until it is measured again.
func (d Detachment) finding() Finding {
	if !d.InForce() {
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
