package sim

import (
	"context"
	"slices"
	"sync"
	"time"

	"github.com/gpu-node-agent/gpu-node-agent/health"
)

// session is a connection to a Source.
type session struct {
	source  *Source
	outages uint64        // the source's when the session was opened
	wake    chan struct{} // holds one
	once    sync.Once
	closed  chan struct{}

	// Guarded by the source's mutex.
	blindSince time.Time // of the first of the latest readings without values; zero if the latest had some
	failed     error     // why the session is unusable
}

// blindAfter is how long readings have no values before the session fails. A session of DCGM fails after the same time:
// after an XID 119, DCGM has no values of GPUs that it calls OK until its engine restarts.
const blindAfter = 3 * time.Second

// Poll measures every device. It fails at once if the source is down, or has been down since Open. While the source is
// stalled, it waits until that ends, the session is closed or ctx ends. Each XID from after the start is in one reading only,
// whichever session polls. While the source is blind, readings have no values, and after blindAfter the session fails for good.
func (ses *session) Poll(ctx context.Context) (*health.Reading, error) {
	s := ses.source
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := s.awaitUp(ctx, ses); err != nil {
		return nil, err
	}
	now := time.Now()
	if err := ses.checkBlind(now); err != nil {
		return nil, err
	}
	return s.reading(now), nil
}

// checkBlind fails once the source has been blind for too long. Called with the source's mutex held.
func (ses *session) checkBlind(now time.Time) error {
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

// Wake fires with every event and when the scenario restarts.
func (ses *session) Wake() <-chan struct{} { return ses.wake }

// Close ends the session and a Poll that waits. It never fails.
func (ses *session) Close() error {
	ses.once.Do(func() {
		close(ses.closed)
		s := ses.source
		s.mu.Lock()
		defer s.mu.Unlock()
		delete(s.sessions, ses)
	})
	return nil
}

// reading measures all devices and takes the XIDs from the queues. Called with mu held.
func (s *Source) reading(now time.Time) *health.Reading {
	if s.state == sourceEmpty { // without a driver its version is unknown too
		return &health.Reading{Versions: health.Versions{DCGM: s.dcgm.version}}
	}
	var (
		blind   = s.blind()
		samples = make([]health.Sample, 0, len(s.listed))
		values  = make([]map[health.Field]float64, 0, len(s.devices))
		t       = now.Sub(s.start).Seconds()
		checks  = s.checks()
		node    []health.Incident // without a GPU
	)
	for i := range s.gpus {
		if s.unlisted[i] {
			continue
		}
		g := &s.gpus[i]
		c := &s.states[i]
		presence := health.Present
		switch {
		case blind:
			presence = health.PresenceUnknown
		case valueOf(c.Lost), s.state == sourceLost:
			presence = health.Lost
		case valueOf(c.Unbound):
			presence = health.Detached
		case !valueOf(c.Stale):
			values = g.values(t, c, &s.dcgm, values[:0])
		}
		for n := range 1 + len(g.slices) {
			sample := health.Sample{Device: s.devices[g.device+n].ID, At: now, Presence: presence}
			switch {
			case presence != health.Present:
			case valueOf(c.Stale):
				sample.Stale = true
			default:
				sample.Values = values[n]
				sample.Checked = n == 0 && checks.Status == health.ChecksUp
				if sample.Checked {
					all := c.incidents.active()
					sample.Incidents = slices.DeleteFunc(slices.Clone(all), isIMEX)
					node = append(node, slices.DeleteFunc(all, func(i health.Incident) bool { return !isIMEX(i) })...)
				}
			}
			sample.RowsWhole = !blind
			if n == 0 && !blind {
				sample.Rows = g.past
				sample.XIDs, g.queue = g.queue, nil
			}
			samples = append(samples, sample)
		}
	}
	r := &health.Reading{
		Devices: s.listed,
		Checks:  checks, Incidents: node,
		Samples:  samples,
		Versions: health.Versions{Driver: driverVersion, CUDA: "13.0", DCGM: s.dcgm.version},
	}
	if !blind {
		r.Entities = s.measureSwitches(t)
	}
	return r
}

// checks returns the state of the health checks. Called with mu held.
func (s *Source) checks() health.Checks {
	if s.state == sourceChecksDown {
		return health.Checks{Status: health.ChecksDown, Err: "simulated: API version mismatch; inject {source: up} to end it"}
	}
	return health.Checks{Status: health.ChecksUp}
}

func isIMEX(i health.Incident) bool { return i.System == imexSystem }
