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
	// xidsEvery is how often the stream is read although no latest value has changed, as long as one may not show that a row
	// has come: see hidesRows.
	xidsEvery = time.Second
	// sampledWithin is how old the newest sample of the fields of health may be, which are sampled once a second.
	sampledWithin = 1500 * time.Millisecond
	// xidsKept bounds the rows of a device that DCGM shows no more. An engine that restarts shows some of them again.
	xidsKept = 1024
	// kernelLogWindow is how long after a connection rows may come from the kernel's log of before: an engine that starts
	// reads /dev/kmsg from its beginning within seconds.
	kernelLogWindow = 10 * time.Second
	// clockSlack is how much older than the one before the newest sample may be without the engine's clock having been
	// set back: another GPU has it, or another field.
	clockSlack = 5 * time.Second
)

// xidRow is one XID as DCGM reports it, in microseconds since 1970 by the engine's clock.
type xidRow struct {
	at   int64
	code int
}

func (r xidRow) xid() health.XID { return health.XID{Code: r.code, At: time.UnixMicro(r.at)} }

// ledger holds the rows of field 230 that were delivered, so that each is delivered once however often DCGM shows it: in
// every reading of the stream, as a latest value, to the session after a reconnect, and from a restarted engine. A row is
// new if the ledger does not have it, whatever its time: the clocks of the driver's host may step either way. The ledger
// outlives a session and belongs to one at a time.
type ledger struct {
	devices map[health.DeviceID]*history
	parts   map[health.DeviceID]health.DeviceID // MIG devices of the last inventory, and their GPUs
	gpus    map[health.DeviceID]health.Device   // GPUs as they were last shown with their own values

	began  int64 // the engine's time at the first reading of this process; 0 if unknown, or if the engine's clock was set back
	newest int64 // the engine's time at the last reading
	most   int64 // the greatest of them
}

// history is the rows of one device.
type history struct {
	rows map[xidRow]*seenRow
	read bool   // the stream has been read with the device in it
	born bool   // a MIG device, not read yet, that has come since the stream was last read
	n    uint64 // rows that ever came
	look uint64 // readings so far
}

type seenRow struct {
	n       uint64 // order of arrival
	shown   uint64 // the last reading that had it
	foreign bool   // the row of another instance that had the entity's number
}

func newLedger() *ledger {
	return &ledger{devices: map[health.DeviceID]*history{}, gpus: map[health.DeviceID]health.Device{}}
}

func (l *ledger) of(id health.DeviceID) *history {
	h := l.devices[id]
	if h == nil {
		h = &history{rows: map[xidRow]*seenRow{}}
		l.devices[id] = h
	}
	return h
}

// know takes the MIG devices of an inventory, by parent. DCGM numbers instances by place and keeps the samples of a number
// while any client watches it: what the entity of a new instance, or of one that is there again, holds already is of another.
// A device is missing from an incomplete inventory although it is there.
func (l *ledger) know(parts map[health.DeviceID]health.DeviceID, gpus map[health.DeviceID]bool, incomplete bool) {
	now := maps.Clone(parts)
	for id, parent := range parts {
		if _, was := l.parts[id]; l.devices[parent] != nil && !was { // with a GPU that was not read before comes the history of its parts
			l.devices[id] = &history{rows: map[xidRow]*seenRow{}, born: true}
		}
	}
	for id, parent := range l.parts {
		switch _, there := parts[id]; {
		case there:
		case incomplete || !gpus[parent]: // a GPU that is not listed takes its parts out of the list, and tells nothing of them
			now[id] = parent
		default:
			delete(l.devices, id)
		}
	}
	l.parts = now
}

// foreign reports whether a row that an entity holds belongs to the instance that had its number before.
func (l *ledger) foreign(id health.DeviceID, row xidRow) bool {
	h := l.devices[id]
	if h == nil {
		return false
	}
	seen := h.rows[row]
	return h.born || seen != nil && seen.foreign
}

// tick takes the time of the engine's newest sample, 0 if it has none.
func (l *ledger) tick(at int64) {
	switch {
	case at == 0:
		return
	case l.newest == 0:
		l.began = at
	case at < l.newest-clockSlack.Microseconds():
		l.began = 0 // no time tells any more what was before
	}
	l.newest, l.most = at, max(l.most, at)
}

// sift returns the rows that are new of those that DCGM shows of a device, and those from before this process first read
// the device. whole says that the stream was read; logged, that rows of the kernel's log of before may be among them.
func (l *ledger) sift(id health.DeviceID, rows []xidRow, whole, logged bool) (fresh, past []xidRow) {
	h := l.of(id)
	h.look++
	for _, row := range rows {
		if seen := h.find(row); seen != nil {
			seen.shown = h.look
			continue
		}
		h.n++
		h.rows[row] = &seenRow{n: h.n, shown: h.look, foreign: h.born}
		switch {
		case h.born:
		case !h.read, logged && health.InKernelLog(row.code) && row.at < l.began:
			past = append(past, row)
		default:
			fresh = append(fresh, row)
		}
	}
	if whole {
		h.read, h.born = true, false
		h.forget()
	}
	return fresh, past
}

func (h *history) find(row xidRow) *seenRow {
	if seen := h.rows[row]; seen != nil || !health.InKernelLog(row.code) {
		return seen
	}
	for old, seen := range h.rows {
		if old.xid().Same(row.xid()) {
			return seen
		}
	}
	return nil
}

// forget drops the rows that came first until xidsKept are left, but none that the last reading of the stream has shown:
// it would be new in the next. DCGM bounds those, by ten minutes at one XID a second.
func (h *history) forget() {
	over := len(h.rows) - xidsKept
	if over <= 0 {
		return
	}
	gone := slices.SortedFunc(maps.Keys(h.rows), func(a, b xidRow) int { return cmp.Compare(h.rows[a].n, h.rows[b].n) })
	gone = slices.DeleteFunc(gone, func(row xidRow) bool { return h.rows[row].shown == h.look })
	for _, row := range gone[:min(over, len(gone))] {
		delete(h.rows, row)
	}
}
