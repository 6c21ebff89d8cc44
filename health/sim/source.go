package sim

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"go.uber.org/zap"

	"github.com/gpu-node-agent/gpu-node-agent/health"
)

var (
	errDown   = errors.New("the simulated source is down")
	errBlind  = errors.New("the simulated source is blind: it has no value of any GPU")
	errClosed = errors.New("the session is closed")
)

// Source is a simulated machine. Its clock starts with the first Open and is not stopped by anything.
type Source struct {
	cfg     Config
	events  []Event // the scenario by time
	profile profile
	log     *zap.Logger

	mu       sync.Mutex      // guards everything below
	gpus     []gpu           // by index
	devices  []health.Device // handed out with every reading, never modified
	words    []string        // how each GPU is partitioned, "" as in the profile
	start    time.Time       // of the first Open; zero before it
	lap      time.Duration   // start of the loop that we are in
	next     int             // first of the events that is still to come in this loop
	scenario layer           // what the scenario has done in this loop
	control  layer           // what a person has done
	state    string          // one of sourceWords: what the layers come to
	falls    uint64          // how often it went down; a session from before the last fall is dead
	changed  chan struct{}   // closed when state changes
	sessions map[*session]struct{}
	users    int         // sessions, and calls of Open that wait; without any the timer rests
	timer    *time.Timer // for the next event; nil before the first use
}

// layer is what events have done. The zero value of source is: nothing.
type layer struct {
	source string
	gpus   []conditions // by index
}

// New makes a machine of a configuration; the error is that of cfg.Validate. Nothing runs and no time
// passes before Open. A new configuration is a new Source.
func New(cfg Config, log *zap.Logger) (*Source, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	if log == nil {
		log = zap.NewNop()
	}
	p, _ := profileNamed(cfg.Profile)
	s := &Source{
		cfg: cfg, profile: p, log: log, devices: p.devices(cfg.Seed), events: slices.Clone(cfg.Scenario),
		words: make([]string, len(p.pci)), state: sourceUp, changed: make(chan struct{}), sessions: map[*session]struct{}{},
		scenario: layer{gpus: make([]conditions, len(p.pci))},
		control:  layer{gpus: make([]conditions, len(p.pci))},
	}
	slices.SortStableFunc(s.events, func(a, b Event) int { return cmp.Compare(a.At, b.At) })
	for i, d := range s.devices {
		if d.Kind == health.KindGPU {
			s.gpus = append(s.gpus, newGPU(p, d.Index, i, s.devices))
		}
	}
	return s, nil
}

// Open connects: it is a health.Opener. While the source is stalled it waits for the end of that or of ctx;
// while it is down or blind it fails.
func (s *Source) Open(ctx context.Context) (health.Session, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.start.IsZero() {
		s.start = time.Now()
		s.recall()
	}
	s.users++
	s.arm()
	if err := s.awaitUp(ctx, nil); err != nil {
		s.leave()
		return nil, err
	}
	ses := &session{source: s, falls: s.falls, wake: make(chan struct{}, 1), closed: make(chan struct{})}
	s.sessions[ses] = struct{}{}
	return ses, nil
}

// awaitUp brings the machine to now and returns when it answers. It is called and returns with mu held,
// but gives it up while it waits. ses is nil in Open.
func (s *Source) awaitUp(ctx context.Context, ses *session) error {
	var closed chan struct{}
	if ses != nil {
		closed = ses.closed
	}
	for {
		s.advance(time.Now())
		switch {
		case ses != nil && ses.isClosed():
			return errClosed
		case ses != nil && ses.falls != s.falls, s.state == sourceDown:
			return errDown
		case ses == nil && s.blind():
			return errBlind
		case ctx.Err() != nil:
			return fmt.Errorf("the simulated source was not asked: %w", context.Cause(ctx))
		case s.state != sourceStalled:
			return nil
		}
		changed := s.changed
		s.mu.Unlock()
		select {
		case <-changed:
		case <-closed:
		case <-ctx.Done():
			s.mu.Lock()
			return fmt.Errorf("the simulated source is stalled: %w", context.Cause(ctx))
		}
		s.mu.Lock()
	}
}

// conditions returns what events have done to a GPU, in both layers. Called with mu held.
func (s *Source) conditions(gpu int) conditions {
	return s.control.gpus[gpu].over(s.scenario.gpus[gpu])
}

// blind reports whether there is no value of any GPU, though they are listed. If every GPU that is on the bus is stale,
// that is the source's fault and not theirs. Called with mu held.
func (s *Source) blind() bool {
	switch s.state {
	case sourceBlind:
		return true
	case sourceEmpty:
		return false
	}
	blind := false
	for i := range s.gpus {
		switch c := s.conditions(i); {
		case is(c.lost):
		case !is(c.stale):
			return false
		default:
			blind = true
		}
	}
	return blind
}

// leave ends what Open began. Called with mu held.
func (s *Source) leave() {
	s.users--
	s.arm()
}

// inject makes something happen now. The error is that the machine does not have such a GPU.
func (s *Source) inject(e Event) error {
	if err := joinFaults(append(e.faults(), e.misses(s.profile)...)); err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	now := time.Now()
	s.advance(now)
	s.apply(e, &s.control, "control", now)
	s.wakeAll()
	return nil
}

// apply writes an event into a layer. Called with mu held.
func (s *Source) apply(e Event, to *layer, from string, at time.Time) {
	fields := append([]zap.Field{zap.String("from", from)}, e.logFields()...)
	if e.GPU != nil {
		g, c := &s.gpus[*e.GPU], &to.gpus[*e.GPU]
		fields = append(fields, zap.Int("gpu", *e.GPU), zap.String("device", string(s.devices[g.device].ID)))
		c.lost = first(e.Lost, c.lost)
		c.stale = first(e.Stale, c.stale)
		c.remap = first(e.RowRemapPending, c.remap)
		c.remapFailed = first(e.RowRemapFailed, c.remapFailed)
		c.doubleBits = first(e.DoubleBitErrors, c.doubleBits)
		c.retired = first(e.RetiredPages, c.retired)
		c.slowed = first(e.ClocksSlowed, c.slowed)
		c.temperature = first(e.Temperature, c.temperature)
		c.mig = first(e.MIG, c.mig)
		if e.RecoveryAction != nil {
			action, _ := e.RecoveryAction.number()
			c.recovery = &action
		}
		if e.Incident != nil {
			c.incidents = c.incidents.with(*e.Incident, e.severity())
		}
		if e.XID != nil && s.state != sourceEmpty { // an engine that knows no GPU reads no events
			g.note(*e.XID)
			g.pending = g.pending.add(report{code: *e.XID, times: is(first(e.Times, new(1))), at: at})
		}
		s.partition(at) // last: it makes other gpus
	}
	s.log.Info("simulated event", fields...)
	if e.Source != nil {
		to.source = *e.Source
		s.settle()
	}
}

// settle works out what the source is now and releases those who wait. Called with mu held.
func (s *Source) settle() {
	state := sourceUp
	if s.scenario.source != "" {
		state = s.scenario.source
	}
	if s.control.source != "" {
		state = s.control.source
	}
	if state == s.state {
		return
	}
	s.state = state
	if state == sourceDown {
		s.falls++
	}
	close(s.changed)
	s.changed = make(chan struct{})
}

// wakeAll tells every session that a poll is worth making. Called with mu held.
func (s *Source) wakeAll() {
	for ses := range s.sessions {
		select {
		case ses.wake <- struct{}{}:
		default: // one is waiting to be noticed already
		}
	}
}
