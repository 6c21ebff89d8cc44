package judge

import (
	"errors"
	"slices"
	"testing"

	"github.com/gpu-node-agent/gpu-node-agent/health"
)

func daemons(id health.DeviceID, cause string) health.MPSState {
	return health.MPSState{Daemons: map[health.DeviceID]*health.MPSDaemon{
		id:         {Cause: cause, Reason: "it exited", Action: health.ActionCheckMPSDaemon, Ready: cause == ""},
		gpu1.ID:    {Ready: true},
		"GPU-gone": {Cause: health.CauseMPSDown},
	}}
}

// A finding of an MPS daemon concerns its device only, lasts as long as its cause, and is a fault.
func TestDecideMPS(t *testing.T) {
	for name, test := range map[string]struct {
		device health.DeviceID
		cause  string
		want   map[health.DeviceID]health.State
	}{
		"GPU": {gpu0.ID, health.CauseMPSDown, map[health.DeviceID]health.State{
			gpu0.ID: health.Unhealthy, mig0.ID: health.Healthy,
			gpu1.ID: health.Healthy,
		}},
		"MIG device": {mig0.ID, health.CauseMPSFault, map[health.DeviceID]health.State{
			gpu0.ID: health.Healthy, mig0.ID: health.Unhealthy,
			gpu1.ID: health.Healthy,
		}},
		"no finding": {gpu0.ID, "", map[health.DeviceID]health.State{gpu0.ID: health.Healthy, mig0.ID: health.Healthy, gpu1.ID: health.Healthy}},
	} {
		for _, recovery := range []string{RecoverAuto, RecoverAfterReset, RecoverNever} {
			c := DefaultConfig()
			c.Recovery = recovery
			judged := judgeAll(c, nil, 0, nil, samples{gpu0.ID: present(), mig0.ID: present(), gpu1.ID: present()}, gpu0, mig0, gpu1)
			state := daemons(test.device, test.cause)
			devices := View(c, judged, ViewContext{MPS: state}, at(1))
			wantStates(t, devices, test.want)
			for _, d := range devices {
				if d.MPS != state.Daemons[d.Device.ID] {
					t.Errorf("%s: %s has the daemon %+v", name, d.Device.ID, d.MPS)
				}
				if d.Device.ID != test.device || test.cause == "" {
					continue
				}
				if f := d.Verdict.OwnFinding(health.HasCause(test.cause)); f == nil || !f.Since.Equal(at(1)) ||
					f.Action != health.ActionCheckMPSDaemon ||
					d.Verdict.Decided() {
					t.Errorf("%s: %+v", name, d.Verdict)
				}
			}
			// Without a new reading, and with one, the finding stays since then and is not a trip.
			devices = View(c, devices, ViewContext{MPS: state}, at(2))
			r, now := reading(3, samples{gpu0.ID: present(), mig0.ID: present(), gpu1.ID: present()}, gpu0, mig0, gpu1)
			devices = View(c, Measure(c, devices, r, ReadingContext{XIDHistory: true}, now), ViewContext{MPS: state}, now)
			wantStates(t, devices, test.want)
			for _, d := range devices {
				if f := d.Verdict.OwnFinding(health.Finding.OfMPS); f != nil &&
					(!f.Since.Equal(at(1)) || !f.Last.Equal(at(3)) || len(d.Memory.Trips) > 0 || len(d.Verdict.Findings) != 1) {
					t.Errorf("%s: %+v", name, d.Verdict)
				}
			}
			healthy := map[health.DeviceID]health.State{gpu0.ID: health.Healthy, mig0.ID: health.Healthy, gpu1.ID: health.Healthy}
			wantStates(t, View(c, devices, ViewContext{MPS: daemons(test.device, "")}, at(4)), healthy)
			r, now = reading(5, samples{gpu0.ID: present(), mig0.ID: present(), gpu1.ID: present()}, gpu0, mig0, gpu1)
			wantStates(t, View(c, Measure(c, devices, r, ReadingContext{XIDHistory: true}, now), ViewContext{}, now),
				healthy)
		}
	}
}

// A fault of a device trips although its MPS daemon is already down. It comes before the daemon's finding, and remains when the daemon is
// back.
func TestMPSFindingHidesNoTrip(t *testing.T) {
	c, state := DefaultConfig(), daemons(gpu0.ID, health.CauseMPSDown)
	judged := judgeAll(c, nil, 0, nil, samples{gpu0.ID: present()}, gpu0)
	devices := View(c, judged, ViewContext{MPS: state}, at(1))
	r, now := reading(2, samples{gpu0.ID: present(xids(79))}, gpu0)
	devices = View(c, Measure(c, devices, r, ReadingContext{XIDHistory: true}, now), ViewContext{MPS: state}, now)
	if v := devices[0].Verdict; len(devices[0].Memory.Trips) != 1 || !v.Has(health.CauseMPSDown) || v.Cause() != "xid-79" {
		t.Errorf("%+v", v)
	}
	devices = View(c, devices, ViewContext{}, at(3))
	if got := devices[0].Verdict.Causes(); !slices.Equal(got, []string{"xid-79"}) {
		t.Errorf("%v", got)
	}
}

func TestClearKeepsMPS(t *testing.T) {
	c := DefaultConfig()
	judged := judgeAll(c, nil, 0, nil, samples{gpu0.ID: present(xids(48))}, gpu0)
	for _, cause := range []string{
		health.CauseMPSForeign, health.CauseMPSDown, health.CauseMPSHung, health.CauseMPSFault,
		health.CauseMPSLimits, health.CauseMPSNotReady,
	} {
		vc := ViewContext{MPS: daemons(gpu0.ID, cause)}
		devices := View(c, judged, vc, at(1))
		if _, _, err := Clear(c, devices, false, gpu0.ID, cause); !errors.Is(err, ErrMPSDaemon) {
			t.Errorf("%s: got %v, want %v", cause, err, ErrMPSDaemon)
		}
		after, cleared, err := Clear(c, devices, false, gpu0.ID, "")
		if err != nil || !slices.Equal(cleared, []string{"xid-48"}) {
			t.Errorf("%s: got %v, %v", cause, cleared, err)
		}
		if got := View(c, after, vc, at(2))[0].Verdict.Causes(); !slices.Equal(got, []string{cause}) {
			t.Errorf("%s: got %v", cause, got)
		}
	}
}
