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

// hidesRows reports whether an XID may come without being the latest value of its entity. DCGM sorts samples by time: after its
// clock was set back new ones are not the latest. Then the samples of all fields stand still, or, watched anew, are older
// than those before.
func (s *session) hidesRows(now time.Time) bool {
	seen := s.node.light
	return !seen.saw || passed(seen.movedAt, now, sampledWithin) || s.ledger.newest < s.ledger.most-clockSlack.Microseconds()
}

// xidOf returns the XID in a value of field 230; false for a blank, a row without data, and 0, which
// says that there was none.
func xidOf(v *dcgm.FieldValue_v2) (xidRow, bool) {
	code, ok := integer(v)
	return xidRow{at: v.TS, code: int(code)}, ok && v.FieldID == fieldXID && code > 0
}

// readXIDs reads the stream of field 230 from its beginning and takes a note of every row. A cursor would miss what DCGM
// sorts before it: an XID of the kernel's log, and every row after the engine's clock was set back.
func (s *session) readXIDs(now time.Time) error {
	rows, _, err := dcgm.GetValuesSince(s.watches.all.handle, s.watches.xidFields.handle, time.UnixMicro(0))
	if err != nil {
		return fmt.Errorf("read XIDs: %w", err)
	}
	for i := range rows {
		s.noteXID(entity{rows[i].EntityGroupId, rows[i].EntityID}, &rows[i])
	}
	s.xidsAt, s.xidsDue, s.xidsWhole = now, false, true
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

// newXIDs returns the XIDs noted in this poll that were never delivered, and those from before this process first read the
// device; oldest first.
func (s *session) newXIDs(device int, logged bool) (fresh, past []health.XID) {
	st := &s.state[device]
	if len(st.rows) == 0 && !st.watched {
		return nil, nil // it was not read
	}
	slices.SortFunc(st.rows, func(a, b xidRow) int { return cmp.Compare(a.at, b.at) })
	newRows, oldRows := s.ledger.sift(st.device.ID, st.rows, s.xidsWhole && st.watched, logged)
	st.rows = st.rows[:0]
	return xids(newRows), xids(oldRows)
}

func xids(rows []xidRow) (xids []health.XID) {
	for _, row := range rows {
		xids = append(xids, row.xid())
	}
	return xids
}
