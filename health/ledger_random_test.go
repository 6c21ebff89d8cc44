package health

import (
	"cmp"
	"flag"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"testing"
	"time"
)

var ledgerSeeds = flag.Uint64("ledger-seeds", 5000, "sequences that TestLedgerIsFormerMemory plays")

// formerXIDs is the memory of a device's XIDs that the ledger replaces: the source delivers each row once, a history knows the rows from
// before the start, and the reports are paired.
type formerXIDs struct {
	rows          map[XIDRow]*formerRow // of the source in this process
	read, created bool
	arrivals      uint64
	reads         uint64
	history       []XID
	awaited       []AwaitedXIDs
	skipped       []XID // from before the start, while the saved state is unread
	counts        map[int]uint64
	details       map[int]XIDDetail
	witnesses     map[int]Witness
	last          XID
}

type formerRow struct {
	arrival, lastListed uint64
	predecessor         bool
}

func newFormerXIDs() *formerXIDs {
	return &formerXIDs{
		rows: map[XIDRow]*formerRow{}, counts: map[int]uint64{}, details: map[int]XIDDetail{}, witnesses: map[int]Witness{},
	}
}

// formerRead is what one read of the source lists.
type formerRead struct {
	Rows  []XIDRow
	Whole bool
}

func (f *formerXIDs) find(row XIDRow) *formerRow {
	row.Old = false
	if old := f.rows[row]; old != nil || !InKernelLog(row.Code) {
		return old
	}
	for r, old := range f.rows {
		if r.XID().SameEvent(row.XID()) {
			return old
		}
	}
	return nil
}

// deliver is what the source does with the rows of a read.
func (f *formerXIDs) deliver(read formerRead) (fresh, past []XID) {
	f.reads++
	for _, row := range read.Rows {
		if old := f.find(row); old != nil {
			old.lastListed = f.reads
			continue
		}
		f.arrivals++
		f.rows[XIDRow{Code: row.Code, At: row.At}] = &formerRow{arrival: f.arrivals, lastListed: f.reads, predecessor: f.created}
		switch {
		case f.created:
		case !f.read, row.Old:
			past = append(past, row.XID())
		default:
			fresh = append(fresh, row.XID())
		}
	}
	if read.Whole {
		f.read, f.created = true, false
		if excess := len(f.rows) - maxLedgerRows; excess > 0 {
			rows := slices.SortedFunc(maps.Keys(f.rows), func(a, b XIDRow) int { return cmp.Compare(f.rows[a].arrival, f.rows[b].arrival) })
			rows = slices.DeleteFunc(rows, func(row XIDRow) bool { return f.rows[row].lastListed == f.reads })
			for _, row := range rows[:min(excess, len(rows))] {
				delete(f.rows, row)
			}
		}
	}
	return fresh, past
}

// list is what judging does with the rows of a read: it returns the XIDs to pair.
func (f *formerXIDs) list(read formerRead, restored, unread bool) []XID {
	fresh, past := f.deliver(read)
	var unjudged []XID
	for _, x := range past {
		if !slices.ContainsFunc(f.history, x.SameEvent) {
			unjudged = append(unjudged, x)
		}
	}
	xids := fresh
	if restored {
		xids = slices.Concat(unjudged, fresh)
		// The ledger takes rows in one order. The former memory took rows from before the start first.
		slices.SortStableFunc(xids, func(x, y XID) int { return cmp.Or(x.At.Compare(y.At), cmp.Compare(x.Code, y.Code)) })
	} else if unread {
		f.skipped = append(f.skipped, unjudged...)
	}
	f.history = appendHistory(f.history, past, xids)
	return xids
}

// pair pairs reports, and counts those that count.
func (f *formerXIDs) pair(xids []XID, on []Witness, now time.Time) pairing {
	p := ReadingContext{Witnesses: on}.pairXIDs(f.awaited, xids, now)
	f.awaited = p.awaited
	for _, x := range p.counted {
		f.counts[x.Code]++
		if delete(f.details, x.Code); x.Detail != (XIDDetail{}) {
			f.details[x.Code] = x.Detail
		}
		f.witnesses[x.Code], f.last = x.Witness, x
	}
	for _, x := range p.twins {
		if x.Detail == (XIDDetail{}) {
			continue
		}
		f.details[x.Code] = x.Detail
		if x.Code == f.last.Code {
			f.last.Detail = x.Detail
		}
	}
	return p
}

// restart keeps what the state file has.
func (f *formerXIDs) restart() *formerXIDs {
	next := newFormerXIDs()
	next.history = f.history
	for _, a := range f.awaited {
		if a.Witness == WitnessSource {
			next.awaited = append(next.awaited, AwaitedXIDs{Code: a.Code, Witness: a.Witness, Count: a.Count, Left: a.Left})
		}
	}
	return next
}

// xidWorld is a GPU and one of its MIG devices, the stream of their source, and both memories of their XIDs.
type xidWorld struct {
	*rand.Rand
	now       time.Time
	clock     time.Duration // of the source's host, beside now
	started   int64         // the source's time at the agent's start
	kernelLog []int64       // the source's times of XIDs in the kernel log
	stream    [2][]XIDRow
	late      [2][]XIDRow // XIDs that the source will list
	on        []Witness
	restored  bool
	unread    bool // the saved state is not read yet
	saved     [2]Ledger
	saving    [2]*formerXIDs
	sampled   time.Time // of the latest reading

	new    [2]Ledger
	former [2]*formerXIDs
}

func newXIDWorld(seed uint64) *xidWorld {
	w := &xidWorld{Rand: rand.New(rand.NewPCG(seed, 3)), now: at(0), former: [2]*formerXIDs{newFormerXIDs(), newFormerXIDs()}}
	w.on = [][]Witness{nil, {WitnessNVML}, {WitnessKernelLog}, {WitnessNVML, WitnessKernelLog}}[w.IntN(4)]
	w.started = w.engineTime()
	return w
}

func (w *xidWorld) engineTime() int64 { return w.now.Add(w.clock).UnixMicro() }

var xidWorldCodes = []int{31, 31, 48, 79, 94, 119, 999}

// occur makes the driver report an XID to some of the witnesses.
func (w *xidWorld) occur() {
	device, code := w.IntN(2), xidWorldCodes[w.IntN(len(xidWorldCodes))]
	if InKernelLog(code) {
		// The ledger knows a row for longer than the former memory, so it could take another event near it for the same.
		near := func(at int64) bool { return max(at-w.engineTime(), w.engineTime()-at) < 10_000_000 }
		if slices.ContainsFunc(w.kernelLog, near) {
			return
		}
		w.kernelLog = append(w.kernelLog, w.engineTime())
	}
	if w.IntN(4) > 0 {
		row := XIDRow{Code: code, At: w.engineTime() + int64(w.IntN(100_000))} // no two are at one microsecond, after a step of the clock either
		rows := []XIDRow{row}
		if InKernelLog(code) && w.IntN(2) == 0 {
			rows = append(rows, XIDRow{Code: code, At: row.At + int64(w.IntN(4_000_000)) - 2_000_000})
		}
		w.late[device] = append(w.late[device], rows...)
	}
	for _, witness := range w.on {
		if w.IntN(4) > 0 {
			times := 1 + w.IntN(5)/4*w.IntN(40)
			x := XID{Code: code, At: w.now, Witness: witness}
			if witness == WitnessKernelLog {
				x.Detail.PID = w.IntN(3)
			}
			w.event(device, x, times)
		}
	}
}

func (w *xidWorld) event(device int, x XID, times int) {
	xids := slices.Repeat([]XID{x}, times)
	many := x
	many.Times = times
	l, counted, taken := w.new[device].expireEvents(w.now).report(many, x.At, w.on, w.now)
	if len(taken) > 0 && x.Detail != (XIDDetail{}) {
		l = l.detail(x)
	}
	w.new[device] = l
	p := w.former[device].pair(xids, w.on, w.now)
	if settled := settledBy(taken); counted != len(p.counted) || settled != len(p.taken) {
		panic(fmt.Sprintf("%d count and %d settle, the former says %d and %d", counted, settled, len(p.counted), len(p.taken)))
	}
}

func settledBy(taken []OwedXIDs) (n int) {
	for _, o := range taken {
		n += o.Count
	}
	return n
}

// read is a reading of the source.
func (w *xidWorld) read() {
	whole, measures := w.IntN(3) == 0, w.IntN(8) > 0
	for d := range w.stream {
		for len(w.late[d]) > 0 && w.IntN(3) > 0 {
			w.stream[d] = append(w.stream[d], w.late[d][0])
			w.late[d] = w.late[d][1:]
		}
	}
	var shown sourceProgress
	var former progress
	for d := range w.stream {
		rows := slices.SortedFunc(slices.Values(w.stream[d]), func(a, b XIDRow) int {
			return cmp.Or(cmp.Compare(a.At, b.At), cmp.Compare(a.Code, b.Code))
		})
		if n := len(rows); !whole && n > 0 {
			rows = rows[w.IntN(n):]
		}
		for i := range rows {
			rows[i].Old = InKernelLog(rows[i].Code) && rows[i].At < w.started
		}
		read := formerRead{rows, whole}
		l, fresh := w.new[d].list(rows, whole, w.restored)
		l = l.expireEvents(w.now)
		for _, x := range fresh {
			var counted int
			var taken []OwedXIDs
			l, counted, taken = l.report(x, x.At, w.on, w.now)
			shown.add(counted, taken)
		}
		w.new[d] = l
		former.add(w.former[d].pair(w.former[d].list(read, w.restored, w.unread), w.on, w.now))
	}
	step := elapsedStep(measures, w.sampled, w.now)
	for d := range w.stream {
		w.new[d], w.former[d].awaited = w.new[d].pass(step, &shown), passTime(w.former[d].awaited, step, &former)
	}
	w.sampled = w.now
}

func (w *xidWorld) pass(d time.Duration) {
	w.now = w.now.Add(d)
	for i := range w.stream { // DCGM keeps rows for ten minutes
		w.stream[i] = slices.DeleteFunc(w.stream[i], func(r XIDRow) bool { return w.engineTime()-r.At > int64(10*time.Minute/time.Microsecond) })
	}
}

// restartEngine restarts the source. It lists what it reads of the old kernel log.
func (w *xidWorld) restartEngine() {
	for d := range w.stream {
		w.stream[d] = slices.DeleteFunc(w.stream[d], func(r XIDRow) bool { return !InKernelLog(r.Code) || w.IntN(2) == 0 })
		w.late[d] = nil
		if w.IntN(3) == 0 {
			w.stream[d] = append(w.stream[d], XIDRow{Code: 79, At: w.started - 1e10 - 1e7*int64(w.IntN(100))})
		}
	}
}

// restartAgent restarts the agent, which may read its saved state at once, late, or never.
func (w *xidWorld) restartAgent() {
	for d := range w.new {
		w.saved[d], w.saving[d] = w.new[d].Restarted(), w.former[d].restart()
		w.new[d], w.former[d] = Ledger{}, newFormerXIDs()
		// The source had the rows of a predecessor in memory only, so that they counted after a restart.
		w.stream[d] = slices.DeleteFunc(w.stream[d], func(r XIDRow) bool {
			return slices.ContainsFunc(w.saved[d].Rows, func(l LedgerRow) bool { return l.Predecessor && l.same(r) })
		})
		w.saved[d].Rows = slices.DeleteFunc(slices.Clone(w.saved[d].Rows), func(l LedgerRow) bool { return l.Predecessor })
	}
	w.started, w.sampled = w.engineTime(), time.Time{}
	switch w.IntN(3) {
	case 0: // the state file has another boot
		w.restored, w.unread = false, false
	case 1:
		w.restored, w.unread = true, false
		w.new, w.former = w.saved, w.saving
	case 2:
		w.restored, w.unread = false, true
	}
}

// restoreLate reads the saved state.
func (w *xidWorld) restoreLate() {
	if !w.unread {
		return
	}
	w.unread, w.restored = false, w.IntN(4) > 0
	for d := range w.new {
		l, fresh := w.new[d].restoreLate(w.saved[d], w.restored)
		f := w.former[d]
		var unjudged []XID
		if w.restored {
			unjudged = slices.DeleteFunc(f.skipped, func(x XID) bool { return slices.ContainsFunc(w.saving[d].history, x.SameEvent) })
		}
		f.skipped = nil
		f.history = appendHistory(w.saving[d].history, f.history)
		f.awaited = slices.Concat(w.saving[d].awaited, f.awaited)
		l = l.expireEvents(w.now)
		for _, x := range fresh {
			l, _, _ = l.report(x, x.At, w.on, w.now)
		}
		w.new[d] = l
		f.pair(unjudged, w.on, w.now)
	}
}

// recreate destroys the MIG device and creates another with its number in the source.
func (w *xidWorld) recreate() {
	later := w.new[0].Read
	w.new[1], w.former[1] = Ledger{Later: later}, newFormerXIDs()
	w.former[1].created = later
	w.late[1] = nil
}

// reportForLong has the source report an XID per second until debts may expire. It may report some of the owed ones.
func (w *xidWorld) reportForLong() {
	d := w.IntN(2)
	for i := range 400 {
		w.pass(time.Second)
		if i%40 == 0 {
			w.occur()
		}
		w.late[d] = append(w.late[d], XIDRow{Code: []int{13, 31, 48}[w.IntN(3)], At: w.engineTime() + int64(w.IntN(100_000))})
		w.read()
	}
}

func (w *xidWorld) step() string {
	if w.IntN(2000) == 0 {
		w.reportForLong()
		return "long report"
	}
	switch n := w.IntN(20); {
	case n < 7:
		w.occur()
		return "occur"
	case n < 13:
		w.pass([]time.Duration{300 * time.Millisecond, time.Second, time.Second, 4 * time.Second, 20 * time.Second}[w.IntN(5)])
		w.read()
		return "read"
	case n < 15:
		w.pass(time.Duration(w.IntN(30)) * time.Second)
		return "pass"
	case n == 15:
		w.restartEngine()
		return "restart of the engine"
	case n == 16:
		w.restartAgent()
		return "restart of the agent"
	case n == 17:
		w.restoreLate()
		return "late restore"
	case n == 18:
		w.recreate()
		return "recreate"
	default:
		w.clock += time.Duration(w.IntN(120)-60) * time.Second
		return "clock step"
	}
}

// check compares both memories.
func (w *xidWorld) check() error {
	for d, l := range w.new {
		f := w.former[d]
		counts, details, witnesses := map[int]uint64{}, map[int]XIDDetail{}, map[int]Witness{}
		for code, t := range l.Codes {
			counts[code], witnesses[code] = t.Total, t.Newest.Witness
			if t.Newest.Detail != (XIDDetail{}) {
				details[code] = t.Newest.Detail
			}
		}
		if !maps.Equal(counts, f.counts) || !maps.Equal(details, f.details) || !maps.Equal(witnesses, f.witnesses) {
			return fmt.Errorf("device %d counts %v %v %v, formerly %v %v %v", d, counts, details, witnesses, f.counts, f.details, f.witnesses)
		}
		if l.Last != f.last.Code || l.Codes[l.Last].Newest != f.last {
			return fmt.Errorf("device %d: last %d %+v, formerly %+v", d, l.Last, l.Codes[l.Last], f.last)
		}
		owed := make([]AwaitedXIDs, 0, len(l.Owed))
		for _, o := range l.Owed {
			a := AwaitedXIDs{Code: o.Code, Witness: o.Witness, Count: o.Count, Since: o.Since, Newest: o.Newest}
			if o.Witness == WitnessSource {
				a.Left, a.Extended = OwedBySource-(l.measured-o.Seen), o.Seen-o.Born
			}
			owed = append(owed, a)
		}
		if !slices.Equal(owed, f.awaited) {
			return fmt.Errorf("device %d owes %+v, formerly %+v", d, owed, f.awaited)
		}
	}
	return nil
}

// The ledger counts every XID as the memories that it replaces, over random rows, reports, restarts and clock steps.
func TestLedgerIsFormerMemory(t *testing.T) {
	for seed := range *ledgerSeeds {
		w := newXIDWorld(seed)
		for i := range 60 {
			did := w.step()
			if err := w.check(); err != nil {
				t.Fatalf("seed %d, step %d, %s: %v", seed, i, did, err)
			}
		}
	}
}
