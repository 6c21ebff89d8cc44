//go:build cgo && linux

package dcgm

import (
	"context"
	"errors"
	"slices"
	"time"

	"github.com/NVIDIA/go-dcgm/pkg/dcgm"

	"github.com/gpu-node-agent/gpu-node-agent/health"
)

const (
	confirmDelay  = 2 * time.Second // how long a changed hierarchy must last before it is used
	retryInterval = time.Minute     // between attempts to find a missing driver or a GPU's UUID
	statusTimeout = 5 * time.Second // for the statuses of all GPUs; what is not read by then stays unknown

	// pollShift is how much earlier than expected a poll may come, because the monitor follows DCGM's measurements. With it, what is read in
	// each nth poll is not read one poll later.
	pollShift = 250 * time.Millisecond
)

// Poll measures every device. It reads DCGM's cache and does not call the driver, but blocks for as long as DCGM does;
// nothing can interrupt it. An error ends the session: the engine died, is blind, or its thread hangs.
func (s *session) Poll(ctx context.Context) (*health.Reading, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := s.usable(); err != nil {
		return nil, err
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

// poll reads values before the statuses: go-dcgm hides the errors of status calls, and with a hung engine each would last a minute.
func (s *session) poll() (*health.Reading, error) {
	now := s.now()
	full := elapsed(s.fullAt, now, s.cfg.Interval-pollShift)
	if full || s.inventoryDirty || !s.candidateSince.IsZero() || s.inventoryPending {
		rebuilt, err := s.refreshInventory(now)
		if err != nil {
			return nil, err
		}
		full = full || rebuilt
	}
	if err := s.readValues(now, full); err != nil {
		// DCGM refuses an entity that was just removed. With the current entities the read must succeed.
		if connectionLost(err) {
			return nil, err
		}
		if again := s.rebuildAndRead(now); again != nil {
			return nil, errors.Join(err, again)
		}
		full = true
	}
	if full {
		s.fullAt = now
	}
	if err := s.checkStaleness(now, full); err != nil {
		return nil, err
	}
	checked := full && s.runHealthCheck()
	if s.updatePresence(s.hierarchy.gpus) {
		s.fullAt, s.wholeAt = time.Time{}, time.Time{} // replace the earlier values soon
	}
	r := s.reading(now, checked)
	r.Entities = s.measureEntities(now)
	return r, nil
}

// elapsed reports whether d has passed since then. It is true if then is zero or, after the clock was set back, in the
// future.
func elapsed(then, now time.Time, d time.Duration) bool {
	return then.IsZero() || now.Before(then) || now.Sub(then) >= d
}

// connectionLost reports whether an error makes the connection unusable (OBSERVED.md#dead-engine,
// OBSERVED.md#hung-engine).
func connectionLost(err error) bool {
	results := []int{dcgm.DCGM_ST_CONNECTION_NOT_VALID, dcgm.DCGM_ST_TIMEOUT, dcgm.DCGM_ST_UNINITIALIZED}
	return err != nil && slices.ContainsFunc(results, func(r int) bool { return isResult(err, r) })
}

// updatePresence reads the statuses of the GPUs and reports whether the presence of any has changed.
func (s *session) updatePresence(gpus []uint) (changed bool) {
	started := s.now()
	for _, id := range gpus {
		p := s.presence[id]
		if p == nil {
			p = &presence{}
			s.presence[id] = p
		}
		status := dcgm.EntityStatusUnknown
		if s.now().Sub(started) < statusTimeout {
			status = dcgm.GetGPUStatus(id)
		}
		presenceChanged, returned := p.update(status, started)
		changed = changed || presenceChanged
		if returned {
			s.inventoryDirty = true
			delete(s.pendingSince, id) // its driver was bound again
		}
	}
	return changed
}

// reading returns the result of a successful poll. checked means that the incidents are of this poll; they are not for a GPU that DCGM
// cannot measure (OBSERVED.md#blind-engine).
func (s *session) reading(now time.Time, checked bool) *health.Reading {
	r := &health.Reading{
		Devices: s.devices, Samples: make([]health.Sample, len(s.state)), Versions: s.versions, Measured: s.measured,
		Checks: s.checks.state(), Incidents: s.nodeIncidents, Unnamed: s.unnamedInstances,
	}
	for i := range s.state {
		st := &s.state[i]
		rows := s.takeRows(st, now)
		stale := s.stale[st.device.gpu] && s.reaches(st.device.gpu)
		if stale {
			st.values = nil
		} else {
			st.merge(s.lastXID(st))
		}
		r.Samples[i] = health.Sample{
			Device: st.device.ID, At: now, Presence: s.presence[st.device.gpu].current, Stale: stale, Values: st.values,
			Rows: rows, RowsWhole: s.wholeRead && st.watched,
		}
		if st.device.Kind == health.KindGPU && r.Checks.Status != health.ChecksDown {
			r.Samples[i].Incidents = s.incidents[st.device.gpu]
			r.Samples[i].Checked = checked && !s.unmeasured(st.device.gpu)
		}
	}
	return r
}
