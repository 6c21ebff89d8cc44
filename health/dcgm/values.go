//go:build cgo && linux

package dcgm

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/NVIDIA/go-dcgm/pkg/dcgm"
	"go.uber.org/zap"

	"github.com/gpu-node-agent/gpu-node-agent/health"
)

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
	xid         fieldValue               // the newest XID in this poll, of the device's entities
	xidAt       int64
	xidReadable bool     // field 230 of the device's entities was readable in this poll, also if it is blank
	hadXID      bool     // it had an XID in this session
	rows        []xidRow // XIDs in this poll
	watched     bool     // DCGM watches its entity
}

// readValues reads the health fields, in a full poll the metric fields too, and then the XIDs.
func (s *session) readValues(now time.Time, full bool) error {
	w := s.watches
	for i := range s.state {
		st := &s.state[i]
		st.read, st.xidAt = st.read[:0], 0
		st.xid, st.xidReadable = fieldValue{field: health.FieldXID}, st.watched
	}
	for _, g := range s.gpuStaleness {
		g.healthCount, g.allCount = readCount{}, readCount{}
	}
	s.xidStreamRead, s.measured = false, time.Time{}
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
	// Not in each poll: go-dcgm allocates a mebibyte for each read of the stream.
	if len(w.gpus) > 0 && (full || s.xidsDue || s.latestMayHideXIDs(now) && elapsed(s.xidsAt, now, xidStreamInterval)) {
		return s.readXIDs(now)
	}
	return nil
}

// addValue adds a value to the devices of its entity.
func (s *session) addValue(v *dcgm.FieldValue_v2) {
	e := entity{v.EntityGroupId, v.EntityID}
	n, ok := floatValue(v)
	if v.FieldID == fieldXID {
		row, isXID := parseXID(v)
		if isXID && row != s.latestXID[e] {
			s.latestXID[e], s.xidsDue = row, true
		}
		s.collectXID(e, v)
		for _, i := range s.devicesOf[e] {
			if st := &s.state[i]; ok && v.TS >= st.xidAt && (!isXID || !s.history.ofPredecessor(st.device.ID, row)) {
				st.xid, st.xidAt = fieldValue{health.FieldXID, n, true}, v.TS
				st.hadXID = st.hadXID || isXID
			}
			if isNotSupported(v) || v.Status == dcgm.DCGM_ST_NOT_WATCHED {
				s.state[i].xidReadable = false
			}
		}
		return
	}
	if e.kind == dcgm.FE_GPU {
		if v.FieldID == paceField && len(s.paceGPU) == 1 && e.id == s.paceGPU[0].EntityId {
			s.measured = measuredAt(v)
		}
		s.countValue(e.id, v, ok)
	}
	for _, i := range s.devicesOf[e] {
		st := &s.state[i]
		st.read = append(st.read, fieldValue{health.Field(v.FieldID), n, ok})
	}
}

// addNoXID sets field 230 to 0 on a device without an XID: DCGM has no value then. DCGM never resets the field, so a blank
// after an XID means that its samples are lost.
func (s *session) addNoXID(st *deviceState) {
	g, p := s.gpuStaleness[st.device.gpu], s.presence[st.device.gpu].current
	if st.xidReadable && !st.xid.ok && !st.hadXID && p <= health.Present && g != nil && g.everMeasured() {
		st.xid = fieldValue{health.FieldXID, 0, true}
	}
}

// countValue counts a value of a GPU for checkStaleness, and notes an unsupported field.
func (s *session) countValue(gpu uint, v *dcgm.FieldValue_v2, ok bool) {
	read := readCount{requested: 1}
	switch {
	case ok:
		read = readCount{requested: 1, measured: 1, timeSum: v.TS, newest: v.TS}
	case isNotSupported(v):
		if s.unsupported != nil {
			s.unsupported[v.FieldID] = append(s.unsupported[v.FieldID], gpu)
		}
		return
	}
	g := s.gpuStaleness[gpu]
	if g == nil || !reachable(s.presence[gpu].status) {
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

// merge takes over the values of this poll. If any differs, it creates a new map, because readings share the old one.
func (st *deviceState) merge() {
	read := append(st.read, st.xid)
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
