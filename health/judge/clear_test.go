package judge

import (
	"errors"
	"slices"
	"testing"

	"github.com/gpu-node-agent/gpu-node-agent/health"
)

// clearAndView clears findings and derives the verdicts.
func clearAndView(
	c Config, devices []health.DeviceState, up bool, id health.DeviceID, cause string, seconds int,
) ([]health.DeviceState, []string, error) {
	devices, cleared, err := Clear(c, devices, up, id, cause)
	return View(c, devices, ViewContext{}, at(seconds)), cleared, err
}

func TestClear(t *testing.T) {
	c := DefaultConfig()
	devices := judge(nil, 0, samples{"GPU-0": present(xids(48, 95), value(health.FieldRemapPending, 1))}, gpu0, mig0, gpu1)
	clear := func(devices []health.DeviceState, id health.DeviceID, cause string) ([]health.DeviceState, []string, error) {
		return clearAndView(c, devices, false, id, cause, 1)
	}
	for _, bad := range []struct {
		devices []health.DeviceState
		id      health.DeviceID
		cause   string
		want    error
	}{
		{devices, "GPU-9", "", ErrUnknownDevice},
		{nil, "GPU-0", "", ErrUnknownDevice},
		{devices, "GPU-0", "xid-1", ErrNoFinding},
		{devices, "MIG-0", "xid-48", ErrInherited},
	} {
		if _, _, err := clear(bad.devices, bad.id, bad.cause); !errors.Is(err, bad.want) {
			t.Errorf("Clear(%s, %s): got %v, want %v", bad.id, bad.cause, err, bad.want)
		}
	}

	after, got, err := clear(devices, "GPU-0", "xid-48")
	if err != nil || !slices.Equal(got, []string{"xid-48"}) {
		t.Fatalf("got %v, %v", got, err)
	}
	wantStates(t, after, map[health.DeviceID]health.State{"GPU-0": health.Unhealthy, "MIG-0": health.Unhealthy, "GPU-1": health.Healthy})
	if after, got, err = clear(after, "GPU-0", ""); err != nil || len(got) != 2 {
		t.Fatalf("got %v, %v", got, err)
	}
	wantStates(t, after, map[health.DeviceID]health.State{"GPU-0": health.Healthy, "MIG-0": health.Healthy, "GPU-1": health.Healthy})
	if devices[0].Verdict.State != health.Unhealthy {
		t.Error("Clear modified an older snapshot")
	}
	if _, got, err := clear(after, "GPU-1", ""); err != nil || len(got) != 0 {
		t.Errorf("without findings: got %v, %v", got, err)
	}

	// A condition that lasts is found again.
	again := judge(after, 5, samples{"GPU-0": present(value(health.FieldRemapPending, 1))}, gpu0, mig0, gpu1)
	wantStates(t, again, map[health.DeviceID]health.State{"GPU-0": health.Degraded, "MIG-0": health.Degraded, "GPU-1": health.Healthy})
}

// Clear keeps what the newest sample of a source that is up shows: the kubelet would allocate the GPU before the next poll.
func TestClearKeepsMeasuredFindings(t *testing.T) {
	c := DefaultConfig()
	c.Confirm = 1
	for cause, sample := range map[string]health.Sample{
		health.CauseLost: blank(health.Lost), health.CauseInaccessible: blank(health.Inaccessible), health.CauseDetached: blank(health.Detached),
		health.CauseMissing:               blank(health.Missing),
		health.CauseRemapFailed:           present(value(health.FieldRemapFailed, 1)),
		health.CauseRecoveryAction:        present(value(health.FieldRecoveryAction, 2)),
		health.CauseTemperature:           present(value(health.FieldGPUTemp, 99)),
		"dcgm-nvlink-crc-error-threshold": checked(health.Incident{Code: 70, Severity: health.SeverityFail}),
	} {
		xids(48)(&sample)
		devices := judgeAll(c, nil, 0, nil, samples{"GPU-0": sample}, gpu0)
		if _, _, err := Clear(c, devices, true, "GPU-0", cause); !errors.Is(err, ErrStillPresent) {
			t.Errorf("%s: got %v", cause, err)
		}
		after, cleared, err := clearAndView(c, devices, true, "GPU-0", "", 1)
		if err != nil || !slices.Equal(cleared, []string{"xid-48"}) || !slices.Equal(after[0].Verdict.Causes(), []string{cause}) {
			t.Errorf("%s: cleared %v, %v; causes %v", cause, cleared, err, after[0].Verdict.Causes())
		}
		if f := after[0].Verdict.Findings[0]; !f.Since.Equal(at(0)) {
			t.Errorf("%s: since %v", cause, f.Since)
		}
		if _, cleared, err := Clear(c, devices, false, "GPU-0", cause); err != nil || !slices.Equal(cleared, []string{cause}) {
			t.Errorf("%s: source down: cleared %v, %v", cause, cleared, err)
		}
	}

	// The newest sample shows that the condition is over, but recoverAfter has not passed.
	devices := judge(nil, 0, samples{"GPU-0": present(value(health.FieldRemapFailed, 1))}, gpu0)
	devices = judge(devices, 2, nil, gpu0)
	if _, cleared, err := Clear(c, devices, true, "GPU-0", health.CauseRemapFailed); err != nil || len(cleared) != 1 {
		t.Errorf("condition over: cleared %v, %v", cleared, err)
	}
}

// An incident without a device that counts for every GPU lasts between two checks, too.
func TestClearKeepsIncidentOfEveryGPU(t *testing.T) {
	const cause = "dcgm-imex-unhealthy"
	c := DefaultConfig()
	c.Confirm, c.Incidents.Unhealthy = 1, []string{"DCGM_FR_IMEX_UNHEALTHY"}
	imex := []health.Incident{{System: "imex", Code: 122, Severity: health.SeverityFail}}
	var devices []health.DeviceState
	for i, sample := range []health.Sample{checked(), present()} {
		r, now := reading(i, samples{"GPU-0": sample}, gpu0)
		r.Checks, r.Incidents = health.Checks{Status: health.ChecksUp}, imex
		devices = judgeReading(c, devices, r, ReadingContext{}, now)
		if _, _, err := Clear(c, devices, true, "GPU-0", cause); !errors.Is(err, ErrStillPresent) {
			t.Errorf("checked %v: %v", sample.Checked, err)
		}
	}
	r, now := reading(2, nil, gpu0)
	r.Checks, r.Incidents = health.Checks{Status: health.ChecksDown}, imex // of the last check
	devices = judgeReading(c, devices, r, ReadingContext{}, now)
	if _, cleared, err := Clear(c, devices, true, "GPU-0", cause); err != nil || !slices.Equal(cleared, []string{cause}) {
		t.Errorf("checks down: cleared %v, %v", cleared, err)
	}
}

// After Clear a fault must be confirmed like a new one. Clear of one cause leaves the confirmations of others.
func TestClearDropsUnconfirmedFault(t *testing.T) {
	for cause, want := range map[string]health.State{
		"": health.Healthy, "dcgm-nvlink-crc-error-threshold": health.Healthy,
		health.CauseRemapPending: health.Unhealthy,
	} {
		faulty := samples{"GPU-0": checked(health.Incident{Code: 70, Severity: health.SeverityFail})}
		devices := judge(nil, 0, samples{"GPU-0": present(value(health.FieldRemapPending, 1))}, gpu0)
		if cause == "dcgm-nvlink-crc-error-threshold" { // a WARN is a finding, too
			devices = judge(devices, 1, samples{"GPU-0": checked(health.Incident{Code: 70, Severity: health.SeverityWarn})}, gpu0)
		}
		devices = judge(devices, 2, faulty, gpu0)
		devices, _, err := Clear(DefaultConfig(), devices, false, "GPU-0", cause)
		if err != nil {
			t.Fatal(err)
		}
		devices = judge(devices, 3, faulty, gpu0)
		if got := devices[0].Verdict.State; max(got, health.Degraded) != max(want, health.Degraded) {
			t.Errorf("clear %q: %v by %v, want %v", cause, got, devices[0].Verdict.Causes(), want)
		}
		devices = judge(devices, 4, faulty, gpu0)
		wantStates(t, devices, map[health.DeviceID]health.State{"GPU-0": health.Unhealthy})
	}
}

// The recovery action no longer decides about a cleared XID, and still about the others.
func TestClearPendingXID(t *testing.T) {
	for cause, want := range map[string][]string{
		"": {health.CauseRecoveryAction}, "xid-144": {"xid-109", health.CauseRecoveryAction},
		health.CauseRemapPending: {"xid-109", "xid-144", health.CauseRecoveryAction},
	} {
		devices := judge(nil, 0, samples{"GPU-0": present(xids(109, 144), value(health.FieldRemapPending, 1))}, gpu0)
		devices, _, err := Clear(DefaultConfig(), devices, false, "GPU-0", cause)
		if err != nil {
			t.Fatal(err)
		}
		devices = judge(devices, 2, samples{"GPU-0": present(value(health.FieldRecoveryAction, 1), without(health.FieldRemapPending))}, gpu0)
		got := slices.DeleteFunc(devices[0].Verdict.Causes(), func(c string) bool { return c == health.CauseRemapPending })
		if !slices.Equal(got, want) {
			t.Errorf("clear %q: %v, want %v", cause, got, want)
		}
	}
}

// Clear forgets the trips with the flapping, and with everything; the end of another finding leaves them.
func TestClearForgetsTrips(t *testing.T) {
	for cause, c := range map[string]struct {
		trips int
		after []string // of one trip more
	}{"": {3, nil}, health.CauseFlapping: {3, nil}, health.CauseTemperature: {2, []string{health.CauseFlapping}}} {
		var devices []health.DeviceState
		for i := range c.trips {
			devices = judge(devices, 2*i, samples{"GPU-0": blank(health.Lost)}, gpu0)
			devices = judge(devices, 2*i+1, samples{"GPU-0": present(value(health.FieldGPUTemp, 99))}, gpu0)
		}
		devices, got, err := Clear(DefaultConfig(), devices, false, "GPU-0", cause)
		if all := []string{health.CauseFlapping, health.CauseTemperature}; err != nil ||
			!slices.Equal(got, all) && !slices.Equal(got, []string{cause}) {
			t.Fatalf("clear %q: got %v, %v", cause, got, err)
		}
		devices = judge(devices, 100, samples{"GPU-0": blank(health.Lost)}, gpu0)
		devices = judge(devices, 101, nil, gpu0)
		if got := devices[0].Verdict.Causes(); !slices.Equal(got, c.after) {
			t.Errorf("clear %q: %v, want %v", cause, got, c.after)
		}
	}
}
