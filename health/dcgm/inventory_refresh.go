//go:build cgo && linux

package dcgm

import (
	"cmp"
	"errors"
	"maps"
	"slices"
	"time"

	"github.com/NVIDIA/go-dcgm/pkg/dcgm"
	"go.uber.org/zap"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/health/dcgm/lib"
)

func (s *session) rebuildAndRead(now time.Time) error {
	h, err := readHierarchy()
	if err != nil {
		return err
	}
	if err := s.rebuild(h); err != nil {
		return err
	}
	return s.readValues(now, true)
}

// refreshInventory reads the inventory again if it has changed. A changed hierarchy must last for confirmDelay: while a
// GPU is bound or unbound, DCGM briefly loses all GPUs (OBSERVED.md#short-detach).
func (s *session) refreshInventory(now time.Time) (rebuilt bool, err error) {
	h, err := readHierarchy()
	if err != nil {
		return false, err
	}
	if len(h.gpus) == 0 && len(s.hierarchy.gpus) == 0 && s.cfg.Address == "" && now.Sub(s.openedAt) >= retryInterval {
		return true, s.restartEngine()
	}
	if h.equal(s.hierarchy) {
		s.candidateSince = time.Time{}
		if s.inventoryDirty || s.migModeChanged() || s.hasUnnamed && now.Sub(s.builtAt) >= retryInterval {
			return true, s.rebuild(h)
		}
		// A required field that is overdue may still arrive, and text fields change (OBSERVED.md#text-fields).
		if s.inventoryPending || len(s.pendingSince)+len(s.watches.texts) > 0 && now.Sub(s.builtAt) >= inventoryInterval {
			if err := s.rereadInventory(now); err == nil || connectionLost(err) || errors.Is(err, errBlind) {
				return true, err
			}
			s.inventoryDirty = true // DCGM refuses an entity that was just removed
		}
		return false, nil
	}
	if s.candidateSince.IsZero() || !h.equal(s.candidate) {
		s.candidate, s.candidateSince = h, now
	}
	if now.Sub(s.candidateSince) < confirmDelay {
		return false, nil
	}
	before := len(s.devices)
	if err := s.rebuild(h); err != nil {
		return false, err
	}
	s.log.Info("inventory changed", zap.Int("devices", len(s.devices)), zap.Int("before", before))
	return true, nil
}

// migModeChanged reports whether the MIG mode of a GPU differs from the inventory.
func (s *session) migModeChanged() bool {
	return slices.ContainsFunc(s.state, func(st deviceState) bool {
		mode, ok := st.values[health.FieldMIGMode]
		return ok && st.device.Kind == health.KindGPU && (mode == 1) != st.device.MIGMode
	})
}

// rereadInventory reads the inventory with the watches that exist. While a required field may arrive soon, it makes DCGM sample the
// inventory once a second instead of once a minute.
func (s *session) rereadInventory(now time.Time) error {
	wasPending := s.inventoryPending
	if wasPending {
		if err := s.watches.speedUpInventory(); err != nil {
			if connectionLost(err) {
				return err
			}
			s.log.Debug("cannot sample the inventory more often", zap.Error(err))
		}
	}
	if err := s.readInventory(now); err != nil {
		return err
	}
	if s.inventoryPending || !wasPending {
		return nil
	}
	if err := s.watches.restoreIntervals(); err != nil {
		s.log.Debug("cannot restore the sampling intervals", zap.Error(err))
	}
	return nil
}

// restartEngine restarts the embedded engine: one without a driver never looks for it again (OBSERVED.md#empty-engine).
func (s *session) restartEngine() error {
	if err := s.disconnect(); err != nil {
		return err
	}
	if err := connect(s.cfg.Address); err != nil {
		s.closed = true // no connection is left to close
		lib.Release()
		return err
	}
	s.openedAt = s.now()
	h, err := readHierarchy()
	if err != nil {
		return err
	}
	s.updatePresence(h.gpus)
	return s.rebuild(h)
}

// rebuild watches the entities of the hierarchy and reads their inventory. It removes the old watches first: DCGM does
// not count the watches of a client, so that removing them later would end the new ones too. It reads the XIDs before
// they are dropped with the watches.
func (s *session) rebuild(h hierarchy) error {
	if len(s.watches.gpus) > 0 {
		if err := s.readStream(0); err != nil {
			s.log.Debug("cannot read XIDs before removing the watches", zap.Error(err))
		}
	}
	if err := s.watches.close(); err != nil {
		s.log.Debug("cannot remove the old watches", zap.Error(err))
	}
	s.watches = &watches{}
	for _, id := range h.gpus {
		if s.presence[id] == nil {
			s.presence[id] = &presence{}
			s.presence[id].update(dcgm.GetGPUStatus(id), s.now())
		}
	}
	w, err := s.newWatches(h)
	if err != nil {
		return err
	}
	s.watches, s.hierarchy, s.inventoryDirty, s.candidateSince = w, h, false, time.Time{}
	s.unsupported = map[dcgm.Short][]uint{}
	return s.readInventory(s.now())
}

// setDevices replaces the devices and keeps the state of remaining ones. It maps entities to devices: a GPU's values are its own, a GPU
// instance's values belong to all of its compute instances.
func (s *session) setDevices(devices []dcgmDevice) {
	before := map[health.DeviceID]deviceState{}
	for _, st := range s.state {
		before[st.device.ID] = st
	}
	watched := map[entity]bool{}
	for _, e := range slices.Concat(s.watches.gpus, s.watches.computes) {
		watched[e] = true
	}
	parentEntity := map[entity]entity{}
	for _, in := range s.hierarchy.instances {
		parentEntity[in.entity] = in.parent
	}
	s.state = make([]deviceState, len(devices))
	s.devices = make([]health.Device, len(devices))
	s.devicesOf = map[entity][]int{}
	for i, d := range devices {
		s.devices[i] = d.Device
		s.state[i] = deviceState{device: d, rows: before[d.ID].rows, watched: watched[d.entity]}
		if watched[d.entity] { // otherwise its values will not be read again
			s.state[i].values = before[d.ID].values
		}
		if watched[d.entity] && !before[d.ID].watched {
			s.wholeAt = time.Time{} // none of its rows may have been read
		}
		s.devicesOf[d.entity] = append(s.devicesOf[d.entity], i)
		if d.Kind == health.KindMIG {
			s.devicesOf[parentEntity[d.entity]] = append(s.devicesOf[parentEntity[d.entity]], i)
		}
	}
	s.wholeRead = false
	gpuStaleness := map[uint]*staleness{}
	for _, e := range s.watches.gpus {
		gpuStaleness[e.id] = cmp.Or(s.gpuStaleness[e.id], &staleness{})
	}
	s.gpuStaleness = gpuStaleness
	maps.DeleteFunc(s.stale, func(id uint, _ bool) bool { return gpuStaleness[id] == nil })
}

// maxSampleSkew is how much older than its predecessor the newest sample may be, because it is another GPU's or another
// field's. If it is older still, the engine's clock was set back.
const maxSampleSkew = 5 * time.Second

// history outlives sessions and belongs to one session at a time. It holds the last complete inventory of each GPU, and what the engine's
// clock has shown.
type history struct {
	gpus map[health.DeviceID]*entityValues // as of the last complete inventory of each; a blank is as before

	firstSample  int64 // the engine's time at the first poll of this process; 0 if unknown, or if its clock was set back
	newestSample int64 // the engine's time at the last poll
	maxSample    int64 // the maximum of newestSample
}

// processHistory is the history of the process. The session that has the connection has it.
//
//nolint:gochecknoglobals // go-dcgm's connection is a variable of its package; this one belongs to it
var processHistory = newHistory()

func newHistory() *history { return &history{gpus: map[health.DeviceID]*entityValues{}} }

// updateClock takes the time of the engine's newest sample, 0 if there is none.
func (h *history) updateClock(at int64) {
	switch {
	case at == 0:
		return
	case h.newestSample == 0:
		h.firstSample = at
	case at < h.newestSample-maxSampleSkew.Microseconds():
		h.firstSample = 0 // after a step back, times no longer tell what happened before the start
	}
	h.newestSample, h.maxSample = at, max(h.maxSample, at)
}

// steppedBack reports whether the engine's clock is behind what it has shown before.
func (h *history) steppedBack() bool {
	return h.newestSample < h.maxSample-maxSampleSkew.Microseconds()
}
