package monitor

import (
	"context"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/internal/healthtest"
)

// Whatever stood before stays until the GPU is seen again, a reset while nobody looked is recognised by what it has
// set back, and nothing flaps.
func TestDetachKeepsWhatStands(t *testing.T) {
	fail := health.Incident{System: "memory", Code: 4, Severity: health.SeverityFail, Message: "a double-bit error"}
	for name, c := range map[string]struct {
		before, after health.Sample
		stands, then  string // while it is let go of, and when it is back
		later         string // after a minute more
	}{
		"healthy":           {healthtest.Present(), healthtest.Present(), "driver-released", "", ""},
		"reset":             {healthtest.Present(healthtest.XIDs(95), healthtest.Value(health.FieldRecoveryAction, 1)), healthtest.Present(healthtest.Value(health.FieldRecoveryAction, 0)), "xid-95,driver-released,recovery-action", "", ""},
		"not reset":         {healthtest.Present(healthtest.XIDs(95), healthtest.Value(health.FieldRecoveryAction, 1)), healthtest.Present(healthtest.Value(health.FieldRecoveryAction, 1)), "xid-95,driver-released,recovery-action", "xid-95,recovery-action", "xid-95,recovery-action"},
		"no evidence":       {healthtest.Present(healthtest.XIDs(95)), healthtest.Present(), "xid-95,driver-released", "xid-95", "xid-95"},
		"double-bit errors": {healthtest.Present(healthtest.XIDs(48), healthtest.Value(health.FieldDBEVolatile, 2)), healthtest.Present(healthtest.Value(health.FieldDBEVolatile, 0)), "double-bit-ecc,xid-48,driver-released", "double-bit-ecc", ""},
		"lost":              {healthtest.Blank(health.Lost), healthtest.Present(), "lost,driver-released", "", ""},
		"still lost":        {healthtest.Blank(health.Lost), healthtest.Blank(health.Lost), "lost,driver-released", "lost", "lost"},
		"breaks":            {healthtest.Present(), healthtest.Blank(health.Lost), "driver-released", "lost", "lost"},
		"hot":               {healthtest.Present(healthtest.Value(health.FieldGPUTemp, 99)), healthtest.Present(healthtest.Value(health.FieldGPUTemp, 40)), "driver-released,temperature", "temperature", ""},
		"not seen":          {healthtest.Present(), healthtest.Blank(health.PresenceUnknown), "driver-released", "driver-released", "driver-released"},
		"a FAIL, and an engine that has just begun to look": {healthtest.Checked(fail), healthtest.Checked(), "dcgm-volatile-dbe-detected,driver-released", "dcgm-volatile-dbe-detected", ""},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				b := monitor(t)
				defer b.stop()
				b.show(c.before)
				pass(5 * time.Second)
				trips := b.out.Load().Devices[0].Verdict.Trips
				b.letGo(t, time.Hour)
				if got := b.stands(); got != c.stands {
					t.Errorf("let go: %s", got)
				}
				pass(20 * time.Minute)
				if got := b.stands(); got != c.stands {
					t.Errorf("after 20 minutes: %s", got)
				}
				b.show(c.after)
				ctx, cancel := context.WithTimeout(t.Context(), time.Second)
				defer cancel()
				if _, err := b.m.Attach(ctx); (err != nil) != strings.Contains(c.then, health.CauseReleased) {
					t.Errorf("back: %v", err)
				}
				if got := b.stands(); got != c.then {
					t.Errorf("back: %s, want %s", got, c.then)
				}
				pass(62 * time.Second)
				if got := b.stands(); got != c.later {
					t.Errorf("a minute later: %s, want %s", got, c.later)
				}
				now := b.out.Load().Devices[0].Verdict.Trips
				if want := len(trips); len(now) != want && name != "breaks" {
					t.Errorf("%d trips, %d before", len(now), want)
				}
			})
		})
	}
}

// An operator's word that the GPU is well does not take the driver back.
func TestReleaseIsNotCleared(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := monitor(t)
		defer b.stop()
		b.show(healthtest.Present(healthtest.XIDs(48)))
		pass(time.Second)
		b.letGo(t, time.Hour)
		if _, err := b.m.Clear("GPU-0", health.CauseReleased); err == nil || !strings.Contains(err.Error(), "gpu-node-agent attach") {
			t.Errorf("%v", err)
		}
		if cleared, err := b.m.Clear("GPU-0", ""); err != nil || len(cleared) != 1 || b.stands() != health.CauseReleased {
			t.Errorf("%v, %v; %s stands", cleared, err, b.stands())
		}
	})
}
