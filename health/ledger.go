package health

import (
	"maps"
	"slices"
	"time"
)

// XIDRow is a row of the source's stream of XIDs. Its code and time identify it, and Old does not: compare rows with same.
type XIDRow struct {
	Code int
	At   int64 // when the driver reported it, in microseconds since 1970 by the clock of the source's host
	Old  bool  // from long before the source reports it: a starting engine reads the old kernel log
}

// XID returns the XID of the row.
func (r XIDRow) XID() XID { return XID{Code: r.Code, At: time.UnixMicro(r.At)} }

// same reports whether two rows of a device are one event: see XID.SameEvent.
func (r XIDRow) same(s XIDRow) bool {
	return r.Code == s.Code && (r.At == s.At || InKernelLog(r.Code) && r.XID().SameEvent(s.XID()))
}

// Ledger holds the XIDs of a device: the rows that the source listed, which XIDs count, and which ones a witness still has to report. It is
// a value: its methods return the next ledger and modify nothing that the earlier one shares.
//
// A source may list its rows again in any read, and after a reconnect and a restart. A row counts when the ledger first learns of it. Its
// time does not tell whether it is new, because the clock of the source's host may step either way.
//
// Several witnesses report one XID. Their reports are paired by order and number: the n-th XID of one witness is the n-th of another. Times
// cannot pair them, because each witness has its own clock and delay. The first report counts. Every other witness then owes the XID, and
// its report does not count. A reset in between does not matter.
//
// A witness may lose an XID, so a debt expires: see OwedBySource and owedByEvents. Until then, the witness' next XID with the same number
// is taken for the lost one, and does not count if no other witness reports it. Nothing else is lost. An XID counts twice only if a witness
// reports it after its debt has expired, or under another number: NVML and DCGM call the numbers that they lack 999, the kernel log does
// not.
type Ledger struct {
	Read  bool // this process has read the whole stream of the device
	Later bool // a MIG device that is newer than its GPU: rows are its predecessor's until the stream is read whole

	Rows  []LedgerRow   // in order of arrival
	Codes map[int]Tally // by number
	Last  int           // the number of the newest XID that counts; 0 if there is none
	Owed  []OwedXIDs    // oldest first

	measured time.Duration // for how long the source has measured, from any origin
}

// LedgerRow is a row that the ledger knows.
type LedgerRow struct {
	XIDRow
	Skipped     bool // from before the agent's start, and whether it counted then was unknown
	Predecessor bool // of the instance that had the MIG device's number before
}

// Newest returns the newest XID that counts, zero if there is none.
func (l *Ledger) Newest() XID { return l.Codes[l.Last].Newest }

// Tally is the XIDs with one number that count since the agent's start.
type Tally struct {
	Total  uint64
	Newest XID // with the witness that reported it first, and the detail that any witness reported
}

// OwedXIDs are XIDs with one number that count already and that a witness has not reported yet.
type OwedXIDs struct {
	Code    int
	Witness Witness
	Count   int

	// Since and Newest are when the first and the last of them counted. For WitnessSource, zero means before the agent's start or before
	// a detach.
	Since, Newest time.Time

	// For WitnessSource, by Ledger.measured: when the debt began, and since when the source has reported no XID.
	Born, Seen time.Duration
}

const (
	// OwedBySource is how long the source owes an XID. This time begins anew whenever the source reports any XID: DCGM reads one event per
	// second from all GPUs together (dcgm/OBSERVED.md#xid-rate), so while it reports XIDs it may have unread ones. DCGM reads in order: while
	// it reports XIDs that it owed for longer, this goes on for up to maxBehind. Otherwise it goes on for up to maxExtension, because the
	// source may report older XIDs that an event source missed. Only time in which the source measures counts, and at most maxStep per
	// reading (health/judge), so a source that stalls or restarts loses nothing.
	OwedBySource = 15 * time.Second

	// owedByEvents is how long an event source owes an XID. These report XIDs within milliseconds, and lose them while they are down.
	owedByEvents = 10 * time.Second

	maxExtension = 5 * time.Minute
	maxBehind    = time.Hour

	maxSpan = time.Minute // of the debts of the source in one entry
	maxOwed = 256         // entries; above it the oldest are dropped

	// maxLedgerRows limits the rows that the source no longer lists. A restarted engine lists some of them again.
	maxLedgerRows = 1024
)

// List takes the rows of a read, oldest first, and returns the XIDs that are new. whole means that the whole stream was read, not only the
// latest value or its end. restored means that the ledger began with all XIDs that counted before the agent's start; otherwise a row from
// before the start is skipped.
func (l Ledger) List(rows []XIDRow, whole, restored bool) (next Ledger, fresh []XID) {
	if len(rows) == 0 && !whole {
		return l, nil
	}
	known := knownRows{rows: slices.Clip(l.Rows), listed: make([]bool, len(l.Rows))}
	for _, r := range rows {
		if known.find(r) {
			continue
		}
		before := !l.Read || r.Old
		row := LedgerRow{XIDRow: XIDRow{Code: r.Code, At: r.At}, Skipped: before && !restored && !l.Later, Predecessor: l.Later}
		known.add(row)
		if !row.Skipped && !row.Predecessor {
			fresh = append(fresh, r.XID())
		}
	}
	l.Rows = known.rows
	if whole {
		l.Read, l.Later, l.Rows = true, false, known.withoutForgotten()
	}
	return l, fresh
}

// LastXID returns field 230 of the device. value is that of the source, which loses it with its samples, and may have that of a
// predecessor.
func (l *Ledger) LastXID(value float64) float64 {
	var newest, own LedgerRow
	for _, r := range l.Rows {
		if r.At >= newest.At {
			newest = r
		}
		if !r.Predecessor && r.At >= own.At {
			own = r
		}
	}
	if value == 0 || newest.Predecessor {
		return float64(own.Code)
	}
	return value
}

// Lacks reports whether a read lists a new row with a number.
func (l *Ledger) Lacks(code int, rows []XIDRow) bool {
	known := knownRows{rows: l.Rows}
	return l.Read && slices.ContainsFunc(rows, func(r XIDRow) bool { return r.Code == code && !r.Old && known.search(r) < 0 })
}

// knownRows are the rows of a ledger while a read is compared with them.
type knownRows struct {
	rows   []LedgerRow
	listed []bool         // by the read
	next   int            // the row after the one that was found last
	index  map[XIDRow]int // by place; nil until it is needed
}

// newestRows is how many of the newest rows are looked at before the index: most reads list only these.
const newestRows = 64

// place returns what an index has instead of a row. For an XID that may have two times, it is the window of SameEvent that the row is in.
func (r XIDRow) place() XIDRow {
	if InKernelLog(r.Code) {
		r.At /= sameEventWindow.Microseconds()
	}
	return XIDRow{Code: r.Code, At: r.At}
}

// find reports whether a row is known.
func (k *knownRows) find(row XIDRow) bool {
	i := k.next // a source lists most rows in the order of their arrival
	if i >= len(k.rows) || !k.rows[i].same(row) {
		i = k.search(row)
	}
	if i < 0 {
		return false
	}
	k.listed[i], k.next = true, i+1
	return true
}

// search returns the position of a row, -1 if it is unknown.
func (k *knownRows) search(row XIDRow) int {
	if k.index == nil {
		for i := len(k.rows) - 1; i >= max(0, len(k.rows)-newestRows); i-- {
			if k.rows[i].same(row) {
				return i
			}
		}
		if len(k.rows) <= newestRows {
			return -1
		}
		k.index = make(map[XIDRow]int, len(k.rows))
		for i, r := range k.rows {
			k.index[r.place()] = i
		}
	}
	place := row.place()
	for at := place.At - 1; at <= place.At+1; at++ {
		if i, ok := k.index[XIDRow{Code: row.Code, At: at}]; ok && k.rows[i].same(row) {
			return i
		}
	}
	return -1
}

func (k *knownRows) add(row LedgerRow) {
	if k.index != nil {
		k.index[row.place()] = len(k.rows)
	}
	k.rows, k.listed = append(k.rows, row), append(k.listed, true)
}

// withoutForgotten returns the rows without the oldest above maxLedgerRows that the source no longer lists. The others would be new in the
// next read.
func (k *knownRows) withoutForgotten() []LedgerRow {
	excess := len(k.rows) - maxLedgerRows
	if excess <= 0 || !slices.Contains(k.listed, false) {
		return k.rows
	}
	left := make([]LedgerRow, 0, len(k.rows))
	for i, r := range k.rows {
		if excess > 0 && !k.listed[i] {
			excess--
			continue
		}
		left = append(left, r)
	}
	return left
}

// RestoreLate adds what an earlier process saved. It returns the XIDs that the ledger skipped and that the saved one lacks; restored is as
// for list, of the saved one.
func (l Ledger) RestoreLate(saved Ledger, restored bool) (next Ledger, fresh []XID) {
	known := knownRows{rows: slices.Clone(saved.Rows), listed: make([]bool, len(saved.Rows))}
	for _, r := range l.Rows {
		if known.find(r.XIDRow) {
			continue
		}
		if r.Skipped && restored {
			r.Skipped, fresh = false, append(fresh, r.XID())
		}
		known.add(r)
	}
	l.Rows = known.rows
	// The clock of the saved debts goes on with this ledger's.
	owed := slices.Clone(saved.Owed)
	for i := range owed {
		owed[i].Born += l.measured - saved.measured
		owed[i].Seen += l.measured - saved.measured
	}
	l.Owed = append(owed, l.Owed...)
	return l, fresh
}

// report takes an XID of a witness, and returns how many of its reports count. The source, and the event sources that are on, now owe these
// unless they are the witness. taken are the debts that the other reports settle. sampled is the time of the sample that has the XID.
func (l Ledger) report(x XID, sampled time.Time, on []Witness, now time.Time) (next Ledger, counted int, taken []OwedXIDs) {
	l.Owed = slices.Clone(l.Owed)
	taken = l.settle(x, x.Count())
	counted = x.Count()
	for _, o := range taken {
		counted -= o.Count
	}
	if counted > 0 {
		newest := x
		newest.At, newest.Times = x.ReportedAt(sampled), 0
		l = l.count(newest, counted)
		for _, w := range append([]Witness{WitnessSource}, on...) {
			if w != x.Witness {
				l.owe(OwedXIDs{Code: x.Code, Witness: w, Count: counted, Since: now, Newest: now, Born: l.measured, Seen: l.measured})
			}
		}
	}
	return l, counted, taken
}

// Take takes the XIDs of a sample. It returns those that count, and those that settle a debt and have a detail.
func (l Ledger) Take(s Sample, on []Witness, now time.Time, p *SourceProgress) (next Ledger, counted, details []XID) {
	for _, x := range s.XIDs {
		var n int
		var taken []OwedXIDs
		l, n, taken = l.report(x, s.At, on, now)
		p.add(n, taken)
		if len(taken) > 0 && x.Detail != (XIDDetail{}) {
			details = append(details, x)
		}
		if n > 0 {
			if n < x.Count() {
				x.Times = n
			}
			counted = append(counted, x)
		}
	}
	return l, counted, details
}

// settle removes the oldest debts that reports of an XID settle, and returns them. l.Owed is l's own.
func (l *Ledger) settle(x XID, times int) (taken []OwedXIDs) {
	for i := range l.Owed {
		o := &l.Owed[i]
		if n := min(o.Count, times); n > 0 && o.Code == x.Code && o.Witness == x.Witness {
			part := *o
			part.Count = n
			taken, times, o.Count = append(taken, part), times-n, o.Count-n
		}
	}
	l.Owed = slices.DeleteFunc(l.Owed, func(o OwedXIDs) bool { return o.Count == 0 })
	return taken
}

// count adds XIDs that count to the tally.
func (l Ledger) count(x XID, times int) Ledger {
	l.Codes = maps.Clone(l.Codes)
	if l.Codes == nil {
		l.Codes = make(map[int]Tally)
	}
	l.Codes[x.Code] = Tally{Total: l.Codes[x.Code].Total + uint64(times), Newest: x}
	l.Last = x.Code
	return l
}

// AddDetail adds the detail of a later report to the newest XID.
func (l Ledger) AddDetail(x XID) Ledger {
	if t, ok := l.Codes[x.Code]; ok {
		l.Codes = maps.Clone(l.Codes)
		t.Newest.Detail = x.Detail
		l.Codes[x.Code] = t
	}
	return l
}

// owe adds a debt. Debts that expire within the same second share an entry, so a storm needs little space. l.Owed is l's own.
func (l *Ledger) owe(x OwedXIDs) {
	for i := range l.Owed {
		o := &l.Owed[i]
		if o.Code == x.Code && o.Witness == x.Witness && o.expiresWith(x) {
			o.Count, o.Newest = o.Count+x.Count, x.Newest
			return
		}
	}
	l.Owed = append(l.Owed, x)
	l.Owed = l.Owed[max(0, len(l.Owed)-maxOwed):]
}

func (o OwedXIDs) expiresWith(x OwedXIDs) bool {
	if o.Witness == WitnessSource {
		return x.Seen-o.Seen < time.Second && x.Since.Sub(o.Since) < maxSpan
	}
	return x.Since.Sub(o.Since) < time.Second
}

// ExpireEvents drops the debts of event sources that have expired.
func (l Ledger) ExpireEvents(now time.Time) Ledger {
	l.Owed = slices.DeleteFunc(slices.Clone(l.Owed), func(o OwedXIDs) bool {
		return o.Witness != WitnessSource && now.Sub(o.Since) >= owedByEvents
	})
	return l
}

// SourceProgress is what a reading shows of all XIDs that the source owes.
type SourceProgress struct {
	reports  bool      // the source reports XIDs
	behind   bool      // among them are XIDs that it owed
	position time.Time // OwedXIDs.Since of the oldest of these
}

// add adds what the source reported of one device.
func (p *SourceProgress) add(counted int, taken []OwedXIDs) {
	p.reports = p.reports || counted+len(taken) > 0
	for _, o := range taken {
		if !p.behind || o.Since.Before(p.position) {
			p.behind, p.position = true, o.Since
		}
	}
}

// mayTake returns how long after its beginning the source may still pay a debt.
func (p *SourceProgress) mayTake(o OwedXIDs) time.Duration {
	if p.behind && !p.position.After(o.Newest) {
		return maxBehind
	}
	return maxExtension
}

// Pass lets the source's time pass: step is for how long it measured since the reading before. It drops the debts that have expired.
func (l Ledger) Pass(step time.Duration, p *SourceProgress) Ledger {
	if step == 0 || len(l.Owed) == 0 {
		return l
	}
	l.measured += step
	l.Owed = slices.Clone(l.Owed)
	for i := range l.Owed {
		if o := &l.Owed[i]; p.reports && o.Seen-o.Born < p.mayTake(*o) {
			o.Seen = l.measured
		}
	}
	l.Owed = slices.DeleteFunc(l.Owed, func(o OwedXIDs) bool {
		return o.Witness == WitnessSource && l.measured-o.Seen >= OwedBySource
	})
	return l
}

// Restarted returns what the ledger is to the next process. An event source does not report XIDs from before its start.
func (l Ledger) Restarted() Ledger {
	next := Ledger{Rows: l.Rows}
	for _, o := range l.Unmeasured().Owed {
		if o.Witness == WitnessSource {
			o.Seen -= l.measured
			o.Born = o.Seen
			next.Owed = append(next.Owed, o)
		}
	}
	return next
}

// Unmeasured returns the ledger as if the debts of the source were from before the agent's start.
func (l Ledger) Unmeasured() Ledger {
	l.Owed = slices.Clone(l.Owed)
	for i := range l.Owed {
		if o := &l.Owed[i]; o.Witness == WitnessSource {
			o.Since, o.Newest = time.Time{}, time.Time{}
		}
	}
	return l
}

// OwesSource reports whether the source owes an XID.
func (l *Ledger) OwesSource() bool {
	return slices.ContainsFunc(l.Owed, func(o OwedXIDs) bool { return o.Witness == WitnessSource })
}
