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
	"github.com/gpu-node-agent/gpu-node-agent/health/wait"
)

var (
	errDown   = errors.New("simulated source is down")
	errBlind  = errors.New("simulated source is blind: no GPU has values")
	errClosed = errors.New("session is closed")
)

// Source is a simulated machine. Its clock starts with the first Open and never stops.
type Source struct {
	cfg     Config
	events  []Event // the scenario by time
	profile profile
	dcgm    generation
	log     *zap.Logger

	mu         sync.Mutex      // guards everything below
	gpus       []gpu           // by index
	devices    []health.Device // of all GPUs; Index is the index in gpus
	unlisted   []bool          // of each GPU: it was unbound when the first of the open sessions was opened
	listed     []health.Device // the others of devices, by the driver's index; shared with readings: immutable
	states     []gpuState      // of each GPU, from both layers
	partitions []string        // of each GPU; "": the profile's
	start      time.Time       // of the first Open; zero before it
	loopStart  time.Duration   // of the current loop, since start
	next       int             // index of the next event in this loop
	scenario   layer           // what the scenario has done in this loop
	control    layer           // what the control socket has done
	state      string          // the source's state from both layers
	eventState string          // of the driver's events, likewise
	outages    uint64          // how often it went down; sessions from before the latest outage are dead
	changed    chan struct{}   // closed when start, state or eventState changes
	sessions   map[*session]struct{}
	receivers  map[*health.EventReceiver]struct{}
}

// layer holds the effects of events from one origin. An empty text means that none has changed that state.
type layer struct {
	source, events string
	gpus           []gpuState // by index
}

// New returns a source; its error is that of cfg.Validate. No time passes before Open. A new configuration needs a new Source.
func New(cfg Config, log *zap.Logger) (*Source, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	if log == nil {
		log = zap.NewNop()
	}
	p, err := profileByName(cfg.Profile)
	if err != nil {
		return nil, err
	}
	dcgm, err := generationByName(cfg.DCGM)
	if err != nil {
		return nil, err
	}
	s := &Source{
		cfg: cfg, profile: *p, dcgm: dcgm, log: log, devices: p.devices(cfg.Seed), events: slices.Clone(cfg.Scenario),
		states: make([]gpuState, len(p.pci)), unlisted: make([]bool, len(p.pci)), partitions: make([]string, len(p.pci)),
		changed: make(chan struct{}),
		state:   sourceUp, eventState: eventsUp, sessions: map[*session]struct{}{}, receivers: map[*health.EventReceiver]struct{}{},
		scenario: layer{gpus: make([]gpuState, len(p.pci))},
		control:  layer{gpus: make([]gpuState, len(p.pci))},
	}
	slices.SortStableFunc(s.events, func(a, b Event) int { return cmp.Compare(a.At, b.At) })
	s.gpus = p.newGPUs(s.devices)
	s.number()
	return s, nil
}

// number numbers the listed GPUs as the driver does: without a gap. Called with mu held.
func (s *Source) number() {
	s.listed = make([]health.Device, 0, len(s.devices))
	index := -1
	for _, d := range s.devices {
		if s.unlisted[d.Index] {
			continue
		}
		if d.Kind == health.KindGPU {
			index++
		}
		d.Index = index
		s.listed = append(s.listed, d)
	}
}

// OnBus returns the bus IDs of the machine's GPUs, including the ones that the driver does not list.
func (s *Source) OnBus() (all []string) {
	for _, bus := range s.profile.pci {
		all = append(all, "0000:"+bus)
	}
	return all
}

// Open opens a session; it is a health.Opener. While the source is stalled, it waits until that or ctx ends. While the
// source is down or blind, it fails.
func (s *Source) Open(ctx context.Context) (health.Session, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.start.IsZero() {
		s.start = time.Now()
		s.addPastXIDs()
		s.signal()
	}
	if err := s.awaitUp(ctx, nil); err != nil {
		return nil, err
	}
	if len(s.sessions) == 0 { // as an engine that starts
		for i := range s.unlisted {
			s.unlisted[i] = valueOf(s.states[i].Unbound)
		}
		s.number()
	}
	ses := &session{source: s, outages: s.outages, wake: make(chan struct{}, 1), closed: make(chan struct{})}
	s.sessions[ses] = struct{}{}
	return ses, nil
}

// awaitUp advances the scenario to now and waits while the source is stalled. It is called with mu held, and releases mu
// while it waits. ses is nil in Open.
func (s *Source) awaitUp(ctx context.Context, ses *session) error {
	var closed chan struct{}
	if ses != nil {
		closed = ses.closed
	}
	for {
		s.advance(time.Now())
		switch {
		case ses != nil && wait.Closed(ses.closed):
			return errClosed
		case ses != nil && ses.outages != s.outages, s.state == sourceDown:
			return errDown
		case ses == nil && s.blind():
			return errBlind
		case ctx.Err() != nil:
			return fmt.Errorf("simulated source: %w", context.Cause(ctx))
		case s.state != sourceStalled:
			return nil
		}
		if err := s.awaitChange(ctx, closed); err != nil {
			return err
		}
	}
}

// awaitChange waits until the source's state changes, the scenario's next event is due, or closed is closed; it fails when ctx
// ends. It is called with mu held, and releases mu while it waits.
func (s *Source) awaitChange(ctx context.Context, closed <-chan struct{}) error {
	var due <-chan time.Time
	if at, ok := s.nextEvent(); ok {
		due = time.After(time.Until(s.start.Add(at)))
	}
	changed := s.changed
	s.mu.Unlock()
	defer s.mu.Lock()
	select {
	case <-changed:
	case <-due:
	case <-closed:
	case <-ctx.Done():
		return fmt.Errorf("simulated source is stalled: %w", context.Cause(ctx))
	}
	return nil
}

// blind reports whether the source lists GPUs and has no values of any. If every GPU on the bus is stale, the fault is
// the source's and not theirs. Called with mu held.
func (s *Source) blind() bool {
	switch s.state {
	case sourceBlind:
		return true
	case sourceEmpty, sourceLost:
		return false
	}
	blind := false
	for i := range s.gpus {
		switch c := &s.states[i]; {
		case valueOf(c.Lost), valueOf(c.Unbound), s.unlisted[i]:
		case !valueOf(c.Stale):
			return false
		default:
			blind = true
		}
	}
	return blind
}

// inject applies an event from the control socket now. It fails if the event is invalid for the profile.
func (s *Source) inject(e Event) error {
	if err := errors.Join(append(e.validate(), e.validateFor(&s.profile)...)...); err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	now := time.Now()
	s.advance(now)
	if err := errors.Join(s.validateMIG(&e)...); err != nil {
		return err
	}
	s.apply(e, &s.control, "control", now)
	s.wakeAll()
	return nil
}

// apply applies a valid event to a layer. Called with mu held.
func (s *Source) apply(e Event, to *layer, from string, at time.Time) {
	fields := append([]zap.Field{zap.String("from", from)}, e.logFields()...)
	if e.GPU != nil {
		g, c := &s.gpus[*e.GPU], &to.gpus[*e.GPU]
		fields = append(fields, zap.Int("gpu", *e.GPU), zap.String("device", string(s.devices[g.device].ID)))
		c.merge(&e)
		if e.Incident != nil {
			c.incidents = c.incidents.with(*e.Incident, e.severity())
		}
		if e.XID != nil && s.state != sourceEmpty { // an engine that lists no GPU reads no XIDs
			x := health.XID{Code: *e.XID, Times: valueOf(e.Times), At: at}
			g.lastXID = x.Code
			g.queue = enqueue(g.queue, x)
			s.report(*e.GPU, health.Event{Kind: health.EventXID, XID: x})
		}
		s.updateGPUs(at) // last: it may replace s.gpus
	}
	s.log.Info("simulated event", fields...)
	to.source, to.events = valueOf(cmp.Or(e.Source, &to.source)), valueOf(cmp.Or(e.Events, &to.events))
	s.updateState()
}

// updateState derives the states of the source and its events from the layers, and ends the calls that wait for a change. Called
// with mu held.
func (s *Source) updateState() {
	state := cmp.Or(s.control.source, s.scenario.source, sourceUp)
	eventState := cmp.Or(s.control.events, s.scenario.events, eventsUp)
	if state == s.state && eventState == s.eventState {
		return
	}
	if state == sourceDown && s.state != sourceDown {
		s.outages++
	}
	s.state, s.eventState = state, eventState
	s.signal()
}

// signal ends the calls that wait for a change. Called with mu held.
func (s *Source) signal() {
	close(s.changed)
	s.changed = make(chan struct{})
}

// wakeAll fires Wake of every session. Called with mu held.
func (s *Source) wakeAll() {
	for ses := range s.sessions {
		wait.Signal(ses.wake)
	}
}

// nextEvent returns when the scenario's next event or restart is due, since the start.
func (s *Source) nextEvent() (at time.Duration, ok bool) {
	switch {
	case s.start.IsZero() || len(s.events) == 0:
		return 0, false
	case s.next < len(s.events):
		return s.loopStart + s.events[s.next].At, true
	case s.cfg.Loop > 0:
		return s.loopStart + s.cfg.Loop, true
	}
	return 0, false
}

// advance applies all events that are due. Called with mu held.
func (s *Source) advance(now time.Time) {
	var changed bool
	for {
		at, ok := s.nextEvent()
		if !ok || now.Before(s.start.Add(at)) {
			break
		}
		changed = true
		if s.next < len(s.events) {
			e := s.events[s.next]
			s.next++
			s.apply(e, &s.scenario, "scenario", s.start.Add(at))
			continue
		}
		s.log.Info("scenario restarts", zap.Duration("after", s.cfg.Loop))
		s.loopStart, s.next = at, 0
		s.scenario.source, s.scenario.events = "", ""
		clear(s.scenario.gpus)
		s.updateGPUs(s.start.Add(at))
		s.updateState()
	}
	if changed {
		s.wakeAll()
	}
}

// play applies the scenario's events on time until ctx ends, so that Wake and the driver's events are on time too.
func (s *Source) play(ctx context.Context) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for s.awaitChange(ctx, nil) == nil {
		s.advance(time.Now())
	}
}
