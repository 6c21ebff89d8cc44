package health

import (
	"slices"
	"strings"
	"testing"
)

// has is a sample of a MIG device that has reported XIDs.
func reports(seconds int, codes ...int) Sample {
	s := blank(Present)
	for _, code := range codes {
		s.XIDs = append(s.XIDs, XID{code, at(seconds)})
	}
	return s
}

// An XID that concerns the whole GPU is the GPU's, whichever of its instances reports it.
func TestXIDOfTheWholeGPU(t *testing.T) {
	all := []Device{gpu0, mig0, mig1, gpu1}
	for code, whole := range map[int]bool{48: false, 94: false, 13: false, 171: false, 999: false, 95: true, 79: true, 119: true, 64: true, 149: true} {
		known := fold(t, nil, 0, map[DeviceID]Sample{"MIG-0": reports(0, code), "MIG-1": reports(0, code)}, all...)
		cause := xidCause(code)
		if got := known[0].Verdict.Has(cause); got != whole {
			t.Errorf("XID %d: the GPU has it: %v, want %v", code, got, whole)
		}
		if known[1].Verdict.State > Healthy {
			t.Errorf("XID %d: the other GPU is %v", code, known[1].Verdict.State)
		}
		for _, d := range known[2:] {
			if d.XIDCounts[code] != 1 || whole && (d.Verdict.Has(cause) || d.Verdict.State != known[0].Verdict.State) {
				t.Errorf("XID %d: %s has %v and counts %v", code, d.Device.ID, d.Verdict.Causes(), d.XIDCounts)
			}
		}
		if len(known[0].XIDCounts) != 0 {
			t.Errorf("XID %d: it is counted for the GPU too", code)
		}
	}
	known := fold(t, nil, 0, map[DeviceID]Sample{"MIG-0": reports(0, 95)}, all...)
	wantStates(t, known, map[DeviceID]State{"GPU-0": Unhealthy, "MIG-0": Unhealthy, "MIG-1": Unhealthy, "GPU-1": Healthy})
}

// What only a reset of the GPU clears outlives the instance that had it: made anew, it is of the same memory.
func TestFindingsOutliveAPartition(t *testing.T) {
	for _, code := range []int{48, 95} {
		cause := xidCause(code)
		known := fold(t, nil, 0, map[DeviceID]Sample{"MIG-0": reports(0, code)}, gpu0, mig0, mig1, gpu1)
		known = fold(t, known, 1, nil, gpu0, mig1, gpu1)
		wantStates(t, known, map[DeviceID]State{"GPU-0": Unhealthy, "MIG-1": Unhealthy, "GPU-1": Healthy})
		known = fold(t, known, 2, nil, gpu0, mig0, mig1, gpu1)
		wantStates(t, known, map[DeviceID]State{"GPU-0": Unhealthy, "MIG-0": Unhealthy, "MIG-1": Unhealthy, "GPU-1": Healthy})
		if f := known[0].Verdict.Findings[0]; f.Cause != cause || !f.Since.Equal(at(0)) || len(known[0].Verdict.Trips) > 1 {
			t.Errorf("XID %d: %+v, trips %v", code, f, known[0].Verdict.Trips)
		}
		known = fold(t, known, 3, map[DeviceID]Sample{"GPU-0": blank(Lost)}, gpu0, mig0, mig1, gpu1)
		known = fold(t, known, 4, map[DeviceID]Sample{"GPU-0": blank(Lost)}, gpu0, mig0, mig1, gpu1)
		known = fold(t, known, 5, nil, gpu0, mig0, mig1, gpu1)
		wantStates(t, known, map[DeviceID]State{"GPU-0": Healthy, "MIG-0": Healthy, "MIG-1": Healthy, "GPU-1": Healthy})
	}

	// A warning goes with its partition, and so does all of it that a reset of the GPU has destroyed.
	known := fold(t, nil, 0, map[DeviceID]Sample{"MIG-0": reports(0, 94)}, gpu0, mig0, gpu1)
	known = fold(t, known, 1, nil, gpu0, gpu1)
	wantStates(t, known, map[DeviceID]State{"GPU-0": Healthy, "GPU-1": Healthy})
	known = fold(t, nil, 0, map[DeviceID]Sample{"GPU-0": present(value(FieldRecoveryAction, 1)), "MIG-0": reports(0, 48)}, gpu0, mig0, gpu1)
	known = fold(t, known, 1, nil, gpu0, gpu1)
	wantStates(t, known, map[DeviceID]State{"GPU-0": Healthy, "GPU-1": Healthy})
}

// A GPU that cannot be measured while others are is degraded, keeps what it had, and is well when it is measured again.
func TestNotMeasured(t *testing.T) {
	stale := Sample{Presence: Present, Stale: true}
	known := fold(t, nil, 0, map[DeviceID]Sample{"GPU-0": present(value(FieldGPUTemp, 99))}, gpu0, mig0, gpu1)
	for i := range 3 {
		known = fold(t, known, 100*i+1, map[DeviceID]Sample{"GPU-0": stale}, gpu0, mig0, gpu1)
		wantStates(t, known, map[DeviceID]State{"GPU-0": Degraded, "MIG-0": Degraded, "GPU-1": Healthy})
		if got := causes(known[0].Verdict); !slices.Equal(got, []string{CauseTemperature, CauseNotMeasured}) {
			t.Errorf("got %v", got)
		}
	}
	known = fold(t, known, 300, nil, gpu0, mig0, gpu1)
	wantStates(t, known, map[DeviceID]State{"GPU-0": Healthy, "MIG-0": Healthy, "GPU-1": Healthy})
}

func TestRecoveryActionsAreTold(t *testing.T) {
	for _, c := range []struct {
		action float64
		state  State
		reason string
	}{
		{1, Degraded, "GPU reset"},
		{2, Unhealthy, "reboot"},
		{3, Unhealthy, "peer-to-peer"},
		{4, Degraded, "drain and reset"},
		{5, Unhealthy, "IMEX"},
		{6, Unhealthy, "PCIe bus reset"},
		{7, Unhealthy, "reboot of the system"},
		{8, Unhealthy, "recovery action 8"},
		{256, Unhealthy, "recovery action 256"},
		{512, Unhealthy, "recovery action 512"},
	} {
		known := judge1(nil, gpu0, step{at: 0, sample: present(value(FieldRecoveryAction, c.action))})
		v := known[0].Verdict
		if v.State != c.state || len(v.Findings) != 1 || !strings.Contains(v.Findings[0].Reason, c.reason) || v.Findings[0].Action == "" {
			t.Errorf("%v: %v %+v", c.action, v.State, v.Findings)
		}
		if c.action == 5 && v.Findings[0].Action != ActionRecoverIMEX {
			t.Errorf("a reset does not recover an IMEX domain: %+v", v.Findings[0])
		}
		// Only what resets the GPU is evidence of a reset when it is over.
		known = judge1(known, gpu0, step{at: 1, sample: present(value(FieldRecoveryAction, c.action), xids(95))})
		known = judge1(known, gpu0, step{at: 2, sample: present()})
		if cured, want := known[0].Verdict.State == Healthy, c.action < 8 && c.action != 3 && c.action != 5; cured != want {
			t.Errorf("%v is over: an XID 95 is cured: %v, want %v", c.action, cured, want)
		}
	}
}
