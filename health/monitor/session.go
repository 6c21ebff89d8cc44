package monitor

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"time"

	"go.uber.org/zap"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/health/backoff"
	"github.com/gpu-node-agent/gpu-node-agent/health/judge"
	"github.com/gpu-node-agent/gpu-node-agent/health/wait"
)

const (
	// The bounds of the pause between attempts to open a session; see backoff.Backoff.
	minBackoff = time.Second
	maxBackoff = 30 * time.Second

	// steadyAfter is how long a session must give readings before the pause after it is a short one again.
	steadyAfter = 10 * time.Second

	// overdueGap is the least time between two requests for all rows because XIDs are overdue: every fifth poll. The source reads them all
	// before an XID that it owes counts again, after health.OwedBySource.
	overdueGap = 4500 * time.Millisecond
)

// keepSession keeps a session open until ctx ends.
func (m *Monitor) keepSession(ctx context.Context, w watchdog, open health.Opener) {
	retry := backoff.Backoff{Min: minBackoff, Max: maxBackoff}
	for {
		var first time.Time // of the session's readings
		err := m.runSession(ctx, w, open, func(r *health.Reading) {
			if first.IsZero() {
				first = time.Now()
			}
			if time.Since(first) >= steadyAfter { // a session that always dies early does not profit from short pauses
				retry.Reset()
			}
			m.applyReading(r)
		})
		if ctx.Err() != nil {
			return
		}
		m.reportSource(health.SourceDown, err.Error())
		if !retry.Wait(ctx) {
			return
		}
	}
}

// runSession opens a session and polls it until it fails or ctx ends.
func (m *Monitor) runSession(ctx context.Context, w watchdog, open health.Opener, apply func(*health.Reading)) (failed error) {
	s, err := call(ctx, w, "opening the source", open)
	if err != nil {
		return err
	}
	m.setSession(s)
	defer func() {
		m.setSession(nil)
		if errors.Is(failed, health.ErrAbandoned) || errors.Is(m.detachEngine(ctx, w, s, failed), health.ErrAbandoned) {
			return // the abandoned call still runs, and no second call runs beside it
		}
		_, err := call(ctx, w, "closing the source", func(context.Context) (struct{}, error) { return struct{}{}, s.Close() })
		if err != nil && !errors.Is(err, health.ErrAbandoned) {
			m.log.Warn("closing the source failed", zap.Error(err))
		}
	}()
	m.sessions++
	var reads reads
	var asked time.Time // for all rows of XIDs
	for {
		if now := time.Now(); now.Sub(asked) >= overdueGap && m.xidsOverdue(now) {
			readAllXIDs(s)
			asked = now
		}
		started := time.Now()
		r, err := call(ctx, w, "reading the GPUs", s.Poll)
		if err != nil {
			return err
		}
		m.pollDuration = time.Since(started)
		reads.add(started, time.Now(), r.Measured)
		reads.learnXIDs(r.Samples)
		if err := m.checkBack(r); err != nil {
			return err
		}
		apply(r)
		config, changed := m.config.Watch()
		reads.polled(time.Now(), config.Interval)
		if err := awaitPoll(ctx, w, s, &reads, changed); err != nil {
			return err
		}
		if ctx.Err() != nil {
			return cmp.Or(m.pollFinally(ctx, w, s, apply), ctx.Err())
		}
	}
}

func (m *Monitor) xidsOverdue(now time.Time) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return judge.OverdueXIDs(m.now.Devices, now)
}

// readAllXIDs makes the next poll list all rows of XIDs.
func readAllXIDs(s health.Session) {
	if watcher, ok := s.(health.XIDWatcher); ok {
		watcher.ReadAllXIDs()
	}
}

func (m *Monitor) setSession(s health.Session) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.session = s
}

// awaitPoll returns nil when the next poll is due or ctx ends. A poll is due after the interval, after a change of the
// configuration, when the session or an event source reports an event, and after a call that stalled, so that the source shows
// as up again. An error ends the session.
func awaitPoll(ctx context.Context, w watchdog, s health.Session, reads *reads, changed <-chan struct{}) error {
	polls := &w.m.eventPolls
	planned := reads.pollDue()
	dueAt := polls.next(time.Now(), planned)
	due := time.NewTimer(time.Until(dueAt))
	defer due.Stop()
	watcher, _ := s.(health.XIDWatcher)
	for {
		var check <-chan time.Time
		if at := reads.checkDue(dueAt); watcher != nil && at.Before(dueAt) { // the poll is the last check
			check = time.After(time.Until(at))
		}
		select {
		case <-ctx.Done():
			return nil
		case <-s.Wake():
			return nil
		case <-changed:
			return nil
		case <-due.C:
			return nil
		case <-w.m.eventPoll:
			dueAt = polls.event(time.Now(), dueAt)
		case <-check:
			started := time.Now()
			var measured time.Time
			reported, err := call(ctx, w, "checking for XIDs", func(ctx context.Context) (reported bool, err error) {
				reported, measured, err = watcher.XIDsChanged(ctx)
				return reported, err
			})
			if err != nil || reported || time.Since(started) >= w.calls.Limit {
				return err
			}
			reads.add(started, time.Now(), measured)
			if dueAt.Equal(planned) { // not sooner because of an event
				planned = reads.pollDue()
				dueAt = polls.next(time.Now(), planned)
			}
		}
		due.Reset(time.Until(dueAt))
	}
}

const (
	// eventPollGap is the least time between two polls because of events.
	eventPollGap = 250 * time.Millisecond

	// eventPollDelay leaves the processors to the snapshot of the event: the views send it first.
	eventPollDelay = 20 * time.Millisecond

	// cacheAge is the age of the oldest value that a poll may return: DCGM measures once a second.
	cacheAge = 1100 * time.Millisecond
)

// eventPolls determines when event sources cause polls: soon, and again when the source has measured after the event.
type eventPolls struct {
	last  time.Time // the latest poll because of an event
	again time.Time // the second poll because of the latest event
}

// next returns when the next poll is due without another event, if it is due at due without events.
func (p *eventPolls) next(now, due time.Time) time.Time {
	if !p.again.After(now) || due.Before(p.again) {
		return due
	}
	return p.again
}

// event returns when the next poll is due after an event, if it was due at due before.
func (p *eventPolls) event(now, due time.Time) time.Time {
	p.again = now.Add(cacheAge)
	at := p.last.Add(eventPollGap)
	if soonest := now.Add(eventPollDelay); at.Before(soonest) {
		at = soonest
	}
	if !at.Before(due) {
		return due
	}
	p.last = at
	return at
}

// pollFinally polls a session before another replaces it: DCGM drops unread XIDs when the last watch on them ends. The end
// of the process does not wait for this poll: its only error is health.ErrAbandoned.
func (m *Monitor) pollFinally(ctx context.Context, w watchdog, s health.Session, apply func(*health.Reading)) error {
	if w.processEnds() {
		return nil
	}
	readAllXIDs(s)
	switch r, err := call(context.WithoutCancel(ctx), w, "reading the GPUs", s.Poll); {
	case errors.Is(err, health.ErrAbandoned):
		return err
	case err == nil && m.checkBack(r) == nil:
		apply(r)
	}
	return nil
}

// abandonAfter is how long the end of the process waits for a call that hangs.
const abandonAfter = time.Second

// watchdog supervises calls to a source, which may hang for as long as the driver does.
type watchdog struct {
	m      *Monitor
	calls  *health.Guard[struct{}, error]
	ending <-chan struct{} // closed when the process ends
}

func (m *Monitor) newWatchdog(stallAfter time.Duration, ending <-chan struct{}) watchdog {
	return watchdog{m, &health.Guard[struct{}, error]{Limit: stallAfter, KeepLate: true, Grace: abandonAfter}, ending}
}

func (w watchdog) processEnds() bool { return wait.Closed(w.ending) }

// call calls f and waits for it without a limit, so that no second call runs beside it. After the limit it publishes the source as
// stalled. Only the end of the process abandons the call, with health.ErrAbandoned.
func call[T any](ctx context.Context, w watchdog, what string, f func(context.Context) (T, error)) (T, error) {
	var v T
	err, abandoned := w.calls.Call(w.ending, struct{}{}, func() (err error) {
		v, err = f(ctx)
		return err
	}, func() {
		w.m.reportSource(health.SourceStalled, fmt.Sprintf("%s has not returned within %v", what, w.calls.Limit))
	})
	if abandoned != nil { // v is still in use
		var none T
		return none, abandoned
	}
	return v, err
}
