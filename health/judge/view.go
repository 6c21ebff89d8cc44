package judge

import (
	"cmp"
	"fmt"
	"slices"
	"time"

	"github.com/gpu-node-agent/gpu-node-agent/health"
)

// ViewContext is what a device's verdict depends on beside its memory.
type ViewContext struct {
	Held   health.Held // if nil, every device counts as held
	Detach health.Detachment
	MPS    health.MPSState
}

// View returns the devices with their verdicts: the findings of each, of its GPU and of its MPS daemon, and what is decided about it. A
// decision, and since when a state lasts, continue from the verdict of the view before.
func View(c Config, devices []health.DeviceState, vc ViewContext, now time.Time) []health.DeviceState {
	ofGPU := make(map[health.DeviceID][]health.Finding)
	view := slices.Clone(devices)
	for i := range view { // GPUs come before their MIG devices
		d := &view[i]
		d.MPS = vc.MPS.Daemons[d.Device.ID]
		own, inherited, old := d.Memory.Findings, ofGPU[d.Device.Parent], d.Verdict
		add := func(f health.Finding) health.Finding {
			f.State, f.Clears, f.Since, f.Last = health.Unhealthy, health.ClearsItself, now, now
			if g := old.OwnFinding(health.HasCause(f.Cause)); g != nil {
				f.Since = g.Since
			}
			return f
		}
		var decisions []health.Finding
		if ref, ok := c.cordonOf(&d.Device); ok && !slices.ContainsFunc(inherited, health.HasCause(health.CauseCordoned)) {
			decisions = append(decisions, add(health.Finding{
				Cause: health.CauseCordoned, Reason: fmt.Sprintf("cordoned by %q in health.cordon", ref), Action: health.ActionUncordon,
			}))
		}
		if pending := pendingReset(&d.Memory); c.IsolatePending && d.Device.Kind == health.KindGPU && pending != nil {
			free := !gpuHeld(vc.Held, devices, d.Device.ID)
			if free || old.Has(health.CauseIsolated) {
				decisions = append(decisions, add(isolation(*pending, free)))
			}
		}
		if d.Device.Kind == health.KindGPU && (vc.Detach.InForce() || d.Unread) { // MIG devices inherit the finding
			decisions = append(decisions, add(releasedFinding(vc.Detach)))
		}
		ofGPU[d.Device.ID] = slices.Concat(own, decisions)
		findings := slices.Concat(own, decisions)
		if f, bad := mpsFinding(d.MPS); bad { // MIG devices do not inherit it
			findings = append(findings, add(f))
		}
		d.Verdict = newVerdict(inherit(findings, d.Device.Parent, inherited), d.Memory.Measured, old, now)
		if vc.Detach.Undecided {
			before := old
			d.Verdict.Before = cmp.Or(old.Before, &before)
		} else if b := old.Before; b != nil && b.State == d.Verdict.State && !b.Since.IsZero() {
			d.Verdict.Since = b.Since
		}
	}
	return view
}

// newVerdict returns the verdict of findings.
func newVerdict(findings []health.Finding, measured bool, old health.Verdict, now time.Time) health.Verdict {
	sortFindings(findings)
	v := health.Verdict{Findings: findings, Since: old.Since}
	switch {
	case len(findings) > 0:
		v.State = findings[0].State
	case measured:
		v.State = health.Healthy
	}
	if v.State != old.State || old.Since.IsZero() {
		v.Since = now
	}
	return v
}

// pendingReset returns the finding of a GPU that works and waits for a reset, nil if there is none.
func pendingReset(m *health.Memory) *health.Finding {
	return m.Find(func(f health.Finding) bool {
		// A reset after Last was the awaited one.
		return f.State == health.Degraded && health.WaitsForReset(f.Cause) && !f.Last.Before(f.Reset)
	})
}

// isolation returns the finding of a GPU that is kept free for a reset. A pod that the kubelet admitted before it received the
// isolation still gets the GPU; the reset must then wait until the pod ends.
func isolation(pending health.Finding, free bool) health.Finding {
	f := health.Finding{
		Cause: health.CauseIsolated, Reason: "kept free for a reset between jobs: " + pending.Reason, Action: health.ActionResetGPUWhenFree,
	}
	if free {
		f.Action = health.ActionResetGPUNow
	}
	return f
}

// releasedFinding returns why a GPU is withheld. Attaching may take long, so a GPU stays withheld until it is measured again.
func releasedFinding(d health.Detachment) health.Finding {
	if !d.InForce() {
		return health.Finding{
			Cause: health.CauseReleased, Reason: "the agent is attaching the driver and has not measured the GPU since",
			Action: health.ActionCheckSource,
		}
	}
	return health.Finding{
		Cause: health.CauseReleased, Action: health.ActionAttach,
		Reason: "an operator detached the driver; the agent attaches it again at " + d.Until.UTC().Format(time.RFC3339),
	}
}

// gpuHeld reports whether a pod holds a GPU or one of its MIG devices, or may hold it.
func gpuHeld(held health.Held, devices []health.DeviceState, gpu health.DeviceID) bool {
	return held == nil || held(gpu) || slices.ContainsFunc(devices, func(d health.DeviceState) bool {
		return d.Device.Parent == gpu && held(d.Device.ID)
	})
}

// cordonOf returns the reference in Config.Cordon that matches a device.
func (c Config) cordonOf(d *health.Device) (ref string, ok bool) {
	for _, ref := range c.Cordon {
		if match, _ := c.bindings.Match(KeyCordon, ref, d); match {
			return ref, true
		}
	}
	return "", false
}

// mpsFinding returns the finding about the MPS daemon of a device, and false if there is none.
func mpsFinding(d *health.MPSDaemon) (health.Finding, bool) {
	if d == nil || d.Cause == "" {
		return health.Finding{}, false
	}
	return health.Finding{Cause: d.Cause, Reason: d.Reason, Action: d.Action}, true
}
