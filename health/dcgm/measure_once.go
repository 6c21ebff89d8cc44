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

// MeasureOnce opens a session, polls once and closes it. It does not watch the profiling fields among cfg.Fields, because that could take
// them from another profiler, but returns the ones that some GPU supports. It runs the health checks that cfg.HealthSystems names, by
// default none. It logs an error of Close and does not return it: the measurement is valid, and DCGM releases everything with the
// connection.
func MeasureOnce(ctx context.Context, cfg Config, log *zap.Logger) (r *health.Reading, profiling []health.Field, err error) {
	requested := cfg.Fields
	if len(cfg.HealthSystems) == 0 {
		cfg.HealthSystems = []string{NoHealthSystems}
	}
	cfg.Fields = slices.DeleteFunc(slices.Clone(requested), func(f health.Field) bool { return isProfiling(dcgm.Short(f)) })
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
	if len(requested) == len(cfg.Fields) {
		return r, nil, nil // a query would load DCGM's profiling module
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, e := range s.watches.gpus {
		supported, err := supportedProfiling(e.id)
		if err != nil { // it supports none, or the module is missing
			log.Debug("cannot list the profiling fields of a GPU", zap.Uint("dcgm_id", e.id), zap.Error(err))
		}
		for _, f := range supported {
			if f := health.Field(f); slices.Contains(requested, f) && !slices.Contains(profiling, f) {
				profiling = append(profiling, f)
			}
		}
	}
	slices.Sort(profiling)
	return r, profiling, nil
}
