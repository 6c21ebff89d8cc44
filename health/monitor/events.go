package monitor

import (
	"context"
	"errors"
	"slices"
	"time"

	"go.uber.org/zap"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/health/judge"
	"github.com/gpu-node-agent/gpu-node-agent/health/wait"
)

const (
	// maxPause limits the pause before events are judged in a storm. It doubles from a millisecond while less than
	// stormGap passes between two judgements.
	maxPause = 50 * time.Millisecond
	stormGap = 2 * maxPause

	// instanceDelay is how long an XID waits for the source to list its GPU instance.
	instanceDelay = 3 * time.Second

	// gpuDelay is how long an XID waits at least for the source to list its GPU.
	gpuDelay = time.Minute

	// xidLogGap is the least time between two log entries of which the second is only for XIDs that change no verdict.
	xidLogGap = time.Second

	// maxUnknownGPUs limits the logged names of GPUs that the source does not list.
	maxUnknownGPUs = 64
)

// eventReceiver takes the events of one event source.
type eventReceiver struct {
	m       *Monitor
	group   *companions
	index   int // in Source.Events
	witness health.Witness
}

// Receive queues an XID or a recovery action. Any other event causes a poll.
func (r *eventReceiver) Receive(e health.Event) {
	switch e.Kind {
	case health.EventXID:
		e.XID.Witness = r.witness
		r.m.events.add(queuedEvent{Event: e})
	case health.EventRecoveryAction:
		r.m.events.add(queuedEvent{Event: health.Event{Kind: e.Kind, GPU: e.GPU, GI: -1, CI: -1}})
	default:
		r.m.wakePoll()
	}
}

// SetEvents publishes the state of the event source and logs a new one.
func (r *eventReceiver) SetEvents(err error) {
	m := r.m
	m.mu.Lock()
	defer m.unlock()
	if r.group.stopped {
		return // the source's Events are of a later group
	}
	status, reason := health.EventsUp, ""
	_, partial := errors.AsType[health.PartialEvents](err)
	_, unused := errors.AsType[health.UnusedEvents](err)
	if err != nil {
		reason = err.Error()
	}
	switch {
	case unused:
		status = health.EventsOff
	case err != nil && !partial:
		status = health.EventsDown
	}
	before := m.now.Source.Events[r.index]
	if before.Status == status && before.Err == reason {
		return
	}
	m.setEventState(r.index, status, reason)
	m.store()
	if before.Status == status && status == health.EventsDown {
		return // only the reason has changed, such as the error of another attempt
	}
	m.logLater(func() {
		switch {
		case unused:
			m.log.Info("events off", zap.Stringer("witness", r.witness), zap.String("cause", reason))
		case partial:
			m.log.Warn("events up, but not of all GPUs", zap.Stringer("witness", r.witness), zap.String("cause", reason))
		case err != nil:
			m.log.Warn("events down", zap.Stringer("witness", r.witness), zap.String("cause", reason))
		default:
			m.log.Info("events up", zap.Stringer("witness", r.witness))
		}
	})
}

// setEventState requires m.mu.
func (m *Monitor) setEventState(index int, status health.EventSourceStatus, reason string) {
	all := slices.Clone(m.now.Source.Events)
	s, now := &all[index], time.Now()
	if s.Status == health.EventsUp {
		m.xids.seen = now
	}
	if s.Status != status {
		s.Status, s.Since = status, now
	}
	s.Err = reason
	m.now.Source.Events = all
	m.followXIDGap(now)
}

// showEvents sets the states of a source's event sources: status for each that is on. m.mu is held.
func (m *Monitor) showEvents(src *Source, status health.EventSourceStatus, reason string) {
	before := m.now.Source.Events
	m.now.Source.Events = nil
	for i, e := range src.Events {
		m.now.Source.Events = append(m.now.Source.Events, health.EventSourceState{Witness: e.Witness, Since: time.Now()})
		if i < len(before) && before[i].Witness == e.Witness {
			m.now.Source.Events[i] = before[i]
		}
		if e.Run == nil {
			m.setEventState(i, health.EventsOff, e.Off)
			continue
		}
		m.setEventState(i, status, reason)
	}
}

// followEvents judges events as they arrive until ctx ends. Events that arrive during a pause are judged together.
func (m *Monitor) followEvents(ctx context.Context) {
	var (
		last  time.Time // when events were judged
		pause time.Duration
		due   <-chan time.Time // when events that wait are looked at again
	)
	for {
		select {
		case <-ctx.Done():
			return
		case <-m.events.arrived:
		case <-due:
		}
		since := time.Since(last)
		if since < pause {
			if !wait.Sleep(ctx, pause-since) {
				return
			}
		}
		if pause = min(2*pause+time.Millisecond, maxPause); since >= stormGap {
			pause = 0
		}
		due = nil
		if wait := m.judgeEvents(); wait > 0 {
			due = time.After(wait)
		}
		last = time.Now()
	}
}

// judgeEvents judges the queued events, and publishes and logs the result. It returns when it is to be called again, 0 if
// there is no need.
func (m *Monitor) judgeEvents() (wait time.Duration) {
	m.mu.Lock()
	defer m.unlock()
	taken := m.events.take()
	for _, e := range taken {
		m.unjudged = appendEvent(m.unjudged, e)
	}
	now := time.Now()
	events, actions := m.takeEvents(now)
	if len(events) > 0 {
		// An XID from after a driver reload must not be cleared by that reload when the next poll notices it.
		reloaded, rememberDriver := m.driverReloaded("")
		m.observe(m.now.Devices, events, reloaded, now)
		rememberDriver()
		m.storeJudged()
	} else if actions {
		m.store()
	}
	if slices.ContainsFunc(taken, func(e queuedEvent) bool { return e.read == nil }) {
		m.wakePoll()
	}
	again := func(since time.Time, delay time.Duration) {
		if left := delay - now.Sub(since); left > 0 && (wait == 0 || left < wait) {
			wait = left
		}
	}
	for i := range m.unjudged {
		again(m.unjudged[i].waitsSince, instanceDelay)
	}
	if m.logWaits {
		m.logChangesLater(now)
	}
	if m.logWaits {
		again(m.changesLogged, xidLogGap)
	}
	return wait
}

// takeEvents removes from m.unjudged the events that can be judged, in order, and those that need not be. actions reports whether a change
// of a recovery action or its value was among them: readActions waits for the next snapshot to look at these. m.mu is held.
func (m *Monitor) takeEvents(now time.Time) (events []judge.Observation, actions bool) {
	if len(m.now.Devices) == 0 {
		return nil, false
	}
	var left []queuedEvent
	for i := range m.unjudged {
		e := &m.unjudged[i]
		gpu, devices := m.match(e, now)
		switch {
		case gpu == nil && e.read != nil:
			delete(m.actions, health.DeviceID(e.GPU))
		case gpu == nil && !m.dropUnknown(e, now), gpu != nil && len(devices) == 0:
			left = append(left, *e)
		case gpu == nil:
		case e.read != nil:
			actions = true
			if m.takeAction(gpu, *e.read) {
				events = append(events, judge.Observation{GPU: gpu.Device.ID, Devices: devices, Action: &e.read.RecoveryAction})
			}
		case e.Kind == health.EventRecoveryAction:
			actions = true
			m.actionChanged(gpu.Device.ID, now)
		default:
			m.overtakeAction(gpu, e.XID.Code, now)
			events = append(events, judge.Observation{GPU: gpu.Device.ID, Devices: devices, XID: e.XID})
		}
	}
	m.unjudged = left
	return events, actions
}

// match returns an event's GPU, nil if it is unknown, and the devices that the event concerns: the GPU, the MIG device of the compute
// instance, or every MIG device of the GPU instance. There are none while it waits for the source to list the instance. m.mu is held.
func (m *Monitor) match(e *queuedEvent, now time.Time) (gpu *health.DeviceState, devices []health.DeviceID) {
	all := m.now.Devices
	i := slices.IndexFunc(all, func(d health.DeviceState) bool {
		match, _ := d.Device.Matches(e.GPU)
		return match && d.Device.Kind == health.KindGPU
	})
	if i < 0 {
		return nil, nil
	}
	gpu = &all[i]
	if e.GI < 0 {
		return gpu, []health.DeviceID{gpu.Device.ID}
	}
	for i := range all {
		d := &all[i].Device
		if d.Parent != gpu.Device.ID || d.GI != e.GI {
			continue
		}
		devices = append(devices, d.ID)
		if d.CI == e.CI {
			return gpu, []health.DeviceID{d.ID}
		}
	}
	switch {
	case (e.CI >= 0 || len(devices) == 0) && !m.waited(e, now, instanceDelay) && !m.readingsSince(e):
		return gpu, nil
	case len(devices) > 0:
		return gpu, devices
	}
	return gpu, []health.DeviceID{gpu.Device.ID}
}

// dropUnknown reports whether an event of a GPU that the source does not list is dropped: readings from after the event lack
// the GPU, too. m.mu is held.
func (m *Monitor) dropUnknown(e *queuedEvent, now time.Time) bool {
	if m.waited(e, now, gpuDelay) && m.readingsSince(e) {
		return true
	}
	if !m.unknownGPUs[e.GPU] && len(m.unknownGPUs) < maxUnknownGPUs {
		m.unknownGPUs[e.GPU] = true
		fields := []zap.Field{zap.String("gpu", e.GPU), zap.Stringer("event", e.Kind), zap.Int("xid", e.XID.Code)}
		m.logLater(func() {
			m.log.Warn("event of a GPU that the source does not list; ignored unless the source lists it", fields...)
		})
	}
	return false
}

// waited reports whether an event has waited for a time. m.mu is held.
func (m *Monitor) waited(e *queuedEvent, now time.Time, delay time.Duration) bool {
	if e.waitsSince.IsZero() {
		e.waitsSince, e.polls = now, m.now.Source.Polls
	}
	return now.Sub(e.waitsSince) >= delay
}

// readingsSince reports whether a poll that began after the event has given a reading. The first one may have begun before.
func (m *Monitor) readingsSince(e *queuedEvent) bool { return m.now.Source.Polls >= e.polls+2 }

// wakePoll has the open session polled soon.
func (m *Monitor) wakePoll() {
	wait.Signal(m.eventPoll)
}

// xidsMayBeLost is the cause in the log of a gap that ended.
const xidsMayBeLost = "the source was away or listed no GPU, and no event source was up"

// minXIDGap is the least gap that is logged: a change of the configuration restarts the event sources within milliseconds.
const minXIDGap = time.Second

// xidWatch records whether XIDs can be seen, and until when they could.
type xidWatch struct {
	away bool      // no session has given a reading with a GPU since one failed, or since a reading listed none of the known ones
	seen time.Time // when a gap began, at the earliest; zero if only the failure says it
}

// followXIDGap begins or ends a gap in the report of XIDs. m.mu is held.
func (m *Monitor) followXIDGap(now time.Time) {
	g := &m.now.Source.XIDGap
	up := slices.ContainsFunc(m.now.Source.Events, func(e health.EventSourceState) bool { return e.Status == health.EventsUp })
	switch gap := m.xids.away && !up; {
	case gap && !g.Lasts():
		g.Since, g.Until = m.xids.seen, time.Time{}
		if g.Since.IsZero() {
			g.Since = now
		}
	case !gap && g.Lasts():
		lasted := now.Sub(g.Since)
		g.Until, g.Total = now, g.Total+lasted
		if lasted >= minXIDGap {
			since := g.Since
			m.logLater(func() {
				m.log.Warn("XIDs may be lost", zap.String("cause", xidsMayBeLost), zap.Duration("lasted", lasted), zap.Time("since", since))
			})
		}
	}
}

// setAway records whether the session with the source has failed or lists no GPU. m.mu is held.
func (m *Monitor) setAway(away bool, now time.Time) {
	m.xids.away = away
	m.followXIDGap(now)
	if !away {
		m.xids.seen = now
	}
}
