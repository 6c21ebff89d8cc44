//go:build cgo && linux

package dcgm

import (
	"cmp"
	"context"
	"errors"
	"maps"
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

func (s *session) readAgain(now time.Time) error {
	t, err := readTopology()
	if err != nil {
		return err
	}
	if err := s.rebuild(t); err != nil {
		return err
	}
	return s.readValues(now, true)
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

// refresh reads the inventory again if it has changed. Another one must stand for a while: when a GPU
// is bound or unbound, DCGM loses sight of all for a moment (11).
func (s *session) refresh(now time.Time) (rebuilt bool, err error) {
	t, err := readTopology()
	if err != nil {
		return false, err
	}
	if len(t.gpus) == 0 && len(s.topology.gpus) == 0 && s.cfg.Address == "" && now.Sub(s.openedAt) >= lookAgain {
		return true, s.restart()
	}
	if t.equal(s.topology) {
		s.since = time.Time{}
		changed, err := s.textsChanged(now)
		if err != nil {
			return false, err
		}
		if changed || s.dirty || s.migSwitched() || (s.incomplete && now.Sub(s.builtAt) >= lookAgain) {
			return true, s.rebuild(t)
		}
		// What did not come in time may come later; a value that DCGM keeps back costs one read of its cache.
		if s.waiting || len(s.waitedSince) > 0 && now.Sub(s.builtAt) >= inventoryEvery {
			return true, s.await(now)
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
	if err := s.rebuild(t); err != nil {
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

// await has DCGM sample again what a GPU that was just bound lacks in the inventory: otherwise that would be in a minute.
func (s *session) await(now time.Time) error {
	hastened := s.waiting
	if hastened {
		if err := s.watches.hasten(); err != nil {
			if dead(err) {
				return err
			}
			s.log.Debug("the inventory cannot be sampled sooner", zap.Error(err))
		}
	}
	status := map[uint]dcgm.EntityStatus{}
	for _, id := range s.topology.gpus {
		status[id] = s.presence[id].status
	}
	found, err := s.inventory(now, s.topology, s.watches, status)
	if err != nil {
		return err
	}
	s.own(found)
	s.builtAt = now
	if s.waiting || !hastened {
		return nil
	}
	if err := s.watches.restore(); err != nil {
		s.log.Debug("the inventory is sampled more often than it need be", zap.Error(err))
	}
	return nil
}

// restart stops the engine of this process and starts another: one that found no driver never looks for
// it again.
func (s *session) restart() error {
	if err := s.disconnect(); err != nil {
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
	return s.rebuild(t)
}

// rebuild has DCGM watch the topology's entities and reads who they are. What was watched before is
// taken back first: DCGM does not count the watches of one client, so that taking back the old ones
// afterwards would end the new ones too. The XIDs are read once more before they go.
func (s *session) rebuild(t topology) error {
	if len(s.watches.gpus) > 0 {
		if err := s.readXIDs(s.now()); err != nil {
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
	found, err := s.inventory(s.now(), t, w, status)
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
	parts := map[health.DeviceID]health.DeviceID{} // and their GPUs
	gpus := map[health.DeviceID]bool{}
	for i, d := range found {
		s.devices[i] = d.Device
		s.state[i] = deviceState{device: d, rows: before[d.ID].rows, watched: watched[d.entity]}
		if watched[d.entity] { // of others nothing will be read: what was known is not known any more
			s.state[i].values = before[d.ID].values
		}
		s.owners[d.entity] = append(s.owners[d.entity], i)
		if d.Kind == health.KindGPU {
			gpus[d.ID] = true
		}
		if d.Kind == health.KindMIG {
			parts[d.ID] = d.Parent
			s.owners[parents[d.entity]] = append(s.owners[parents[d.entity]], i)
		}
	}
	s.ledger.know(parts, gpus, s.incomplete || s.waiting)
	sights := map[uint]*sight{}
	for _, e := range s.watches.gpus {
		sights[e.id] = cmp.Or(s.sights[e.id], &sight{})
	}
	s.sights = sights
	maps.DeleteFunc(s.stale, func(id uint, _ bool) bool { return sights[id] == nil })
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
