package health

import (
	"slices"
	"strings"
	"testing"
	"time"
)

// runSteps folds the steps and checks each verdict.
func runSteps(t *testing.T, c Config, steps []step) []DeviceState {
	t.Helper()
	var known []DeviceState
	for _, st := range steps {
		known = judgeWith(c, known, gpu0, st)
		v := known[0].Verdict
		if got := causes(v); v.State != st.want || !slices.Equal(got, st.causes) {
			t.Fatalf("at %d s: got %v %v, want %v %v", st.at, v.State, got, st.want, st.causes)
		}
	}
	return known
}

func TestRecoveryModes(t *testing.T) {
	for name, c := range map[string]struct {
		mode  string
		steps []step
	}{
		"afterReset: a condition that is gone is not enough": {RecoverAfterReset, []step{
			{0, present(value(FieldRemapFailed, 1)), Unhealthy, []string{CauseRemapFailed}},
			{100, present(), Unhealthy, []string{CauseRemapFailed}},
			{101, blank(Lost), Unhealthy, []string{CauseRemapFailed, CauseLost}},
			{102, blank(Lost), Unhealthy, []string{CauseRemapFailed, CauseLost}},
			{103, present(), Healthy, nil},
		}},
		"afterReset: the reset may come before the condition has been gone for long": {RecoverAfterReset, []step{
			{0, present(value(FieldRemapFailed, 1)), Unhealthy, []string{CauseRemapFailed}},
			{1, blank(Lost), Unhealthy, []string{CauseRemapFailed, CauseLost}},
			{2, blank(Lost), Unhealthy, []string{CauseRemapFailed, CauseLost}},
			{3, present(), Unhealthy, []string{CauseRemapFailed}},
			{60, present(), Healthy, nil},
		}},
		"afterReset: a hidden GPU needs no reset": {RecoverAfterReset, []step{
			{0, blank(Inaccessible), Unhealthy, []string{CauseInaccessible}},
			{1, present(), Healthy, nil},
		}},
		"afterReset: the driver takes its action back": {RecoverAfterReset, []step{
			{0, present(value(FieldRecoveryAction, 2)), Unhealthy, []string{CauseRecoveryAction}},
			{1, present(), Healthy, nil},
		}},
		"afterReset: what is only degraded goes by itself": {RecoverAfterReset, []step{
			{0, present(value(FieldGPUTemp, 99)), Degraded, []string{CauseTemperature}},
			{60, present(), Healthy, nil},
		}},
		"never": {RecoverNever, []step{
			{0, blank(Lost), Unhealthy, []string{CauseLost}},
			{1, present(), Unhealthy, []string{CauseLost}},
			{9999, present(value(FieldRecoveryAction, 2)), Unhealthy, []string{CauseLost, CauseRecoveryAction}},
			{99999, present(), Unhealthy, []string{CauseLost, CauseRecoveryAction}},
		}},
		"auto: an XID that comes again after a reset stands again": {RecoverAuto, []step{
			{0, present(xids(95)), Unhealthy, []string{"xid-95"}},
			{1, blank(Lost), Unhealthy, []string{"xid-95", CauseLost}},
			{2, present(xids(95)), Unhealthy, []string{"xid-95"}},
			{3, present(), Unhealthy, []string{"xid-95"}},
		}},
	} {
		t.Run(name, func(t *testing.T) {
			config := DefaultConfig()
			config.Flap.Trips = 0
			config.Recovery = c.mode
			runSteps(t, config, c.steps)
		})
	}
}

func TestFlapping(t *testing.T) {
	c := DefaultConfig()
	lost, back := []string{CauseLost}, []string(nil)
	known := runSteps(t, c, []step{
		{0, blank(Lost), Unhealthy, lost},
		{1, present(), Healthy, back},
		{2, blank(Lost), Unhealthy, lost},
		{3, blank(Lost), Unhealthy, lost}, // the same trip
		{4, present(), Healthy, back},
		{5, blank(Lost), Unhealthy, []string{CauseFlapping, CauseLost}},
		{6, present(), Unhealthy, []string{CauseFlapping}},
		{99999, present(), Unhealthy, []string{CauseFlapping}}, // not even in a day
	})
	if f := known[0].Verdict.Findings[0]; f.Clears != ClearsReboot {
		t.Errorf("flapping clears by %v", f.Clears)
	}

	// Three times in more than an hour is no flapping.
	runSteps(t, c, []step{
		{0, blank(Lost), Unhealthy, lost},
		{1, present(), Healthy, back},
		{10, blank(Lost), Unhealthy, lost},
		{11, present(), Healthy, back},
		{3600, blank(Lost), Unhealthy, lost},
		{3601, present(), Healthy, back},
		{3602, blank(Lost), Unhealthy, []string{CauseFlapping, CauseLost}},
	})

	// Warnings are no trips.
	var steps []step
	for i := range 10 {
		steps = append(steps, step{200 * i, present(value(FieldGPUTemp, 99)), Degraded, []string{CauseTemperature}}, step{200*i + 100, present(), Healthy, nil})
	}
	runSteps(t, c, steps)
}

// A MIG device trips by itself, not by its GPU.
func TestFlappingIsTheGPUs(t *testing.T) {
	all := []Device{gpu0, mig0}
	var known []DeviceState
	for i := range 3 {
		known = fold(t, known, 2*i, map[DeviceID]Sample{"GPU-0": blank(Lost), "MIG-0": blank(Lost)}, all...)
		known = fold(t, known, 2*i+1, nil, all...)
	}
	wantStates(t, known, map[DeviceID]State{"GPU-0": Unhealthy, "MIG-0": Unhealthy})
	if f := known[1].Verdict.Findings[0]; f.Cause != CauseFlapping || f.From != "GPU-0" || len(known[1].Verdict.Trips) != 0 {
		t.Errorf("the MIG device has %+v and trips %v", f, known[1].Verdict.Trips)
	}
}

func TestClear(t *testing.T) {
	c := DefaultConfig()
	known := fold(t, nil, 0, map[DeviceID]Sample{"GPU-0": present(xids(48, 95), value(FieldRemapPending, 1))}, gpu0, mig0, gpu1)
	clear := func(devices []DeviceState, id DeviceID, cause string) ([]DeviceState, []string, error) {
		return Clear(c, devices, false, id, cause, at(1))
	}

	for _, bad := range []struct {
		id    DeviceID
		cause string
		want  string
	}{
		{"GPU-9", "", `device "GPU-9" is not known; use one of GPU-0, GPU-1, MIG-0`},
		{"GPU-0", "xid-1", `cause "xid-1" does not stand on GPU-0; there stand xid-48, xid-95, row-remap-pending`},
		{"MIG-0", "xid-48", `cause "xid-48" of MIG-0 is its GPU's; clear it on GPU-0`},
	} {
		if _, _, err := clear(known, bad.id, bad.cause); err == nil || err.Error() != bad.want {
			t.Errorf("Clear(%s, %s): got %v, want %s", bad.id, bad.cause, err, bad.want)
		}
	}

	after, got, err := clear(known, "GPU-0", "xid-48")
	if err != nil || !slices.Equal(got, []string{"xid-48"}) {
		t.Fatalf("got %v, %v", got, err)
	}
	wantStates(t, after, map[DeviceID]State{"GPU-0": Unhealthy, "MIG-0": Unhealthy, "GPU-1": Healthy})
	if after, got, err = clear(after, "GPU-0", ""); err != nil || len(got) != 2 {
		t.Fatalf("got %v, %v", got, err)
	}
	wantStates(t, after, map[DeviceID]State{"GPU-0": Healthy, "MIG-0": Healthy, "GPU-1": Healthy})
	if known[0].Verdict.State != Unhealthy {
		t.Error("an older snapshot was modified")
	}
	if _, got, err := clear(after, "GPU-1", ""); err != nil || len(got) != 0 {
		t.Errorf("nothing to clear: got %v, %v", got, err)
	}

	// What still stands is found again.
	again := fold(t, after, 5, map[DeviceID]Sample{"GPU-0": present(value(FieldRemapPending, 1))}, gpu0, mig0, gpu1)
	wantStates(t, again, map[DeviceID]State{"GPU-0": Degraded, "MIG-0": Degraded, "GPU-1": Healthy})
}

func TestClearEndsFlapping(t *testing.T) {
	c := DefaultConfig()
	var known []DeviceState
	for i := range 3 {
		known = judgeWith(c, known, gpu0, step{at: 2 * i, sample: blank(Lost)})
		known = judgeWith(c, known, gpu0, step{at: 2*i + 1, sample: present()})
	}
	known, got, err := Clear(c, known, false, "GPU-0", "", at(6))
	if err != nil || !slices.Equal(got, []string{CauseFlapping}) {
		t.Fatalf("got %v, %v", got, err)
	}
	known = judgeWith(c, known, gpu0, step{at: 10, sample: blank(Lost)})
	known = judgeWith(c, known, gpu0, step{at: 11, sample: present()})
	if known[0].Verdict.State != Healthy {
		t.Errorf("the trips of before still count: %v", causes(known[0].Verdict))
	}
}

func TestClearWithoutAPoll(t *testing.T) {
	if _, _, err := Clear(DefaultConfig(), nil, false, "GPU-0", "", at(0)); err == nil || err.Error() != `device "GPU-0" is not known; use one of none` {
		t.Errorf("got %v", err)
	}
}

func TestConfigValidate(t *testing.T) {
	if err := DefaultConfig().Validate(); err != nil {
		t.Fatal(err)
	}
	bad := Config{
		Recovery: "maybe", StateFile: "here", Flap: FlapConfig{Trips: -1, Within: time.Millisecond}, RecoverAfter: -1,
		Kubernetes: KubernetesConfig{Kubeconfig: "here"},
	}
	for _, key := range []string{"interval: ", "confirm: ", "recovery: ", "recoverAfter: ", "temperature: ", "flap.trips: ", "flap.within: ", "stateFile: ", "kubernetes.kubeconfig: "} {
		if !slices.ContainsFunc(strings.Split(bad.Validate().Error(), "\n"), func(l string) bool { return len(l) > len(key) && l[:len(key)] == key }) {
			t.Errorf("no error for %s in\n%v", key, bad.Validate())
		}
	}
}

// While a GPU is gone its finding has begun when it went, and is one finding with another cause once that is told.
func TestGoneSince(t *testing.T) {
	for _, p := range []Presence{Lost, Inaccessible, Detached, Missing} {
		var known []DeviceState
		for at := range 5 {
			known = judgeWith(DefaultConfig(), known, gpu0, step{at: at, sample: blank(p)})
		}
		if f := known[0].Verdict.Findings; len(f) != 1 || !f[0].Since.Equal(at(0)) || !f[0].Last.Equal(at(4)) {
			t.Errorf("%v: %+v, want one since %v", p, f, at(0))
		}
	}
	known := runSteps(t, DefaultConfig(), []step{
		{0, blank(Missing), Unhealthy, []string{CauseMissing}},
		{1, blank(Missing), Unhealthy, []string{CauseMissing}},
		{2, blank(Lost), Unhealthy, []string{CauseLost}},
		{3, blank(PresenceUnknown), Unhealthy, []string{CauseLost}},
		{4, blank(Lost), Unhealthy, []string{CauseLost}},
	})
	if f := known[0].Verdict.Findings[0]; !f.Since.Equal(at(2)) {
		t.Errorf("lost since %v, want %v", f.Since, at(2))
	}
}
