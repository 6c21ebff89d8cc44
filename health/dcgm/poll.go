//go:build cgo && linux

package dcgm

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/NVIDIA/go-dcgm/pkg/dcgm"
	"go.uber.org/zap"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/health/dcgm/lib"
)

const (
	confirmDelay  = 2 * time.Second // how long a changed hierarchy must last before it is used
	retryInterval = time.Minute     // between attempts to find a missing driver or a GPU's UUID
	statusTimeout = 5 * time.Second // for the statuses of all GPUs; what is not read by then stays unknown

	// pollShift is how much earlier than expected a poll may come, because the monitor follows DCGM's measurements. With it, what is read in
	// each nth poll is not read one poll later.
	pollShift = 250 * time.Millisecond
)

// Poll measures every device. It reads DCGM's cache and does not call the driver, but blocks for as long as DCGM does;
// nothing can interrupt it. An error ends the session: the engine died, is blind, or its thread hangs.
func (s *session) Poll(ctx context.Context) (*health.Reading, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := s.usable(); err != nil {
		return nil, err
	}
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	reading, err := s.poll()
	if err != nil {
		s.failed = err
	}
	return reading, err
}

// poll reads values before the statuses: go-dcgm hides the errors of status calls, and with a hung engine each would last a minute.
func (s *session) poll() (*health.Reading, error) {
	now := s.now()
	full := elapsed(s.fullAt, now, s.cfg.Interval-pollShift)
	if full || s.inventoryDirty || !s.candidateSince.IsZero() || s.inventoryPending {
		rebuilt, err := s.refreshInventory(now)
		if err != nil {
			return nil, err
		}
		full = full || rebuilt
	}
	if err := s.readValues(now, full); err != nil {
		// DCGM refuses an entity that was just removed. With the current entities the read must succeed.
		if connectionLost(err) {
			return nil, err
		}
		if again := s.rebuildAndRead(now); again != nil {
			return nil, errors.Join(err, again)
		}
		full = true
	}
	if full {
		s.fullAt = now
	}
	if err := s.checkStaleness(now, full); err != nil {
		return nil, err
	}
	checked := full && s.runHealthCheck()
	if s.updatePresence(s.hierarchy.gpus) {
		s.fullAt, s.wholeAt = time.Time{}, time.Time{} // replace the earlier values soon
	}
	r := s.reading(now, checked)
	r.Entities = s.measureEntities(now)
	return r, nil
}

// elapsed reports whether d has passed since then. It is true if then is zero or, after the clock was set back, in the
// future.
func elapsed(then, now time.Time, d time.Duration) bool {
	return then.IsZero() || now.Before(then) || now.Sub(then) >= d
}

// connectionLost reports whether an error makes the connection unusable (OBSERVED.md#dead-engine,
// OBSERVED.md#hung-engine).
func connectionLost(err error) bool {
	results := []int{dcgm.DCGM_ST_CONNECTION_NOT_VALID, dcgm.DCGM_ST_TIMEOUT, dcgm.DCGM_ST_UNINITIALIZED}
	return err != nil && slices.ContainsFunc(results, func(r int) bool { return isResult(err, r) })
}

// updatePresence reads the statuses of the GPUs and reports whether the presence of any has changed.
func (s *session) updatePresence(gpus []uint) (changed bool) {
	started := s.now()
	for _, id := range gpus {
		p := s.presence[id]
		if p == nil {
			p = &presence{}
			s.presence[id] = p
		}
		status := dcgm.EntityStatusUnknown
		if s.now().Sub(started) < statusTimeout {
			status = dcgm.GetGPUStatus(id)
		}
		presenceChanged, returned := p.update(status, started)
		changed = changed || presenceChanged
		if returned {
			s.inventoryDirty = true
			delete(s.pendingSince, id) // its driver was bound again
		}
	}
	return changed
}

// reading returns the result of a successful poll. checked means that the incidents are of this poll; they are not for a GPU that DCGM
// cannot measure (OBSERVED.md#blind-engine).
func (s *session) reading(now time.Time, checked bool) *health.Reading {
	r := &health.Reading{
		Devices: s.devices, Samples: make([]health.Sample, len(s.state)), Versions: s.versions, Measured: s.measured,
		Checks: s.checks.state(), Incidents: s.nodeIncidents, Unnamed: s.unnamedInstances,
	}
	for i := range s.state {
		st := &s.state[i]
		rows := s.takeRows(st, now)
		stale := s.stale[st.device.gpu] && s.reaches(st.device.gpu)
		if stale {
			st.values = nil
		} else {
			st.merge(s.lastXID(st))
		}
		r.Samples[i] = health.Sample{
			Device: st.device.ID, At: now, Presence: s.presence[st.device.gpu].current, Stale: stale, Values: st.values,
			Rows: rows, RowsWhole: s.wholeRead && st.watched,
		}
		if st.device.Kind == health.KindGPU && r.Checks.Status != health.ChecksDown {
			r.Samples[i].Incidents = s.incidents[st.device.gpu]
			r.Samples[i].Checked = checked && !s.unmeasured(st.device.gpu)
		}
	}
	return r
}

// maxValues limits the values of one call. They fit DCGM's message size of 4 MiB (dcgm_structs_internal.h:
// dcgmEntitiesGetLatestValues_v4), and up to this number go-dcgm reuses its memory, 4 KiB per value, for the next call
// (poolCapacityThreshold).
const maxValues = 256

// maxFields limits the fields of a field group and of one call. dcgm_structs.h has 128
// (DCGM_MAX_FIELD_IDS_PER_FIELD_GROUP); dcgm-exporter's tests call 127 the limit.
const maxFields = 127

// readLatest reads the newest sample of each field of each entity from DCGM's cache and passes it to add, which must not
// retain it. It never uses DCGM_FV_FLAG_LIVE_DATA, which calls the driver (OBSERVED.md#live-reads).
func readLatest(entities []dcgm.GroupEntityPair, fields []dcgm.Short, add func(*dcgm.FieldValue_v2)) error {
	for chunk := range slices.Chunk(fields, maxFields) {
		for part := range slices.Chunk(entities, maxValues/len(chunk)) {
			values, err := dcgm.EntitiesGetLatestValues(part, chunk, 0)
			if err != nil {
				return fmt.Errorf("read values: %w", err)
			}
			for i := range values {
				add(&values[i])
			}
		}
	}
	return nil
}

// fieldValue is the value of a field in the current poll.
type fieldValue struct {
	field health.Field
	value float64
	ok    bool // false: blank
}

// deviceState is what a session keeps of a device between polls.
type deviceState struct {
	device      dcgmDevice
	values      map[health.Field]float64 // shared with readings: immutable
	read        []fieldValue             // in this poll; the memory is reused
	latest      health.XIDRow            // the newest of the latest values of its entities, zero if there is none
	xidReadable bool                     // field 230 of the device's entities was readable in this poll, also if it is blank
	rows        []health.XIDRow          // of the device's entities in this poll
	watched     bool                     // DCGM watches its entity
}

// readValues reads the health fields, in a full poll the metric fields too, and then the rows of field 230.
func (s *session) readValues(now time.Time, full bool) error {
	w := s.watches
	for i := range s.state {
		st := &s.state[i]
		st.read, st.latest, st.xidReadable = st.read[:0], health.XIDRow{}, st.watched
	}
	for _, g := range s.gpuStaleness {
		g.healthCount, g.allCount = readCount{}, readCount{}
	}
	s.wholeRead, s.measured = false, time.Time{}
	s.choosePaceGPU()
	xidField := w.computeFields[:min(1, len(w.computeFields))]
	gpuFields, computeFields := w.lightFields, xidField
	if full {
		gpuFields, computeFields = w.gpuFields, w.computeFields
	}
	if err := readLatest(w.gpuPairs, gpuFields, s.addValue); err != nil {
		return err
	}
	if err := readLatest(w.computePairs, computeFields, s.addValue); err != nil {
		return err
	}
	if err := readLatest(w.instancePairs, xidField, s.addValue); err != nil {
		return err
	}
	if full {
		s.logUnsupported()
	}
	s.countValues()
	if len(w.gpus) == 0 {
		return nil
	}
	return s.readXIDs(now, full)
}

// addValue adds a value to the devices of its entity.
func (s *session) addValue(v *dcgm.FieldValue_v2) {
	e := entity{v.EntityGroupId, v.EntityID}
	n, ok := lib.Float(v)
	if v.FieldID == fieldXID {
		s.addLatestXID(e, v)
		return
	}
	if e.kind == dcgm.FE_GPU {
		if v.FieldID == paceField && len(s.paceGPU) == 1 && e.id == s.paceGPU[0].EntityId {
			s.measured = measuredAt(v)
		}
		if v.FieldID == fieldRecoveryAction && ok {
			if old, known := s.actions[e]; known && old != n {
				s.wholeAt = time.Time{} // a row of the kernel log may be the cause
			}
			s.actions[e] = n
		}
		s.countValue(e.id, v, ok)
	}
	for _, i := range s.devicesOf[e] {
		st := &s.state[i]
		st.read = append(st.read, fieldValue{health.Field(v.FieldID), n, ok})
	}
}

// countValue counts a value of a GPU for checkStaleness, and notes an unsupported field.
func (s *session) countValue(gpu uint, v *dcgm.FieldValue_v2, ok bool) {
	read := readCount{requested: 1}
	switch {
	case ok:
		read = readCount{requested: 1, measured: 1, timeSum: v.TS, newest: v.TS}
	case lib.NotSupported(v):
		if s.unsupported != nil {
			s.unsupported[v.FieldID] = append(s.unsupported[v.FieldID], gpu)
		}
		return
	}
	g := s.gpuStaleness[gpu]
	if g == nil || !s.reaches(gpu) {
		return
	}
	g.allCount.add(read)
	if slices.Contains(s.watches.lightFields, v.FieldID) {
		g.healthCount.add(read)
	}
}

// logUnsupported logs the fields that GPUs do not support, in the first full poll of an inventory, if they differ from the fields logged
// last.
func (s *session) logUnsupported() {
	if s.unsupported == nil {
		return
	}
	var fields []string
	for _, field := range slices.Sorted(maps.Keys(s.unsupported)) {
		gpus := slices.Sorted(slices.Values(s.unsupported[field]))
		list := strings.Trim(fmt.Sprint(slices.Compact(gpus)), "[]")
		fields = append(fields, fmt.Sprintf("%d (GPU %s)", field, strings.ReplaceAll(list, " ", ", ")))
	}
	s.unsupported = nil
	if len(fields) > 0 && !slices.Equal(fields, s.lastUnsupported) {
		s.log.Info("omitting fields that GPUs do not support", zap.Strings("fields", fields))
	}
	s.lastUnsupported = fields
}

// merge takes over the values of this poll and field 230. If any differs, it creates a new map, because readings share the old one.
func (st *deviceState) merge(xid fieldValue) {
	read := append(st.read, xid)
	st.read = read[:len(read)-1]
	changed := func(v fieldValue) bool {
		old, existed := st.values[v.field]
		return existed != v.ok || v.ok && old != v.value
	}
	if !slices.ContainsFunc(read, changed) {
		return
	}
	st.values = maps.Clone(st.values)
	if st.values == nil {
		st.values = make(map[health.Field]float64, len(read))
	}
	for _, v := range read {
		if v.ok {
			st.values[v.field] = v.value
		} else {
			delete(st.values, v.field)
		}
	}
}
