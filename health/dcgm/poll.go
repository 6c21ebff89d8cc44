//go:build cgo && linux

package dcgm

import (
	"context"
	"errors"
	"time"

	"github.com/NVIDIA/go-dcgm/pkg/dcgm"

	"github.com/gpu-node-agent/gpu-node-agent/health"
)

// Times that nobody has a reason to set.
const (
	confirmAfter = 2 * time.Second // for how long another inventory must stand before it is believed
	lookAgain    = time.Minute     // how often what is missing is looked for: a driver, a GPU's name
	slowStatus   = 5 * time.Second // how long statuses may take before no more are asked for
)

// Poll measures every device. It reads DCGM's cache and does not touch the driver, and still blocks for
// as long as DCGM does; nothing can interrupt it. An error ends the session, and so do an engine that
// died, one that went blind, and one whose thread hangs.
func (s *session) Poll(ctx context.Context) (*health.Reading, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return nil, errors.New("the DCGM session is closed")
	}
	if s.failed != nil {
		return nil, s.failed
	}
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	reading, err := s.poll()
	if err != nil {
		s.failed = err
	}
	return reading, err
}

// poll reads before it asks for the status of each GPU: go-dcgm keeps the error of that call to itself,
// and with an engine that hangs each such call would last a minute.
func (s *session) poll() (*health.Reading, error) {
	now := s.now()
	full := passed(s.fullAt, now, s.cfg.Interval)
	if full || s.dirty || !s.since.IsZero() || s.waiting {
		rebuilt, err := s.refresh(now)
		if err != nil {
			return nil, err
		}
		full = full || rebuilt
	}
	if err := s.readValues(now, full); err != nil {
		// DCGM may refuse an entity that has gone since; with the present ones it must work.
		if dead(err) {
			return nil, err
		}
		if again := s.readAgain(now); again != nil {
			return nil, errors.Join(err, again)
		}
		full = true
	}
	if full {
		s.fullAt = now
	}
	if err := s.checkSight(now, full); err != nil {
		return nil, err
	}
	checked := full && s.checkHealth()
	if s.updatePresence(s.topology.gpus) {
		s.fullAt = time.Time{} // what was measured before is not to be shown much longer
	}
	return s.reading(now, checked), nil
}

// passed reports whether so much time has passed since then, or nobody can tell: there was no then, or the clock was set back.
func passed(then, now time.Time, d time.Duration) bool {
	return then.IsZero() || now.Before(then) || now.Sub(then) >= d
}

// dead reports whether an error says that the connection is of no more use (14, 15).
func dead(err error) bool {
	switch code(err) {
	case dcgm.DCGM_ST_CONNECTION_NOT_VALID, dcgm.DCGM_ST_TIMEOUT, dcgm.DCGM_ST_UNINITIALIZED:
		return true
	}
	return false
}

// updatePresence asks for the status of the GPUs and reports whether any is shown otherwise than before.
func (s *session) updatePresence(gpus []uint) (changed bool) {
	started := s.now()
	for _, id := range gpus {
		p := s.presence[id]
		if p == nil {
			p = &presence{}
			s.presence[id] = p
		}
		status := dcgm.EntityStatusUnknown
		if s.now().Sub(started) < slowStatus {
			status = dcgm.GetGPUStatus(id)
		}
		differs, back := p.update(status, started)
		changed = changed || differs
		if back {
			s.dirty = true
			delete(s.waitedSince, id) // its driver was bound again
		}
	}
	return changed
}

// reading makes the result of a poll that went well. Nothing after it can fail: it marks XIDs as reported.
// The incidents are those of the last check, which this poll has made if checked is true. A check of a GPU that
// DCGM does not see tells nothing: DCGM warns of what it cannot read (12).
func (s *session) reading(now time.Time, checked bool) *health.Reading {
	r := &health.Reading{Devices: s.devices, Samples: make([]health.Sample, len(s.state)), Versions: s.versions}
	s.ledger.tick(s.node.all.newest)
	logged := !passed(s.openedAt, now, kernelLogWindow)
	for i := range s.state {
		st := &s.state[i]
		stale := s.stale[st.device.gpu] && reachable(s.presence[st.device.gpu].status)
		if stale {
			st.values = nil
		} else {
			st.merge()
		}
		r.Samples[i] = health.Sample{
			Device: st.device.ID, At: now, Presence: s.presence[st.device.gpu].shown, Stale: stale, Values: st.values,
		}
		r.Samples[i].XIDs, r.Samples[i].Past = s.newXIDs(i, logged)
		if st.device.Kind == health.KindGPU {
			r.Samples[i].Incidents = s.incidents[st.device.gpu]
			r.Samples[i].Checked = checked && !s.unseen(st.device.gpu)
		}
	}
	return r
}
