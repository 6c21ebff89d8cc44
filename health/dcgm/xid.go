//go:build cgo && linux

package dcgm

import (
	"cmp"
	"fmt"
	"slices"
	"time"

	"github.com/NVIDIA/go-dcgm/pkg/dcgm"

	"github.com/gpu-node-agent/gpu-node-agent/health"
)

// xidOverlap is how far each reading of the stream reaches back before the last: rows arrive up to
// seconds after the time they bear, and DCGM moves its cursor with rows that carry no data too.
const xidOverlap = time.Minute

// xidRow is one XID as DCGM reports it, in microseconds since 1970.
type xidRow struct {
	at   int64
	code int
}

// ledger remembers which XIDs were reported, so that each is reported once however often DCGM shows it:
// in overlapping readings, as a latest value, to the session after a reconnect, and from a restarted
// engine that reads /dev/kmsg from its beginning. It belongs to one session at a time.
type ledger struct {
	started int64 // what happened before is history
	looked  int64 // when the devices were last found to be those that are known; 0 before that
	devices map[health.DeviceID]*history
	parts   map[health.DeviceID]bool // the MIG devices that are there
}

// history is one device's.
type history struct {
	born  int64    // a MIG device: what its entity had up to here was another's; 0 if it is not known to have been one
	floor int64    // all rows up to here are reported or history
	rows  []xidRow // reported, later than floor, by time
}

// xidsKept bounds a history. DCGM reads one XID a second at most and keeps ten minutes of them.
const xidsKept = 1024

func newLedger(now time.Time) *ledger {
	return &ledger{started: now.UnixMicro(), devices: map[health.DeviceID]*history{}}
}

// of returns the history of a device, which begins with the first that is asked of it.
func (l *ledger) of(id health.DeviceID) *history {
	h := l.devices[id]
	if h == nil {
		h = &history{floor: l.started}
		l.devices[id] = h
	}
	return h
}

// know takes a note of the MIG devices that are there. One that is new, or there again, was not there when the
// devices were last looked at: DCGM uses the number of an instance again, and keeps what it had while any client
// watches it.
func (l *ledger) know(parts map[health.DeviceID]bool) {
	for id := range parts {
		if l.parts[id] {
			continue
		}
		h := l.of(id)
		h.born, h.floor = l.looked, max(h.floor, l.looked)
	}
	l.parts = parts
}

// anothers reports whether what an entity had at a time was of the device before this one.
func (l *ledger) anothers(id health.DeviceID, at int64) bool {
	h := l.devices[id]
	return h != nil && at <= h.born
}

// add reports whether the row is one that was not reported before, and remembers it.
func (l *ledger) add(id health.DeviceID, row xidRow) bool {
	h := l.of(id)
	if row.at <= h.floor || slices.ContainsFunc(h.rows, func(old xidRow) bool { return sameXID(old, row) }) {
		return false
	}
	at, _ := slices.BinarySearchFunc(h.rows, row, func(a, b xidRow) int { return cmp.Compare(a.at, b.at) })
	h.rows = slices.Insert(h.rows, at, row)
	if len(h.rows) > xidsKept {
		h.floor = h.rows[0].at
		h.rows = slices.Delete(h.rows, 0, 1)
	}
	return true
}

// sameXID reports whether two rows are one event. DCGM reads XIDs 79, 119 and 120 from /dev/kmsg as well
// as from the driver, with another clock's time. An RPC to the GSP times out after six seconds, so that 119 and
// 120 do not come to a GPU twice in five.
func sameXID(a, b xidRow) bool {
	if a.code != b.code {
		return false
	}
	switch a.code {
	case 79, 119, 120:
		return max(a.at-b.at, b.at-a.at) < (5 * time.Second).Microseconds()
	}
	return a.at == b.at
}

// xidOf returns the XID in a value of field 230; false for a blank, a row without data, and 0, which
// says that there was none.
func xidOf(v *dcgm.FieldValue_v2) (xidRow, bool) {
	code, ok := integer(v)
	return xidRow{at: v.TS, code: int(code)}, ok && v.FieldID == fieldXID && code > 0
}

// readXIDs reads the stream of field 230 and takes a note of every row. The first reading of a session
// takes all that DCGM has, so that an XID between two sessions is not lost.
func (s *session) readXIDs() error {
	since := time.UnixMicro(0)
	if !s.xidCursor.IsZero() {
		since = s.xidCursor.Add(-xidOverlap)
	}
	rows, next, err := dcgm.GetValuesSince(s.watches.all.handle, s.watches.xidFields.handle, since)
	if err != nil {
		return fmt.Errorf("read XIDs: %w", err)
	}
	for i := range rows {
		s.noteXID(entity{rows[i].EntityGroupId, rows[i].EntityID}, &rows[i])
	}
	if next.After(s.xidCursor) {
		s.xidCursor = next
	}
	s.xidsDue = false
	return nil
}

// noteXID keeps a row until the poll is known to be good: one that was marked as reported by a poll
// that then failed would be lost. An XID of a GPU instance is of all compute instances in it; one of a
// whole GPU is the GPU's alone, and the judge's to pass on.
func (s *session) noteXID(e entity, v *dcgm.FieldValue_v2) {
	row, ok := xidOf(v)
	if !ok {
		return
	}
	for _, device := range s.owners[e] {
		s.state[device].rows = append(s.state[device].rows, row)
	}
}

// newXIDs returns the rows noted in this poll that were never reported, oldest first.
func (s *session) newXIDs(device int) []health.XID {
	st := &s.state[device]
	slices.SortFunc(st.rows, func(a, b xidRow) int { return cmp.Compare(a.at, b.at) })
	var xids []health.XID
	for _, row := range st.rows {
		if s.ledger.add(st.device.ID, row) {
			xids = append(xids, health.XID{Code: row.code, At: time.UnixMicro(row.at)})
		}
	}
	st.rows = st.rows[:0]
	return xids
}
