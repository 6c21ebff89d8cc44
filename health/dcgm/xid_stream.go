//go:build cgo && linux

package dcgm

import (
	"cmp"
	"context"
	"encoding/binary"
	"fmt"
	"slices"
	"time"

	"github.com/NVIDIA/go-dcgm/pkg/dcgm"
	"go.uber.org/zap"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/health/dcgm/lib"
)

// How often the whole stream of XIDs is read. A read of its window, from xidWindow before its newest row on, costs little, but can miss a
// row that DCGM sorts before it (OBSERVED.md#kernel-log-xid, OBSERVED.md#sample-order).
const (
	xidWindow = time.Minute

	// wholeInterval is how often if nothing suggests that the window lacks a row.
	wholeInterval = 5*time.Minute - pollShift
	// wholeIfHidden is how often while an XID may arrive without changing a latest value: see latestMayHideXIDs.
	wholeIfHidden = time.Second - pollShift
)

const (
	// maxSampleAge is the maximum age of the newest sample of the health fields, which are sampled once a second.
	maxSampleAge = 1500 * time.Millisecond
	// kernelLogWindow is how long after connecting rows of the old kernel log may arrive: a starting engine reads /dev/kmsg
	// from its beginning within seconds (OBSERVED.md#kernel-log). Until then, each poll reads the whole stream: a later one would
	// take these rows for new.
	kernelLogWindow = 10 * time.Second
)

// latestMayHideXIDs reports whether an XID may arrive without becoming the latest value of its entity, as after the
// engine's clock was set back (OBSERVED.md#sample-order). Then the samples of all fields stand still or, if watched again,
// are older than before.
func (s *session) latestMayHideXIDs(now time.Time) bool {
	age := s.allGPUs.health
	age.update(s.allGPUs.healthCount, now)
	return !age.measured || elapsed(age.changedAt, now, maxSampleAge) || s.history.steppedBack()
}

// parseXID returns the XID in a value of field 230; ok is false for a blank, a row without data, and 0, which means none.
func parseXID(v *dcgm.FieldValue_v2) (row health.XIDRow, ok bool) {
	code, ok := lib.Int(v)
	ok = ok && v.FieldID == fieldXID && code > 0
	return health.XIDRow{Code: health.XIDNumber(uint64(max(0, code))), At: v.TS}, ok
}

// ReadAllXIDs makes the next poll read the whole stream of XIDs.
func (s *session) ReadAllXIDs() { s.allXIDs.Store(true) }

// readXIDs reads the stream of XIDs in full polls, and when it has new rows: its window or, when that may lack a row, the whole.
func (s *session) readXIDs(now time.Time, full bool) error {
	hidden := s.latestMayHideXIDs(now)
	s.xidHidden = s.xidHidden || hidden
	whole := wholeInterval
	switch {
	case s.allXIDs.Swap(false), !elapsed(s.openedAt, now, kernelLogWindow):
		whole = 0
	case s.xidHidden:
		whole = wholeIfHidden
	}
	if !elapsed(s.wholeAt, now, whole) {
		if !full && len(s.unlisted) == 0 {
			return nil
		}
		// After a step back, rows from before it are newer than any sample.
		from := min(s.newestRow, s.history.newestSample) - xidWindow.Microseconds()
		if err := s.readStream(max(0, from)); err != nil || len(s.unlisted) == 0 {
			return err
		}
	}
	if err := s.readStream(0); err != nil {
		return err
	}
	s.wholeAt, s.wholeRead, s.xidHidden = now, true, hidden
	clear(s.unlisted) // a latest value need not be in the stream
	return nil
}

// readStream reads the rows of the stream from a time on, by the engine's clock in microseconds since 1970.
func (s *session) readStream(from int64) error {
	v := dcgm.FieldValue_v2{FieldID: fieldXID}
	err := lib.Rows(s.watches.allGroup.GetHandle(), s.watches.xidFields.GetHandle(), from, func(r lib.Row) {
		v.FieldType, v.Status, v.TS = uint(r.Type), r.Status, r.At
		binary.NativeEndian.PutUint64(v.Value[:], uint64(r.Value))
		row, ok := parseXID(&v)
		if !ok {
			return
		}
		e := entity{dcgm.Field_Entity_Group(r.Kind), r.ID}
		if s.unlisted[e] == row {
			delete(s.unlisted, e)
		}
		s.newestRow = max(s.newestRow, row.At)
		s.addRow(e, row)
	})
	if err != nil {
		return fmt.Errorf("read XIDs: %w", err)
	}
	return nil
}

// addLatestXID adds the XID in the latest value of an entity.
func (s *session) addLatestXID(e entity, v *dcgm.FieldValue_v2) {
	if row, ok := parseXID(v); ok {
		if row != s.latestXID[e] {
			s.latestXID[e], s.unlisted[e] = row, row
		}
		s.addRow(e, row)
		for _, i := range s.devicesOf[e] {
			if st := &s.state[i]; row.At >= st.latest.At {
				st.latest = row
			}
		}
	}
	if lib.NotSupported(v) || v.Status == dcgm.DCGM_ST_NOT_WATCHED {
		for _, i := range s.devicesOf[e] {
			s.state[i].xidReadable = false
		}
	}
}

// addRow adds a row to the devices of its entity. An XID of a GPU instance belongs to all its compute instances. An XID of a GPU belongs to
// the GPU only; judging applies it to the MIG devices.
func (s *session) addRow(e entity, row health.XIDRow) {
	for _, i := range s.devicesOf[e] {
		s.state[i].rows = append(s.state[i].rows, row)
	}
}

// takeRows returns the rows of the device in this poll, oldest first, and each once.
func (s *session) takeRows(st *deviceState, now time.Time) []health.XIDRow {
	rows := st.rows
	st.rows = nil // readings share it
	slices.SortFunc(rows, func(a, b health.XIDRow) int { return cmp.Or(cmp.Compare(a.At, b.At), cmp.Compare(a.Code, b.Code)) })
	rows = slices.Compact(rows)
	if !elapsed(s.openedAt, now, kernelLogWindow) {
		for i := range rows {
			rows[i].Old = health.InKernelLog(rows[i].Code) && rows[i].At < s.history.firstSample
		}
	}
	return rows
}

// lastXID returns field 230 of the device, which is 0 if there is none: DCGM has no value before the first XID.
func (s *session) lastXID(st *deviceState) fieldValue {
	g, p := s.gpuStaleness[st.device.gpu], s.presence[st.device.gpu].current
	readable := st.xidReadable && p <= health.Present && g != nil && g.everMeasured()
	return fieldValue{health.FieldXID, float64(st.latest.Code), readable || st.latest.Code > 0}
}

// XIDsChanged reports whether the latest value of field 230 has changed on any entity since the last poll, and returns when
// DCGM has measured. It makes two reads of DCGM's cache, for one field each: go-dcgm needs 4 KiB for a value. Only polls read the
// stream.
func (s *session) XIDsChanged(context.Context) (changed bool, measured time.Time, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := s.usable(); err != nil {
		return false, time.Time{}, err
	}
	err = readLatest(s.watches.xidPairs, []dcgm.Short{fieldXID}, func(v *dcgm.FieldValue_v2) {
		row, ok := parseXID(v)
		changed = changed || ok && row != s.latestXID[entity{v.EntityGroupId, v.EntityID}]
	})
	if err == nil {
		err = readLatest(s.paceGPU, []dcgm.Short{paceField}, func(v *dcgm.FieldValue_v2) {
			measured = measuredAt(v)
		})
	}
	switch {
	case err == nil:
		return changed, measured, nil
	case connectionLost(err):
		s.failed = err
		return false, time.Time{}, err
	}
	// DCGM refuses an entity that was removed. The next poll reads the remaining ones.
	s.log.Debug("cannot read XIDs between polls", zap.Error(err))
	return true, time.Time{}, nil
}

// paceField is the field whose sample of one GPU tells when DCGM has measured. DCGM samples it once a second with the other health
// fields, and every supported GPU has it.
const paceField = dcgm.Short(health.FieldGPUTemp)

// choosePaceGPU chooses the first GPU that the driver reaches and DCGM measures.
func (s *session) choosePaceGPU() {
	s.paceGPU = nil
	for i, e := range s.watches.gpus {
		if p := s.presence[e.id]; p != nil && reachable(p.status) && !s.stale[e.id] {
			s.paceGPU = s.watches.gpuPairs[i : i+1]
			return
		}
	}
}

// measuredAt returns the time of a sample, zero for a blank.
func measuredAt(v *dcgm.FieldValue_v2) time.Time {
	if _, ok := lib.Float(v); !ok {
		return time.Time{}
	}
	return time.UnixMicro(v.TS)
}
