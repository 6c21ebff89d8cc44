package health

import (
	"cmp"
	"flag"
	"fmt"
	"maps"
	"math/rand/v2"
	"reflect"
	"slices"
	"testing"
	"time"

	former "github.com/gpu-node-agent/gpu-node-agent/internal/formerhealth"
)

var (
	formerSeeds = flag.Uint64("former-seeds", 200, "sequences that TestJudgesAsFormer plays")
	formerFirst = flag.Uint64("former-first", 0, "seed of the first of them")
)

// convert copies a value to a type with the same exported fields.
func convert[T any](from any) (to T) {
	convertTo(reflect.ValueOf(&to).Elem(), reflect.ValueOf(from))
	return to
}

func convertTo(to, from reflect.Value) {
	switch {
	case from.Type() == to.Type():
		to.Set(from)
	case to.Kind() == reflect.Struct:
		for i := range to.NumField() {
			if f := to.Type().Field(i); f.IsExported() && from.FieldByName(f.Name).IsValid() {
				convertTo(to.Field(i), from.FieldByName(f.Name))
			}
		}
	case to.Kind() == reflect.Slice:
		if from.IsNil() {
			return
		}
		to.Set(reflect.MakeSlice(to.Type(), from.Len(), from.Len()))
		for i := range from.Len() {
			convertTo(to.Index(i), from.Index(i))
		}
	case to.Kind() == reflect.Array:
		for i := range from.Len() {
			convertTo(to.Index(i), from.Index(i))
		}
	case to.Kind() == reflect.Map:
		if from.IsNil() {
			return
		}
		to.Set(reflect.MakeMap(to.Type()))
		for key, value := range from.Seq2() {
			k, v := reflect.New(to.Type().Key()).Elem(), reflect.New(to.Type().Elem()).Elem()
			convertTo(k, key)
			convertTo(v, value)
			to.SetMapIndex(k, v)
		}
	case to.Kind() == reflect.Pointer:
		if from.IsNil() {
			return
		}
		to.Set(reflect.New(to.Type().Elem()))
		convertTo(to.Elem(), from.Elem())
	default:
		to.Set(from.Convert(to.Type()))
	}
}

// formerWorld is a node that this package and the former one judge.
type formerWorld struct {
	random
	t       *testing.T
	now     time.Time
	config  Config
	rc      ReadingContext
	vc      ViewContext
	unread  []int             // XIDs of GPU-0 that the source has not reported
	cleared map[DeviceID]bool // MIG devices that were cleared since the latest reading: see clearedInherits
	lasts   map[DeviceID]left // the states in which they were left

	stream    map[DeviceID][]XIDRow // what the source lists
	rowAt     int64                 // of the newest row
	kernelLog []int64               // the times of XIDs in the kernel log

	filter       OutageFilter
	devices      []DeviceState
	formerFilter former.OutageFilter
	former       []former.DeviceState

	source map[DeviceID]*formerXIDs         // what the former source has delivered, since the start
	past   map[former.DeviceID][]former.XID // XIDs from before the start, while the saved state is unread
}

type left struct {
	state State
	at    time.Time
}

func newFormerWorld(t *testing.T, seed uint64) *formerWorld {
	w := &formerWorld{
		random: random{rand.New(rand.NewPCG(seed, 4))}, t: t, now: at(0), cleared: map[DeviceID]bool{},
		lasts: map[DeviceID]left{}, stream: map[DeviceID][]XIDRow{}, source: map[DeviceID]*formerXIDs{},
	}
	w.config = w.random.config()
	w.rc = ReadingContext{
		XIDHistory: w.IntN(2) == 0, FirstReading: true, Witnesses: []Witness{WitnessNVML, WitnessKernelLog}[:w.IntN(3)],
	}
	return w
}

func (w *formerWorld) pass(d time.Duration) { w.now = w.now.Add(d) }

// view derives the verdicts. before are the former devices whose decisions continue.
func (w *formerWorld) view(before []former.DeviceState) {
	w.devices = View(w.config, w.devices, w.vc, w.now)
	dc := former.DecisionContext{Detach: convert[former.Detachment](w.vc.Detach), MPS: convert[former.MPSState](w.vc.MPS)}
	if held := w.vc.Held; held != nil {
		dc.Held = func(id former.DeviceID) bool { return held(DeviceID(id)) }
	}
	w.former = former.Decide(convert[former.Config](w.config), before, w.former, dc, w.now)
}

// judge judges a reading and derives the verdicts.
func (w *formerWorld) judge(r *Reading, oldReading *former.Reading, rc ReadingContext) {
	defer clear(w.cleared)
	before := w.former
	var warning, formerWarning string
	w.devices, warning = w.filter.Measure(w.config, w.devices, r, rc, w.now)
	if oldReading, formerWarning = w.formerFilter.Filter(before, oldReading, w.now); warning != formerWarning {
		w.t.Fatalf("outage %q, formerly %q", warning, formerWarning)
	}
	if formerWarning != "" { // as the monitor did
		rc.FirstReading, rc.DriverReloaded = false, false
	} else {
		w.rc.FirstReading = false
	}
	w.former = former.Judge(convert[former.Config](w.config), before, oldReading, convert[former.ReadingContext](rc), w.now)
	w.view(before)
}

// observe judges an event and derives the verdicts. Formerly, a reading had the event.
func (w *formerWorld) observe(e Observation, rc ReadingContext) {
	defer maps.DeleteFunc(w.cleared, func(id DeviceID, _ bool) bool {
		i := slices.IndexFunc(w.devices, func(d DeviceState) bool { return d.Device.ID == id })
		return rc.DriverReloaded || e.GPU == "" || i < 0 || w.devices[i].Device.GPU() == e.GPU
	})
	r := &former.Reading{}
	for _, id := range e.Devices {
		s := former.Sample{Device: former.DeviceID(id), At: w.now}
		if e.Action != nil {
			s.Values = map[former.Field]float64{former.FieldRecoveryAction: float64(*e.Action)}
		} else {
			s.XIDs = convert[[]former.XID](each([]XID{e.XID}))
		}
		r.Samples = append(r.Samples, s)
	}
	before, oldContext := w.former, convert[former.ReadingContext](rc)
	oldContext.Events = true
	w.devices = Observe(w.config, w.devices, []Observation{e}, rc, w.now)
	w.former = w.othersStay(e.GPU, rc, func(devices []former.DeviceState) []former.DeviceState {
		return former.Judge(convert[former.Config](w.config), devices, r, oldContext, w.now)
	})
	w.view(before)
}

// othersStay is an allowed difference: formerly an event had all devices judged again. So in an event, time dropped trips and pending XIDs
// of other GPUs, and a new configuration applied to them. Now the next reading does that, and only a reload of the driver concerns them.
func (w *formerWorld) othersStay(
	gpu DeviceID, rc ReadingContext, judge func([]former.DeviceState) []former.DeviceState,
) []former.DeviceState {
	if rc.DriverReloaded || gpu == "" {
		return judge(w.former)
	}
	concerned := func(d former.DeviceState) bool { return DeviceID(cmp.Or(d.Device.Parent, d.Device.ID)) == gpu }
	judged := judge(slices.DeleteFunc(slices.Clone(w.former), func(d former.DeviceState) bool { return !concerned(d) }))
	all := slices.Clone(w.former)
	for i := range all {
		if all[i].Sample.XIDs = nil; concerned(all[i]) {
			all[i], judged = judged[0], judged[1:]
		}
	}
	hits["othersStay"]++
	return all
}

// occur adds an XID to the stream of the source. It is listed with two times at most, as the driver and the kernel log have it.
func (w *formerWorld) occur(id DeviceID, code int) {
	w.rowAt = max(w.rowAt+1, w.now.UnixMicro())
	if InKernelLog(code) {
		near := slices.ContainsFunc(w.kernelLog, func(at int64) bool { return w.rowAt-at < 10_000_000 })
		if near {
			return
		}
		w.kernelLog = append(w.kernelLog, w.rowAt)
		if w.IntN(2) == 0 {
			w.stream[id] = append(w.stream[id], XIDRow{Code: code, At: w.rowAt})
			w.rowAt += int64(w.IntN(4_000_000))
		}
	}
	w.stream[id] = append(w.stream[id], XIDRow{Code: code, At: w.rowAt})
}

// read judges a reading of the source. It lists its rows again and again; formerly it delivered each once.
func (w *formerWorld) read() {
	r, _ := w.reading(int(w.now.Sub(at(0)) / time.Second))
	if w.IntN(20) == 0 {
		clear(w.stream) // the engine was restarted
	}
	for i := range r.Samples {
		s := &r.Samples[i]
		s.At = w.now
		for _, x := range s.XIDs {
			w.occur(s.Device, x.Code)
		}
		if s.Device == gpu0.ID && w.IntN(2) == 0 {
			for _, code := range w.unread {
				w.occur(s.Device, code)
			}
			w.unread = nil
		}
		s.XIDs, s.Rows, s.RowsWhole = nil, nil, false
	}
	if w.IntN(6) == 0 {
		r.Checks.Status = ChecksDown
	}
	old := w.list(&r)
	if w.past != nil {
		for id, xids := range old.UnjudgedPast(w.former) {
			w.past[id] = append(w.past[id], xids...)
		}
	}
	rc := w.rc
	rc.DriverReloaded = w.IntN(20) == 0
	w.judge(&r, &old, rc)
	maps.DeleteFunc(w.source, func(id DeviceID, _ *formerXIDs) bool { return w.find(id) == nil })
	w.pastOfDestroyed()
}

// pastOfDestroyed is an allowed difference: formerly the XIDs from before the start of a MIG device that was destroyed while the saved
// state was unread counted for the next with its ID.
func (w *formerWorld) pastOfDestroyed() {
	for id, xids := range w.past {
		if w.find(DeviceID(id)) == nil {
			hits["pastOfDestroyed"] += len(xids)
			delete(w.past, id)
		}
	}
}

func (w *formerWorld) find(id DeviceID) *DeviceState {
	if i := slices.IndexFunc(w.devices, func(d DeviceState) bool { return d.Device.ID == id }); i >= 0 {
		return &w.devices[i]
	}
	return nil
}

// list adds the rows to a reading, and returns the former reading.
func (w *formerWorld) list(r *Reading) former.Reading {
	for _, d := range r.Devices {
		gpu := w.find(d.Parent)
		switch {
		case d.Kind != KindMIG || w.source[d.ID] != nil:
		case w.find(d.ID) == nil && w.source[d.Parent] != nil:
			w.source[d.ID] = newFormerXIDs()
			w.source[d.ID].created = true
		case w.source[d.Parent] != nil || gpu != nil && gpu.Memory.measured:
			w.listedLate(d.ID)
		}
	}
	old := convert[former.Reading](*r)
	for i := range r.Samples {
		s := &r.Samples[i]
		if !slices.ContainsFunc(r.Devices, func(d Device) bool { return d.ID == s.Device }) {
			continue
		}
		f := w.source[s.Device]
		if f == nil {
			f = newFormerXIDs()
			w.source[s.Device] = f
		}
		s.Rows, s.RowsWhole = slices.Clone(w.stream[s.Device]), w.IntN(3) == 0 || !f.read && !f.created
		if n := len(s.Rows); n > 0 && !s.RowsWhole {
			s.Rows = s.Rows[w.IntN(n):]
		}
		fresh, past := f.deliver(formerRead{s.Rows, s.RowsWhole})
		old.Samples[i].XIDs, old.Samples[i].Past = convert[[]former.XID](fresh), convert[[]former.XID](past)
	}
	return old
}

// listedLate is an allowed difference: formerly the XIDs from before the start of a MIG device did not count if the source listed it later
// than its GPU, or listed both later than others.
func (w *formerWorld) listedLate(id DeviceID) {
	before := len(w.stream[id])
	var known knownRows
	if d := w.find(id); d != nil {
		known = knownRows{rows: d.XIDs.Rows, listed: make([]bool, len(d.XIDs.Rows))}
	}
	w.stream[id] = slices.DeleteFunc(w.stream[id], func(r XIDRow) bool { return !known.find(r) })
	hits["listedLate"] += before - len(w.stream[id])
}

// predecessorsOverRestart is an allowed difference: formerly only the process knew which rows are of the instance that had the number of a
// MIG device before, so they counted after a restart.
func (w *formerWorld) predecessorsOverRestart() {
	for _, d := range w.devices {
		before := len(w.stream[d.Device.ID])
		w.stream[d.Device.ID] = slices.DeleteFunc(w.stream[d.Device.ID], func(r XIDRow) bool {
			return slices.ContainsFunc(d.XIDs.Rows, func(l LedgerRow) bool { return l.Predecessor && l.same(r) })
		})
		hits["predecessorsOverRestart"] += before - len(w.stream[d.Device.ID])
	}
}

func (w *formerWorld) events() {
	rc := w.rc
	if len(rc.Witnesses) == 0 || len(w.devices) == 0 {
		return
	}
	rc.DriverReloaded = w.IntN(8) == 0
	for _, d := range w.devices {
		e := Observation{GPU: d.Device.GPU(), Devices: []DeviceID{d.Device.ID}}
		if d.Device.Kind == KindGPU && w.IntN(3) == 0 {
			action := e
			action.Action = new(RecoveryAction(w.IntN(5)))
			w.observe(action, rc)
			rc.DriverReloaded = false
		}
		for i := range w.IntN(3) {
			x := XID{
				Code: []int{31, 48, 79, 94, 95, 109, 144, 149}[w.IntN(8)], At: w.now.Add(time.Duration(i)),
				Witness: rc.Witnesses[w.IntN(len(rc.Witnesses))],
			}
			if x.Witness == WitnessKernelLog {
				x.Detail = XIDDetail{Process: "python3", PID: w.IntN(2)}
			}
			x.Times = []int{0, 0, 1, 3}[w.IntN(4)]
			if d.Device.ID == gpu0.ID && w.IntN(2) == 0 {
				w.unread = append(w.unread, slices.Repeat([]int{x.Code}, x.Count())...)
			}
			e.XID = x
			w.observe(e, rc)
			rc.DriverReloaded = false
		}
	}
}

// each returns XIDs as they were formerly: one for each report.
func each(xids []XID) (all []XID) {
	for _, x := range xids {
		n := x.Count()
		x.Times = 0
		all = append(all, slices.Repeat([]XID{x}, n)...)
	}
	return all
}

// change changes what verdicts depend on beside the memory.
func (w *formerWorld) change() {
	switch w.IntN(4) {
	case 0:
		w.config = w.random.config()
	case 1:
		w.vc.Held = w.held()
	case 2:
		w.detach()
	case 3:
		w.vc.MPS.Daemons = nil
		if w.IntN(2) == 0 {
			w.vc.MPS.Daemons = map[DeviceID]*MPSDaemon{[]DeviceID{gpu0.ID, mig0.ID}[w.IntN(2)]: {Cause: CauseMPSDown, Reason: "r"}}
		}
	}
	w.view(w.former)
}

// clear has an operator clear a cause of a device, or all.
func (w *formerWorld) clear() {
	if len(w.devices) == 0 {
		return
	}
	i := w.IntN(len(w.devices))
	d, cause := w.devices[i], ""
	if n := len(d.Verdict.Findings); n > 0 && w.IntN(2) == 0 {
		cause = d.Verdict.Findings[w.IntN(n)].Cause
	}
	up := w.IntN(2) == 0
	devices, causes, err := Clear(w.config, w.devices, up, d.Device.ID, cause)
	old, oldCauses, oldErr := former.Clear(convert[former.Config](w.config), w.former, up, former.DeviceID(d.Device.ID), cause, w.now)
	if w.cleared[d.Device.ID] && err != nil && oldErr != nil {
		return // of another finding: see clearedInherits
	}
	if fmt.Sprint(err) != fmt.Sprint(oldErr) || !slices.Equal(causes, oldCauses) {
		w.t.Fatalf("clear %s of %s: %v, %v; formerly %v, %v", cause, d.Device.ID, causes, err, oldCauses, oldErr)
	}
	if err != nil {
		return
	}
	before := w.former
	w.devices, w.former = devices, old
	w.view(before)
	w.cleared[d.Device.ID] = d.Device.Kind == KindMIG
}

// detach has an operator detach the driver, keep it after all, or use it again.
func (w *formerWorld) detach() {
	switch unread := slices.ContainsFunc(w.devices, func(d DeviceState) bool { return d.Unread }); {
	case !w.vc.Detach.InForce():
		w.vc.Detach = Detachment{Since: w.now, Until: w.now.Add(time.Hour), For: time.Hour}
	case unread || w.IntN(2) == 0: // if the driver was kept, the monitor, and not the former view, freed the devices that were read
		w.vc.Detach = Detachment{Over: true}
		w.devices, w.former = DiscardMeasurements(w.devices, w.now), former.DiscardMeasurements(w.former, w.now)
	default:
		w.vc.Detach = Detachment{}
	}
}

// saved returns what the state file keeps of the devices for the next process, as statefile.FromSnapshot and Restore.
func (w *formerWorld) saved(sameBoot bool) (devices []DeviceState, old []former.DeviceState) {
	for _, d := range w.devices {
		s := DeviceState{Device: d.Device, Memory: d.Memory}
		s.Verdict = Verdict{Since: d.Verdict.Since, Findings: slices.Concat(d.Memory.Findings, d.Verdict.Decisions())}
		for _, f := range s.Verdict.Findings {
			s.Verdict.State = max(s.Verdict.State, f.State)
		}
		s.Memory = Memory{Findings: stored(d.Memory.Findings), Trips: d.Memory.Trips, PendingXIDs: storedXIDs(d.Memory.PendingXIDs)}
		s.XIDs = d.XIDs.Restarted()
		if !sameBoot {
			s = s.AfterReboot(w.now)
		}
		devices = append(devices, s.Restored(w.now))
	}
	for _, d := range w.former {
		v := former.Verdict{Since: d.Verdict.Since, Trips: d.Verdict.Trips}
		v.PendingXIDs = convert[[]former.XID](storedXIDs(convert[[]XID](d.Verdict.PendingXIDs)))
		for _, f := range d.Verdict.Findings {
			if f.From == "" && !f.OfMPS() && f.Cause != CauseReleased {
				v.Findings = append(v.Findings, convert[former.Finding](convert[Finding](f)))
				v.State = max(v.State, f.State)
			}
		}
		s := former.DeviceState{Device: d.Device, Verdict: v, XIDHistory: d.XIDHistory}
		for _, a := range d.Awaited {
			if a.Witness == former.WitnessSource {
				s.Awaited = append(s.Awaited, former.AwaitedXIDs{Code: a.Code, Witness: a.Witness, Count: a.Count, Left: a.Left})
			}
		}
		if !sameBoot {
			s.Verdict = s.Verdict.Without(w.now, func(f former.Finding) bool { return !(Finding{Cause: f.Cause}).OutlivesBoot() })
			s.Verdict.Trips, s.Verdict.PendingXIDs, s.Awaited = nil, nil, nil
		}
		s.Verdict = s.Verdict.Restored(w.now)
		old = append(old, s)
	}
	return devices, old
}

// undecidedOverRestart is an allowed difference: formerly a restored MIG device did not know that the driver asks to drain peer-to-peer
// work of its GPU, and forgot its pending XIDs.
func undecidedOverRestart(devices []former.DeviceState) {
	for i := range devices {
		d := &devices[i]
		for _, gpu := range devices {
			for _, f := range gpu.Verdict.Findings {
				if gpu.Device.ID == d.Device.Parent && f.Cause == CauseRecoveryAction && !d.Verdict.Has(f.Cause) {
					f.From = d.Device.Parent
					d.Verdict.Findings = append(slices.Clone(d.Verdict.Findings), f)
					hits["undecidedOverRestart"]++
				}
			}
		}
	}
}

func stored(findings []Finding) (all []Finding) {
	for _, f := range findings {
		f.othersBackSince = time.Time{}
		all = append(all, f)
	}
	return all
}

func storedXIDs(xids []XID) (all []XID) {
	for _, x := range xids {
		all = append(all, XID{Code: x.Code, At: x.At})
	}
	return all
}

// restart restarts the process, which reads the saved state at once or after some readings.
func (w *formerWorld) restart() {
	sameBoot := w.IntN(4) > 0
	history := sameBoot && w.IntN(2) == 0
	w.predecessorsOverRestart()
	devices, old := w.saved(sameBoot)
	clear(w.source)
	if !history {
		for i := range devices {
			devices[i].XIDs.Rows, old[i].XIDHistory = nil, nil
		}
	}
	w.filter, w.formerFilter, w.vc.Held = OutageFilter{}, former.OutageFilter{}, nil
	w.rc.FirstReading = true
	if w.IntN(2) == 0 {
		undecidedOverRestart(old)
		w.devices, w.former, w.rc.XIDHistory = devices, old, history
		return
	}
	w.devices, w.former, w.rc.XIDHistory, w.past = nil, nil, false, map[former.DeviceID][]former.XID{}
	for range w.IntN(4) {
		w.pass(time.Second)
		w.read()
	}
	reloaded := w.IntN(4) == 0
	after, unjudged := RestoreLate(w.config, w.devices, LateState{Devices: devices, DriverReloaded: reloaded, XIDHistory: history}, w.now)
	oldAfter, oldUnjudged := former.RestoreLate(convert[former.Config](w.config), w.former,
		former.LateState{Devices: old, DriverReloaded: reloaded, XIDHistory: history, Past: w.past}, w.now)
	w.past = nil
	var listed []XID
	for _, s := range oldUnjudged {
		listed = append(listed, convert[[]XID](s.XIDs)...)
	}
	undecidedOverRestart(oldAfter)
	w.devices, w.former, w.rc.XIDHistory = after, oldAfter, history
	w.observe(Observation{}, w.rc)
	for _, e := range unjudged {
		w.observe(e, w.rc)
		listed = slices.DeleteFunc(listed, e.XID.SameEvent)
	}
	if len(listed) > 0 {
		w.t.Fatalf("no longer left to be judged: %v", listed)
	}
}

// clearedInherits is an allowed difference: an operator cleared the own finding of a MIG device whose GPU has a finding with the same
// cause. The MIG device now inherits the GPU's at once, and formerly from the next reading on. So formerly its state did not last.
func (w *formerWorld) clearedInherits(d, old *DeviceState) {
	if w.cleared[d.Device.ID] {
		w.lasts[d.Device.ID] = left{d.Verdict.State, w.now} // until the next reading, another clear may change both
		lacks := func(f Finding) bool { return f.From != "" && !slices.Contains(old.Verdict.Causes(), f.Cause) }
		common := slices.DeleteFunc(slices.Clone(d.Verdict.Findings), lacks)
		if len(common) < len(d.Verdict.Findings) && reflect.DeepEqual(stored(common), stored(old.Verdict.Findings)) {
			old.Verdict = d.Verdict
			hits["clearedInherits"]++
		}
	}
	lasts, cleared := w.lasts[d.Device.ID]
	switch {
	case !cleared:
	case d.Verdict.State != lasts.state && !old.Verdict.Since.Equal(lasts.at):
		delete(w.lasts, d.Device.ID)
	case d.Verdict.State != lasts.state: // it was left in this state formerly
		w.lasts[d.Device.ID] = left{d.Verdict.State, lasts.at}
		old.Verdict.Since = d.Verdict.Since
		hits["clearedInherits, state"]++
	case old.Verdict.State == lasts.state && !old.Verdict.Since.Equal(d.Verdict.Since):
		old.Verdict.Since = d.Verdict.Since
		hits["clearedInherits, since"]++
	}
}

// firstDifference returns the first difference of two values, with its path.
func firstDifference(path string, a, b reflect.Value) string {
	switch {
	case a.Type() == reflect.TypeFor[time.Time]():
	case a.Kind() == reflect.Struct:
		for i := range a.NumField() {
			if a.Type().Field(i).IsExported() && !reflect.DeepEqual(a.Field(i).Interface(), b.Field(i).Interface()) {
				return firstDifference(path+"."+a.Type().Field(i).Name, a.Field(i), b.Field(i))
			}
		}
	case a.Kind() == reflect.Slice && a.Len() == b.Len():
		for i := range a.Len() {
			if !reflect.DeepEqual(a.Index(i).Interface(), b.Index(i).Interface()) {
				return firstDifference(fmt.Sprintf("%s[%d]", path, i), a.Index(i), b.Index(i))
			}
		}
	}
	return fmt.Sprintf("%s is %+v, formerly %+v", path, a, b)
}

var hits = map[string]int{}

func (w *formerWorld) check(where string) {
	w.t.Helper()
	if len(w.devices) != len(w.former) {
		w.t.Fatalf("%s: %d devices, formerly %d", where, len(w.devices), len(w.former))
	}
	for i, d := range w.devices {
		old := convert[struct {
			Device       Device
			Sample       Sample
			Verdict      Verdict
			XIDCounts    map[int]uint64
			XIDDetails   map[int]XIDDetail
			XIDWitnesses map[int]Witness
			LastXID      XID
			MPS          *MPSDaemon
			ResetAt      time.Time
		}](w.former[i])
		is := DeviceState{
			Device: old.Device, Sample: old.Sample, Verdict: old.Verdict, MPS: old.MPS, ResetAt: old.ResetAt,
		}
		w.clearedInherits(&d, &is)
		counts, details, witnesses := map[int]uint64{}, map[int]XIDDetail{}, map[int]Witness{}
		for code, t := range d.XIDs.Codes {
			counts[code], witnesses[code] = t.Total, t.Newest.Witness
			if t.Newest.Detail != (XIDDetail{}) {
				details[code] = t.Newest.Detail
			}
		}
		maps.DeleteFunc(old.XIDDetails, func(code int, _ XIDDetail) bool { return old.XIDCounts[code] == 0 }) // of a MIG device's XID
		if !maps.Equal(counts, old.XIDCounts) || !maps.Equal(details, old.XIDDetails) || !maps.Equal(witnesses, old.XIDWitnesses) ||
			d.XIDs.Newest() != old.LastXID {
			w.t.Fatalf("%s: %s counts %v, formerly %v %v %v, last %+v", where, d.Device.ID, d.XIDs, old.XIDCounts, old.XIDDetails,
				old.XIDWitnesses, old.LastXID)
		}
		was := w.former[i].Verdict
		if !slices.Equal(d.Memory.Trips, was.Trips) ||
			!slices.Equal(storedXIDs(d.Memory.PendingXIDs), storedXIDs(convert[[]XID](was.PendingXIDs))) {
			w.t.Fatalf("%s: %s remembers %v %v, formerly %v %v", where, d.Device.ID, d.Memory.Trips, d.Memory.PendingXIDs, was.Trips,
				was.PendingXIDs)
		}
		d.Memory, d.XIDs, d.Unread = Memory{}, Ledger{}, false
		d.Sample.XIDs = each(d.Sample.XIDs)
		d.Verdict.Findings, is.Verdict.Findings = stored(d.Verdict.Findings), stored(is.Verdict.Findings)
		if !reflect.DeepEqual(d, is) {
			w.t.Fatalf("%s: %s: %s", where, d.Device.ID, firstDifference("", reflect.ValueOf(d), reflect.ValueOf(is)))
		}
	}
}

func (w *formerWorld) step() string {
	w.pass([]time.Duration{100 * time.Millisecond, time.Second, 2 * time.Second, 11 * time.Second, 70 * time.Second}[w.IntN(5)])
	switch n := w.IntN(20); {
	case n < 9:
		w.read()
		return "reading"
	case n < 14:
		w.events()
		return "events"
	case n < 17:
		w.change()
		return "change"
	case n == 17:
		w.clear()
		return "clear"
	case n == 18:
		w.detach()
		w.view(w.former)
		return "detach"
	}
	for range w.IntN(4) { // the driver reports XIDs while no agent runs
		w.occur([]DeviceID{gpu0.ID, gpu1.ID, mig0.ID}[w.IntN(3)], []int{31, 48, 79, 94, 95}[w.IntN(5)])
	}
	w.restart()
	for range w.IntN(3) {
		w.events()
	}
	w.read() // nothing is published before
	return "restart"
}

// Random readings, events, decisions and restarts give the devices that the former package gives.
func TestJudgesAsFormer(t *testing.T) {
	for seed := *formerFirst; seed < *formerFirst+*formerSeeds; seed++ {
		w := newFormerWorld(t, seed)
		for i := range 60 {
			did := w.step()
			w.check(fmt.Sprintf("seed %d, step %d, %s", seed, i, did))
		}
	}
	t.Log(hits)
}
