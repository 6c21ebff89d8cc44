package health

import (
	"encoding/json"
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
		if known[0].Verdict.has("xid-48") != st.stands {
			t.Errorf("at %d s: %v", st.at, causes(known[0].Verdict))
		}
	}
	if known[0].Verdict.State != Healthy {
		t.Errorf("%v", causes(known[0].Verdict))
	}
}

// A reset that was seen before a restart of the agent is no evidence against an XID after it.
func TestResetIsNotSeenTwice(t *testing.T) {
	x := func(code, s int, dbe float64) Sample {
		return present(value(FieldDBEVolatile, dbe), func(y *Sample) { y.XIDs = []XID{{Code: code, At: at(s)}} })
	}
	good := present(value(FieldDBEVolatile, 0))
	var known []DeviceState
	for s, sample := range []Sample{x(48, 0, 1), good, x(95, 2, 0)} {
		known = judgeAll(DefaultConfig(), known, s, nil, map[DeviceID]Sample{"GPU-0": sample}, gpu0)
	}
	devices, _ := restart(t, &Snapshot{Source: Source{Kind: "dcgm"}, Devices: known}, "b", "b", "dcgm")
	known = judgeAll(DefaultConfig(), devices, 101, nil, map[DeviceID]Sample{"GPU-0": good}, gpu0)
	if !known[0].Verdict.has("xid-95") {
		t.Errorf("%v", causes(known[0].Verdict))
	}
}

// The driver says how bad an XID was, though the agent has begun anew between the two.
func TestEscalationAfterRestart(t *testing.T) {
	hit := present(func(s *Sample) { s.XIDs = []XID{{Code: 109, At: at(99)}} })
	known := judgeAll(DefaultConfig(), nil, 99, nil, map[DeviceID]Sample{"GPU-0": hit}, gpu0)
	devices, _ := restart(t, &Snapshot{Source: Source{Kind: "dcgm"}, Devices: known}, "b", "b", "dcgm")
	wants := present(value(FieldRecoveryAction, float64(RecoveryReset)))
	known = judgeAll(DefaultConfig(), devices, 101, nil, map[DeviceID]Sample{"GPU-0": wants}, gpu0)
	if known[0].Verdict.State != Unhealthy || !known[0].Verdict.has("xid-109") {
		t.Errorf("%v", causes(known[0].Verdict))
	}
}

// What is kept of a device does not change while nothing happens to it: the state file is written for news only.
func TestNoNewsIsNotKept(t *testing.T) {
	never := DefaultConfig()
	never.Recovery = RecoverNever
	for name, c := range map[string]struct {
		config Config
		story  []Sample
	}{
		"back, and never to recover":              {never, []Sample{blank(Lost)}},
		"action taken back, and never to recover": {never, []Sample{present(value(FieldRecoveryAction, 2))}},
		"flapping": {DefaultConfig(), []Sample{blank(Lost), present(), blank(Lost), present(), blank(Lost)}},
	} {
		var known []DeviceState
		poll := func(s int, sample Sample) string {
			known = judgeAll(c.config, known, s, nil, map[DeviceID]Sample{"GPU-0": sample}, gpu0)
			text, err := json.Marshal(Remember(&Snapshot{Devices: known}, "b").gist())
			if err != nil {
				t.Fatal(err)
			}
			return string(text)
		}
		for s, sample := range c.story {
			poll(s, sample)
		}
		was := poll(10, present())
		if known[0].Verdict.State != Unhealthy {
			t.Errorf("%s: %v", name, causes(known[0].Verdict))
		}
		for s := 11; s < 40; s++ {
			if now := poll(s, present()); now != was {
				t.Errorf("%s: at %d s it changed from\n%s to\n%s", name, s, was, now)
				break
			}
		}
	}
}

// A GPU that was reset waits for none, though its finding stands a while.
func TestNotIsolatedAfterReset(t *testing.T) {
	c := DefaultConfig()
	c.IsolatePending = true
	nobody := func(DeviceID) bool { return false }
	known := judgeAll(c, nil, 0, nobody, map[DeviceID]Sample{"GPU-0": present(value(FieldRemapPending, 1))}, gpu0)
	if !known[0].Verdict.has(CauseIsolated) {
		t.Fatalf("%v", causes(known[0].Verdict))
	}
	known = judgeAll(c, known, 10, nobody, map[DeviceID]Sample{"GPU-0": blank(Lost)}, gpu0)
	known = judgeAll(c, known, 12, nobody, nil, gpu0)
	if known[0].Verdict.has(CauseIsolated) || known[0].Verdict.State == Unhealthy {
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

// What was decided for the sake of a finding ends with it, though no poll may come.
func TestClearEndsIsolation(t *testing.T) {
	c := DefaultConfig()
	c.IsolatePending = true
	nobody := func(DeviceID) bool { return false }
	known := judgeAll(c, nil, 0, nobody, map[DeviceID]Sample{"GPU-0": present(value(FieldRemapPending, 1))}, gpu0)
	m := monitorOf(c, known)
	if _, err := m.Clear("GPU-0", CauseRemapPending); err != nil {
		t.Fatal(err)
	}
	if v := m.out.Load().Devices[0].Verdict; len(v.Findings) != 0 {
		t.Errorf("%v", causes(v))
	}
}
