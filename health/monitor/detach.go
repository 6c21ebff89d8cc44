package monitor

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"go.uber.org/zap"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/health/judge"
	"github.com/gpu-node-agent/gpu-node-agent/health/wait"
)

var (
	errDetachPending  = errors.New("another detach is being decided; retry later")
	errDetachCanceled = errors.New("detach canceled: attach was requested, or the time limit was reached, before the driver was detached")
	errAttachCanceled = errors.New("attach canceled: detach was requested before the driver was attached")
)

// ErrNotBack is Source.Err after an attach while the driver reports no GPU.
var ErrNotBack = errors.New("driver not back after detach: no GPU found")

// DetachResult describes a detach in force.
type DetachResult struct {
	Since         time.Time
	Until         time.Time // time limit: when the agent attaches the driver automatically
	Already       bool      // the driver was detached before
	EngineUnasked bool      // the host engine was not connected and not asked to detach: it may still use the driver
}

// AttachResult describes the source after an attach. If Status is not SourceUp, the agent keeps retrying.
type AttachResult struct {
	Already bool // the driver was not detached
	Status  health.SourceStatus
	Err     string // why the source is not up
}

// Withholding is the state in which all devices are unhealthy while the agent asks who holds them, ahead of a Detach. The
// agent still uses the driver.
type Withholding struct {
	m      *Monitor
	wanted health.Detachment
}

// Withhold makes all devices unhealthy, so that the kubelet allocates none, until End. A Detach for the same time limit
// continues from there. If the driver is detached already, Withhold changes nothing.
func (m *Monitor) Withhold(limit time.Duration) (*Withholding, error) {
	m.mu.Lock()
	defer m.unlock()
	switch {
	case m.detach.detachRequested():
		return &Withholding{m: m}, nil
	case m.detach.Undecided:
		return nil, errDetachPending
	}
	if err := m.canDetach(); err != nil {
		return nil, err
	}
	now := time.Now()
	m.setDetachment(m.detach.withhold(now, limit, m.hasHostEngine()), now)
	return &Withholding{m, m.detach.Detachment}, nil
}

// End returns the devices to their state before Withhold, apart from later measurements. It does nothing after a Detach.
func (w *Withholding) End() {
	m := w.m
	m.mu.Lock()
	defer m.unlock()
	if d := m.detach.endWithholding(w.wanted); d.Detachment != m.detach.Detachment {
		m.setDetachment(d, time.Now())
	}
}

// Detach stops using the driver until Attach is called or the time limit is reached. It returns when the driver is detached
// or ctx ends; the end of ctx ends only the waiting. All devices become unhealthy first. If the driver is detached already,
// the time limit starts again. If the host engine refuses, the devices return to their state.
func (m *Monitor) Detach(ctx context.Context, limit time.Duration) (DetachResult, error) {
	already, err := m.requestDetach(limit)
	if err != nil {
		return DetachResult{}, err
	}
	var r DetachResult
	err = m.await(ctx, func() (done bool, err error) {
		switch d := m.detach; {
		case d.refusal != nil:
			return true, d.refusal
		case !d.detachRequested():
			return true, errDetachCanceled
		case d.detached():
			r = DetachResult{m.now.Source.Since, d.Until, already, d.EngineUnasked}
			return true, nil
		}
		return false, fmt.Errorf("driver not detached yet, source %s; the agent keeps trying and withholds the GPUs; "+
			"run detach again to wait, or attach to cancel", describe(m.now.Source))
	})
	return r, err
}

// await calls done, with m.mu held, until it reports true or ctx ends, and returns its last error.
func (m *Monitor) await(ctx context.Context, done func() (bool, error)) error {
	for {
		_, changed := m.out.Watch()
		m.mu.Lock()
		ok, err := done()
		m.mu.Unlock()
		if ok {
			return err
		}
		if !wait.For(ctx, changed) {
			return err
		}
	}
}

func (m *Monitor) requestDetach(limit time.Duration) (already bool, err error) {
	m.mu.Lock()
	defer m.unlock()
	now := time.Now()
	if already = m.detach.detachRequested(); !already {
		if err := m.canDetach(); err != nil {
			return false, err
		}
		m.logLater(func() { m.log.Warn("detach requested", zap.Time("until", now.Add(limit))) })
	}
	m.setDetachment(m.detach.detach(now, limit, m.hasHostEngine()), now)
	return already, nil
}

// Attach uses the driver again. It returns when the source is up and has read every device, when the source is down or
// stalled, or when ctx ends. It asks a host engine to attach even if the driver was not detached, because an agent that was
// restarted does not know.
func (m *Monitor) Attach(ctx context.Context) (AttachResult, error) {
	already := m.requestAttach("requested")
	var r AttachResult
	err := m.await(ctx, func() (done bool, err error) {
		d, source, unread := m.detach, m.now.Source, withheldDevices(m.now.Devices)
		followed := d.followed == d.requests
		switch {
		case d.detachRequested():
			return true, errAttachCanceled
		case source.Status == health.SourceStalled,
			followed && source.Status == health.SourceDown,
			followed && source.Status == health.SourceUp && len(unread) == 0:
			r = AttachResult{already, source.Status, source.Err}
			return true, nil
		}
		return false, fmt.Errorf("driver not attached yet, source %s; devices not read since detach: %s; "+
			"the agent keeps trying, see gpu-node-agent status", describe(source), cmp.Or(strings.Join(unread, ", "), "none"))
	})
	return r, err
}

func (m *Monitor) requestAttach(reason string) (already bool) {
	m.mu.Lock()
	defer m.unlock()
	return m.attach(reason)
}

// attachAtLimit attaches when the time limit is reached. A detach that hangs does not delay it.
func (m *Monitor) attachAtLimit() {
	m.mu.Lock()
	defer m.unlock()
	if m.detach.detachRequested() && !time.Now().Before(m.detach.Until) {
		m.attach("time limit reached")
	}
}

// attach requires m.mu.
func (m *Monitor) attach(reason string) (already bool) {
	before, now := m.detach, time.Now()
	already = !before.detachRequested()
	d := before.attach(m.session != nil, m.hasHostEngine() && m.canDetach() == nil)
	if d.requests == before.requests {
		return already
	}
	m.logLater(func() { m.log.Info("attaching the driver", zap.String("reason", reason)) })
	m.xids.seen = now
	if !already && m.session == nil {
		m.now.Devices = judge.DiscardMeasurements(m.now.Devices, now)
	}
	if s := &m.now.Source; s.Status == health.SourceUp || s.Status == health.SourceDetached {
		setStatus(s, health.SourceStarting, "", now)
	}
	m.setDetachment(d, now)
	return already
}

// setDetachment puts a detachment into effect: it decides which devices are withheld, publishes, and has Run follow a request.
// m.mu is held.
func (m *Monitor) setDetachment(d detachment, now time.Time) {
	before := m.detach
	m.detach = d
	if m.timeLimit != nil {
		m.timeLimit.Stop()
	}
	if d.detachRequested() {
		m.timeLimit = time.AfterFunc(d.Until.Sub(now), m.attachAtLimit)
	}
	if d.detached() {
		m.setAway(false, now)
		setStatus(&m.now.Source, health.SourceDetached, fmt.Sprintf("driver detached on request until %s; gpu-node-agent attach ends it",
			d.Until.UTC().Format(time.RFC3339)), now)
	}
	m.store()
	if d.requests != before.requests {
		if d.detachRequested() {
			m.companions.stop()
		}
		m.request.Store(&request{d.requests, d.detachRequested()})
	}
}

// request is the latest request for the driver. Run ends its session when there is another.
type request struct {
	number int
	detach bool
}

// serve follows the requests with one source until ctx ends: it keeps a session open, or none. The companions run until the
// process ends, a detach is requested, or the last session is closed.
func (m *Monitor) serve(process, ctx context.Context, w watchdog, src *Source) {
	defer m.stopCompanions()
	for ctx.Err() == nil {
		r, same, cancel := health.WatchPart(ctx, &m.request, func(r *request) request { return *r })
		if r.detach {
			if m.releaseDriver(same, w, src) == nil {
				m.completeDetach(src, r.number)
			}
			<-same.Done()
		} else {
			m.startCompanions(process, w, src)
			m.keepSession(same, w, m.opener(src, r.number))
		}
		cancel()
	}
}

// releaseDriver returns nil when no companion and no other process uses the driver any more. Every process that finds a detach in force
// calls it, because the process that began it may have ended before.
func (m *Monitor) releaseDriver(ctx context.Context, w watchdog, src *Source) error {
	err := m.awaitCompanions(ctx, w)
	if err != nil || src.Release == nil {
		return err
	}
	_, err = call(ctx, w, "stopping processes that use the driver", func(ctx context.Context) (struct{}, error) {
		src.Release(ctx)
		return struct{}{}, ctx.Err()
	})
	return err
}

// completeDetach publishes that nothing of the source uses the driver after a request.
func (m *Monitor) completeDetach(src *Source, request int) {
	m.mu.Lock()
	defer m.unlock()
	d := m.detach
	if d.followed = request; !d.detached() || m.now.Source.Status == health.SourceDetached {
		return
	}
	m.logLater(func() { m.log.Info("driver detached", zap.Time("until", d.Until)) })
	m.loggedCause.Clear()
	m.showEvents(src, health.EventsOff, reasonDetached)
	m.setDetachment(d, time.Now())
}

// detachEngine asks the host engine behind a session that is about to be closed to detach, if that is requested. A session
// that failed cannot ask. If the engine refuses, the agent keeps the driver and opens a session again.
func (m *Monitor) detachEngine(ctx context.Context, w watchdog, s health.Session, failed error) error {
	d, ok := s.(health.Detacher)
	if !ok || !m.request.Load().detach || !errors.Is(failed, context.Canceled) || w.processEnds() {
		return nil // at the end of the process the driver stays as it is for the next one
	}
	_, err := call(context.WithoutCancel(ctx), w, "detaching the host engine",
		func(ctx context.Context) (struct{}, error) { return struct{}{}, d.Detach(ctx) })
	m.mu.Lock()
	defer m.unlock()
	switch {
	case err == nil:
		m.detach.EngineUnasked = false
	case !errors.Is(err, health.ErrAbandoned) && m.detach.detachRequested():
		m.logLater(func() { m.log.Warn("detach refused; keeping the driver", zap.Error(err)) })
		m.setDetachment(m.detach.refuse(err), time.Now())
	}
	return err
}

// opener returns a function that opens a session after a request. If the host engine has to attach first, the function asks it. If the
// engine refuses although no detach is known, the source is used all the same.
func (m *Monitor) opener(src *Source, request int) health.Opener {
	return func(ctx context.Context) (health.Session, error) {
		m.mu.Lock()
		if m.detach.followed != request {
			m.detach.followed = request
			setStatus(&m.now.Source, health.SourceStarting, "", time.Now()) // earlier results of the source do not answer the request
			m.store()
		}
		engine := m.detach.engine
		m.unlock()
		if engine == engineAttached || src.Attach == nil {
			return src.Open(ctx)
		}
		s, err := src.Attach(ctx)
		if err == nil || engine == engineReleased {
			return s, err
		}
		m.log.Warn("the host engine refused to attach", zap.Error(err))
		return src.Open(ctx)
	}
}

// checkBack returns an error if a reading after a detach reports no GPU that the driver reaches. Then the driver is not back
// yet and no GPU is missing; an engine in this process would never look for the driver again.
func (m *Monitor) checkBack(r *health.Reading) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	reached := func(s health.Sample) bool { return s.Presence != health.Detached }
	switch {
	case m.newInventory || !someUnread(m.now.Devices):
		return nil
	case len(r.Devices) > 0 && (len(r.Samples) == 0 || slices.ContainsFunc(r.Samples, reached)):
		return nil
	}
	return ErrNotBack
}

// canDetach returns why the open session would refuse to detach. m.mu is held.
func (m *Monitor) canDetach() error {
	if d, ok := m.session.(health.Detacher); ok {
		return d.CanDetach()
	}
	return nil
}

// hasHostEngine reports whether a process other than the agent uses the driver for the source.
func (m *Monitor) hasHostEngine() bool {
	src := m.source.Load()
	return src != nil && src.Attach != nil
}

func someUnread(devices []health.DeviceState) bool {
	return slices.ContainsFunc(devices, func(d health.DeviceState) bool { return d.Unread })
}

// withheldDevices returns the IDs of the devices that are withheld for a detach.
func withheldDevices(devices []health.DeviceState) (ids []string) {
	for _, d := range devices {
		if d.Verdict.Has(health.CauseReleased) {
			ids = append(ids, string(d.Device.ID))
		}
	}
	return ids
}

func describe(s health.Source) string {
	if s.Err == "" {
		return s.Status.String()
	}
	return s.Status.String() + " (" + s.Err + ")"
}
