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

const (
	// xidStreamInterval is how often the stream is read while an XID may arrive without changing a latest value: see
	// latestMayHideXIDs.
	xidStreamInterval = time.Second - pollShift
	// maxSampleAge is the maximum age of the newest sample of the health fields, which are sampled once a second.
	maxSampleAge = 1500 * time.Millisecond
	// kernelLogWindow is how long after connecting rows of the old kernel log may arrive: a starting engine reads /dev/kmsg
	// from its beginning within seconds (OBSERVED.md#kernel-log).
	kernelLogWindow = 10 * time.Second
)

// latestMayHideXIDs reports whether an XID may arrive without becoming the latest value of its entity, as after the
// engine's clock was set back (OBSERVED.md#sample-order). Then the samples of all fields stand still or, if watched again,
// are older than before.
func (s *session) latestMayHideXIDs(now time.Time) bool {
	age := s.allGPUs.health
	return !age.measured || elapsed(age.changedAt, now, maxSampleAge) ||
		s.history.newestSample < s.history.maxSample-maxSampleSkew.Microseconds()
}

// parseXID returns the XID in a value of field 230; ok is false for a blank, a row without data, and 0, which means none.
func parseXID(v *dcgm.FieldValue_v2) (row xidRow, ok bool) {
	code, ok := intValue(v)
	ok = ok && v.FieldID == fieldXID && code > 0
	return xidRow{at: v.TS, code: health.XIDNumber(uint64(max(0, code)))}, ok
}

// readXIDs reads the stream of field 230 from its beginning and collects all rows. A cursor would miss the rows that DCGM
// sorts before it (OBSERVED.md#kernel-log-xid, OBSERVED.md#sample-order).
func (s *session) readXIDs(now time.Time) error {
	rows, _, err := dcgm.GetValuesSince(s.watches.allGroup, s.watches.xidFields, time.UnixMicro(0))
	if err != nil {
		return fmt.Errorf("read XIDs: %w", err)
	}
	for i := range rows {
		s.collectXID(entity{rows[i].EntityGroupId, rows[i].EntityID}, &rows[i])
	}
	s.xidsAt, s.xidsDue, s.xidStreamRead = now, false, true
	return nil
}

// collectXID keeps a row for takeXIDs, which only a successful poll calls; otherwise the rows of a failed poll would be
// lost. An XID of a GPU instance belongs to all its compute instances. An XID of a GPU belongs to the GPU only; judging
// applies it to the MIG devices.
func (s *session) collectXID(e entity, v *dcgm.FieldValue_v2) {
	row, ok := parseXID(v)
	if !ok {
		return
	}
	for _, device := range s.devicesOf[e] {
		s.state[device].rows = append(s.state[device].rows, row)
	}
}

// takeXIDs returns the new XIDs of a device in this poll, and its past XIDs, from before this process first read the device. Both are
// oldest first.
func (s *session) takeXIDs(device int, kernelLog bool) (fresh, past []health.XID) {
	st := &s.state[device]
	if len(st.rows) == 0 && !st.watched {
		return nil, nil // not read
	}
	slices.SortFunc(st.rows, func(a, b xidRow) int { return cmp.Compare(a.at, b.at) })
	freshRows, pastRows := s.history.deliver(st.device.ID, st.rows, s.xidStreamRead && st.watched, kernelLog)
	st.rows = st.rows[:0]
	return toXIDs(freshRows), toXIDs(pastRows)
}

func toXIDs(rows []xidRow) (xids []health.XID) {
	for _, row := range rows {
		xids = append(xids, row.xid())
	}
	return xids
}
