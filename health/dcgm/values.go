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

// maxValues is how many values one call may ask for. DCGM answers in a message of 4 MiB at most
// (dcgm_structs_internal.h: dcgmEntitiesGetLatestValues_v4), which so many values fit in whatever they
// are; and go-dcgm keeps its memory, 4 KiB a value, for the next call up to here (poolCapacityThreshold).
const maxValues = 256

// maxFields is how many fields a field group has and one call reads at most. dcgm_structs.h says 128
// (DCGM_MAX_FIELD_IDS_PER_FIELD_GROUP); dcgm-exporter's tests call 127 the limit.
const maxFields = 127

// latest reads the newest sample of each field of each entity from DCGM's cache and hands them to take,
// which must not keep them. Never DCGM_FV_FLAG_LIVE_DATA: that asks the driver, which can hang, and
// fails altogether over field 230 (16).
func latest(entities []dcgm.GroupEntityPair, fields []dcgm.Short, take func(*dcgm.FieldValue_v2)) error {
	for some := range slices.Chunk(fields, maxFields) {
		for part := range slices.Chunk(entities, maxValues/len(some)) {
			values, err := dcgm.EntitiesGetLatestValues(part, some, 0)
			if err != nil {
				return fmt.Errorf("read values: %w", err)
			}
			for i := range values {
				take(&values[i])
			}
		}
	}
	return nil
}

// measured is one field of one device, as just read.
type measured struct {
	field health.Field
	value float64
	ok    bool // false: blank
}

// deviceState is what a session keeps of a device from poll to poll.
type deviceState struct {
	device  located
	values  map[health.Field]float64 // given away: not modified
	now     []measured               // read in this poll; the memory is used again
	xid     measured                 // the newest XID read in this poll, of the entities that the device is
	xidAt   int64
	rows    []xidRow // XIDs read in this poll
	watched bool     // DCGM has its entity in the groups
}

// readValues reads the fields of health, and at a full poll the metrics too, and then the XIDs.
func (s *session) readValues(now time.Time, full bool) error {
	w := s.watches
	for i := range s.state {
		st := &s.state[i]
		st.now, st.xidAt = st.now[:0], 0
		st.xid = measured{field: health.FieldXID}
	}
	for _, g := range s.sights {
		g.judged, g.all = readCount{}, readCount{}
	}
	s.xidsWhole = false
	gpuFields, computeFields := w.lightFields, w.computeFields[:min(1, len(w.computeFields))]
	if full {
		gpuFields, computeFields = w.gpuFields, w.computeFields
	}
	if err := latest(w.gpuPairs, gpuFields, s.take); err != nil {
		return err
	}
	if err := latest(w.computePairs, computeFields, s.take); err != nil {
		return err
	}
	if err := latest(w.instancePairs, w.computeFields[:min(1, len(w.computeFields))], s.take); err != nil {
		return err
	}
	if full {
		s.sayUnsupported()
	}
	// Not at each poll: go-dcgm takes a mebibyte for each reading, however small.
	if len(w.gpus) > 0 && (full || s.xidsDue || s.hidesRows(now) && passed(s.xidsAt, now, xidsEvery)) {
		return s.readXIDs(now)
	}
	return nil
}

// take sorts one value to the devices that it is of.
func (s *session) take(v *dcgm.FieldValue_v2) {
	e := entity{v.EntityGroupId, v.EntityID}
	n, ok := number(v)
	if v.FieldID == fieldXID {
		row, isXID := xidOf(v)
		if isXID && row != s.latestXID[e] {
			s.latestXID[e], s.xidsDue = row, true
		}
		s.noteXID(e, v)
		for _, i := range s.owners[e] {
			if st := &s.state[i]; ok && v.TS >= st.xidAt && (!isXID || !s.ledger.foreign(st.device.ID, row)) {
				st.xid, st.xidAt = measured{health.FieldXID, n, true}, v.TS
			}
		}
		return
	}
	if e.kind == dcgm.FE_GPU {
		s.count(e.id, v, ok)
	}
	for _, i := range s.owners[e] {
		st := &s.state[i]
		st.now = append(st.now, measured{health.Field(v.FieldID), n, ok})
	}
}

// count counts a value of a GPU for checkSight, and takes a note of one that there never will be.
func (s *session) count(gpu uint, v *dcgm.FieldValue_v2, ok bool) {
	read := readCount{asked: 1}
	switch {
	case ok:
		read = readCount{asked: 1, answered: 1, times: v.TS, newest: v.TS}
	case notSupported(v):
		if s.unsupported != nil {
			s.unsupported[v.FieldID] = append(s.unsupported[v.FieldID], gpu)
		}
		return
	}
	g := s.sights[gpu]
	if g == nil || !reachable(s.presence[gpu].status) {
		return
	}
	g.all.add(read)
	if slices.Contains(s.watches.lightFields, v.FieldID) {
		g.judged.add(read)
	}
}

// sayUnsupported says, once for each inventory that differs in it, which fields which GPUs do not have. They
// are absent there.
func (s *session) sayUnsupported() {
	if s.unsupported == nil {
		return
	}
	var left []string
	for _, field := range slices.Sorted(maps.Keys(s.unsupported)) {
		left = append(left, onGPUs(field, s.unsupported[field]))
	}
	s.unsupported = nil
	if len(left) > 0 && !slices.Equal(left, s.saidUnsupported) {
		s.log.Info("fields that a GPU does not support are left out there", zap.Strings("fields", left))
	}
	s.saidUnsupported = left
}

// onGPUs is "449 (GPU 0, 1)".
func onGPUs(field dcgm.Short, gpus []uint) string {
	slices.Sort(gpus)
	return fmt.Sprintf("%d (GPU %s)", field, strings.Join(strings.Fields(strings.Trim(fmt.Sprint(slices.Compact(gpus)), "[]")), ", "))
}

// merge puts what was just read into the values: the same map if nothing differs, for a map
// that was given away is never modified.
func (st *deviceState) merge() {
	read := append(st.now, st.xid)
	st.now = read[:len(read)-1]
	for _, m := range read {
		if old, had := st.values[m.field]; had != m.ok || (m.ok && old != m.value) {
			st.values = maps.Clone(st.values)
			if st.values == nil {
				st.values = make(map[health.Field]float64, len(read))
			}
			for _, m := range read {
				if m.ok {
					st.values[m.field] = m.value
				} else {
					delete(st.values, m.field)
				}
			}
			break
		}
	}
}
