package sim

import (
	"context"
	"sync"
	"time"

	"github.com/gpu-node-agent/gpu-node-agent/health"
)

// session is a connection to a Source.
type session struct {
	source *Source
	falls  uint64        // the source's when it was opened
	wake   chan struct{} // holds one
	once   sync.Once
	closed chan struct{}

	// Guarded by the source's mutex.
	blindSince time.Time // of the first reading that told nothing; zero if the last one told something
	failed     error     // the session is of no more use
}

// blindAfter is for how long a session tells nothing before it fails: as long as one of DCGM, which has nothing of GPUs
// that it calls OK after an XID 119 and sees again only when its engine is started again.
const blindAfter = 3 * time.Second

// Poll measures every device as it is now. It fails at once if the source is down or was since Open. While
// the source is stalled it waits for the end of that, of the session, or of ctx. The XIDs of a reading are
// in no other one, whichever session asks. While the source is blind a reading tells nothing of any device, and after
// blindAfter the session fails for good.
func (ses *session) Poll(ctx context.Context) (*health.Reading, error) {
	s := ses.source
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := s.awaitUp(ctx, ses); err != nil {
		return nil, err
	}
	now := time.Now()
	if err := ses.look(now); err != nil {
		return nil, err
	}
	return s.reading(now), nil
}

// look tells whether the session is still of use. Called with the source's mutex held.
func (ses *session) look(now time.Time) error {
	switch {
	case ses.failed != nil:
	case !ses.source.blind():
		ses.blindSince = time.Time{}
	case ses.blindSince.IsZero():
		ses.blindSince = now
	case now.Sub(ses.blindSince) >= blindAfter:
		ses.failed = errBlind
	}
	return ses.failed
}

// Wake fires with every event, and when the scenario's loop starts anew.
func (ses *session) Wake() <-chan struct{} { return ses.wake }

// Close ends the session and releases a Poll that waits. It never fails.
func (ses *session) Close() error {
	ses.once.Do(func() {
		close(ses.closed)
		s := ses.source
		s.mu.Lock()
		defer s.mu.Unlock()
		delete(s.sessions, ses)
		s.leave()
	})
	return nil
}

func (ses *session) isClosed() bool {
	select {
	case <-ses.closed:
		return true
	default:
		return false
	}
}

// reading measures the machine and hands the XIDs out. Called with mu held.
func (s *Source) reading(now time.Time) *health.Reading {
	if s.state == sourceEmpty { // without a driver there is no version of it either
		return &health.Reading{Versions: health.Versions{DCGM: "sim"}}
	}
	var (
		blind   = s.blind()
		samples = make([]health.Sample, 0, len(s.devices))
		values  = make([]map[health.Field]float64, 0, len(s.devices))
		t       = now.Sub(s.start).Seconds()
		more    bool
	)
	for i := range s.gpus {
		g := &s.gpus[i]
		c := s.conditions(i)
		presence := health.Present
		switch {
		case blind:
			presence = health.PresenceUnknown
		case is(c.lost):
			presence = health.Lost
		case !is(c.stale):
			values = g.values(t, c, values[:0])
		}
		for n := range 1 + len(g.slices) {
			sample := health.Sample{Device: s.devices[g.device+n].ID, At: now, Presence: presence}
			switch {
			case presence != health.Present:
			case is(c.stale):
				sample.Stale = true
			default:
				sample.Values = values[n]
				sample.Checked = n == 0
				if n == 0 {
					sample.Incidents = append(c.incidents.standing(), g.incidents()...)
				}
			}
			if n == 0 && !blind {
				sample.Past, g.past = g.past, nil
				sample.XIDs, g.pending = g.pending.take()
				more = more || len(g.pending) > 0
			}
			samples = append(samples, sample)
		}
	}
	if more {
		s.wakeAll()
	}
	return &health.Reading{
		Devices:  s.devices,
		Samples:  samples,
		Versions: health.Versions{Driver: driverVersion, CUDA: "13.0", DCGM: "sim"},
	}
}
