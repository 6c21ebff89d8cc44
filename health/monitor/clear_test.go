package monitor

import (
	"errors"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/internal/healthtest"
)

// What was just measured is not cleared: the kubelet would give the GPU out until the next poll.
func TestClearKeepsWhatStands(t *testing.T) {
	link := health.Incident{System: "nvlink", Code: 71, Severity: health.SeverityFail, Message: "errors"} // NVLINK_ERROR_CRITICAL
	for name, c := range map[string]struct {
		bad   health.Sample
		cause string
	}{
		"lost":            {healthtest.Blank(health.Lost), health.CauseLost},
		"hidden":          {healthtest.Blank(health.Inaccessible), health.CauseInaccessible},
		"detached":        {healthtest.Blank(health.Detached), health.CauseDetached},
		"missing":         {healthtest.Blank(health.Missing), health.CauseMissing},
		"remap failed":    {healthtest.Present(healthtest.Value(health.FieldRemapFailed, 1)), health.CauseRemapFailed},
		"recovery action": {healthtest.Present(healthtest.Value(health.FieldRecoveryAction, 2)), health.CauseRecoveryAction},
		"hot":             {healthtest.Present(healthtest.Value(health.FieldGPUTemp, 99)), health.CauseTemperature},
		"DCGM's checks":   {healthtest.Checked(link), "dcgm-nvlink-error-critical"},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				b := monitor(t)
				defer b.stop()
				bad := c.bad
				bad.XIDs = []health.XID{{Code: 48}}
				b.show(bad)
				pass(3 * time.Second)
				before := b.out.Load().Devices[0].Verdict
				for _, cause := range []string{c.cause, "xid-48"} {
					if !slices.Contains(before.Causes(), cause) {
						t.Fatalf("%s does not stand: %v", cause, before.Causes())
					}
				}
				if _, err := b.m.Clear("GPU-0", c.cause); !errors.Is(err, health.ErrStillPresent) {
					t.Errorf("by its name: %v", err)
				}
				got, err := b.m.Clear("GPU-0", "")
				after := b.out.Load().Devices[0].Verdict
				if err != nil || !slices.Equal(got, []string{"xid-48"}) || !slices.Equal(after.Causes(), []string{c.cause}) {
					t.Errorf("cleared %v, %v; %v stands", got, err, after.Causes())
				}
				f, was := after.Findings[0], before.Findings[slices.Index(before.Causes(), c.cause)]
				if f.Since != was.Since || f.State != was.State {
					t.Errorf("%+v, was %+v", f, was)
				}
				// What is known of a source that is away is old, and an operator knows better.
				hang := make(chan struct{})
				b.set(func(s *script) { s.hang = hang })
				pass(time.Minute)
				if got, err := b.m.Clear("GPU-0", c.cause); err != nil || !slices.Equal(got, []string{c.cause}) {
					t.Errorf("while the source stalls: %v, %v", got, err)
				}
				b.set(func(s *script) { s.hang = nil })
				close(hang)
			})
		})
	}
}

// A GPU that is back and whose finding is still to age is well at an operator's word.
func TestClearOfWhatIsGone(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := monitor(t)
		defer b.stop()
		b.show(healthtest.Present(healthtest.Value(health.FieldRemapFailed, 1)))
		pass(2 * time.Second)
		b.show(healthtest.Present())
		pass(2 * time.Second)
		if b.stands() != health.CauseRemapFailed {
			t.Fatalf("%s stands", b.stands())
		}
		if got, err := b.m.Clear("GPU-0", ""); err != nil || len(got) != 1 || b.stands() != "" {
			t.Errorf("%v, %v; %s stands", got, err, b.stands())
		}
	})
}

// TestClearForgetsWhatIsNotConfirmed: after an operator's word, a fault must be seen as often as one that is new.
func TestClearForgetsWhatIsNotConfirmed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := monitor(t)
		defer b.stop()
		synctest.Wait()
		link := health.Incident{System: "nvlink", Code: 71, Severity: health.SeverityFail, Message: "errors"} // NVLINK_ERROR_CRITICAL
		cause := "dcgm-nvlink-error-critical"
		b.show(healthtest.Checked(link))
		pass(time.Second)
		if stands := b.stands(); stands != "" {
			t.Fatalf("%s stands after one check", stands)
		}
		if _, err := b.m.Clear(healthtest.GPU0.ID, ""); err != nil {
			t.Fatal(err)
		}
		for check, want := range []string{"", cause} {
			pass(time.Second)
			if stands := b.stands(); stands != want {
				t.Errorf("%d checks after the operator's word: %q stands; want %q", check+1, stands, want)
			}
		}
	})
}

// TestClearEndsTheFollowingOfAnXID: what the driver asks for after an operator's word is no news of an XID before it.
func TestClearEndsTheFollowingOfAnXID(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := monitor(t)
		defer b.stop()
		synctest.Wait()
		b.show(healthtest.Present(healthtest.XIDs(109)))
		pass(time.Second)
		if _, err := b.m.Clear(healthtest.GPU0.ID, ""); err != nil {
			t.Fatal(err)
		}
		b.show(healthtest.Present(healthtest.Value(health.FieldRecoveryAction, 1)))
		pass(time.Second)
		if v := b.out.Load().Devices[0].Verdict; slices.Contains(v.Causes(), "xid-109") {
			t.Errorf("%v stand", v.Causes())
		}
	})
}

// What was decided for the sake of a finding ends with it, though no poll may come.
func TestClearEndsIsolation(t *testing.T) {
	c := health.DefaultConfig()
	c.IsolatePending = true
	nobody := func(health.DeviceID) bool { return false }
	known := healthtest.Judge(c, nil, 0, nobody, map[health.DeviceID]health.Sample{"GPU-0": healthtest.Present(healthtest.Value(health.FieldRemapPending, 1))}, healthtest.GPU0)
	m := monitorOf(c, known)
	if _, err := m.Clear("GPU-0", health.CauseRemapPending); err != nil {
		t.Fatal(err)
	}
	if v := m.out.Load().Devices[0].Verdict; len(v.Findings) != 0 {
		t.Errorf("%v", v.Causes())
	}
}
