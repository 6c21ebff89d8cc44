package health

import (
	"testing"
)

// A GPU that was hidden from the agent was not reset.
func TestHiddenGPUWasNotReset(t *testing.T) {
	known := fold(t, nil, 0, map[DeviceID]Sample{"GPU-0": present(xids(95))}, gpu0, gpu1)
	for i := range 5 {
		known = fold(t, known, 1+i, map[DeviceID]Sample{"GPU-0": blank(Inaccessible)}, gpu0, gpu1)
	}
	known = fold(t, known, 7, nil, gpu0, gpu1)
	wantStates(t, known, map[DeviceID]State{"GPU-0": Unhealthy, "GPU-1": Healthy})
}

// A GPU and its partition that are listed from the second reading on were there all the same.
func TestPastOfAPartitionThatIsListedLate(t *testing.T) {
	r, now := reading(11, nil, gpu1)
	known := Judge(DefaultConfig(), nil, r, Basis{History: true, First: true}, now)
	s := blank(Present)
	s.Past = []XID{{48, at(5)}}
	r, now = reading(13, map[DeviceID]Sample{"MIG-0": s}, gpu0, mig0, gpu1)
	known = Judge(DefaultConfig(), known, r, Basis{History: true}, now)
	wantStates(t, known, map[DeviceID]State{"GPU-0": Healthy, "MIG-0": Unhealthy, "GPU-1": Healthy})
}

// An XID of an application is not why the driver wants a reset.
func TestApplicationErrorExplainsNoRecoveryAction(t *testing.T) {
	for _, code := range []int{13, 43} {
		s := present(value(FieldRecoveryAction, 1))
		s.XIDs = []XID{{code, at(0)}}
		s.Past = []XID{{95, at(-10)}}
		d := judgeBasis(nil, 0, s, Basis{})
		if d.Verdict.State != Unhealthy {
			t.Errorf("XID %d: %v %v", code, d.Verdict.State, d.Verdict.Causes())
		}
	}
}

// Nor is it what DCGM's check has found.
func TestApplicationErrorHidesNoIncident(t *testing.T) {
	s := checked(Incident{System: "xid", Code: 81, Severity: SeverityFail, Message: "XID 95 was seen"})
	s.XIDs = []XID{{13, at(0)}}
	d := judgeBasis(nil, 0, s, Basis{})
	if d.Verdict.State != Degraded {
		t.Errorf("%v %v", d.Verdict.State, d.Verdict.Causes())
	}
}

// The instances of lost GPUs leave the list a reading later than all GPUs are lost. Their return is no reset either.
func TestReturnOfAPartitionIsNoReset(t *testing.T) {
	known := fold(t, nil, 0, map[DeviceID]Sample{"MIG-0": reports(0, 48)}, gpu0, mig0, gpu1)
	lost := map[DeviceID]Sample{"GPU-0": blank(Lost), "MIG-0": blank(Lost), "GPU-1": blank(Lost)}
	known = fold(t, known, 1, lost, gpu0, mig0, gpu1)
	known = fold(t, known, 2, lost, gpu0, mig0, gpu1)
	known = fold(t, known, 3, lost, gpu0, gpu1)
	known = fold(t, known, 4, lost, gpu0, gpu1)
	known = fold(t, known, 5, nil, gpu0, mig0, gpu1)
	wantStates(t, known, map[DeviceID]State{"GPU-0": Healthy, "MIG-0": Unhealthy, "GPU-1": Healthy})
}

// A GPU that stays away long after the others are back is gone by itself.
func TestLostLongerThanTheOthers(t *testing.T) {
	lost := map[DeviceID]Sample{"GPU-0": blank(Lost), "GPU-1": blank(Lost)}
	known := fold(t, nil, 0, map[DeviceID]Sample{"GPU-0": present(xids(95))}, gpu0, gpu1)
	known = fold(t, known, 1, lost, gpu0, gpu1)
	known = fold(t, known, 2, lost, gpu0, gpu1)
	for i := range 100 {
		known = fold(t, known, 10+10*i, map[DeviceID]Sample{"GPU-0": blank(Lost)}, gpu0, gpu1)
	}
	known = fold(t, known, 2000, nil, gpu0, gpu1)
	wantStates(t, known, map[DeviceID]State{"GPU-0": Healthy, "GPU-1": Healthy})
}

// The states of the GPUs are asked for one after the other, so that one may be lost a reading before the rest.
func TestLostOneAfterTheOther(t *testing.T) {
	known := fold(t, nil, 0, map[DeviceID]Sample{"GPU-0": present(xids(95))}, gpu0, gpu1)
	both := map[DeviceID]Sample{"GPU-0": blank(Lost), "GPU-1": blank(Lost)}
	known = fold(t, known, 1, map[DeviceID]Sample{"GPU-0": blank(Lost)}, gpu0, gpu1)
	for i := range 3 {
		known = fold(t, known, 2+i, both, gpu0, gpu1)
	}
	known = fold(t, known, 6, nil, gpu0, gpu1)
	wantStates(t, known, map[DeviceID]State{"GPU-0": Unhealthy, "GPU-1": Healthy})
}

// Nobody knows that an unknown recovery action resets anything.
func TestEndOfAnUnknownActionIsNoReset(t *testing.T) {
	known := judge1(nil, gpu0, step{at: 0, sample: present(value(FieldRecoveryAction, 8), xids(95))})
	known = judge1(known, gpu0, step{at: 1, sample: present()})
	if known[0].Verdict.State != Unhealthy {
		t.Error("cured")
	}
}
