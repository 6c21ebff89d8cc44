//go:build cgo && linux

package dcgm

// #include <stdlib.h>
// #include "symbols.h"
import "C"

import (
	"cmp"
	"encoding/binary"
	"fmt"
	"slices"
	"time"
	"unsafe"

	"github.com/NVIDIA/go-dcgm/pkg/dcgm"

	"github.com/gpu-node-agent/gpu-node-agent/health"
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
	code, ok := intValue(v)
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

// readStream reads the rows of the stream from a time on, by the engine's clock in microseconds since 1970. It does not call go-dcgm, which
// allocates 4 KiB for each row, and a mebibyte for none.
func (s *session) readStream(from int64) error {
	var rows *C.gna_row_t
	var count C.unsigned
	group, fields := s.watches.allGroup.GetHandle(), s.watches.xidFields.GetHandle()
	result := C.gna_read_rows(C.uintptr_t(group), C.uintptr_t(fields), C.longlong(from), &rows, &count)
	defer C.free(unsafe.Pointer(rows))
	if result != 0 {
		return fmt.Errorf("read XIDs: %s", errorText(int(result)))
	}
	v := dcgm.FieldValue_v2{FieldID: fieldXID}
	for _, r := range unsafe.Slice(rows, count) {
		v.FieldType, v.Status, v.TS = uint(r._type), int(r.status), int64(r.at)
		binary.NativeEndian.PutUint64(v.Value[:], uint64(r.value))
		row, ok := parseXID(&v)
		if !ok {
			continue
		}
		e := entity{dcgm.Field_Entity_Group(r.kind), uint(r.id)}
		if s.unlisted[e] == row {
			delete(s.unlisted, e)
		}
		s.newestRow = max(s.newestRow, row.At)
		s.addRow(e, row)
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
	if isNotSupported(v) || v.Status == dcgm.DCGM_ST_NOT_WATCHED {
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
