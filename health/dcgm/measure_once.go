//go:build cgo && linux

package dcgm

import (
	"context"
	"slices"
	"time"

	"github.com/NVIDIA/go-dcgm/pkg/dcgm"
	"go.uber.org/zap"

	"github.com/gpu-node-agent/gpu-node-agent/health"
)

// MeasureOnce measures once what cfg.Fields names, as a session would that ends at once, and returns which of the
// profiling fields among them some GPU has. Those are only asked about: to watch them could take them from whoever
// has them. It makes no health checks. An end that is not clean is logged and no error: what was measured is true, and
// the connection takes all with it.
func MeasureOnce(ctx context.Context, cfg Config, log *zap.Logger) (r *health.Reading, profiling []health.Field, err error) {
	wanted := cfg.Fields
	cfg.HealthSystems = []string{"none"}
	cfg.Fields = slices.DeleteFunc(slices.Clone(wanted), func(f health.Field) bool { return isProfiling(dcgm.Short(f)) })
	s, err := open(ctx, cfg, log, time.Now)
	if err != nil {
		return nil, nil, err
	}
	defer func() {
		if err := s.Close(); err != nil {
			log.Warn("DCGM did not close cleanly", zap.Error(err))
		}
	}()
	if r, err = s.Poll(ctx); err != nil {
		return nil, nil, err
	}
	if len(wanted) == len(cfg.Fields) {
		return r, nil, nil // DCGM loads its module for them when it is asked
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, e := range s.watches.gpus {
		has, err := supportedProfiling(e.id)
		if err != nil { // it has none, or the module is not there
			log.Debug("profiling fields of a GPU are not known", zap.Uint("dcgm_id", e.id), zap.Error(err))
		}
		for _, f := range has {
			if f := health.Field(f); slices.Contains(wanted, f) && !slices.Contains(profiling, f) {
				profiling = append(profiling, f)
			}
		}
	}
	slices.Sort(profiling)
	return r, profiling, nil
}
