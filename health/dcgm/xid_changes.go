//go:build cgo && linux

package dcgm

import (
	"context"
	"errors"

	"github.com/NVIDIA/go-dcgm/pkg/dcgm"
	"go.uber.org/zap"
)

// XIDsChanged reports whether the latest value of field 230 differs from the last poll's on any entity. It is one
// read of DCGM's cache. The stream itself is left to the poll: go-dcgm allocates a mebibyte for each reading of it.
func (s *session) XIDsChanged(context.Context) (bool, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case s.closed:
		return false, errors.New("the DCGM session is closed")
	case s.failed != nil:
		return false, s.failed
	}
	changed := false
	err := latest(s.watches.xidPairs, []dcgm.Short{fieldXID}, func(v *dcgm.FieldValue_v2) {
		row, ok := xidOf(v)
		changed = changed || ok && row != s.latestXID[entity{v.EntityGroupId, v.EntityID}]
	})
	switch {
	case err == nil:
		return changed, nil
	case dead(err):
		s.failed = err
		return false, err
	}
	// DCGM may refuse an entity that has gone. A poll finds out whether it works with the others.
	s.log.Debug("XIDs could not be read between two polls", zap.Error(err))
	return true, nil
}
