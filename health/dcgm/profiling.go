//go:build cgo && linux

package dcgm

import (
	"errors"
	"fmt"
	"slices"

	"github.com/NVIDIA/go-dcgm/pkg/dcgm"
	"go.uber.org/zap"
)

// The fields of DCGM's profiling module (dcgm_fields.h: DCGM_FI_PROF_).
func isProfiling(f dcgm.Short) bool { return f >= 1001 && f <= 1099 }

// watchProfiling watches the profiling fields on the GPUs that have them, and on their MIG instances. Each GPU
// is asked, for a node may have GPUs of several kinds. DCGM refuses a whole group if one entity in it lacks
// one of the fields, so that those with the same fields share a group. What a GPU lacks, and what another
// profiler holds, is absent and said once a session.
func (s *session) watchProfiling(w *watches, t topology, fields []dcgm.Short) error {
	if len(fields) == 0 {
		return nil
	}
	var left []string
	have := map[uint][]dcgm.Short{}
	var sets []profiled
	for _, e := range w.gpus {
		supported, err := supportedProfiling(e.id)
		if err != nil && dead(err) {
			return err
		}
		for _, f := range fields {
			switch {
			case slices.Contains(supported, f):
				have[e.id] = append(have[e.id], f)
			case err != nil:
				left = append(left, fmt.Sprintf("%d (GPU %d: %v)", f, e.id, err))
			default:
				left = append(left, fmt.Sprintf("%d (GPU %d does not have it)", f, e.id))
			}
		}
		sets = join(sets, e, have[e.id])
	}
	for _, in := range t.instances {
		if slices.Contains(w.computes, in.entity) {
			sets = join(sets, in.entity, perInstance(have[in.gpu]))
		}
	}
	for _, set := range sets {
		g, err := s.groupOf(w, "profiled", set.entities)
		if err != nil {
			return err
		}
		if err := s.watchGroup(w, "profiling", g, set.fields, s.cfg.Interval); err != nil {
			if dead(err) {
				return err
			}
			left = append(left, err.Error())
			continue
		}
		w.gpuFields = union(w.gpuFields, set.fields)
		w.computeFields = union(w.computeFields, perInstance(set.fields))
	}
	if len(left) > 0 && !s.saidProfiling {
		s.saidProfiling = true
		s.log.Warn("profiling fields are left out where they cannot be had", zap.Strings("fields", left))
	}
	return nil
}

// supportedProfiling asks which profiling fields a GPU has.
func supportedProfiling(gpu uint) (fields []dcgm.Short, err error) {
	if !has("dcgmProfGetSupportedMetricGroups") {
		return nil, errors.New("this libdcgm cannot tell")
	}
	groups, err := dcgm.GetSupportedMetricGroups(gpu)
	for _, g := range groups {
		for _, f := range g.FieldIds {
			fields = append(fields, dcgm.Short(f))
		}
	}
	return fields, err
}

// profiled are entities with the same profiling fields.
type profiled struct {
	fields   []dcgm.Short
	entities []entity
}

// join puts an entity with those that have the same fields.
func join(sets []profiled, e entity, fields []dcgm.Short) []profiled {
	if len(fields) == 0 {
		return sets
	}
	i := slices.IndexFunc(sets, func(p profiled) bool { return slices.Equal(p.fields, fields) })
	if i < 0 {
		return append(sets, profiled{fields, []entity{e}})
	}
	sets[i].entities = append(sets[i].entities, e)
	return sets
}

func union(a, b []dcgm.Short) []dcgm.Short {
	for _, f := range b {
		if !slices.Contains(a, f) {
			a = append(a, f)
		}
	}
	return a
}
