//go:build cgo && linux

package dcgm

import (
	"cmp"
	"maps"
	"slices"
	"time"

	"github.com/gpu-node-agent/gpu-node-agent/health"
)

const (
	// maxXIDRows limits the rows of a device that DCGM no longer lists. A restarted engine lists some of them again.
	maxXIDRows = 1024
	// maxSampleSkew is how much older than its predecessor the newest sample may be, because it is another GPU's or another
	// field's. If it is older still, the engine's clock was set back.
	maxSampleSkew = 5 * time.Second
)

// xidRow is one XID in DCGM's stream: its time in microseconds since 1970, by the engine's clock, and its number.
type xidRow struct {
	at   int64
	code int
}

func (r xidRow) xid() health.XID { return health.XID{Code: r.code, At: time.UnixMicro(r.at)} }

// history outlives sessions and belongs to one session at a time. It holds the delivered rows of field 230, so that each is delivered once.
// DCGM lists a row again in every read of the stream, as a latest value, to the session after a reconnect, and after an engine restart. A
// row is new if the history lacks it, whatever its time, because the clock of the engine's host may step either way. It also holds the last
// complete inventory of each GPU.
type history struct {
	devices map[health.DeviceID]*deviceXIDs
	parents map[health.DeviceID]health.DeviceID // of the MIG devices in the last inventory
	gpus    map[health.DeviceID]health.Device   // as of the last complete inventory of each
	driver  string                              // version at the last inventory

	firstSample  int64 // the engine's time at the first poll of this process; 0 if unknown, or if its clock was set back
	newestSample int64 // the engine's time at the last poll
	maxSample    int64 // the maximum of newestSample
}

// deviceXIDs holds the rows of one device.
type deviceXIDs struct {
	rows     map[xidRow]*deliveredRow
	read     bool   // the stream was read for this device
	created  bool   // a MIG device created since the stream was last read
	arrivals uint64 // number of rows so far
	reads    uint64 // number of reads so far
}

type deliveredRow struct {
	arrival     uint64 // order of arrival
	lastListed  uint64 // number of the last read that listed it
	predecessor bool   // the row of another instance that had the same number in DCGM
}

func newHistory() *history {
	return &history{devices: map[health.DeviceID]*deviceXIDs{}, gpus: map[health.DeviceID]health.Device{}}
}

func (h *history) device(id health.DeviceID) *deviceXIDs {
	d := h.devices[id]
	if d == nil {
		d = &deviceXIDs{rows: map[xidRow]*deliveredRow{}}
		h.devices[id] = d
	}
	return d
}

// setMIGDevices takes over the MIG devices of an inventory, given with their parents. The rows that DCGM already has under the number of a
// new or recreated MIG device belong to the predecessor (OBSERVED.md#reused-numbers). If the inventory is incomplete, MIG devices may be
// missing from it although they exist.
func (h *history) setMIGDevices(parents map[health.DeviceID]health.DeviceID, gpus map[health.DeviceID]bool, incomplete bool) {
	next := maps.Clone(parents)
	for id, parent := range parents {
		// If the parent was not read before either, the rows are the MIG device's own past.
		if _, existed := h.parents[id]; h.devices[parent] != nil && !existed {
			h.devices[id] = &deviceXIDs{rows: map[xidRow]*deliveredRow{}, created: true}
		}
	}
	for id, parent := range h.parents {
		switch _, exists := parents[id]; {
		case exists:
		case incomplete || !gpus[parent]: // without its GPU in the inventory, the MIG device may still exist
			next[id] = parent
		default:
			delete(h.devices, id)
		}
	}
	h.parents = next
}

// ofPredecessor reports whether a row of a device belongs to the instance that had its number in DCGM before.
func (h *history) ofPredecessor(id health.DeviceID, row xidRow) bool {
	d := h.devices[id]
	if d == nil {
		return false
	}
	old := d.rows[row]
	return d.created || old != nil && old.predecessor
}

// updateClock takes the time of the engine's newest sample, 0 if there is none.
func (h *history) updateClock(at int64) {
	switch {
	case at == 0:
		return
	case h.newestSample == 0:
		h.firstSample = at
	case at < h.newestSample-maxSampleSkew.Microseconds():
		h.firstSample = 0 // after a step back, times no longer tell what happened before the start
	}
	h.newestSample, h.maxSample = at, max(h.maxSample, at)
}

// deliver records the rows of a device that DCGM lists. It returns the new rows, and separately rows from before this process first read
// the device. whole means that the whole stream was read; kernelLog, that rows of the old kernel log may be listed.
func (h *history) deliver(id health.DeviceID, rows []xidRow, whole, kernelLog bool) (fresh, past []xidRow) {
	d := h.device(id)
	d.reads++
	for _, row := range rows {
		if old := d.find(row); old != nil {
			old.lastListed = d.reads
			continue
		}
		d.arrivals++
		d.rows[row] = &deliveredRow{arrival: d.arrivals, lastListed: d.reads, predecessor: d.created}
		switch {
		case d.created:
		case !d.read, kernelLog && health.InKernelLog(row.code) && row.at < h.firstSample:
			past = append(past, row)
		default:
			fresh = append(fresh, row)
		}
	}
	if whole {
		d.read, d.created = true, false
		d.prune()
	}
	return fresh, past
}

// find returns the delivered row of the same XID. The driver and the kernel log report some XIDs at different times.
func (d *deviceXIDs) find(row xidRow) *deliveredRow {
	if old := d.rows[row]; old != nil || !health.InKernelLog(row.code) {
		return old
	}
	for r, old := range d.rows {
		if r.xid().SameEvent(row.xid()) {
			return old
		}
	}
	return nil
}

// prune removes the oldest rows by arrival above maxXIDRows. It keeps the rows in the last read of the stream: they would
// be new in the next. DCGM limits their number to ten minutes at one XID per second.
func (d *deviceXIDs) prune() {
	excess := len(d.rows) - maxXIDRows
	if excess <= 0 {
		return
	}
	rows := slices.SortedFunc(maps.Keys(d.rows), func(a, b xidRow) int { return cmp.Compare(d.rows[a].arrival, d.rows[b].arrival) })
	rows = slices.DeleteFunc(rows, func(row xidRow) bool { return d.rows[row].lastListed == d.reads })
	for _, row := range rows[:min(excess, len(rows))] {
		delete(d.rows, row)
	}
}
