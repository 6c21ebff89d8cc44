//go:build cgo && linux

package dcgm

import (
	"errors"
	"math/bits"
	"slices"
	"time"

	"github.com/NVIDIA/go-dcgm/pkg/dcgm"
	"go.uber.org/zap"

	"github.com/gpu-node-agent/gpu-node-agent/health"
)

const (
	// entityTimeout is how long a poll waits for the entities beside the GPUs. DCGM's modules for them load on first use,
	// and each asks a library or a kernel interface of its own, which may hang.
	entityTimeout = 500 * time.Millisecond

	maxGroup = 1024 // entities of a group (dcgm_structs.h: DCGM_GROUP_MAX_ENTITIES_V2)
)

// otherEntity is an NVSwitch, an NVLink, a CPU or a core, by DCGM's number.
type otherEntity struct {
	entity
	port   uint   // of an NVLink
	parent entity // the GPU or NVSwitch of an NVLink, the CPU of a core
}

// module is a part of DCGM that measures entities beside the GPUs. If it fails, the values of its entities are absent, and
// it is asked again after inventoryInterval. Its watches are removed together: when a client unwatches one entity, the modules
// of NVSwitches and CPUs end all watches of that client (DCGM, DcgmModuleSysmon.cpp: ProcessUnwatchFields). The cache keeps
// the last values then.
type module struct {
	name   string  // of its entities
	ends   *module // its watches may end with those of this one; nil if none do
	list   func() ([]otherEntity, error)
	fields map[dcgm.Field_Entity_Group][]dcgm.Short // requested, by kind of entity

	listedAt time.Time
	listed   []otherEntity // those that are watched
	watched  map[dcgm.Field_Entity_Group][]dcgm.Short
	watches  watches
	err      error  // of the latest attempt to list, watch or read them
	lastErr  string // as logged

	loggedFields bool
}

// entityWatch measures the entities beside the GPUs, for metrics only. Nothing is listed, loaded or watched without a field
// of theirs in Config.Fields.
type entityWatch struct {
	modules []*module
	latest  []health.Entity // shared with readings: immutable

	running   chan []health.Entity // receives the result of the measurement in progress; nil if there is none
	startedAt time.Time            // of the latest measurement
	slow      bool                 // it takes longer than Config.Interval
}

// takeEntityFields moves the fields of entities beside the GPUs from the configuration to the modules that measure them.
func (s *session) takeEntityFields() {
	switches := &module{name: "NVSwitches"}
	switches.list = switches.listSwitches
	// To unwatch an NVLink, DCGM sends the module of NVSwitches the client only (DcgmCacheManager.cpp: helperNvSwitchRemoveFieldWatch).
	links := &module{name: "NVLinks of GPUs", list: func() ([]otherEntity, error) { return listLinks(dcgm.FE_GPU) }, ends: switches}
	cpus := &module{name: "CPUs", list: listCPUs}
	take := func(m *module, f health.Field, kinds ...dcgm.Field_Entity_Group) bool {
		if m.fields == nil {
			m.fields = map[dcgm.Field_Entity_Group][]dcgm.Short{}
		}
		for _, kind := range kinds {
			m.fields[kind] = append(m.fields[kind], dcgm.Short(f))
		}
		return true
	}
	s.cfg.Fields = slices.DeleteFunc(slices.Clone(s.cfg.Fields), func(f health.Field) bool {
		meta, err := dcgm.FieldGetByID(dcgm.Short(f))
		switch {
		case err != nil:
			return false
		case meta.EntityLevel == dcgm.FE_SWITCH:
			return take(switches, f, dcgm.FE_SWITCH)
		case meta.EntityLevel == dcgm.FE_LINK && f >= 700 && f <= 899: // dcgm_fields.h: DCGM_FI_FIRST_NVSWITCH_FIELD_ID
			return take(switches, f, dcgm.FE_LINK)
		case meta.EntityLevel == dcgm.FE_LINK:
			return take(links, f, dcgm.FE_LINK)
		case meta.EntityLevel == dcgm.FE_CPU:
			return take(cpus, f, dcgm.FE_CPU)
		case meta.EntityLevel == dcgm.FE_CPU_CORE: // DCGM averages it over the cores of a CPU
			return take(cpus, f, dcgm.FE_CPU, dcgm.FE_CPU_CORE)
		}
		return false
	})
	for _, m := range []*module{links, switches, cpus} { // a module before the one that it ends
		if m.fields != nil {
			s.entities.modules = append(s.entities.modules, m)
		}
	}
}

// measureEntities returns the entities of the latest full poll. It never waits longer than entityTimeout, and does not wait
// again for a measurement that takes longer: meanwhile there are no entities, and the GPUs are polled as usual.
func (s *session) measureEntities(now time.Time, full bool) []health.Entity {
	w := &s.entities
	if len(w.modules) == 0 || !full && w.running == nil {
		return w.latest
	}
	var limit time.Duration
	if w.running == nil {
		gpus := map[uint]health.DeviceID{}
		for _, id := range s.hierarchy.gpus {
			gpus[id] = s.lastDevices[entity{dcgm.FE_GPU, id}].ID
		}
		running := make(chan []health.Entity, 1)
		go func() { running <- s.measureModules(now, gpus) }()
		w.running, w.startedAt, limit = running, now, entityTimeout
	}
	timer := time.NewTimer(limit)
	defer timer.Stop()
	select {
	case w.latest = <-w.running:
		w.running, w.slow = nil, false
	case <-timer.C:
		w.latest = nil
		if !w.slow && now.Sub(w.startedAt) >= s.cfg.Interval { // the first use of a module may take some seconds
			w.slow = true
			s.log.Warn("DCGM does not return from measuring NVSwitches, NVLinks or CPUs; omitting them until it does")
		}
	}
	return w.latest
}

// stopEntities waits for the measurement in progress, for as long as DCGM blocks. If the connection stays open, it removes
// the watches.
func (s *session) stopEntities() {
	w := &s.entities
	if w.running != nil {
		<-w.running
		w.running = nil
	}
	w.latest = nil
	for _, m := range w.modules {
		if s.failed == nil {
			m.unwatch(s)
		}
		m.listed, m.listedAt, m.watches = nil, time.Time{}, watches{}
	}
}

// measureModules runs beside the polls of the GPUs and uses only the fields of s that are safe for that.
func (s *session) measureModules(now time.Time, gpus map[uint]health.DeviceID) (all []health.Entity) {
	for _, m := range s.entities.modules {
		entities, err := m.measure(s, now, gpus)
		all = append(all, entities...)
		text := ""
		if err != nil {
			text = err.Error()
		}
		switch {
		case text == m.lastErr:
		case errors.Is(err, errNoEntities):
			s.log.Info("omitting fields of "+m.name, zap.Error(err))
		case err != nil:
			s.log.Warn("omitting fields of "+m.name, zap.Error(err))
		default:
			s.log.Info("measuring "+m.name+" again", zap.Int("entities", len(m.listed)))
		}
		m.lastErr = text
	}
	return all
}

var errNoEntities = errors.New("DCGM lists none")

// measure lists and watches the entities if that is due, and reads their values.
func (m *module) measure(s *session, now time.Time, gpus map[uint]health.DeviceID) (entities []health.Entity, err error) {
	if elapsed(m.listedAt, now, inventoryInterval) {
		m.listedAt = now
		m.err = m.refresh(s)
	}
	if m.err == nil {
		entities, m.err = m.read(gpus)
	}
	if m.err != nil {
		m.unwatch(s)
	}
	return entities, m.err
}

// refresh watches the entities that DCGM lists, if they have changed.
func (m *module) refresh(s *session) error {
	found, err := m.list()
	if err != nil {
		return err
	}
	found = slices.DeleteFunc(found, func(e otherEntity) bool { return len(m.fields[e.kind]) == 0 })
	if len(found) == 0 {
		return errNoEntities
	}
	if slices.Equal(found, m.listed) {
		return nil
	}
	return m.watch(s, found)
}

// read returns the watched entities with their latest values.
func (m *module) read(gpus map[uint]health.DeviceID) ([]health.Entity, error) {
	index := make(map[entity]int, len(m.listed))
	entities := make([]health.Entity, len(m.listed))
	for i, e := range m.listed {
		index[e.entity] = i
		entities[i] = e.describe(gpus)
	}
	for kind, fields := range m.watched {
		err := readLatest(pairs(m.ofKind(kind)), fields, func(v *dcgm.FieldValue_v2) {
			i, ok := index[entity{v.EntityGroupId, v.EntityID}]
			if !ok {
				return
			}
			if n, ok := floatValue(v); ok {
				entities[i].Values[health.Field(v.FieldID)] = n
			} else if text := textValue(v); text != "" {
				entities[i].Texts[health.Field(v.FieldID)] = text
			}
		})
		if err != nil {
			return nil, err
		}
	}
	return entities, nil
}

// ofKind returns the watched entities of a kind.
func (m *module) ofKind(kind dcgm.Field_Entity_Group) (entities []entity) {
	for _, e := range m.listed {
		if e.kind == kind {
			entities = append(entities, e.entity)
		}
	}
	return entities
}

// watch replaces the watches by those of the entities found. It omits the entities that DCGM adds to no group, such as the
// NVLinks of a lost GPU may be; it tries them again the next time.
func (m *module) watch(s *session, found []otherEntity) error {
	m.unwatch(s)
	m.watched = map[dcgm.Field_Entity_Group][]dcgm.Short{}
	added := map[entity]bool{}
	for kind, fields := range m.fields {
		of := slices.DeleteFunc(slices.Clone(found), func(e otherEntity) bool { return e.kind != kind })
		if len(of) == 0 {
			continue
		}
		fields, omitted, err := s.supportedByEngine(fields)
		if err != nil {
			return err
		}
		if len(omitted) > 0 && !m.loggedFields {
			m.loggedFields = true
			s.log.Warn("omitting fields that DCGM does not support", zap.Stringers("fields", omitted))
		}
		m.watched[kind] = fields
		for part := range slices.Chunk(of, maxGroup) {
			if err := m.watchPart(s, part, fields, added); err != nil {
				return err
			}
		}
	}
	m.listed = slices.DeleteFunc(found, func(e otherEntity) bool { return !added[e.entity] })
	return nil
}

// watchPart watches entities of one kind and sets those that DCGM has added to a group.
func (m *module) watchPart(s *session, entities []otherEntity, fields []dcgm.Short, added map[entity]bool) error {
	g, err := s.newGroup(&m.watches, "entities")
	if err != nil {
		return err
	}
	before := len(added)
	for _, e := range entities {
		if err = dcgm.AddEntityToGroup(g, e.kind, e.id); err == nil {
			added[e.entity] = true
		}
	}
	if len(added) == before {
		return err
	}
	return s.watchLatest(&m.watches, "entities", g, fields, s.cfg.Interval)
}

func (m *module) unwatch(s *session) {
	if m.ends != nil && len(m.watches.cleanup) > 0 {
		m.ends.unwatch(s)
		m.ends.listedAt = time.Time{}
	}
	if err := m.watches.close(); err != nil {
		s.log.Debug("cannot remove the watches of entities", zap.String("entities", m.name), zap.Error(err))
	}
	m.listed, m.watches = nil, watches{}
}

// describe returns an entity without values.
func (e otherEntity) describe(gpus map[uint]health.DeviceID) health.Entity {
	h := health.Entity{ID: e.id, Parent: e.parent.id, Values: map[health.Field]float64{}, Texts: map[health.Field]string{}}
	switch e.kind {
	case dcgm.FE_SWITCH:
		h.Kind = health.EntityNVSwitch
	case dcgm.FE_LINK:
		h.Kind, h.ID = health.EntitySwitchLink, e.port
		if e.parent.kind == dcgm.FE_GPU {
			h.Kind, h.GPU = health.EntityGPULink, gpus[e.parent.id]
		}
	case dcgm.FE_CPU:
		h.Kind = health.EntityCPU
	case dcgm.FE_CPU_CORE:
		h.Kind = health.EntityCPUCore
	}
	return h
}

// listSwitches lists the NVSwitches, their links, or both, depending on the fields.
func (m *module) listSwitches() (list []otherEntity, err error) {
	if len(m.fields[dcgm.FE_LINK]) > 0 {
		if list, err = listLinks(dcgm.FE_SWITCH); err != nil {
			return nil, err
		}
	}
	if len(m.fields[dcgm.FE_SWITCH]) > 0 {
		ids, err := dcgm.GetEntityGroupEntities(dcgm.FE_SWITCH)
		if err != nil {
			return nil, err
		}
		slices.Sort(ids)
		for _, id := range ids {
			list = append(list, otherEntity{entity: entity{dcgm.FE_SWITCH, id}})
		}
	}
	return list, nil
}

// listLinks lists the NVLinks of GPUs or of NVSwitches that are in use, up or down.
func listLinks(of dcgm.Field_Entity_Group) (list []otherEntity, err error) {
	links, err := dcgm.GetNvLinkLinkStatus()
	for _, l := range links {
		if l.ParentType == of && (l.State == dcgm.LS_UP || l.State == dcgm.LS_DOWN) {
			// dcgm_structs.h: dcgm_link_t
			id := uint(l.ParentType) | l.Index<<8 | l.ParentId<<24
			list = append(list, otherEntity{entity{dcgm.FE_LINK, id}, l.Index, entity{l.ParentType, l.ParentId}})
		}
	}
	return list, err
}

// listCPUs lists NVIDIA's CPUs with their cores. DCGM returns an error on a node with other CPUs.
func listCPUs() (list []otherEntity, err error) {
	h, err := dcgm.GetCPUHierarchy()
	if err != nil {
		return nil, err
	}
	for _, cpu := range h.CPUs[:min(h.NumCPUs, dcgm.MAX_NUM_CPUS)] {
		parent := entity{dcgm.FE_CPU, cpu.CPUID}
		list = append(list, otherEntity{entity: parent})
		for i, mask := range cpu.OwnedCores {
			for ; mask != 0; mask &= mask - 1 {
				core := entity{dcgm.FE_CPU_CORE, uint(i*64 + bits.TrailingZeros64(mask))}
				list = append(list, otherEntity{entity: core, parent: parent})
			}
		}
	}
	return list, nil
}
