package monitor

import (
	"errors"
	"testing"
	"time"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/internal/healthtest"
)

var errRefused = errors.New("refused")

// driverState is the agent's relation to the GPUs' driver.
type driverState uint8

const (
	attached driverState = iota
	withheld
	detaching
	detached
	attaching
)

func (d detachment) state() driverState {
	switch {
	case d.detached():
		return detached
	case d.detachRequested():
		return detaching
	case d.InForce():
		return withheld
	case d.engine == engineReleased:
		return attaching
	}
	return attached
}

func follow(d detachment) detachment {
	d.followed = d.requests
	return d
}

func TestDetachmentTransitions(t *testing.T) {
	now := healthtest.Epoch
	withholding := detachment{}.withhold(now, time.Minute, false)
	unreadWithholding := detachment{engine: engineReleased}.withhold(now, time.Minute, false)
	type events map[string]func(detachment) detachment
	all := events{
		"withhold":            func(d detachment) detachment { return d.withhold(now, time.Hour, true) },
		"endWithholding":      func(d detachment) detachment { return d.endWithholding(withholding.Detachment) },
		"end another":         func(d detachment) detachment { return d.endWithholding(health.Detachment{}) },
		"detach":              func(d detachment) detachment { return d.detach(now, time.Hour, true) },
		"follow":              follow,
		"refuse":              func(d detachment) detachment { return d.refuse(errRefused) },
		"attach, session":     func(d detachment) detachment { return d.attach(true, false) },
		"attach, no session":  func(d detachment) detachment { return d.attach(false, false) },
		"attach, host engine": func(d detachment) detachment { return d.attach(true, true) },
		"all devices read":    func(d detachment) detachment { return d.devicesRead(false) },
		"some device unread":  func(d detachment) detachment { return d.devicesRead(true) },
	}
	for name, c := range map[string]struct {
		from detachment
		to   map[string]driverState // by event; other events keep the state
	}{
		"attached":         {detachment{}, map[string]driverState{"withhold": withheld, "detach": detaching}},
		"withheld":         {withholding, map[string]driverState{"endWithholding": attached, "detach": detaching}},
		"withheld, unread": {unreadWithholding, map[string]driverState{"endWithholding": attaching, "detach": detaching}},
		"detaching": {withholding.detach(now, time.Minute, false), map[string]driverState{
			"follow": detached, "refuse": attached, "attach, session": attached, "attach, host engine": attached,
			"attach, no session": attaching,
		}},
		"detaching, unread": {unreadWithholding.detach(now, time.Minute, false), map[string]driverState{
			"follow": detached, "refuse": attaching, "attach, session": attaching, "attach, host engine": attaching,
			"attach, no session": attaching,
		}},
		"detached": {follow(withholding.detach(now, time.Minute, false)), map[string]driverState{
			"attach, session": attaching, "attach, host engine": attaching, "attach, no session": attaching,
		}},
		"attaching": {detachment{engine: engineReleased}, map[string]driverState{
			"withhold": withheld, "detach": detaching,
			"all devices read": attached,
		}},
	} {
		for event, apply := range all {
			t.Run(name+"/"+event, func(t *testing.T) {
				want, changes := c.to[event]
				if !changes {
					want = c.from.state()
				}
				got := apply(c.from)
				if got.state() != want {
					t.Errorf("state %d, want %d", got.state(), want)
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
	asked := requested && (event == "refuse" || got.state() == attaching || event == "attach, host engine" && !from.detachRequested()) ||
		from.engine == engineReleased && (event != "all devices read" || from.followed != from.requests) // still
	if (got.engine != engineAttached) != asked {
		t.Errorf("the host engine is asked to attach: %t, want %t", got.engine != engineAttached, asked)
	}
	if errors.Is(got.refusal, errRefused) != (event == "refuse" && from.state() == detaching) {
		t.Errorf("refusal %v", got.refusal)
	}
}

// checkSaved checks what a restart finds of the detachment.
func checkSaved(t *testing.T, got detachment) {
	t.Helper()
	if saved := got.saved(); saved.InForce() != (got.state() == withheld || got.detachRequested()) ||
		saved.Undecided != (got.state() == withheld) ||
		saved.Over != (got.state() == attaching || got.state() == attached && got.engine != engineAttached) {
		t.Errorf("saved as %+v", saved)
	}
}

// The host engine still has to be asked until a session that was begun after the request gives a reading.
func TestDetachmentAsksEngineUntilReading(t *testing.T) {
	d := detachment{}.attach(true, true)
	if d = d.devicesRead(false); d.engine != engineUnknown {
		t.Error("a reading of the session before the request counts")
	}
	if d.followed = d.requests - 1; d.devicesRead(false).engine != engineUnknown {
		t.Error("a session for an earlier request counts")
	}
	if d = follow(d).devicesRead(true); d.engine != engineUnknown {
		t.Error("a reading that lacks a GPU counts")
	}
	if d = d.devicesRead(false); d.engine != engineAttached {
		t.Error("a reading after the request does not count")
	}
}
