//go:build cgo && linux

package dcgm

import (
	"errors"
	"fmt"
	"slices"

	"github.com/NVIDIA/go-dcgm/pkg/dcgm"
	"go.uber.org/zap"

	"github.com/gpu-node-agent/gpu-node-agent/health/dcgm/lib"
)

// isProfiling reports whether DCGM's profiling module measures a field (dcgm_fields.h: DCGM_FI_PROF_).
func isProfiling(f dcgm.Short) bool { return f >= 1001 && f <= 1099 }

// watchProfiling watches the profiling fields on the GPUs that support them, and on their MIG instances. It queries each
// GPU, because a node may have several models. DCGM refuses a group if one entity lacks one field, so entities with the
// same fields share a group (OBSERVED.md#profiling-groups). Fields that a GPU lacks or that another profiler holds are
// absent; it logs them once per session.
func (s *session) watchProfiling(w *watches, h hierarchy, fields []dcgm.Short) error {
	if len(fields) == 0 {
		return nil
	}
	var omitted []string
	gpuFields := map[uint][]dcgm.Short{}
	var groups []profilingGroup
	for _, e := range w.gpus {
		supported, err := supportedProfiling(e.id)
		if err != nil && connectionLost(err) {
			return err
		}
		for _, f := range fields {
			switch {
			case slices.Contains(supported, f):
				gpuFields[e.id] = append(gpuFields[e.id], f)
			case err != nil:
				omitted = append(omitted, fmt.Sprintf("%d (GPU %d: %v)", f, e.id, err))
			default:
				omitted = append(omitted, fmt.Sprintf("%d (GPU %d: not supported)", f, e.id))
			}
		}
		groups = addToGroup(groups, e, gpuFields[e.id])
	}
	for _, in := range h.instances {
		if slices.Contains(w.computes, in.entity) {
			groups = addToGroup(groups, in.entity, instanceFields(gpuFields[in.gpu]))
		}
	}
	for _, group := range groups {
		g, err := s.newGroupOf(w, "profiled", group.entities)
		if err != nil {
			return err
		}
		if err := s.watchLatest(w, "profiling", g, group.fields, s.cfg.Interval); err != nil {
			if connectionLost(err) {
				return err
			}
			omitted = append(omitted, err.Error())
			continue
		}
		w.gpuFields = union(w.gpuFields, group.fields)
		w.computeFields = union(w.computeFields, instanceFields(group.fields))
	}
	if len(omitted) > 0 && !s.loggedProfiling {
		s.loggedProfiling = true
		s.log.Warn("omitting profiling fields where they are not available", zap.Strings("fields", omitted))
	}
	return nil
}

// supportedProfiling returns the profiling fields that a GPU supports.
func supportedProfiling(gpu uint) (fields []dcgm.Short, err error) {
	if !lib.Has("dcgmProfGetSupportedMetricGroups") {
		return nil, errors.New("libdcgm lacks dcgmProfGetSupportedMetricGroups")
	}
	groups, err := dcgm.GetSupportedMetricGroups(gpu)
	for _, g := range groups {
		for _, f := range g.FieldIds {
			fields = append(fields, dcgm.Short(f))
		}
	}
	return fields, err
}

// profilingGroup holds entities with the same profiling fields.
type profilingGroup struct {
	fields   []dcgm.Short
	entities []entity
}

// addToGroup adds an entity to the group with its fields.
func addToGroup(groups []profilingGroup, e entity, fields []dcgm.Short) []profilingGroup {
	if len(fields) == 0 {
		return groups
	}
	i := slices.IndexFunc(groups, func(g profilingGroup) bool { return slices.Equal(g.fields, fields) })
	if i < 0 {
		return append(groups, profilingGroup{fields, []entity{e}})
	}
	groups[i].entities = append(groups[i].entities, e)
	return groups
}

func union(a, b []dcgm.Short) []dcgm.Short {
	for _, f := range b {
		if !slices.Contains(a, f) {
			a = append(a, f)
		}
	}
	return a
}
