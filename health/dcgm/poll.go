//go:build cgo && linux

package dcgm

import (
	"context"
	"errors"
	"slices"
	"time"

	"github.com/NVIDIA/go-dcgm/pkg/dcgm"
	"go.uber.org/zap"

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
	reading, err := s.poll(ctx)
	if err != nil {
		s.failed = err
	}
	return reading, err
}

// poll reads before it asks for the status of each GPU: go-dcgm keeps the error of that call to itself,
// and with an engine that hangs each such call would last a minute.
func (s *session) poll(ctx context.Context) (*health.Reading, error) {
	now := s.now()
	full := s.fullAt.IsZero() || now.Sub(s.fullAt) >= s.cfg.Interval
	if full || s.dirty || !s.since.IsZero() {
		rebuilt, err := s.refresh(ctx, now)
		if err != nil {
			return nil, err
		}
		full = full || rebuilt
	}
	if err := s.readValues(full); err != nil {
		// DCGM may refuse an entity that has gone since; with the present ones it must work.
		if dead(err) {
			return nil, err
		}
		if again := s.readAgain(ctx); again != nil {
			return nil, errors.Join(err, again)
		}
		full = true
	}
	sight, stale := &s.lightSight, staleAfter
	checked := false
	if full {
		s.fullAt = now
		checked = s.checkHealth()
		sight, stale = &s.fullSight, staleAfter+3*s.cfg.Interval
	}
	if s.updatePresence(s.topology.gpus) {
		s.fullAt = time.Time{} // what was measured before is not to be shown much longer
	}
	if err := sight.check(s.reads, now, stale); err != nil {
		return nil, err
	}
	return s.reading(now, checked), nil
}

func (s *session) readAgain(ctx context.Context) error {
	t, err := readTopology()
	if err != nil {
		return err
	}
	if err := s.rebuild(ctx, t); err != nil {
		return err
	}
	return s.readValues(true)
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
		s.dirty = s.dirty || back
	}
	return changed
}

// refresh reads the inventory again if it has changed. Another one must stand for a while: when a GPU
// is bound or unbound, DCGM loses sight of all for a moment (11).
func (s *session) refresh(ctx context.Context, now time.Time) (rebuilt bool, err error) {
	t, err := readTopology()
	if err != nil {
		return false, err
	}
	if len(t.gpus) == 0 && len(s.topology.gpus) == 0 && s.cfg.Address == "" && now.Sub(s.openedAt) >= lookAgain {
		return true, s.restart(ctx)
	}
	if t.equal(s.topology) {
		s.since = time.Time{}
		changed, err := s.textsChanged(now)
		if err != nil {
			return false, err
		}
		if changed || s.dirty || s.migSwitched() || (s.incomplete && now.Sub(s.builtAt) >= lookAgain) {
			return true, s.rebuild(ctx, t)
		}
		if !s.incomplete {
			s.ledger.looked = now.UnixMicro()
		}
		return false, nil
	}
	if s.since.IsZero() || !t.equal(s.suspected) {
		s.suspected, s.since = t, now
	}
	if now.Sub(s.since) < confirmAfter {
		return false, nil
	}
	before := len(s.devices)
	if err := s.rebuild(ctx, t); err != nil {
		return false, err
	}
	s.log.Info("the inventory has changed", zap.Int("devices", len(s.devices)), zap.Int("before", before))
	return true, nil
}

// migSwitched reports whether a GPU's MIG mode is not what the inventory says, as far as was read.
func (s *session) migSwitched() bool {
	return slices.ContainsFunc(s.state, func(st deviceState) bool {
		mode, ok := st.values[health.FieldMIGMode]
		return ok && st.device.Kind == health.KindGPU && (mode == 1) != st.device.MIGMode
	})
}

// textsChanged reports whether a text that was asked for is another than the inventory has: most never change, but the
// state of an IMEX domain does, and the UUID of the NVLink domain comes when the fabric is up. It looks as often as DCGM.
func (s *session) textsChanged(now time.Time) (changed bool, err error) {
	if len(s.watches.texts) == 0 || now.Sub(s.textsAt) < inventoryEvery {
		return false, nil
	}
	s.textsAt = now
	err = latest(s.watches.gpuPairs, s.watches.texts, func(v *dcgm.FieldValue_v2) {
		is, was := text(v), s.known[entity{v.EntityGroupId, v.EntityID}].Texts[health.Field(v.FieldID)]
		changed = changed || is != "" && is != was // one that reads blank is what it was
	})
	return changed, err
}

// restart stops the engine of this process and starts another: one that found no driver never looks for
// it again.
func (s *session) restart(ctx context.Context) error {
	if err := s.disconnect(); err != nil { //nolint:contextcheck // as in Close, nothing there can be cancelled
		return err
	}
	if err := connect(s.cfg.Address); err != nil {
		s.closed = true // there is no connection to close
		release()
		return err
	}
	s.openedAt = s.now()
	t, err := readTopology()
	if err != nil {
		return err
	}
	s.updatePresence(t.gpus)
	return s.rebuild(ctx, t)
}

// rebuild has DCGM watch the topology's entities and reads who they are. What was watched before is
// taken back first: DCGM does not count the watches of one client, so that taking back the old ones
// afterwards would end the new ones too. The XIDs are read once more before they go.
func (s *session) rebuild(ctx context.Context, t topology) error {
	if len(s.watches.gpus) > 0 {
		if err := s.readXIDs(); err != nil {
			s.log.Debug("XIDs could not be read before the watches go", zap.Error(err))
		}
	}
	if err := s.watches.close(); err != nil {
		s.log.Debug("the old watches could not be taken back", zap.Error(err))
	}
	s.watches = &watches{}
	status := map[uint]dcgm.EntityStatus{}
	for _, id := range t.gpus {
		if s.presence[id] == nil {
			s.presence[id] = &presence{}
			s.presence[id].update(dcgm.GetGPUStatus(id), s.now())
		}
		status[id] = s.presence[id].status
	}
	w, err := s.watch(t, status)
	if err != nil {
		return err
	}
	s.watches = w
	found, err := s.inventory(t, w, status)
	if err != nil {
		return err
	}
	s.topology, s.dirty, s.since, s.builtAt = t, false, time.Time{}, s.now()
	s.textsAt = s.builtAt
	s.unsupported = map[dcgm.Short][]uint{}
	s.own(found)
	return nil
}

// own takes over the devices found and which entity's values are whose: a GPU's are its own, a GPU
// instance's are of all compute instances in it.
func (s *session) own(found []located) {
	before := map[health.DeviceID]deviceState{}
	for _, st := range s.state {
		before[st.device.ID] = st
	}
	watched := map[entity]bool{}
	for _, e := range slices.Concat(s.watches.gpus, s.watches.computes) {
		watched[e] = true
	}
	parents := map[entity]entity{}
	for _, in := range s.topology.instances {
		parents[in.entity] = in.parent
	}
	s.state = make([]deviceState, len(found))
	s.devices = make([]health.Device, len(found))
	s.owners = map[entity][]int{}
	parts := map[health.DeviceID]bool{}
	for i, d := range found {
		s.devices[i] = d.Device
		s.state[i] = deviceState{device: d, rows: before[d.ID].rows}
		if watched[d.entity] { // of others nothing will be read: what was known is not known any more
			s.state[i].values = before[d.ID].values
		}
		s.owners[d.entity] = append(s.owners[d.entity], i)
		if d.Kind == health.KindMIG {
			parts[d.ID] = true
			s.owners[parents[d.entity]] = append(s.owners[parents[d.entity]], i)
		}
	}
	s.ledger.know(parts)
}

// reading makes the result of a poll that went well. Nothing after it can fail: it marks XIDs as reported.
// The incidents are those of the last check, which this poll has made if checked is true.
func (s *session) reading(now time.Time, checked bool) *health.Reading {
	r := &health.Reading{Devices: s.devices, Samples: make([]health.Sample, len(s.state)), Versions: s.versions}
	for i := range s.state {
		st := &s.state[i]
		r.Samples[i] = health.Sample{
			Device: st.device.ID, At: now, Presence: s.presence[st.device.gpu].shown,
			Values: st.merge(), XIDs: s.newXIDs(i),
		}
		if st.device.Kind == health.KindGPU {
			r.Samples[i].Incidents, r.Samples[i].Checked = s.incidents[st.device.gpu], checked
		}
	}
	return r
}
