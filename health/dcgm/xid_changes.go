//go:build cgo && linux

package dcgm

import (
	"context"
	"time"

	"github.com/NVIDIA/go-dcgm/pkg/dcgm"
	"go.uber.org/zap"

	"github.com/gpu-node-agent/gpu-node-agent/health"
)

// XIDsChanged reports whether the latest value of field 230 has changed on any entity since the last poll, and returns when
// DCGM has measured. It makes two reads of DCGM's cache, for one field each: go-dcgm needs 4 KiB for a value. Only polls read the
// stream.
func (s *session) XIDsChanged(context.Context) (changed bool, measured time.Time, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := s.usable(); err != nil {
		return false, time.Time{}, err
	}
	err = readLatest(s.watches.xidPairs, []dcgm.Short{fieldXID}, func(v *dcgm.FieldValue_v2) {
		row, ok := parseXID(v)
		changed = changed || ok && row != s.latestXID[entity{v.EntityGroupId, v.EntityID}]
	})
	if err == nil {
		err = readLatest(s.paceGPU, []dcgm.Short{paceField}, func(v *dcgm.FieldValue_v2) {
			measured = measuredAt(v)
		})
	}
	switch {
	case err == nil:
		return changed, measured, nil
	case connectionLost(err):
		s.failed = err
		return false, time.Time{}, err
	}
	// DCGM refuses an entity that was removed. The next poll reads the remaining ones.
	s.log.Debug("cannot read XIDs between polls", zap.Error(err))
	return true, time.Time{}, nil
}

// paceField is the field whose sample of one GPU tells when DCGM has measured. DCGM samples it once a second with the other health
// fields, and every supported GPU has it.
const paceField = dcgm.Short(health.FieldGPUTemp)

// choosePaceGPU chooses the first GPU that the driver reaches and DCGM measures.
func (s *session) choosePaceGPU() {
	s.paceGPU = nil
	for i, e := range s.watches.gpus {
		if p := s.presence[e.id]; p != nil && reachable(p.status) && !s.stale[e.id] {
			s.paceGPU = s.watches.gpuPairs[i : i+1]
			return
		}
	}
}

// measuredAt returns the time of a sample, zero for a blank.
func measuredAt(v *dcgm.FieldValue_v2) time.Time {
	if _, ok := floatValue(v); !ok {
		return time.Time{}
	}
	return time.UnixMicro(v.TS)
}
