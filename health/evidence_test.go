package health

import (
	"slices"
	"testing"
)

// Evidence of a reset counts once for each time that the fault was there, and for every time.
func TestSecondReset(t *testing.T) {
	bad := func(s int) Sample {
		return present(value(FieldDBEVolatile, 1), func(x *Sample) { x.XIDs = []XID{{Code: 48, At: at(s)}} })
	}
	good := present(value(FieldDBEVolatile, 0))
	var known []DeviceState
	for _, st := range []struct {
		at     int
		sample Sample
		stands bool // the XID
	}{
		{0, bad(0), true},
		{10, good, false},
		{30, bad(30), true}, // within recoverAfter: the finding of before still stands
		{40, good, false},
		{200, good, false},
	} {
		known = judgeAll(DefaultConfig(), known, st.at, nil, map[DeviceID]Sample{"GPU-0": st.sample}, gpu0)
		if known[0].Verdict.Has("xid-48") != st.stands {
			t.Errorf("at %d s: %v", st.at, causes(known[0].Verdict))
		}
	}
	if known[0].Verdict.State != Healthy {
		t.Errorf("%v", causes(known[0].Verdict))
	}
}

// A GPU that was reset waits for none, though its finding stands a while.
func TestNotIsolatedAfterReset(t *testing.T) {
	c := DefaultConfig()
	c.IsolatePending = true
	nobody := func(DeviceID) bool { return false }
	known := judgeAll(c, nil, 0, nobody, map[DeviceID]Sample{"GPU-0": present(value(FieldRemapPending, 1))}, gpu0)
	if !known[0].Verdict.Has(CauseIsolated) {
		t.Fatalf("%v", causes(known[0].Verdict))
	}
	known = judgeAll(c, known, 10, nobody, map[DeviceID]Sample{"GPU-0": blank(Lost)}, gpu0)
	known = judgeAll(c, known, 12, nobody, nil, gpu0)
	if known[0].Verdict.Has(CauseIsolated) || known[0].Verdict.State == Unhealthy {
		t.Errorf("%v", causes(known[0].Verdict))
	}
}

// How a GPU that cannot be reached is partitioned is not known: its parts stay listed.
func TestPartsOfALostGPUStay(t *testing.T) {
	known := judgeAll(DefaultConfig(), nil, 0, nil, nil, gpu0, mig0, mig1)
	known = judgeAll(DefaultConfig(), known, 1, nil, map[DeviceID]Sample{"GPU-0": blank(Lost)}, gpu0)
	if len(known) != 3 || slices.ContainsFunc(known, func(d DeviceState) bool { return d.Verdict.State != Unhealthy }) {
		t.Errorf("%v", known)
	}
	known = judgeAll(DefaultConfig(), known, 2, nil, nil, gpu0)
	if len(known) != 1 {
		t.Errorf("the GPU is back without parts: %v", known)
	}
}
