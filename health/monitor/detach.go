package monitor

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"go.uber.org/zap"

	"github.com/gpu-node-agent/gpu-node-agent/health"
)

// word is what an operator has said last of the driver. Another word is another one; only heard changes.
type word struct {
	away   bool      // the agent is to let go of it
	until  time.Time // away: when it takes it back by itself
	failed error     // not away: why it could not be let go of

	unseen bool        // away: a device had not been seen since the driver was let go of before
	expiry *time.Timer // away: ends the word
	heard  bool        // not away: a session was begun since; guarded by Monitor.mu
}

// LetGo is how the driver was let go of.
type LetGo struct {
	Since   time.Time
	Until   time.Time // when it is taken back if nobody asks for it before
	Already bool      // it was let go of before
	Unasked bool      // there was no connection to the host engine, which was not asked: it may have the driver
}

// TakenBack is how the driver was taken back. If Status is not SourceUp, that is tried again as with any source.
type TakenBack struct {
	Already bool // it was not let go of
	Status  health.SourceStatus
	Err     string // why the source is not up, in words
}

// Detach lets go of the driver until Attach is said, for d at most, and returns when that is done or ctx ends, which
// ends nothing but the waiting. All devices become Unhealthy before. Said again it says how it is, and d counts from
// then. If a host engine cannot let go, nothing has changed.
func (m *Monitor) Detach(ctx context.Context, d time.Duration) (LetGo, error) {
	already, err := m.letGo(d)
	if err != nil {
		return LetGo{}, err
	}
	for {
		w, said := m.word.Watch()
		s, changed := m.out.Watch()
		switch {
		case w.failed != nil:
			return LetGo{}, w.failed
		case !w.away:
			return LetGo{}, errors.New("attach was said, or the time was up, before the driver was let go of")
		case s.Source.Status == health.SourceDetached:
			return LetGo{s.Source.Since, w.until, already, m.wasUnasked()}, nil
		}
		select {
		case <-ctx.Done():
			return LetGo{}, fmt.Errorf("the driver is not let go of yet: the source is %s; "+
				"the agent goes on, and the GPUs are kept from pods: say detach again to wait, or attach", inWords(s.Source))
		case <-said:
		case <-changed:
		}
	}
}

func inWords(s health.Source) string {
	if s.Err == "" {
		return s.Status.String()
	}
	return s.Status.String() + ": " + s.Err
}

// letGo says that the driver is to be let go of. The devices are withheld before Run can hear of it.
func (m *Monitor) letGo(d time.Duration) (already bool, err error) {
	m.mu.Lock()
	defer m.unlock()
	said := m.word.Load()
	already = said.away
	if !already {
		if err := m.canDetach(); err != nil {
			return false, err
		}
	}
	now := time.Now()
	w := &word{away: true, until: now.Add(d), unseen: said.unseen}
	// A call that hangs keeps Run from the driver and not from the end of the word.
	w.expiry = time.AfterFunc(d, func() { m.takeBack(w, "the time is up") })
	if !already {
		w.unseen = m.release != nil && (!m.release.asking || m.release.before != nil)
		src := m.source.Load()
		m.unasked = src != nil && src.Attach != nil
		m.logLater(func() { m.log.Warn("an operator has the driver let go of", zap.Time("until", w.until)) })
	}
	r := &release{since: now, until: w.until, term: d}
	if m.release != nil && !m.release.over {
		r.since = m.release.since
	}
	m.withhold(r, now)
	if m.now.Source.Status == health.SourceDetached {
		detach(&m.now.Source, w.until, now)
	}
	m.store()
	m.say(w)
	return already, nil
}

// say makes it the last word. m.mu is held.
func (m *Monitor) say(w *word) {
	if t := m.word.Load().expiry; t != nil {
		t.Stop()
	}
	m.word.Store(w)
}

// detach makes the source one that is let go of.
func detach(s *health.Source, until, now time.Time) {
	s.Until = until
	become(s, health.SourceDetached, fmt.Sprintf("the driver is let go of on request; gpu-node-agent attach takes it back, "+
		"and at %s that happens by itself", until.UTC().Format(time.RFC3339)), now)
}

// Attach takes the driver back, and returns when the source is up and has seen the devices, or could not be had, or ctx
// ends. A host engine is asked to take it back even if it was not let go of: an agent that was restarted does not know.
func (m *Monitor) Attach(ctx context.Context) (TakenBack, error) {
	already := m.takeBack(nil, "an operator asks for it")
	for {
		_, changed := m.out.Watch()
		m.mu.Lock()
		w, s, unseen := m.word.Load(), m.now.Source, unseen(m.now.Devices)
		heard := w.heard
		m.mu.Unlock()
		switch {
		case w.away:
			return TakenBack{}, errors.New("detach was said before the driver was back")
		case s.Status == health.SourceStalled || heard && (s.Status == health.SourceDown || s.Status == health.SourceUp && len(unseen) == 0):
			return TakenBack{Already: already, Status: s.Status, Err: s.Err}, nil
		}
		select {
		case <-ctx.Done():
			return TakenBack{}, fmt.Errorf("the driver is not back yet: the source is %s, and not seen since are %s; "+
				"the agent goes on: see gpu-node-agent status", inWords(s), cmp.Or(strings.Join(unseen, ", "), "none"))
		case <-changed:
		}
	}
}

// takeBack says that the driver is to be taken back, if the word is still that one; nil is any. If the session is still
// open, the driver was not let go of, and all is as it was: a session that hangs keeps no GPU from pods.
func (m *Monitor) takeBack(only *word, why string) (already bool) {
	m.mu.Lock()
	defer m.unlock()
	said, src := m.word.Load(), m.source.Load()
	if only != nil && said != only {
		return true
	}
	already = !said.away
	if already && (src == nil || src.Attach == nil || m.live != nil && m.live.CanDetach() != nil) {
		return true // the session has it
	}
	now := time.Now()
	m.logLater(func() { m.log.Info("the driver is taken back", zap.String("because", why)) })
	switch {
	case already:
		m.attaching = true
	case m.live != nil && !said.unseen:
		m.withhold(nil, now)
	default:
		m.attaching = true
		m.now.Devices = health.Unmeasured(m.now.Devices, now)
		m.withhold(&release{until: said.until, over: true}, now)
	}
	if s := &m.now.Source; s.Status == health.SourceUp || s.Status == health.SourceDetached {
		s.Until = time.Time{}
		become(s, health.SourceStarting, "", now)
	}
	m.store()
	m.say(&word{})
	return already
}

// obey keeps a session open to one source, but for when the driver is to be let go of, until ctx ends.
func (m *Monitor) obey(ctx context.Context, c caller, src *Source) {
	for ctx.Err() == nil {
		w, same, cancel := health.While(ctx, &m.word, func(w *word) *word { return w })
		if w.away {
			m.rest(same, w)
		} else {
			m.follow(same, c, m.opener(src, w))
		}
		cancel()
	}
}

// rest shows that the driver is let go of, until ctx ends.
func (m *Monitor) rest(ctx context.Context, w *word) {
	if m.showDetached(w) {
		<-ctx.Done()
	}
}

// showDetached publishes that the driver is let go of, unless another word was said.
func (m *Monitor) showDetached(w *word) bool {
	m.mu.Lock()
	defer m.unlock()
	if m.word.Load() != w {
		return false
	}
	if m.now.Source.Status != health.SourceDetached {
		m.logLater(func() { m.log.Info("the driver is let go of", zap.Time("until", w.until)) })
		m.said = ""
	}
	detach(&m.now.Source, w.until, time.Now())
	m.store()
	return true
}

// hold remembers the session that is open.
func (m *Monitor) hold(s health.Session) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.live = s
}

func (m *Monitor) wasUnasked() bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.unasked
}

// handOver has the driver let go of by whoever holds it for a session that is about to be closed, if that is wanted. A
// session that failed cannot ask. If it is refused, the driver is kept, and the session opened again.
func (m *Monitor) handOver(ctx context.Context, c caller, s health.Session, failed error) error {
	if !m.word.Load().away || !errors.Is(failed, context.Canceled) {
		return nil
	}
	select {
	case <-c.ending:
		return nil // the driver stays as it is for the next process
	default:
	}
	_, err := call(context.WithoutCancel(ctx), c, "letting go of the driver",
		func(ctx context.Context) (struct{}, error) { return struct{}{}, s.Detach(ctx) })
	m.mu.Lock()
	defer m.unlock()
	switch {
	case err == nil:
		m.unasked = false
	case errors.Is(err, errAbandoned) || !m.word.Load().away:
	default:
		m.logLater(func() { m.log.Warn("the driver could not be let go of, and is kept", zap.Error(err)) })
		m.attaching = true // it may be half way
		m.withhold(nil, time.Now())
		m.store()
		m.say(&word{failed: err})
	}
	return err
}

// opener opens a source, and has a host engine take the driver back before if that is due. If it was not let go of, as
// far as we know, a refusal is no reason to do without the source.
func (m *Monitor) opener(src *Source, w *word) health.Opener {
	return func(ctx context.Context) (health.Session, error) {
		m.hear(w)
		m.mu.Lock()
		due, needed := m.attaching && src.Attach != nil, m.release != nil
		m.mu.Unlock()
		if !due {
			return src.Open(ctx)
		}
		s, err := src.Attach(ctx)
		if err == nil || needed {
			return s, err
		}
		m.log.Warn("the host engine was asked to take the driver back", zap.Error(err))
		return src.Open(ctx)
	}
}

// hear notes that a session is begun after a word. What the source was before is no answer to it: a poll that was under
// way may have ended well since.
func (m *Monitor) hear(w *word) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if w.heard {
		return
	}
	w.heard = true
	if m.now.Source.Status != health.SourceStarting {
		become(&m.now.Source, health.SourceStarting, "", time.Now())
		m.store()
	}
}
