package judge

import (
	"errors"
	"slices"
	"testing"

	"github.com/gpu-node-agent/gpu-node-agent/health"
)

var pciGPU = health.Device{ID: "GPU-0", Kind: health.KindGPU, Index: 0, PCI: "00000000:1B:00.0"}

// cordoning returns a configuration with the references in health.cordon.
func cordoning(refs ...string) Config {
	c := DefaultConfig()
	c.Cordon = refs
	return c
}

func TestCordon(t *testing.T) {
	all := []health.Device{pciGPU, mig0, mig1, gpu1}
	const u, h = health.Unhealthy, health.Healthy
	for _, c := range []struct {
		refs      []string
		want      [4]health.State // of GPU-0, its MIG devices 0 and 1, and GPU-1
		unmatched []string
	}{
		{nil, [4]health.State{h, h, h, h}, nil},
		{[]string{"GPU-0"}, [4]health.State{u, u, u, h}, nil},
		{[]string{"1"}, [4]health.State{h, h, h, u}, nil},
		{[]string{"0000:1b:00.0"}, [4]health.State{u, u, u, h}, nil},
		{[]string{"MIG-1"}, [4]health.State{h, h, u, h}, nil},
		{[]string{"0:0"}, [4]health.State{h, u, h, h}, nil},
		{[]string{"0:1", "GPU-1"}, [4]health.State{h, h, u, u}, nil},
		{[]string{"GPU-9"}, [4]health.State{h, h, h, h}, []string{"GPU-9"}},
		{[]string{"GPU-9", "7", "0:2", "1b:00.1", "1"}, [4]health.State{h, h, h, u}, []string{"GPU-9", "7", "0:2", "1b:00.1"}},
	} {
		config := cordoning(c.refs...)
		devices := judgeAll(config, nil, 0, nil, nil, all...)
		wantStates(t, devices, map[health.DeviceID]health.State{"GPU-0": c.want[0], "MIG-0": c.want[1], "MIG-1": c.want[2], "GPU-1": c.want[3]})
		var unmatched []string
		for _, u := range config.UnmatchedCordons(nil, devices) {
			unmatched = append(unmatched, u.Refs...)
		}
		if !slices.Equal(unmatched, c.unmatched) {
			t.Errorf("%q: unmatched %q, want %q", c.refs, unmatched, c.unmatched)
		}
		for _, d := range devices {
			for _, f := range d.Verdict.Findings {
				if f.Cause != health.CauseCordoned || f.Action != health.ActionUncordon ||
					(f.From != "") != (d.Device.Kind == health.KindMIG && c.want[0] == u) {
					t.Errorf("%q: %s: %+v", c.refs, d.Device.ID, f)
				}
			}
		}
	}
}

// A cordon ends at once with its entry in the configuration, in every recovery mode, and does not count as a trip.
func TestCordonEnds(t *testing.T) {
	for _, mode := range []string{RecoverAuto, RecoverAfterReset, RecoverNever} {
		on, off := cordoning("0"), DefaultConfig()
		on.Recovery, off.Recovery = mode, mode
		var devices []health.DeviceState
		for i := range 5 {
			devices = judgeAll(on, devices, 10*i, nil, nil, gpu0, mig0)
			devices = judgeAll(on, devices, 10*i+3, nil, nil, gpu0, mig0)
			for _, d := range devices {
				if v := d.Verdict; v.State != health.Unhealthy || !v.Since.Equal(at(10*i)) || !v.Findings[0].Since.Equal(at(10*i)) {
					t.Fatalf("%s: %s is %v since %v: %+v", mode, d.Device.ID, v.State, v.Since, v.Findings)
				}
			}
			devices = judgeAll(off, devices, 10*i+5, nil, nil, gpu0, mig0)
			wantStates(t, devices, map[health.DeviceID]health.State{"GPU-0": health.Healthy, "MIG-0": health.Healthy})
			if d := devices[0]; len(d.Memory.Trips) != 0 || !d.Verdict.Since.Equal(at(10*i+5)) {
				t.Fatalf("%s: trips %v, healthy since %v", mode, d.Memory.Trips, d.Verdict.Since)
			}
		}
	}
}

// Faults are found on a cordoned GPU, and their findings stay when the cordon ends.
func TestCordonKeepsFindings(t *testing.T) {
	on := cordoning("GPU-0")
	devices := judgeAll(on, nil, 0, nil, nil, gpu0)
	broken := present(xids(48))
	devices = judgeAll(on, devices, 1, nil, samples{"GPU-0": broken}, gpu0)
	if got := devices[0].Verdict.Causes(); !slices.Equal(got, []string{"xid-48", health.CauseCordoned}) || len(devices[0].Memory.Trips) != 1 {
		t.Errorf("%v, trips %v", got, devices[0].Memory.Trips)
	}
	devices = judgeAll(DefaultConfig(), devices, 2, nil, nil, gpu0)
	if v := devices[0].Verdict; v.State != health.Unhealthy || !slices.Equal(v.Causes(), []string{"xid-48"}) || !v.Since.Equal(at(0)) {
		t.Errorf("%+v", v)
	}

	// A cordon does not make an unmeasured GPU healthy.
	devices = judgeAll(on, nil, 0, nil, samples{"GPU-0": blank(health.PresenceUnknown)}, gpu0)
	wantStates(t, devices, map[health.DeviceID]health.State{"GPU-0": health.Unhealthy})
	devices = judgeAll(DefaultConfig(), devices, 1, nil, samples{"GPU-0": blank(health.PresenceUnknown)}, gpu0)
	wantStates(t, devices, map[health.DeviceID]health.State{"GPU-0": health.Unknown})
}

func TestClearKeepsCordon(t *testing.T) {
	devices := judgeAll(cordoning("0"), nil, 0, nil, samples{"GPU-0": present(xids(48))}, gpu0)
	c := cordoning("0")
	if _, _, err := Clear(c, devices, false, "GPU-0", health.CauseCordoned); !errors.Is(err, ErrDecision) {
		t.Errorf("got %v", err)
	}
	after, got, err := clearAndView(c, devices, false, "GPU-0", "", 1)
	if err != nil || !slices.Equal(got, []string{"xid-48"}) {
		t.Errorf("got %v, %v", got, err)
	}
	wantStates(t, after, map[health.DeviceID]health.State{"GPU-0": health.Unhealthy})
}

func TestIsolatePending(t *testing.T) {
	free := func(health.DeviceID) bool { return false }
	holding := func(ids ...health.DeviceID) health.Held {
		return func(id health.DeviceID) bool { return slices.Contains(ids, id) }
	}
	pending, reset, drain := present(value(health.FieldRemapPending, 1)), present(value(health.FieldRecoveryAction, 1)),
		present(value(health.FieldRecoveryAction, 4))
	retired := present(value(health.FieldRetiredPending, 1))
	type poll struct {
		at     int
		held   health.Held
		sample health.Sample
		want   health.State
		causes []string
	}
	isolated := func(cause string) []string { return []string{health.CauseIsolated, cause} }
	for name, polls := range map[string][]poll{
		"a free GPU is isolated at once": {
			{0, free, pending, health.Unhealthy, isolated(health.CauseRemapPending)},
		},
		"a held GPU, or one with a held MIG device, is not isolated": {
			{0, holding("GPU-0"), pending, health.Degraded, []string{health.CauseRemapPending}},
			{1, holding("MIG-0"), pending, health.Degraded, []string{health.CauseRemapPending}},
			{2, holding("GPU-1"), pending, health.Unhealthy, isolated(health.CauseRemapPending)},
		},
		"unknown holders count as held": {
			{0, nil, pending, health.Degraded, []string{health.CauseRemapPending}},
		},
		"isolation lasts until the cause clears, also while held": {
			{0, free, reset, health.Unhealthy, isolated(health.CauseRecoveryAction)},
			{1, holding("GPU-0"), reset, health.Unhealthy, isolated(health.CauseRecoveryAction)},
			{2, nil, reset, health.Unhealthy, isolated(health.CauseRecoveryAction)},
			{3, free, blank(health.PresenceUnknown), health.Unhealthy, isolated(health.CauseRecoveryAction)},
			{4, free, present(), health.Healthy, nil},
		},
		"drain and reset, page retirement": {
			{0, free, drain, health.Unhealthy, isolated(health.CauseRecoveryAction)},
			{1, free, present(), health.Healthy, nil},
			{2, free, retired, health.Unhealthy, isolated(health.CauseRetiredPending)},
		},
		"a hot or slow GPU waits for no reset": {
			{0, free, present(value(health.FieldGPUTemp, 99)), health.Degraded, []string{health.CauseTemperature}},
			{1, free, present(value(health.FieldClocksEvents, 8)), health.Degraded, []string{health.CauseTemperature, health.CauseClocks}},
		},
		"a GPU that needs a reboot is not isolated": {
			{0, free, present(value(health.FieldRecoveryAction, 2)), health.Unhealthy, []string{health.CauseRecoveryAction}},
		},
		"three isolations in an hour are not flapping": {
			{0, free, reset, health.Unhealthy, isolated(health.CauseRecoveryAction)},
			{1, free, present(), health.Healthy, nil},
			{2, free, reset, health.Unhealthy, isolated(health.CauseRecoveryAction)},
			{3, free, present(), health.Healthy, nil},
			{4, free, reset, health.Unhealthy, isolated(health.CauseRecoveryAction)},
			{5, free, present(), health.Healthy, nil},
		},
	} {
		for _, mode := range []string{RecoverAuto, RecoverAfterReset, RecoverNever} {
			t.Run(name+", "+mode, func(t *testing.T) {
				if mode == RecoverNever && name == "a GPU that needs a reboot is not isolated" {
					t.Skip("the finding never clears")
				}
				c := DefaultConfig()
				c.Recovery, c.IsolatePending = mode, true
				var devices []health.DeviceState
				for _, l := range polls {
					devices = judgeAll(c, devices, l.at, l.held, samples{"GPU-0": l.sample}, gpu0, mig0)
					for _, d := range devices {
						got, decided := d.Verdict.Causes(), d.Verdict.Decided()
						if d.Verdict.State != l.want || !slices.Equal(got, l.causes) || decided != slices.Contains(l.causes, health.CauseIsolated) {
							t.Fatalf("at %d s %s is %v %v, decided: %v, want %v %v", l.at, d.Device.ID, d.Verdict.State, got, decided, l.want, l.causes)
						}
					}
				}
			})
		}
	}

	c := DefaultConfig()
	devices := judgeAll(c, nil, 0, free, samples{"GPU-0": pending}, gpu0)
	wantStates(t, devices, map[health.DeviceID]health.State{"GPU-0": health.Degraded})
	c.IsolatePending = true
	devices = judgeAll(c, devices, 1, free, samples{"GPU-0": pending}, gpu0)
	f := devices[0].Verdict.Findings[0]
	if f.Action != health.ActionResetGPUNow {
		t.Errorf("%+v", f)
	}
	// The kubelet may have admitted a pod meanwhile: the advice must not end it.
	devices = judgeAll(c, devices, 2, holding("GPU-0"), samples{"GPU-0": pending}, gpu0)
	if f := devices[0].Verdict.Findings[0]; f.Action != health.ActionResetGPUWhenFree || !f.Since.Equal(at(1)) {
		t.Errorf("%+v", f)
	}
	c.IsolatePending = false
	wantStates(t, judgeAll(c, devices, 3, free, samples{"GPU-0": pending}, gpu0), map[health.DeviceID]health.State{"GPU-0": health.Degraded})
}

// A MIG device of a cordoned GPU inherits the cordon, and has none of its own.
func TestCordonOfGPUAndMIGDevice(t *testing.T) {
	devices := judgeAll(cordoning("0", "0:1"), nil, 0, nil, nil, gpu0, mig0, mig1)
	for _, d := range devices[1:] {
		if f := d.Verdict.Findings; len(f) != 1 || f[0].From != gpu0.ID {
			t.Errorf("%s: %+v", d.Device.ID, f)
		}
	}
}

// Of findings with equal severity, a fault of the device is the first, then the fault of its MPS daemon, then decisions, however strong
// their actions are.
func TestOrderOfFaultsAndDecisions(t *testing.T) {
	c := cordoning("0")
	devices := judgeAll(c, nil, 0, nil, samples{gpu0.ID: present(xids(110))}, gpu0)
	for _, action := range []health.Action{health.ActionReplaceGPU, health.ActionWatch} { // stronger and weaker than the others' actions
		state := health.MPSState{
			Daemons: map[health.DeviceID]*health.MPSDaemon{gpu0.ID: {Cause: health.CauseMPSDown, Reason: "it exited", Action: action}},
		}
		after := View(c, devices, ViewContext{Detach: health.Detachment{Since: at(0), Until: at(60)}, MPS: state}, at(1))
		want := []string{"xid-110", health.CauseMPSDown, health.CauseReleased, health.CauseCordoned}
		if got := after[0].Verdict.Causes(); !slices.Equal(got, want) || after[0].Verdict.Decided() {
			t.Errorf("%s: %v, want %v", action, got, want)
		}
	}
	decided := View(cordoning("1"), judge(nil, 0, nil, gpu1), ViewContext{}, at(1))
	if !decided[0].Verdict.Decided() {
		t.Errorf("%+v", decided[0].Verdict)
	}
}

// After the end of a detach, a GPU is withheld until it has been measured; one whose measurements count stays free.
func TestDetachmentEndsWithMeasurement(t *testing.T) {
	c := DefaultConfig()
	unread := func() []health.DeviceState {
		return judge(nil, 0, samples{gpu0.ID: blank(health.PresenceUnknown), gpu1.ID: blank(health.PresenceUnknown)}, gpu0, gpu1)
	}
	before := View(c, unread(), ViewContext{Detach: health.Detachment{Since: at(0), Until: at(60)}}, at(1))
	over := View(c, DiscardMeasurements(before, at(2)), ViewContext{}, at(2))
	for action, devices := range map[health.Action][]health.DeviceState{health.ActionAttach: before, health.ActionCheckSource: over} {
		for _, d := range devices {
			if f := d.Verdict.Findings; len(f) != 1 || f[0].Cause != health.CauseReleased || !f[0].Since.Equal(at(1)) || f[0].Action != action {
				t.Errorf("%s: %+v, want %s", d.Device.ID, f, action)
			}
		}
	}
	r, now := reading(3, samples{gpu1.ID: blank(health.PresenceUnknown)}, gpu0, gpu1)
	over = View(c, Measure(c, over, r, ReadingContext{}, now), ViewContext{}, now)
	wantStates(t, over, map[health.DeviceID]health.State{gpu0.ID: health.Healthy, gpu1.ID: health.Unhealthy})
	free := View(c, before, ViewContext{}, at(4))
	wantStates(t, free, map[health.DeviceID]health.State{gpu0.ID: health.Unknown, gpu1.ID: health.Unknown})
}

// MIG devices inherit the detachment from their GPU.
func TestDecideDetachment(t *testing.T) {
	devices := judgeAll(DefaultConfig(), nil, 0, nil, samples{gpu0.ID: present(), mig0.ID: present()}, gpu0, mig0)
	devices = View(DefaultConfig(), devices, ViewContext{Detach: health.Detachment{Until: at(60)}}, at(1))
	if f := devices[1].Verdict.Findings; len(f) != 1 || f[0].From != gpu0.ID || f[0].Cause != health.CauseReleased ||
		devices[1].Verdict.State != health.Unhealthy {
		t.Errorf("%+v", f)
	}
	devices = View(DefaultConfig(), devices, ViewContext{}, at(2))
	wantStates(t, devices, map[health.DeviceID]health.State{gpu0.ID: health.Healthy, mig0.ID: health.Healthy})
}

// A GPU that was reset is not isolated, although its finding lasts until recoverAfter.
func TestIsolatePendingAfterReset(t *testing.T) {
	c := DefaultConfig()
	c.IsolatePending = true
	free := func(health.DeviceID) bool { return false }
	devices := judgeAll(c, nil, 0, free, samples{"GPU-0": present(value(health.FieldRemapPending, 1))}, gpu0)
	if !devices[0].Verdict.Has(health.CauseIsolated) {
		t.Fatalf("%v", devices[0].Verdict.Causes())
	}
	devices = judgeAll(c, devices, 10, free, samples{"GPU-0": blank(health.Lost)}, gpu0)
	devices = judgeAll(c, devices, 12, free, nil, gpu0)
	if devices[0].Verdict.Has(health.CauseIsolated) || devices[0].Verdict.State == health.Unhealthy {
		t.Errorf("%v", devices[0].Verdict.Causes())
	}
}
