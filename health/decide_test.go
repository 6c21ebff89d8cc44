package health

import (
	"slices"
	"strings"
	"testing"
)

var pciGPU = Device{ID: "GPU-0", Kind: KindGPU, Index: 0, PCI: "00000000:1B:00.0"}

// cordoning is a configuration with these words in health.cordon.
func cordoning(words ...string) Config {
	c := DefaultConfig()
	c.Cordon = words
	return c
}

func judgeAll(c Config, known []DeviceState, seconds int, held Held, samples map[DeviceID]Sample, devices ...Device) []DeviceState {
	r, now := reading(seconds, samples, devices...)
	return judgeAndDecide(c, known, r, held, now)
}

func TestCordon(t *testing.T) {
	all := []Device{pciGPU, mig0, mig1, gpu1}
	const u, h = Unhealthy, Healthy
	for _, c := range []struct {
		words []string
		want  [4]State // of GPU-0, its MIG devices 0 and 1, and GPU-1
		idle  []string
	}{
		{nil, [4]State{h, h, h, h}, nil},
		{[]string{"GPU-0"}, [4]State{u, u, u, h}, nil},
		{[]string{"1"}, [4]State{h, h, h, u}, nil},
		{[]string{"0000:1b:00.0"}, [4]State{u, u, u, h}, nil},
		{[]string{"MIG-1"}, [4]State{h, h, u, h}, nil},
		{[]string{"0:0"}, [4]State{h, u, h, h}, nil},
		{[]string{"0:1", "GPU-1"}, [4]State{h, h, u, u}, nil},
		{[]string{"GPU-9", "7", "0:2", "1b:00.1", "1"}, [4]State{h, h, h, u}, []string{"GPU-9", "7", "0:2", "1b:00.1"}},
	} {
		config := cordoning(c.words...)
		known := judgeAll(config, nil, 0, nil, nil, all...)
		wantStates(t, known, map[DeviceID]State{"GPU-0": c.want[0], "MIG-0": c.want[1], "MIG-1": c.want[2], "GPU-1": c.want[3]})
		if got := config.UnmatchedCordons(known); !slices.Equal(got, c.idle) {
			t.Errorf("%q: %q mean nothing, want %q", c.words, got, c.idle)
		}
		for _, d := range known {
			for _, f := range d.Verdict.Findings {
				if f.Cause != CauseCordoned || f.Action != ActionUncordon ||
					(f.From != "") != (d.Device.Kind == KindMIG && c.want[0] == u) {
					t.Errorf("%q: %s: %+v", c.words, d.Device.ID, f)
				}
			}
		}
	}
}

// A cordon ends with its word, at once, whatever else is configured, and is no trip.
func TestCordonEnds(t *testing.T) {
	for _, mode := range []string{RecoverAuto, RecoverAfterReset, RecoverNever} {
		on, off := cordoning("0"), DefaultConfig()
		on.Recovery, off.Recovery = mode, mode
		var known []DeviceState
		for i := range 5 {
			known = judgeAll(on, known, 10*i, nil, nil, gpu0, mig0)
			known = judgeAll(on, known, 10*i+3, nil, nil, gpu0, mig0)
			for _, d := range known {
				if v := d.Verdict; v.State != Unhealthy || !v.Since.Equal(at(10*i)) || !v.Findings[0].Since.Equal(at(10*i)) {
					t.Fatalf("%s: %s is %v since %v: %+v", mode, d.Device.ID, v.State, v.Since, v.Findings)
				}
			}
			known = judgeAll(off, known, 10*i+5, nil, nil, gpu0, mig0)
			wantStates(t, known, map[DeviceID]State{"GPU-0": Healthy, "MIG-0": Healthy})
			if v := known[0].Verdict; len(v.Trips) != 0 || !v.Since.Equal(at(10*i+5)) {
				t.Fatalf("%s: trips %v, healthy since %v", mode, v.Trips, v.Since)
			}
		}
	}
}

// What is wrong with a GPU while it is cordoned is found all the same, and stays when the cordon ends.
func TestCordonHidesNothing(t *testing.T) {
	on := cordoning("GPU-0")
	known := judgeAll(on, nil, 0, nil, nil, gpu0)
	broken := present(func(s *Sample) { s.XIDs = []XID{{Code: 48, At: at(1)}} })
	known = judgeAll(on, known, 1, nil, map[DeviceID]Sample{"GPU-0": broken}, gpu0)
	if got := causes(known[0].Verdict); !slices.Equal(got, []string{"xid-48", CauseCordoned}) || len(known[0].Verdict.Trips) != 1 {
		t.Errorf("%v, trips %v", got, known[0].Verdict.Trips)
	}
	known = judgeAll(DefaultConfig(), known, 2, nil, nil, gpu0)
	if v := known[0].Verdict; v.State != Unhealthy || !slices.Equal(causes(v), []string{"xid-48"}) || !v.Since.Equal(at(0)) {
		t.Errorf("%+v", v)
	}

	// A GPU that was never read is not healthy for having been cordoned.
	known = judgeAll(on, nil, 0, nil, map[DeviceID]Sample{"GPU-0": blank(PresenceUnknown)}, gpu0)
	wantStates(t, known, map[DeviceID]State{"GPU-0": Unhealthy})
	known = judgeAll(DefaultConfig(), known, 1, nil, map[DeviceID]Sample{"GPU-0": blank(PresenceUnknown)}, gpu0)
	wantStates(t, known, map[DeviceID]State{"GPU-0": Unknown})
}

func TestCordonIsNotCleared(t *testing.T) {
	known := judgeAll(cordoning("0"), nil, 0, nil, map[DeviceID]Sample{"GPU-0": present(xids(48))}, gpu0)
	c := cordoning("0")
	if _, _, err := Clear(c, known, false, "GPU-0", CauseCordoned, at(1)); err == nil || !strings.Contains(err.Error(), ActionUncordon.Advice()) {
		t.Errorf("got %v", err)
	}
	after, got, err := Clear(c, known, false, "GPU-0", "", at(1))
	if err != nil || !slices.Equal(got, []string{"xid-48"}) {
		t.Errorf("got %v, %v", got, err)
	}
	wantStates(t, after, map[DeviceID]State{"GPU-0": Unhealthy})
}

func TestIsolation(t *testing.T) {
	nobody := func(DeviceID) bool { return false }
	holding := func(ids ...DeviceID) Held { return func(id DeviceID) bool { return slices.Contains(ids, id) } }
	pending, reset, drain := present(value(FieldRemapPending, 1)), present(value(FieldRecoveryAction, 1)), present(value(FieldRecoveryAction, 4))
	retired := present(value(FieldRetiredPending, 1))
	type look struct {
		at     int
		held   Held
		sample Sample
		want   State
		causes []string
	}
	isolated := func(cause string) []string { return []string{CauseIsolated, cause} }
	for name, looks := range map[string][]look{
		"at once if nobody has it": {
			{0, nobody, pending, Unhealthy, isolated(CauseRemapPending)},
		},
		"not while a pod has it, nor a part of it": {
			{0, holding("GPU-0"), pending, Degraded, []string{CauseRemapPending}},
			{1, holding("MIG-0"), pending, Degraded, []string{CauseRemapPending}},
			{2, holding("GPU-1"), pending, Unhealthy, isolated(CauseRemapPending)},
		},
		"never on ignorance": {
			{0, nil, pending, Degraded, []string{CauseRemapPending}},
		},
		"it stays when it is held, or nobody knows, until the cause is gone": {
			{0, nobody, reset, Unhealthy, isolated(CauseRecoveryAction)},
			{1, holding("GPU-0"), reset, Unhealthy, isolated(CauseRecoveryAction)},
			{2, nil, reset, Unhealthy, isolated(CauseRecoveryAction)},
			{3, nobody, blank(PresenceUnknown), Unhealthy, isolated(CauseRecoveryAction)},
			{4, nobody, present(), Healthy, nil},
		},
		"drain and reset, pages": {
			{0, nobody, drain, Unhealthy, isolated(CauseRecoveryAction)},
			{1, nobody, present(), Healthy, nil},
			{2, nobody, retired, Unhealthy, isolated(CauseRetiredPending)},
		},
		"a GPU that is only hot waits for no reset": {
			{0, nobody, present(value(FieldGPUTemp, 99)), Degraded, []string{CauseTemperature}},
		},
		"nor one that needs a reboot": {
			{0, nobody, present(value(FieldRecoveryAction, 2)), Unhealthy, []string{CauseRecoveryAction}},
		},
		"between jobs, three times in an hour, is no flapping": {
			{0, nobody, reset, Unhealthy, isolated(CauseRecoveryAction)},
			{1, nobody, present(), Healthy, nil},
			{2, nobody, reset, Unhealthy, isolated(CauseRecoveryAction)},
			{3, nobody, present(), Healthy, nil},
			{4, nobody, reset, Unhealthy, isolated(CauseRecoveryAction)},
			{5, nobody, present(), Healthy, nil},
		},
	} {
		for _, mode := range []string{RecoverAuto, RecoverAfterReset, RecoverNever} {
			t.Run(name+", "+mode, func(t *testing.T) {
				if mode == RecoverNever && name == "nor one that needs a reboot" {
					t.Skip("nothing ends")
				}
				c := DefaultConfig()
				c.Recovery, c.IsolatePending = mode, true
				var known []DeviceState
				for _, l := range looks {
					known = judgeAll(c, known, l.at, l.held, map[DeviceID]Sample{"GPU-0": l.sample}, gpu0, mig0)
					for _, d := range known {
						if got := causes(d.Verdict); d.Verdict.State != l.want || !slices.Equal(got, l.causes) {
							t.Fatalf("at %d s %s is %v %v, want %v %v", l.at, d.Device.ID, d.Verdict.State, got, l.want, l.causes)
						}
					}
				}
			})
		}
	}

	c := DefaultConfig()
	known := judgeAll(c, nil, 0, nobody, map[DeviceID]Sample{"GPU-0": pending}, gpu0)
	wantStates(t, known, map[DeviceID]State{"GPU-0": Degraded})
	c.IsolatePending = true
	known = judgeAll(c, known, 1, nobody, map[DeviceID]Sample{"GPU-0": pending}, gpu0)
	f := known[0].Verdict.Findings[0]
	if f.Action != ActionResetGPUNow {
		t.Errorf("%+v", f)
	}
	// A pod that was admitted in the last moment is not to be killed by the advice.
	known = judgeAll(c, known, 2, holding("GPU-0"), map[DeviceID]Sample{"GPU-0": pending}, gpu0)
	if f := known[0].Verdict.Findings[0]; f.Action != ActionResetGPUWhenFree || !f.Since.Equal(at(1)) {
		t.Errorf("%+v", f)
	}
	c.IsolatePending = false
	wantStates(t, judgeAll(c, known, 3, nobody, map[DeviceID]Sample{"GPU-0": pending}, gpu0), map[DeviceID]State{"GPU-0": Degraded})
}

func TestCordonValidate(t *testing.T) {
	c := cordoning("GPU-1", "MIG-1", "0", "3:1", "1b:00.0")
	if err := c.Validate(); err != nil {
		t.Error(err)
	}
	for _, word := range []string{"", "-1", "*H100*", "mig-1g.*", "0:", "GPU-"} {
		c.Cordon = []string{"0", word}
		if err := c.Validate(); err == nil || !strings.HasPrefix(err.Error(), `cordon[1]: "`+word+`" names no GPU; use a UUID`) {
			t.Errorf("%q: %v", word, err)
		}
	}
}

// MIG devices have it from their GPU, and a partition made meanwhile has nothing of it.
func TestDetachmentOfMIGDevices(t *testing.T) {
	known := judgeAll(DefaultConfig(), nil, 0, nil, map[DeviceID]Sample{gpu0.ID: present(), mig0.ID: present()}, gpu0, mig0)
	known = Decide(DefaultConfig(), known, known, nil, Detachment{Until: at(60)}, at(1))
	if f := known[1].Verdict.Findings; len(f) != 1 || f[0].From != gpu0.ID || f[0].Cause != CauseReleased || known[1].Verdict.State != Unhealthy {
		t.Errorf("%+v", f)
	}
	known = Decide(DefaultConfig(), known, known, nil, Detachment{Over: true}, at(2))
	wantStates(t, known, map[DeviceID]State{gpu0.ID: Healthy, mig0.ID: Healthy})
}
