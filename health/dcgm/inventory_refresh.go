//go:build cgo && linux

package dcgm

import (
	"cmp"
	"maps"
	"slices"
	"time"

	"github.com/NVIDIA/go-dcgm/pkg/dcgm"
	"go.uber.org/zap"

	"github.com/gpu-node-agent/gpu-node-agent/health"
)

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
