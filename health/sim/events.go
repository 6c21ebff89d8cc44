package sim

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/health/wait"
)

var (
	errNoDriver   = errors.New("simulated driver is not loaded; inject {source: up} to load it")
	errEventsDown = errors.New("simulated events are down; inject {events: up} to end it")
)

// States of the events, the values of Event.Events.
const (
	eventsUp    = "up"
	eventsDown  = "down"  // the event source fails
	eventsLossy = "lossy" // the event source works, and the driver's events do not arrive
)

// Events reports the events of the simulated driver as NVML does, until ctx ends: at once, whatever the source's state, and only events
// from after the call. XIDs are also in the readings.
func (s *Source) Events(ctx context.Context, to health.EventReceiver) {
	s.mu.Lock()
	defer s.mu.Unlock()
	receiver := &to
	s.receivers[receiver] = struct{}{}
	defer delete(s.receivers, receiver)
	for {
		err, changed := s.eventsError(), s.changed
		s.mu.Unlock()
		to.SetEvents(err)
		ended := !wait.For(ctx, changed)
		s.mu.Lock()
		if ended {
			return
		}
	}
}

// eventsError returns why no events are reported. Called with mu held.
func (s *Source) eventsError() error {
	switch {
	case s.state == sourceEmpty:
		return errNoDriver
	case s.eventState == eventsDown:
		return errEventsDown
	}
	return nil
}

// RecoveryAction returns the recovery action of a GPU as NVML does: in every state of the source, unless there is no driver.
func (s *Source) RecoveryAction(id health.DeviceID) (health.RecoveryAction, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.state == sourceEmpty {
		return 0, errNoDriver
	}
	gpu := slices.IndexFunc(s.gpus, func(g gpu) bool { return s.devices[g.device].ID == id })
	if gpu < 0 {
		return 0, fmt.Errorf("the simulation has no GPU %s", id)
	}
	return s.states[gpu].recoveryAction(), nil
}

// recoveryAction returns what the driver asks for.
func (c *gpuState) recoveryAction() health.RecoveryAction {
	action, _ := valueOf(c.RecoveryAction).number()
	return health.RecoveryAction(action)
}

// report reports an event of a GPU. Called with mu held.
func (s *Source) report(gpu int, e health.Event) {
	if s.eventsError() != nil || s.eventState == eventsLossy {
		return
	}
	e.GPU, e.GI, e.CI = string(s.devices[s.gpus[gpu].device].ID), -1, -1
	times := e.XID.Count()
	e.XID.Times = 0
	for range times { // as the driver does
		e.XID.At = time.Now()
		for to := range s.receivers {
			(*to).Receive(e)
		}
	}
}

// reportChanges reports what has changed in a GPU's state. Called with mu held.
func (s *Source) reportChanges(gpu int, before, after *gpuState, partitioned bool) {
	if after.recoveryAction() != before.recoveryAction() {
		s.report(gpu, health.Event{Kind: health.EventRecoveryAction})
	}
	if valueOf(after.Lost) && !valueOf(before.Lost) {
		s.report(gpu, health.Event{Kind: health.EventUnavailable})
	}
	if valueOf(after.DoubleBitErrors) > valueOf(before.DoubleBitErrors) {
		s.report(gpu, health.Event{Kind: health.EventDBE})
	}
	if partitioned {
		s.report(gpu, health.Event{Kind: health.EventMIG})
	}
}
