//go:build cgo && linux

package dcgm

import (
	"context"

	"github.com/NVIDIA/go-dcgm/pkg/dcgm"
	"go.uber.org/zap"
)

// XIDsChanged reports whether the latest value of field 230 has changed on any entity since the last poll. It makes one
// read of DCGM's cache. Only polls read the stream: go-dcgm allocates a mebibyte for each read of it.
func (s *session) XIDsChanged(context.Context) (bool, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := s.usable(); err != nil {
		return false, err
	}
	changed := false
	err := readLatest(s.watches.xidPairs, []dcgm.Short{fieldXID}, func(v *dcgm.FieldValue_v2) {
		row, ok := parseXID(v)
		changed = changed || ok && row != s.latestXID[entity{v.EntityGroupId, v.EntityID}]
	})
	switch {
	case err == nil:
		return changed, nil
	case connectionLost(err):
		s.failed = err
		return false, err
	}
	// DCGM refuses an entity that was removed. The next poll reads the remaining ones.
	s.log.Debug("cannot read XIDs between polls", zap.Error(err))
	return true, nil
}
