package health

import (
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

var formerSeeds = flag.Uint64("former-seeds", 200, "sequences that TestJudgesAsFormer plays")

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
	unread  []XID              // XIDs of GPU-0 that the source has not reported
	cleared map[DeviceID]bool  // MIG devices that were cleared since the latest reading: see clearedInherits
	lasts   map[DeviceID]State // the states in which they were left

	filter       OutageFilter
	devices      []DeviceState
	formerFilter former.OutageFilter
	former       []former.DeviceState
}

func newFormerWorld(t *testing.T, seed uint64) *formerWorld {
	w := &formerWorld{
		random: random{rand.New(rand.NewPCG(seed, 4))}, t: t, now: at(0), cleared: map[DeviceID]bool{},
		lasts: map[DeviceID]State{},
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
func (w *formerWorld) judge(r, formerReading *Reading, rc ReadingContext) {
	defer clear(w.cleared)
	before, old := w.former, convert[former.Reading](*formerReading)
	oldReading := &old
	if !rc.Events {
		var warning, formerWarning string
		r, warning = w.filter.Filter(w.devices, r, w.now)
		if oldReading, formerWarning = w.formerFilter.Filter(before, oldReading, w.now); warning != formerWarning {
			w.t.Fatalf("outage %q, formerly %q", warning, formerWarning)
		}
	}
	w.devices = Judge(w.config, w.devices, r, rc, w.now)
	w.former = former.Judge(convert[former.Config](w.config), before, oldReading, convert[former.ReadingContext](rc), w.now)
	w.view(before)
}

func (w *formerWorld) read() {
	r, _ := w.reading(int(w.now.Sub(at(0)) / time.Second))
	for i := range r.Samples {
		s := &r.Samples[i]
		s.At = w.now
		if s.Device == gpu0.ID && len(w.unread) > 0 && w.IntN(2) == 0 {
			s.XIDs, w.unread = append(s.XIDs, w.unread...), nil
		}
		for j := range s.XIDs {
			s.XIDs[j].Witness = WitnessSource
			s.XIDs[j].At = s.XIDs[j].At.Add(time.Duration(j) * time.Microsecond)
		}
	}
	if w.IntN(6) == 0 {
		r.Checks.Status = ChecksDown
	}
	rc := w.rc
	rc.DriverReloaded = w.IntN(20) == 0
	w.judge(&r, &r, rc)
	w.rc.FirstReading = false
}

func (w *formerWorld) events() {
	rc := w.rc
	if rc.Events = true; len(rc.Witnesses) == 0 || len(w.devices) == 0 {
		return
	}
	var r, old Reading
	for _, d := range w.devices {
		s := Sample{Device: d.Device.ID, At: w.now}
		for range w.IntN(3) {
			x := XID{
				Code: []int{31, 48, 79, 94, 95, 109, 144, 149}[w.IntN(8)], At: w.now.Add(time.Duration(len(s.XIDs))),
				Witness: rc.Witnesses[w.IntN(len(rc.Witnesses))],
			}
			if x.Witness == WitnessKernelLog {
				x.Detail = XIDDetail{Process: "python3", PID: w.IntN(2)}
			}
			x.Times = []int{0, 0, 1, 3}[w.IntN(4)]
			if d.Device.ID == gpu0.ID && w.IntN(2) == 0 {
				for i := range x.Count() {
					w.unread = append(w.unread, XID{Code: x.Code, At: x.At.Add(time.Duration(i) * time.Microsecond)})
				}
			}
			s.XIDs = append(s.XIDs, x)
		}
		if d.Device.Kind == KindGPU && w.IntN(3) == 0 {
			s.Values = map[Field]float64{FieldRecoveryAction: float64(w.IntN(5))}
		}
		r.Samples = append(r.Samples, s)
		s.XIDs = each(s.XIDs)
		old.Samples = append(old.Samples, s)
	}
	w.judge(&r, &old, rc)
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
		s := DeviceState{Device: d.Device, Memory: d.Memory, XIDHistory: d.XIDHistory}
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
	devices, old := w.saved(sameBoot)
	if !history {
		for i := range devices {
			devices[i].XIDHistory, old[i].XIDHistory = nil, nil
		}
	}
	w.filter, w.formerFilter, w.vc.Held = OutageFilter{}, former.OutageFilter{}, nil
	w.rc.FirstReading = true
	if w.IntN(2) == 0 {
		undecidedOverRestart(old)
		w.devices, w.former, w.rc.XIDHistory = devices, old, history
		return
	}
	w.devices, w.former, w.rc.XIDHistory = nil, nil, false
	for range w.IntN(4) {
		w.pass(time.Second)
		w.read()
	}
	reloaded := w.IntN(4) == 0
	after, unjudged := RestoreLate(w.config, w.devices, LateState{Devices: devices, DriverReloaded: reloaded, XIDHistory: history}, w.now)
	oldAfter, oldUnjudged := former.RestoreLate(convert[former.Config](w.config), w.former,
		former.LateState{Devices: old, DriverReloaded: reloaded, XIDHistory: history}, w.now)
	if len(unjudged) != len(oldUnjudged) {
		w.t.Fatalf("%d samples are not judged, formerly %d", len(unjudged), len(oldUnjudged))
	}
	undecidedOverRestart(oldAfter)
	w.devices, w.former, w.rc.XIDHistory = after, oldAfter, history
	rc := w.rc
	rc.Events = true
	w.judge(&Reading{Samples: unjudged}, &Reading{Samples: unjudged}, rc)
}

// clearedInherits is an allowed difference: an operator cleared the own finding of a MIG device whose GPU has a finding with the same
// cause. The MIG device now inherits the GPU's at once, and formerly from the next reading on. So formerly its state did not last.
func (w *formerWorld) clearedInherits(d, old *DeviceState) {
	if w.cleared[d.Device.ID] {
		w.lasts[d.Device.ID] = d.Verdict.State // until the next reading, another clear may change both
		lacks := func(f Finding) bool { return f.From != "" && !slices.Contains(old.Verdict.Causes(), f.Cause) }
		common := slices.DeleteFunc(slices.Clone(d.Verdict.Findings), lacks)
		if len(common) < len(d.Verdict.Findings) && reflect.DeepEqual(stored(common), stored(old.Verdict.Findings)) {
			old.Verdict = d.Verdict
			hits["clearedInherits"]++
		}
	}
	state, lasts := w.lasts[d.Device.ID]
	switch {
	case !lasts:
	case d.Verdict.State != state:
		delete(w.lasts, d.Device.ID)
	case old.Verdict.State == state && !old.Verdict.Since.Equal(d.Verdict.Since):
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
			!slices.Equal(storedXIDs(d.Memory.PendingXIDs), storedXIDs(convert[[]XID](was.PendingXIDs))) ||
			!slices.Equal(storedXIDs(d.XIDHistory), storedXIDs(convert[[]XID](w.former[i].XIDHistory))) {
			w.t.Fatalf("%s: %s remembers %v %v %v, formerly %v %v %v", where, d.Device.ID, d.Memory.Trips, d.Memory.PendingXIDs, d.XIDHistory,
				was.Trips, was.PendingXIDs, w.former[i].XIDHistory)
		}
		d.Memory, d.XIDHistory, d.XIDs, d.Unread = Memory{}, nil, Ledger{}, false
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
	w.restart()
	for range w.IntN(3) {
		w.events()
	}
	w.read() // nothing is published before
	return "restart"
}

// Random readings, events, decisions and restarts give the devices that the former package gives.
func TestJudgesAsFormer(t *testing.T) {
	for seed := range *formerSeeds {
		w := newFormerWorld(t, seed)
		for i := range 60 {
			did := w.step()
			w.check(fmt.Sprintf("seed %d, step %d, %s", seed, i, did))
		}
	}
	t.Log(hits)
}
