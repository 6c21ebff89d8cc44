package health

import (
	"context"
	"strings"
	"testing"
	"testing/synctest"
	"time"
)

// Whatever stood before stays until the GPU is seen again, a reset while nobody looked is recognised by what it has
// set back, and nothing flaps.
func TestDetachKeepsWhatStands(t *testing.T) {
	fail := Incident{System: "memory", Code: 4, Severity: SeverityFail, Message: "a double-bit error"}
	for name, c := range map[string]struct {
		before, after Sample
		stands, then  string // while it is let go of, and when it is back
		later         string // after a minute more
	}{
		"healthy":           {present(), present(), "driver-released", "", ""},
		"reset":             {present(xids(95), value(FieldRecoveryAction, 1)), present(value(FieldRecoveryAction, 0)), "xid-95,driver-released,recovery-action", "", ""},
		"not reset":         {present(xids(95), value(FieldRecoveryAction, 1)), present(value(FieldRecoveryAction, 1)), "xid-95,driver-released,recovery-action", "xid-95,recovery-action", "xid-95,recovery-action"},
		"no evidence":       {present(xids(95)), present(), "xid-95,driver-released", "xid-95", "xid-95"},
		"double-bit errors": {present(xids(48), value(FieldDBEVolatile, 2)), present(value(FieldDBEVolatile, 0)), "double-bit-ecc,xid-48,driver-released", "double-bit-ecc", ""},
		"lost":              {blank(Lost), present(), "lost,driver-released", "", ""},
		"still lost":        {blank(Lost), blank(Lost), "lost,driver-released", "lost", "lost"},
		"breaks":            {present(), blank(Lost), "driver-released", "lost", "lost"},
		"hot":               {present(value(FieldGPUTemp, 99)), present(value(FieldGPUTemp, 40)), "driver-released,temperature", "temperature", ""},
		"not seen":          {present(), blank(PresenceUnknown), "driver-released", "driver-released", "driver-released"},
		"a FAIL, and an engine that has just begun to look": {checked(fail), checked(), "dcgm-volatile-dbe-detected,driver-released", "dcgm-volatile-dbe-detected", ""},
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
				if _, err := b.m.Attach(ctx); (err != nil) != strings.Contains(c.then, CauseReleased) {
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
		b.show(present(xids(48)))
		pass(time.Second)
		b.letGo(t, time.Hour)
		if _, err := b.m.Clear("GPU-0", CauseReleased); err == nil || !strings.Contains(err.Error(), "gpu-node-agent attach") {
			t.Errorf("%v", err)
		}
		if cleared, err := b.m.Clear("GPU-0", ""); err != nil || len(cleared) != 1 || b.stands() != CauseReleased {
			t.Errorf("%v, %v; %s stands", cleared, err, b.stands())
		}
	})
}

// MIG devices have it from their GPU, and a partition made meanwhile has nothing of it.
func TestReleaseOfMIGDevices(t *testing.T) {
	known := judgeAll(DefaultConfig(), nil, 0, nil, map[DeviceID]Sample{gpu0.ID: present(), mig0.ID: present()}, gpu0, mig0)
	known = decide(DefaultConfig(), known, known, nil, &release{until: at(60)}, at(1))
	if f := known[1].Verdict.Findings; len(f) != 1 || f[0].From != gpu0.ID || f[0].Cause != CauseReleased || known[1].Verdict.State != Unhealthy {
		t.Errorf("%+v", f)
	}
	known = decide(DefaultConfig(), known, known, nil, &release{over: true}, at(2))
	wantStates(t, known, map[DeviceID]State{gpu0.ID: Healthy, mig0.ID: Healthy})
}
