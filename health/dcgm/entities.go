//go:build cgo && linux

package dcgm

import (
	"errors"
	"fmt"
	"math/bits"
	"slices"
	"time"

	"github.com/NVIDIA/go-dcgm/pkg/dcgm"
	"go.uber.org/zap"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/health/dcgm/lib"
	"github.com/gpu-node-agent/gpu-node-agent/health/logonce"
)

// entityTimeout is how long the entities of the latest measurement count while the next one runs.
const entityTimeout = 10 * time.Second

// otherEntity is an NVSwitch, an NVLink, a CPU or a core, by DCGM's number.
type otherEntity struct {
	entity
	number uint // a link's number in its GPU or NVSwitch; other entities have DCGM's
	parent uint // the GPU or NVSwitch of a link, the CPU of a core
}

// entitySet holds the entities beside the GPUs that have the same fields.
type entitySet struct {
	name   string
	kind   health.EntityKind
	levels []dcgm.Field_Entity_Group // of its fields
	list   func() ([]otherEntity, error)
	fields []dcgm.Short

	listed, watched []otherEntity
	err             error         // of the latest attempt to list, watch or read them
	logged          logonce.State // that error, or success
}

// entityWatch measures the entities beside the GPUs, for metrics only. Without a field of theirs in Config.Fields, nothing is listed,
// loaded or watched. A measurement runs beside the polls of the GPUs: DCGM's modules for these entities load on first use, and each asks a
// library or a kernel interface of its own, which may hang.
type entityWatch struct {
	sets     []*entitySet // that have fields
	watches  watches
	listedAt time.Time

	latest    []health.Entity      // shared with readings: immutable
	running   chan []health.Entity // receives the result of the measurement that uses the fields above; nil if there is none
	startedAt time.Time            // of the latest measurement
	slow      bool                 // it takes longer than entityTimeout
}

// takeEntityFields moves the fields of entities beside the GPUs from the configuration to the sets that have them.
func (s *session) takeEntityFields() {
	level := func(levels ...dcgm.Field_Entity_Group) []dcgm.Field_Entity_Group { return levels }
	sets := []*entitySet{
		{name: "NVSwitches", kind: health.EntityNVSwitch, levels: level(dcgm.FE_SWITCH), list: listSwitches},
		{name: "NVLinks of NVSwitches", kind: health.EntitySwitchLink, levels: level(dcgm.FE_LINK), list: listSwitchLinks},
		{name: "NVLinks of GPUs", kind: health.EntityGPULink, levels: level(dcgm.FE_LINK), list: listGPULinks},
		// For a CPU, DCGM averages the fields of its cores.
		{name: "CPUs", kind: health.EntityCPU, levels: level(dcgm.FE_CPU, dcgm.FE_CPU_CORE), list: listCPUs},
		{name: "CPU cores", kind: health.EntityCPUCore, levels: level(dcgm.FE_CPU_CORE), list: listCores},
	}
	var requested []dcgm.Short
	s.cfg.Fields = slices.DeleteFunc(slices.Clone(s.cfg.Fields), func(f health.Field) (found bool) {
		meta, err := dcgm.FieldGetByID(dcgm.Short(f))
		if err != nil {
			return false
		}
		lacking := health.EntitySwitchLink // the links without it
		if f >= 700 && f <= 899 {          // dcgm_fields.h: DCGM_FI_FIRST_NVSWITCH_FIELD_ID
			lacking = health.EntityGPULink
		}
		for _, set := range sets {
			if slices.Contains(set.levels, meta.EntityLevel) && set.kind != lacking {
				set.fields, found = append(set.fields, meta.FieldID), true
			}
		}
		if found {
			requested = append(requested, meta.FieldID)
		}
		return found
	})
	supported, omitted, err := s.supportedByEngine(requested)
	if err != nil && !connectionLost(err) || len(omitted) > 0 {
		s.log.Warn("omitting fields of NVSwitches, NVLinks or CPUs that DCGM does not support", zap.Stringers("fields", omitted), zap.Error(err))
	}
	for _, set := range sets {
		set.fields = slices.DeleteFunc(set.fields, func(f dcgm.Short) bool { return !slices.Contains(supported, f) })
		if len(set.fields) > 0 {
			s.entities.sets = append(s.entities.sets, set)
		}
	}
}

// measureEntities returns the entities of the latest measurement and starts the next one when it is due. It does not wait
// for DCGM: while a measurement hangs, there are no entities, and the GPUs are polled as usual.
func (s *session) measureEntities(now time.Time) []health.Entity {
	w := &s.entities
	select {
	case latest := <-w.running:
		if !w.slow { // otherwise parts of it are old
			w.latest = latest
		}
		w.running, w.slow = nil, false
		for i := range w.latest {
			if e := &w.latest[i]; e.Kind == health.EntityGPULink {
				e.GPU = s.deviceOf(entity{dcgm.FE_GPU, e.Parent}).ID
			}
		}
	default:
	}
	switch {
	case len(w.sets) == 0:
	case w.running == nil && elapsed(w.startedAt, now, s.cfg.Interval-pollShift):
		running := make(chan []health.Entity, 1)
		go func() { running <- w.measure(s, now) }()
		w.running, w.startedAt = running, now
	case w.running != nil && elapsed(w.startedAt, now, entityTimeout):
		w.latest = nil
		if !w.slow {
			w.slow = true
			s.log.Warn("DCGM does not return from measuring NVSwitches, NVLinks or CPUs; omitting them until it does")
		}
	}
	return w.latest
}

// stopEntities waits for the measurement in progress, for as long as DCGM blocks: the connection must not close during a
// call. If the connection is usable, it removes the watches.
func (s *session) stopEntities() {
	w := &s.entities
	if w.running != nil {
		<-w.running
	}
	if s.failed == nil {
		w.unwatch(s)
	}
	s.entities = entityWatch{sets: w.sets}
}

func (w *entityWatch) unwatch(s *session) {
	if err := w.watches.close(); err != nil {
		s.log.Debug("cannot remove the watches of entities", zap.Error(err))
	}
	w.watches = watches{}
	for _, set := range w.sets {
		set.watched = nil
	}
}

// measure lists and watches the entities if that is due, and reads their values. If a set fails, its entities are absent, and
// it is tried again after inventoryInterval. An error of the connection ends the measurement: each further call could last a
// minute, and Close waits for it.
func (w *entityWatch) measure(s *session, now time.Time) (all []health.Entity) {
	lost := false
	if elapsed(w.listedAt, now, inventoryInterval) {
		w.listedAt = now
		lost = w.refresh(s)
	}
	for _, set := range w.sets {
		if !lost && set.err == nil {
			var entities []health.Entity
			if entities, set.err = set.read(); set.err == nil {
				all = append(all, entities...)
			} else {
				lost, set.watched = connectionLost(set.err), nil
			}
		}
		if text := fmt.Sprint(set.err); (set.err != nil || !lost) && set.logged.Changed(text) {
			switch {
			case set.err == nil:
				s.log.Info("measuring "+set.name, zap.Int("entities", len(set.watched)))
			case errors.Is(set.err, errNoEntities):
				s.log.Info("omitting fields of "+set.name, zap.Error(set.err))
			default:
				s.log.Warn("omitting fields of "+set.name, zap.Error(set.err))
			}
		}
	}
	return all
}

// refresh watches the entities that DCGM lists, if any have changed. It then replaces all watches, because unwatching one entity ends
// others, whose last values the cache keeps: the modules of NVSwitches and CPUs end all watches of the client (DCGM, DcgmModuleSysmon.cpp:
// ProcessUnwatchFields), and an NVLink of a GPU ends the watches of NVSwitches (DcgmCacheManager.cpp: helperNvSwitchRemoveFieldWatch). For
// the same reason, if one set fails, it watches the other sets again without it.
func (w *entityWatch) refresh(s *session) (lost bool) {
	changed := false
	for _, set := range w.sets {
		if set.listed, set.err = set.list(); connectionLost(set.err) {
			return true
		}
		if set.err != nil {
			set.listed = nil
		} else if len(set.listed) == 0 {
			set.err = errNoEntities
		}
		changed = changed || !slices.Equal(set.listed, set.watched)
	}
	for changed {
		changed = false
		w.unwatch(s)
		for _, set := range w.sets {
			if set.err != nil {
				continue
			}
			if set.err = set.watch(s, &w.watches); connectionLost(set.err) {
				return true
			}
			changed = changed || set.err != nil
		}
	}
	return false
}

var errNoEntities = errors.New("DCGM lists none")

// watch watches the listed entities. It omits entities that DCGM adds to no group, as the NVLinks of a lost GPU may be; the next refresh
// tries them again.
func (set *entitySet) watch(s *session, w *watches) error {
	g, err := s.newGroup(w, "entities")
	if err != nil {
		return err
	}
	var added []otherEntity
	for _, e := range set.listed {
		if err = dcgm.AddEntityToGroup(g, e.kind, e.id); err == nil {
			added = append(added, e)
		} else if connectionLost(err) {
			return err
		}
	}
	if len(added) == 0 {
		return err
	}
	if err = s.watchLatest(w, "entities", g, set.fields, s.cfg.Interval); err == nil {
		set.watched = added
	}
	return err
}

// read returns the watched entities with their latest values.
func (set *entitySet) read() ([]health.Entity, error) {
	index := make(map[entity]int, len(set.watched))
	entities := make([]health.Entity, len(set.watched))
	watched := make([]entity, len(set.watched))
	for i, e := range set.watched {
		index[e.entity], watched[i] = i, e.entity
		entities[i] = health.Entity{
			Kind: set.kind, ID: e.number, Parent: e.parent, Values: map[health.Field]float64{}, Texts: map[health.Field]string{},
		}
	}
	return entities, readLatest(pairs(watched), set.fields, func(v *dcgm.FieldValue_v2) {
		i, ok := index[entity{v.EntityGroupId, v.EntityID}]
		if !ok {
			return
		}
		if n, ok := lib.Float(v); ok {
			entities[i].Values[health.Field(v.FieldID)] = n
		} else if text := lib.Text(v); text != "" {
			entities[i].Texts[health.Field(v.FieldID)] = text
		}
	})
}

func listSwitches() (list []otherEntity, err error) {
	ids, err := dcgm.GetEntityGroupEntities(dcgm.FE_SWITCH)
	for _, id := range ids {
		list = append(list, otherEntity{entity{dcgm.FE_SWITCH, id}, id, 0})
	}
	return list, err
}

func listSwitchLinks() ([]otherEntity, error) { return listLinks(dcgm.FE_SWITCH) }
func listGPULinks() ([]otherEntity, error)    { return listLinks(dcgm.FE_GPU) }

// listLinks lists the NVLinks of GPUs or of NVSwitches that are in use, up or down.
func listLinks(of dcgm.Field_Entity_Group) (list []otherEntity, err error) {
	links, err := dcgm.GetNvLinkLinkStatus()
	for _, l := range links {
		if l.ParentType == of && (l.State == dcgm.LS_UP || l.State == dcgm.LS_DOWN) {
			id := uint(of) | l.Index<<8 | l.ParentId<<24 // dcgm_structs.h: dcgm_link_t
			list = append(list, otherEntity{entity{dcgm.FE_LINK, id}, l.Index, l.ParentId})
		}
	}
	return list, err
}

// listCPUs lists NVIDIA's CPUs. DCGM returns an error on a node with other CPUs.
func listCPUs() (list []otherEntity, err error) {
	h, err := dcgm.GetCPUHierarchy()
	for _, cpu := range h.CPUs[:min(h.NumCPUs, dcgm.MAX_NUM_CPUS)] {
		list = append(list, otherEntity{entity{dcgm.FE_CPU, cpu.CPUID}, cpu.CPUID, 0})
	}
	return list, err
}

func listCores() (list []otherEntity, err error) {
	h, err := dcgm.GetCPUHierarchy()
	for _, cpu := range h.CPUs[:min(h.NumCPUs, dcgm.MAX_NUM_CPUS)] {
		for i, mask := range cpu.OwnedCores {
			for ; mask != 0; mask &= mask - 1 {
				id := uint(i*64 + bits.TrailingZeros64(mask))
				list = append(list, otherEntity{entity{dcgm.FE_CPU_CORE, id}, id, cpu.CPUID})
			}
		}
	}
	return list, err
}
