package monitor

import (
	"errors"
	"testing"
	"time"

	"github.com/gpu-node-agent/gpu-node-agent/internal/healthtest"
)

var errRefused = errors.New("refused")

func TestDetachmentTransitions(t *testing.T) {
	now, w := healthtest.Epoch, new(Withholding)
	type events map[string]func(detachment) detachment
	all := events{
		"withhold":            func(d detachment) detachment { return d.withhold(w, now, time.Hour, true) },
		"endWithholding":      func(d detachment) detachment { return d.endWithholding(w) },
		"end another":         func(d detachment) detachment { return d.endWithholding(&Withholding{m: new(Monitor)}) },
		"detach":              func(d detachment) detachment { return d.detach(now, time.Hour, true) },
		"sessionClosed":       detachment.sessionClosed,
		"refuse":              func(d detachment) detachment { return d.refuse(errRefused) },
		"attach, session":     func(d detachment) detachment { return d.attach(true, false) },
		"attach, no session":  func(d detachment) detachment { return d.attach(false, false) },
		"attach, host engine": func(d detachment) detachment { return d.attach(true, true) },
		"all devices read":    func(d detachment) detachment { return d.devicesRead(false) },
		"some device unread":  func(d detachment) detachment { return d.devicesRead(true) },
	}
	withholding := detachment{}.withhold(w, now, time.Minute, false)
	unreadWithholding := detachment{state: attaching}.withhold(w, now, time.Minute, false)
	for name, c := range map[string]struct {
		from detachment
		to   map[string]driverState // by event; other events keep the state
	}{
		"attached":         {detachment{}, map[string]driverState{"withhold": withheld, "detach": detaching}},
		"withheld":         {withholding, map[string]driverState{"endWithholding": attached, "detach": detaching}},
		"withheld, unread": {unreadWithholding, map[string]driverState{"endWithholding": attaching, "detach": detaching}},
		"detaching": {withholding.detach(now, time.Minute, false), map[string]driverState{
			"sessionClosed": detached, "refuse": attached, "attach, session": attached, "attach, host engine": attached,
			"attach, no session": attaching,
		}},
		"detaching, unread": {unreadWithholding.detach(now, time.Minute, false), map[string]driverState{
			"sessionClosed": detached, "refuse": attaching, "attach, session": attaching, "attach, host engine": attaching,
			"attach, no session": attaching,
		}},
		"detached": {withholding.detach(now, time.Minute, false).sessionClosed(), map[string]driverState{
			"attach, session": attaching, "attach, host engine": attaching, "attach, no session": attaching,
		}},
		"attaching": {detachment{state: attaching}, map[string]driverState{
			"withhold": withheld, "detach": detaching,
			"all devices read": attached,
		}},
	} {
		for event, apply := range all {
			t.Run(name+"/"+event, func(t *testing.T) {
				want, changes := c.to[event]
				if !changes {
					want = c.from.state
				}
				got := apply(c.from)
				if got.state != want {
					t.Errorf("state %d, want %d", got.state, want)
				}
				checkRequests(t, event, c.from, got)
				checkSaved(t, got)
			})
		}
	}
}

// checkRequests checks what an event asks of Run, and of the host engine.
func checkRequests(t *testing.T, event string, from, got detachment) {
	t.Helper()
	// Run follows a request when the driver is to be used, or not to be used, and after each attach of the host engine.
	requested := got.detachRequested() != from.detachRequested() || event == "attach, host engine"
	if (got.requests != from.requests) != requested {
		t.Errorf("%d requests, before %d", got.requests, from.requests)
	}
	asked := requested && (event == "refuse" || got.state == attaching || event == "attach, host engine" && !from.detachRequested())
	if got.engineAttach != asked {
		t.Errorf("the host engine is asked to attach: %t, want %t", got.engineAttach, asked)
	}
	if errors.Is(got.refusal, errRefused) != (event == "refuse" && from.state == detaching) {
		t.Errorf("refusal %v", got.refusal)
	}
}

// checkSaved checks what a restart finds of the detachment.
func checkSaved(t *testing.T, got detachment) {
	t.Helper()
	if saved := got.saved(); saved.InForce() != (got.state == withheld || got.detachRequested()) ||
		saved.Undecided != (got.state == withheld) ||
		saved.Over != (got.state == attaching || got.state == attached && got.engineAttach) {
		t.Errorf("saved as %+v", saved)
	}
	if (got.withholding != nil) != (got.state == withheld) {
		t.Errorf("withholding %v", got.withholding)
	}
}

// The host engine still has to be asked until a session that was begun after the request gives a reading.
func TestDetachmentAsksEngineUntilReading(t *testing.T) {
	d := detachment{}.attach(true, true)
	if d = d.devicesRead(false); !d.engineAttach {
		t.Error("a reading of the session before the request counts")
	}
	if d = d.sessionBegun(d.requests - 1).devicesRead(false); !d.engineAttach {
		t.Error("a session for an earlier request counts")
	}
	if d = d.sessionBegun(d.requests).devicesRead(false); d.engineAttach {
		t.Error("a reading after the request does not count")
	}
}
