package health

import (
	"math/rand/v2"
	"slices"
	"testing"
	"time"
)

var epoch = time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)

func at(seconds int) time.Time { return epoch.Add(time.Duration(seconds) * time.Second) }

var (
	gpu0 = Device{ID: "GPU-0", Kind: KindGPU, Index: 0}
	gpu1 = Device{ID: "GPU-1", Kind: KindGPU, Index: 1}
	mig0 = Device{ID: "MIG-0", Kind: KindMIG, Parent: "GPU-0", Index: 0, GI: 1}
	mig1 = Device{ID: "MIG-1", Kind: KindMIG, Parent: "GPU-0", Index: 0, GI: 2, MIGIndex: 1}
)

// present is a sample of a device that is there and has nothing wrong.
func present(edit ...func(*Sample)) Sample {
	s := Sample{Presence: Present, Values: map[Field]float64{
		FieldRecoveryAction: 0, FieldGPUTemp: 40, FieldRemapFailed: 0, FieldRemapPending: 0, FieldUnrepairable: 0,
	}}
	for _, e := range edit {
		e(&s)
	}
	return s
}

func value(f Field, v float64) func(*Sample) { return func(s *Sample) { s.Values[f] = v } }

func without(f Field) func(*Sample) { return func(s *Sample) { delete(s.Values, f) } }

func xids(codes ...int) func(*Sample) {
	return func(s *Sample) {
		for _, c := range codes {
			s.XIDs = append(s.XIDs, XID{Code: c})
		}
	}
}

// blank is a sample of a device of which nothing can be read.
func blank(p Presence) Sample { return Sample{Presence: p} }

type step struct {
	at     int // seconds
	sample Sample
	want   State
	causes []string // worst first
}

func TestJudgeSequences(t *testing.T) {
	for name, steps := range map[string][]step{
		"healthy": {
			{0, present(), Healthy, nil},
			{1, present(), Healthy, nil},
		},
		"nothing is known before the first sample": {
			{0, blank(PresenceUnknown), Unknown, nil},
			{1, present(), Healthy, nil},
			{2, blank(PresenceUnknown), Healthy, nil},
		},
		"lost and back": {
			{0, present(), Healthy, nil},
			{1, blank(Lost), Unhealthy, []string{CauseLost}},
			{2, blank(PresenceUnknown), Unhealthy, []string{CauseLost}},
			{3, present(), Healthy, nil},
		},
		"detached and inaccessible are told apart": {
			{0, blank(Detached), Unhealthy, []string{CauseDetached}},
			{1, blank(Inaccessible), Unhealthy, []string{CauseInaccessible}},
			{2, present(), Healthy, nil},
		},
		"fallen off the bus, lost, and back": {
			{0, present(xids(79)), Unhealthy, []string{"xid-79"}},
			{1, present(), Unhealthy, []string{"xid-79"}},
			{2, blank(Lost), Unhealthy, []string{"xid-79", CauseLost}},
			{3, present(), Healthy, nil},
		},
		"one reading of a lost GPU is no reset": {
			{0, present(xids(95)), Unhealthy, []string{"xid-95"}},
			{1, blank(Lost), Unhealthy, []string{"xid-95", CauseLost}},
			{2, present(), Unhealthy, []string{"xid-95"}},
			{3, blank(Detached), Unhealthy, []string{"xid-95", CauseDetached}},
			{4, present(), Unhealthy, []string{"xid-95"}},
		},
		"an XID stays without evidence of a cure": {
			{0, present(xids(48)), Unhealthy, []string{"xid-48"}},
			{3600, present(), Unhealthy, []string{"xid-48"}},
			{7200, blank(PresenceUnknown), Unhealthy, []string{"xid-48"}},
		},
		"a reset that the driver asked for cures an XID": {
			{0, present(xids(95)), Unhealthy, []string{"xid-95"}},
			{1, present(value(FieldRecoveryAction, 1)), Unhealthy, []string{"xid-95", CauseRecoveryAction}},
			{2, present(), Healthy, nil},
		},
		"a GPU that works and wants a reset is degraded": {
			{0, present(value(FieldRecoveryAction, 1)), Degraded, []string{CauseRecoveryAction}},
			{1, present(value(FieldRecoveryAction, 4)), Degraded, []string{CauseRecoveryAction}},
			{2, present(without(FieldRecoveryAction)), Degraded, []string{CauseRecoveryAction}},
			{3, present(), Healthy, nil},
		},
		"a reboot, a drain of peer-to-peer work and what is not known are unhealthy": {
			{0, present(value(FieldRecoveryAction, 2)), Unhealthy, []string{CauseRecoveryAction}},
			{1, present(), Healthy, nil},
			{2, present(value(FieldRecoveryAction, 3)), Unhealthy, []string{CauseRecoveryAction}},
			{3, present(), Healthy, nil},
			{4, present(value(FieldRecoveryAction, 9)), Unhealthy, []string{CauseRecoveryAction}},
			{5, present(without(FieldRecoveryAction)), Unhealthy, []string{CauseRecoveryAction}},
			{6, present(), Healthy, nil},
		},
		"a reset that nobody announced is seen by what it sets back": {
			{0, present(xids(48), value(FieldDBEVolatile, 2)), Unhealthy, []string{CauseDBE, "xid-48"}},
			{1, present(), Unhealthy, []string{CauseDBE, "xid-48"}},
			{2, blank(PresenceUnknown), Unhealthy, []string{CauseDBE, "xid-48"}},
			{3, present(value(FieldDBEVolatile, 0)), Unhealthy, []string{CauseDBE}},
			{4, present(value(FieldDBEVolatile, 0), xids(48)), Unhealthy, []string{CauseDBE, "xid-48"}}, // and it cured nothing
			{70, present(value(FieldDBEVolatile, 0)), Unhealthy, []string{"xid-48"}},
		},
		"a row that was remapped was so by a reset": {
			{0, present(xids(95), value(FieldRemapPending, 1)), Unhealthy, []string{"xid-95", CauseRemapPending}},
			{1, present(without(FieldRemapPending)), Unhealthy, []string{"xid-95", CauseRemapPending}},
			{2, present(value(FieldRemapPending, 0)), Degraded, []string{CauseRemapPending}},
		},
		"a row that could not be remapped was not": {
			{0, present(xids(95), value(FieldRemapPending, 1)), Unhealthy, []string{"xid-95", CauseRemapPending}},
			{1, present(value(FieldRemapFailed, 1)), Unhealthy, []string{"xid-95", CauseRemapFailed, CauseRemapPending}},
		},
		"a lesser recovery action hides no greater one": {
			{0, present(value(FieldRecoveryAction, 2)), Unhealthy, []string{CauseRecoveryAction}},
			{1, present(value(FieldRecoveryAction, 1)), Unhealthy, []string{CauseRecoveryAction}},
			{60, present(value(FieldRecoveryAction, 1)), Degraded, []string{CauseRecoveryAction}},
			{61, present(value(FieldRecoveryAction, 2)), Unhealthy, []string{CauseRecoveryAction}},
			{62, present(), Healthy, nil},
		},
		"a context switch timeout alone is an application's": {
			{0, present(xids(109)), Healthy, nil},
			{70, present(value(FieldRecoveryAction, 1)), Degraded, []string{CauseRecoveryAction}},
			{71, present(), Healthy, nil},
		},
		"a context switch timeout for which the driver wants a reset": {
			{0, present(xids(109)), Healthy, nil},
			{1, present(value(FieldRecoveryAction, 1)), Unhealthy, []string{"xid-109", CauseRecoveryAction}},
			{900, present(value(FieldRecoveryAction, 1)), Unhealthy, []string{"xid-109", CauseRecoveryAction}},
			{901, present(), Healthy, nil},
			{902, present(value(FieldRecoveryAction, 1)), Degraded, []string{CauseRecoveryAction}},
		},
		"an NVLink 5 error is as bad as the driver says": {
			{0, present(xids(149)), Degraded, []string{"xid-149"}},
			{2, present(value(FieldRecoveryAction, 4)), Unhealthy, []string{"xid-149", CauseRecoveryAction}},
			{3, present(), Healthy, nil},
			{10, present(xids(145)), Degraded, []string{"xid-145"}},
			{70, present(), Healthy, nil},
		},
		"an XID comes while the driver wants a reset": {
			{0, present(value(FieldRecoveryAction, 1)), Degraded, []string{CauseRecoveryAction}},
			{1, present(xids(144), value(FieldRecoveryAction, 1)), Unhealthy, []string{"xid-144", CauseRecoveryAction}},
			{2, blank(Lost), Unhealthy, []string{"xid-144", CauseLost, CauseRecoveryAction}},
			{3, blank(Lost), Unhealthy, []string{"xid-144", CauseLost, CauseRecoveryAction}},
			{4, present(value(FieldRecoveryAction, 1)), Degraded, []string{CauseRecoveryAction}},
		},
		"the announcement of a recovery action is no more than that": {
			{0, present(xids(154), value(FieldRecoveryAction, 1)), Degraded, []string{CauseRecoveryAction, "xid-154"}},
		},
		"a drain of peer-to-peer work resets nothing": {
			{0, present(xids(48)), Unhealthy, []string{"xid-48"}},
			{1, present(value(FieldRecoveryAction, 3)), Unhealthy, []string{"xid-48", CauseRecoveryAction}},
			{2, present(), Unhealthy, []string{"xid-48"}},
		},
		"application errors do nothing": {
			{0, present(xids(13, 31, 43, 45, 68, 109)), Healthy, nil},
		},
		"an unknown XID warns for a while": {
			{0, present(xids(999)), Degraded, []string{"xid-999"}},
			{30, present(xids(999)), Degraded, []string{"xid-999"}},
			{89, present(), Degraded, []string{"xid-999"}},
			{90, present(), Healthy, nil},
		},
		"a warning never hides a fault": {
			{0, present(xids(999, 48, 998)), Unhealthy, []string{"xid-48", "xid-998", "xid-999"}},
			{100, present(), Unhealthy, []string{"xid-48"}},
		},
		"hot": {
			{0, present(value(FieldGPUTemp, 97)), Degraded, []string{CauseTemperature}},
			{100, present(without(FieldGPUTemp)), Degraded, []string{CauseTemperature}},
			{101, present(value(FieldGPUTemp, 95)), Degraded, []string{CauseTemperature}},
			{160, present(value(FieldGPUTemp, 89)), Degraded, []string{CauseTemperature}},
			{161, present(value(FieldGPUTemp, 89)), Healthy, nil},
		},
		"a row waits to be remapped, then cannot be": {
			{0, present(value(FieldRemapPending, 1)), Degraded, []string{CauseRemapPending}},
			{1, present(value(FieldRemapFailed, 1), value(FieldRemapPending, 1)), Unhealthy, []string{CauseRemapFailed, CauseRemapPending}},
			{60, present(), Unhealthy, []string{CauseRemapFailed, CauseRemapPending}},
			{61, present(), Healthy, nil},
		},
		"memory that cannot be repaired": {
			{0, present(value(FieldUnrepairable, 1)), Unhealthy, []string{CauseUnrepairable}},
		},
		"double-bit errors until the count is set back by a reset": {
			{0, present(value(FieldDBEVolatile, 2)), Unhealthy, []string{CauseDBE}},
			{100, present(), Unhealthy, []string{CauseDBE}},
			{101, present(value(FieldDBEVolatile, 0)), Healthy, nil},
		},
		"retired pages": {
			{0, present(value(FieldRetiredSBE, 40), value(FieldRetiredDBE, 22)), Healthy, nil},
			{1, present(value(FieldRetiredSBE, 40)), Healthy, nil},
			{2, present(value(FieldRetiredSBE, 40), value(FieldRetiredDBE, 23)), Unhealthy, []string{CauseRetiredPages}},
			{3, present(value(FieldRetiredPending, 1)), Unhealthy, []string{CauseRetiredPages, CauseRetiredPending}},
		},
		"clocks at full load are no fault, a power brake is": {
			{0, present(value(FieldClocksEvents, 0x4)), Healthy, nil},
			{1, present(value(FieldClocksEvents, 0x84)), Degraded, []string{CauseClocks}},
		},
		"a reset does not end what still stands": {
			{0, present(value(FieldRemapFailed, 1), value(FieldRecoveryAction, 1)), Unhealthy, []string{CauseRemapFailed, CauseRecoveryAction}},
			{1, present(value(FieldRemapFailed, 1)), Unhealthy, []string{CauseRemapFailed}},
		},
	} {
		t.Run(name, func(t *testing.T) {
			var known []DeviceState
			for _, st := range steps {
				known = judge1(known, gpu0, st)
				v := known[0].Verdict
				if got := causes(v); v.State != st.want || !slices.Equal(got, st.causes) {
					t.Fatalf("at %d s: got %v %v, want %v %v", st.at, v.State, got, st.want, st.causes)
				}
				for _, f := range v.Findings {
					if f.Reason == "" || f.Action == "" || f.Since.IsZero() {
						t.Errorf("at %d s: a finding needs a reason, an action and a time: %+v", st.at, f)
					}
				}
			}
		})
	}
}

// judgeAndDecide judges a reading with the XIDs of this boot known, and decides. If held is nil, every device is held.
func judgeAndDecide(c Config, before []DeviceState, r *Reading, held Held, now time.Time) []DeviceState {
	return Decide(c, before, Judge(c, before, r, Basis{History: true}, now), held, Detachment{}, now)
}

func judge1(known []DeviceState, d Device, st step) []DeviceState {
	c := DefaultConfig()
	c.Flap.Trips = 0
	return judgeWith(c, known, d, st)
}

func judgeWith(c Config, known []DeviceState, d Device, st step) []DeviceState {
	s := st.sample
	s.Device, s.At = d.ID, at(st.at)
	for i := range s.XIDs {
		s.XIDs[i].At = s.At
	}
	return judgeAndDecide(c, known, &Reading{Devices: []Device{d}, Samples: []Sample{s}}, nil, s.At)
}

func causes(v Verdict) []string { return v.Causes() }

func TestJudgeRemembersSince(t *testing.T) {
	known := judge1(nil, gpu0, step{at: 0, sample: present()})
	known = judge1(known, gpu0, step{at: 5, sample: present(xids(79))})
	known = judge1(known, gpu0, step{at: 9, sample: blank(Lost)})
	known = judge1(known, gpu0, step{at: 10, sample: blank(Lost)})
	v := known[0].Verdict
	if !v.Since.Equal(at(5)) || !v.Findings[0].Since.Equal(at(5)) || !v.Findings[1].Since.Equal(at(9)) {
		t.Fatalf("unhealthy since %v, findings %+v", v.Since, v.Findings)
	}
	known = judge1(known, gpu0, step{at: 20, sample: present()})
	if v := known[0].Verdict; !v.Since.Equal(at(20)) {
		t.Fatalf("healthy since %v", v.Since)
	}
}

func TestJudgeCountsXIDs(t *testing.T) {
	known := judge1(nil, gpu0, step{at: 0, sample: present(xids(13, 13, 48))})
	first := known[0].XIDCounts
	known = judge1(known, gpu0, step{at: 1, sample: present()})
	known = judge1(known, gpu0, step{at: 2, sample: present(xids(13))})
	got := known[0]
	if got.XIDCounts[13] != 3 || got.XIDCounts[48] != 1 || got.LastXID.Code != 13 || !got.LastXID.At.Equal(at(2)) {
		t.Fatalf("counts %v, last %+v", got.XIDCounts, got.LastXID)
	}
	if first[13] != 2 {
		t.Fatal("counts of an older snapshot were modified")
	}
}

// reading makes a reading of some devices, each with the sample that it has in samples, else a good one.
func reading(seconds int, samples map[DeviceID]Sample, devices ...Device) (*Reading, time.Time) {
	r := &Reading{Devices: devices}
	for _, d := range devices {
		s, ok := samples[d.ID]
		if !ok {
			s = present()
			if d.Kind == KindMIG {
				s = blank(Present)
			}
		}
		s.Device, s.At = d.ID, at(seconds)
		r.Samples = append(r.Samples, s)
	}
	return r, at(seconds)
}

func fold(t *testing.T, known []DeviceState, seconds int, samples map[DeviceID]Sample, devices ...Device) []DeviceState {
	t.Helper()
	r, now := reading(seconds, samples, devices...)
	return judgeAndDecide(DefaultConfig(), known, r, nil, now)
}

func states(known []DeviceState) map[DeviceID]State {
	m := make(map[DeviceID]State)
	for _, d := range known {
		m[d.Device.ID] = d.Verdict.State
	}
	return m
}

func wantStates(t *testing.T, known []DeviceState, want map[DeviceID]State) {
	t.Helper()
	got := states(known)
	if len(got) != len(want) {
		t.Fatalf("got %v, want %v", got, want)
	}
	for id, s := range want {
		if got[id] != s {
			t.Fatalf("got %v, want %v", got, want)
		}
	}
}

func TestMIGInheritsItsGPU(t *testing.T) {
	all := []Device{gpu0, mig0, mig1, gpu1}
	known := fold(t, nil, 0, nil, all...)
	wantStates(t, known, map[DeviceID]State{"GPU-0": Healthy, "MIG-0": Healthy, "MIG-1": Healthy, "GPU-1": Healthy})

	known = fold(t, known, 1, map[DeviceID]Sample{"GPU-0": present(xids(48))}, all...)
	wantStates(t, known, map[DeviceID]State{"GPU-0": Unhealthy, "MIG-0": Unhealthy, "MIG-1": Unhealthy, "GPU-1": Healthy})
	for _, d := range known {
		if d.Device.Kind == KindMIG && (d.Verdict.Findings[0].From != "GPU-0" || len(d.XIDCounts) != 0) {
			t.Fatalf("%s: findings %+v, XIDs %v: want its GPU's finding and no XID of its own", d.Device.ID, d.Verdict.Findings, d.XIDCounts)
		}
	}

	// A reset of the GPU is a reset of its instances.
	known = fold(t, known, 2, map[DeviceID]Sample{"GPU-0": present(value(FieldRecoveryAction, 1)), "MIG-0": {Presence: Present, XIDs: []XID{{Code: 95, At: at(2)}}}}, all...)
	known = fold(t, known, 3, nil, all...)
	wantStates(t, known, map[DeviceID]State{"GPU-0": Healthy, "MIG-0": Healthy, "MIG-1": Healthy, "GPU-1": Healthy})
}

func TestMIGsOwnXIDStaysItsOwn(t *testing.T) {
	all := []Device{gpu0, mig0, mig1}
	known := fold(t, nil, 0, map[DeviceID]Sample{"MIG-0": {Presence: Present, XIDs: []XID{{Code: 48, At: at(0)}}}}, all...)
	wantStates(t, known, map[DeviceID]State{"GPU-0": Healthy, "MIG-0": Unhealthy, "MIG-1": Healthy})
	known = fold(t, known, 1, map[DeviceID]Sample{"GPU-0": present(value(FieldGPUTemp, 99))}, all...)
	wantStates(t, known, map[DeviceID]State{"GPU-0": Degraded, "MIG-0": Unhealthy, "MIG-1": Degraded})
	known = fold(t, known, 61, nil, all...)
	wantStates(t, known, map[DeviceID]State{"GPU-0": Healthy, "MIG-0": Unhealthy, "MIG-1": Healthy})
}

func TestDevicesThatLeaveTheInventory(t *testing.T) {
	known := fold(t, nil, 0, nil, gpu0, mig0, mig1, gpu1)

	// Partitioned anew: the MIG device is gone.
	known = fold(t, known, 1, nil, gpu0, mig0, gpu1)
	wantStates(t, known, map[DeviceID]State{"GPU-0": Healthy, "MIG-0": Healthy, "GPU-1": Healthy})

	// A whole GPU is not: it stays listed, and its MIG devices with it.
	known = fold(t, known, 2, nil, gpu1)
	wantStates(t, known, map[DeviceID]State{"GPU-0": Unhealthy, "MIG-0": Unhealthy, "GPU-1": Healthy})
	if c := known[0].Verdict.Cause(); c != CauseMissing {
		t.Fatalf("cause %q, want %q", c, CauseMissing)
	}
	known = fold(t, known, 3, nil)
	wantStates(t, known, map[DeviceID]State{"GPU-0": Unhealthy, "MIG-0": Unhealthy, "GPU-1": Unhealthy})

	known = fold(t, known, 4, nil, gpu0, gpu1)
	wantStates(t, known, map[DeviceID]State{"GPU-0": Healthy, "GPU-1": Healthy})
}

// A source that reconnects may know next to nothing of a GPU that is lost.
func TestALostGPUIsStillWhatItWas(t *testing.T) {
	whole := Device{ID: "GPU-0", Index: 0, Minor: 3, Model: "H100", MIGMode: true, NUMA: []int{1}}
	known := fold(t, nil, 0, nil, whole)
	known = fold(t, known, 1, map[DeviceID]Sample{"GPU-0": blank(Lost)}, Device{ID: "GPU-0", Minor: -1})
	if d := known[0].Device; !d.MIGMode || d.Minor != 3 || d.Model != "H100" {
		t.Errorf("the lost GPU became %+v", d)
	}
	known = fold(t, known, 2, nil, Device{ID: "GPU-0", Minor: 4})
	if d := known[0].Device; d.Minor != 4 {
		t.Errorf("the GPU that came back stayed %+v", d)
	}
}

// No order of samples hides a fatal XID that has had no cure, makes a device vanish, or lets the state be
// anything but the greatest of the findings' states.
func TestJudgeProperties(t *testing.T) {
	const seed = 1
	r := rand.New(rand.NewPCG(seed, seed))
	codes := []int{13, 31, 48, 74, 95, 999, 1000}
	for round := range 300 {
		var known []DeviceState
		uncured := make(map[string]bool)
		asked := false // the driver has asked for a recovery action
		for i := range 60 {
			s := present()
			if r.IntN(3) == 0 {
				code := codes[r.IntN(len(codes))]
				xids(code)(&s)
				if LookupXID(code).Effect == EffectUnhealthy {
					uncured[xidCause(code)] = true
				}
			}
			switch r.IntN(8) {
			case 0:
				s.Values[FieldRecoveryAction] = float64(1 + r.IntN(4))
				asked = true
			case 1:
				delete(s.Values, FieldRecoveryAction)
			case 2:
				s.Presence, s.Values = PresenceUnknown, nil
			}
			if a, told := s.Values[FieldRecoveryAction]; told && a == 0 && asked {
				asked = false
				for c := range uncured {
					if !slices.ContainsFunc(s.XIDs, func(x XID) bool { return xidCause(x.Code) == c }) {
						delete(uncured, c)
					}
				}
			}
			known = judge1(known, gpu0, step{at: 10 * i, sample: s})
			if len(known) != 1 {
				t.Fatalf("seed %d round %d step %d: %d devices", seed, round, i, len(known))
			}
			v := known[0].Verdict
			for c := range uncured {
				if !slices.Contains(causes(v), c) || v.State != Unhealthy {
					t.Fatalf("seed %d round %d step %d: %s is hidden: %v %v", seed, round, i, c, v.State, causes(v))
				}
			}
			worst := Healthy
			for _, f := range v.Findings {
				worst = max(worst, f.State)
			}
			if v.State != worst && (v.State != Unknown || len(v.Findings) > 0) {
				t.Fatalf("seed %d round %d step %d: state %v, worst finding %v", seed, round, i, v.State, worst)
			}
		}
	}
}
