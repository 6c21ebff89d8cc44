package monitor

import (
	"context"
	"slices"
	"sync"
	"time"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/health/judge"
)

// actionDelay is how long a source that is up has to measure a recovery action: until the second poll after the event, and some more.
const actionDelay = cacheAge + 400*time.Millisecond

// xidRecoveryAction is the XID by which the driver reports a new recovery action beside the event.
const xidRecoveryAction = 154

// unmeasuredAction is a recovery action that the driver has changed and that the source has not measured since. If the source is away,
// hangs or lacks the field, it is read from the driver.
type unmeasuredAction struct {
	since     time.Time
	reading   bool
	overtaken bool // an event or an XID of the GPU has arrived since the reading began, so the value may be older
	none      bool // the value was none, which a source that measures recovery actions will show
}

// driverAction is a recovery action that was read from the driver.
type driverAction struct {
	health.RecoveryAction
	err error
}

// actionChanged notes that the driver has changed the recovery action of a GPU. m.mu is held.
func (m *Monitor) actionChanged(gpu health.DeviceID, now time.Time) {
	reading := m.actions[gpu] != nil && m.actions[gpu].reading
	m.actions[gpu] = &unmeasuredAction{since: now, reading: reading, overtaken: reading}
}

// overtakeAction notes an XID of a GPU. A recovery action that was read before it does not count. If the GPU has the finding of a recovery
// action, a newer observation tells whether a reset came between that and the XID. m.mu is held.
func (m *Monitor) overtakeAction(d *health.DeviceState, code int, now time.Time) {
	switch a := m.actions[d.Device.ID]; {
	case code == xidRecoveryAction:
	case a != nil:
		a.overtaken = a.reading
	case d.Verdict.Has(health.CauseRecoveryAction):
		m.actionChanged(d.Device.ID, now)
	}
}

// takeAction ends the reading of a GPU's recovery action, and reports whether the value is to be judged. The source shows the end of a
// recovery action, which is evidence of a reset then, unless it lacks the field. m.mu is held.
func (m *Monitor) takeAction(d *health.DeviceState, read driverAction) bool {
	a := m.actions[d.Device.ID]
	if a == nil {
		return false // of another source
	}
	none := read.RecoveryAction == health.RecoveryNone && !m.lacksActions(d.Sample)
	again := a.overtaken
	a.reading, a.overtaken = false, false
	switch {
	case again:
		return false
	case read.err == nil && none:
		a.none = true
		return false
	}
	delete(m.actions, d.Device.ID)
	return read.err == nil && !a.measuredIn(d.Sample)
}

// measuredIn reports whether a sample has a recovery action that the source measured after the change.
func (a *unmeasuredAction) measuredIn(s health.Sample) bool {
	_, ok := s.Values[health.FieldRecoveryAction]
	return ok && s.At.Sub(a.since) >= cacheAge
}

// lacksActions reports whether the source measures a GPU except for its recovery action. m.mu is held.
func (m *Monitor) lacksActions(s health.Sample) bool {
	has := func(f health.Field) bool { _, ok := s.Values[f]; return ok }
	return m.now.Source.Status == health.SourceUp && !has(health.FieldRecoveryAction) && slices.ContainsFunc(judge.JudgedFields(), has)
}

// dueActions returns the GPUs whose recovery actions must be read now, and for how long no other one is due; 0 if none waits.
func (m *Monitor) dueActions() (gpus []health.DeviceID, wait time.Duration) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for i := range m.now.Devices {
		d := &m.now.Devices[i]
		a := m.actions[d.Device.ID]
		switch {
		case a == nil || a.reading:
		case a.measuredIn(d.Sample):
			delete(m.actions, d.Device.ID)
		case a.none && !m.lacksActions(d.Sample):
		case m.now.Source.Status == health.SourceUp && time.Since(a.since) < actionDelay:
			if left := actionDelay - time.Since(a.since); wait == 0 || left < wait {
				wait = left
			}
		default:
			a.reading = true
			gpus = append(gpus, d.Device.ID)
		}
	}
	return gpus, wait
}

// readActions reads recovery actions when they are due, until ctx ends and every read has returned. read may hang.
func (m *Monitor) readActions(ctx context.Context, read func(health.DeviceID) (health.RecoveryAction, error)) {
	var calls health.Guard[health.DeviceID, driverAction]
	var callers sync.WaitGroup
	defer calls.Wait()
	defer callers.Wait()
	for {
		_, changed := m.out.Watch()
		gpus, wait := m.dueActions()
		for _, gpu := range gpus {
			callers.Go(func() {
				got, err := calls.Call(ctx.Done(), gpu, func() driverAction {
					action, err := read(gpu)
					return driverAction{action, err}
				}, nil)
				if err != nil {
					got.err = err
				}
				m.events.add(queuedEvent{Event: health.Event{Kind: health.EventRecoveryAction, GPU: string(gpu), GI: -1, CI: -1}, read: &got})
			})
		}
		var due <-chan time.Time
		if wait > 0 {
			due = time.After(wait)
		}
		select {
		case <-ctx.Done():
			return
		case <-changed:
		case <-due:
		}
	}
}
