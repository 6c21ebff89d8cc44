package statefile

import (
	"maps"
	"slices"
	"testing"
	"time"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/health/judge"
	"github.com/gpu-node-agent/gpu-node-agent/internal/healthtest"
)

// witnessedNode simulates a node: the driver's XIDs, DCGM, which reads one of them per second and loses some, and an event
// source, which is late or loses some. It judges what they report.
type witnessedNode struct {
	t       *testing.T
	now     time.Time
	devices []health.DeviceState
	history bool // the saved state has all XIDs

	dcgmQueue []nodeXID // not read yet
	rows      []nodeXID // read
	delivered int       // rows delivered to this process
	started   bool      // this process has polled
	nvml      []nodeXID // not delivered yet
	stalled   bool

	action   map[health.DeviceID]float64 // the driver's recovery action
	wasReset map[health.DeviceID]bool    // reset, and no XID since
	cured    map[health.DeviceID]bool    // the GPU was cured by that reset
	truth    map[xidKey]int
	seen     map[health.Witness]map[xidKey]int // reported to the agent
	counted  map[xidKey]int                    // by earlier processes
	lossy    bool
}

type nodeXID struct {
	device health.DeviceID
	code   int
	at     time.Time
}

type xidKey struct {
	device health.DeviceID
	code   int
}

func newWitnessedNode(t *testing.T) *witnessedNode {
	n := &witnessedNode{
		t: t, now: healthtest.Epoch, history: true, action: map[health.DeviceID]float64{}, wasReset: map[health.DeviceID]bool{},
		cured: map[health.DeviceID]bool{}, truth: map[xidKey]int{}, counted: map[xidKey]int{},
		seen: map[health.Witness]map[xidKey]int{health.WitnessSource: {}, health.WitnessNVML: {}},
	}
	n.poll()
	return n
}

func fuzzDevices() []health.Device { return []health.Device{healthtest.GPU0, healthtest.GPU1} }

// emit lets the driver report an XID of a device.
func (n *witnessedNode) emit(device, code int, lostByDCGM, lostByNVML bool) {
	if len(n.dcgmQueue) >= 200 {
		return // DCGM must read an event within maxExtension
	}
	n.now = n.now.Add(time.Millisecond)
	x := nodeXID{fuzzDevices()[device].ID, code, n.now}
	n.truth[xidKey{x.device, x.code}]++
	n.wasReset[x.device], n.cured[x.device] = false, false
	if !lostByDCGM {
		n.dcgmQueue = append(n.dcgmQueue, x)
	}
	if !lostByNVML {
		n.nvml = append(n.nvml, x)
	}
	n.lossy = n.lossy || lostByDCGM || lostByNVML
}

// judged derives the verdicts of devices that a reading or events have changed.
func (n *witnessedNode) judged(devices []health.DeviceState) {
	n.devices = judge.View(judge.DefaultConfig(), devices, judge.ViewContext{}, n.now)
	for _, d := range n.devices {
		broken := d.Verdict.Has("xid-95")
		if n.cured[d.Device.ID] && !n.lossy && broken {
			n.t.Fatalf("%s: a late report of an XID from before the reset broke the GPU again", d.Device.ID)
		}
		n.cured[d.Device.ID] = n.wasReset[d.Device.ID] && !broken
		waiting := 0
		for _, a := range d.XIDs.Owed {
			if waiting += a.Count; a.Count <= 0 {
				n.t.Fatalf("%s: owed %+v", d.Device.ID, d.XIDs.Owed)
			}
		}
		if len(d.XIDs.Owed) > 64 {
			n.t.Fatalf("%s: %d entries for %d owed XIDs", d.Device.ID, len(d.XIDs.Owed), waiting)
		}
	}
}

func (n *witnessedNode) context() judge.ReadingContext {
	return judge.ReadingContext{XIDHistory: n.history, FirstReading: !n.started, Witnesses: []health.Witness{health.WitnessNVML}}
}

// events delivers what the event source has, and the recovery actions that the driver asks for while the source is stalled.
func (n *witnessedNode) events() {
	if len(n.devices) < len(fuzzDevices()) {
		return // the monitor keeps events while it has no inventory
	}
	var events []judge.Observation
	for _, d := range fuzzDevices() {
		e := judge.Observation{GPU: d.GPU(), Devices: []health.DeviceID{d.ID}}
		if a := n.action[d.ID]; a != 0 && n.stalled {
			action := e
			action.Action = new(health.RecoveryAction(a))
			events = append(events, action)
		}
		for _, x := range n.nvml {
			if x.device == d.ID {
				e.XID = health.XID{Code: x.code, At: x.at, Witness: health.WitnessNVML}
				events = append(events, e)
				n.seen[health.WitnessNVML][xidKey{x.device, x.code}]++
			}
		}
	}
	n.nvml = nil
	n.judged(judge.Observe(judge.DefaultConfig(), n.devices, events, n.context(), n.now))
}

// poll lists the rows that DCGM has read.
func (n *witnessedNode) poll() {
	r := &health.Reading{Devices: fuzzDevices()}
	for _, d := range r.Devices {
		s := healthtest.Present()
		s.Device, s.At = d.ID, n.now
		s.Values[health.FieldRecoveryAction] = n.action[d.ID]
		for i, x := range n.rows {
			if x.device != d.ID {
				continue
			}
			s.Rows = append(s.Rows, health.XIDRow{Code: x.code, At: x.at.UnixMicro()})
			if i >= n.delivered {
				n.seen[health.WitnessSource][xidKey{x.device, x.code}]++
			}
		}
		s.RowsWhole = true
		r.Samples = append(r.Samples, s)
	}
	n.delivered = len(n.rows)
	n.judged(judge.Measure(judge.DefaultConfig(), n.devices, r, n.context(), n.now))
	n.started = true
}

// second lets a second pass.
func (n *witnessedNode) second() {
	n.now = n.now.Add(time.Second)
	if len(n.dcgmQueue) > 0 && !n.stalled {
		n.rows, n.dcgmQueue = append(n.rows, n.dcgmQueue[0]), n.dcgmQueue[1:]
	}
	// The event source is at most some seconds late.
	if len(n.nvml) > 0 && n.now.Sub(n.nvml[0].at) >= 3*time.Second {
		n.events()
	}
	if !n.stalled {
		n.poll()
	}
}

// reset resets a device, for which the driver asks some seconds before.
func (n *witnessedNode) reset(device int) {
	id := fuzzDevices()[device].ID
	if len(n.devices) < len(fuzzDevices()) {
		return
	}
	n.action[id] = float64(health.RecoveryReset)
	n.events()
	for range 8 {
		n.second()
	}
	n.action[id] = float64(health.RecoveryNone)
	n.wasReset[id] = true
}

// restart starts a new process from the state file. What the event source has not delivered is lost.
func (n *witnessedNode) restart() {
	n.lossy = n.lossy || len(n.nvml) > 0
	n.nvml = nil
	snapshot := &health.Snapshot{At: n.now, Source: health.Source{Kind: "dcgm"}, Devices: n.devices}
	saved := roundTrip(n.t, FromSnapshot(snapshot, "boot"))
	n.counted = n.counts()
	r := saved.Restore("boot", health.SourceID{Kind: "dcgm"}, n.now)
	n.devices, n.history, n.started = r.Devices, r.History, false
}

// counts returns how often each XID counted in all processes.
func (n *witnessedNode) counts() map[xidKey]int {
	all := maps.Clone(n.counted)
	for _, d := range n.devices {
		for code, t := range d.XIDs.Codes {
			all[xidKey{d.Device.ID, code}] += int(t.Total)
		}
	}
	return all
}

// play plays two bytes per step.
func (n *witnessedNode) play(steps []byte) {
	for len(steps) >= 2 {
		op, arg := steps[0], int(steps[1])
		steps = steps[2:]
		device, code := arg&1, []int{31, 95}[arg>>1&1]
		switch op % 8 {
		case 0, 1: // one XID, or a burst
			for range 1 + int(op%8)*(arg>>4) {
				n.emit(device, code, false, false)
			}
		case 2:
			n.emit(device, code, arg&4 != 0, arg&8 != 0)
		case 3:
			n.events()
		case 4:
			for range 1 + arg%20 {
				n.second()
			}
		case 5:
			if n.stalled = !n.stalled; !n.stalled {
				n.events()
				n.now = n.now.Add(time.Duration(arg) * time.Minute) // while it is stalled
			}
		case 6:
			n.reset(device)
		case 7:
			n.restart()
		}
	}
	n.stalled = false
	for range len(n.dcgmQueue) + 5 {
		n.second()
	}
}

// Two witnesses report the driver's XIDs in any order, with losses, stalls, restarts and resets. Without losses each XID counts
// once. With losses, no fewer count than either witness reported, and no more than there were.
func FuzzWitnesses(f *testing.F) {
	f.Add([]byte{0, 0, 3, 0, 4, 1, 0, 2, 4, 2})               // each witness first
	f.Add([]byte{5, 0, 0, 2, 3, 0, 6, 0, 5, 60, 4, 9})        // an XID and a reset while the source is stalled
	f.Add([]byte{1, 0xf0, 1, 0xf1, 3, 0, 7, 0, 4, 9, 7, 0})   // bursts and restarts
	f.Add([]byte{2, 4, 3, 0, 4, 19, 2, 8, 4, 19, 2, 12})      // losses
	f.Add([]byte{2, 6, 3, 0, 6, 0, 7, 0, 4, 19, 2, 10, 4, 3}) // a loss, a reset and a restart
	f.Fuzz(func(t *testing.T, steps []byte) {
		if len(steps) > 160 {
			return
		}
		n := newWitnessedNode(t)
		n.play(steps)
		for _, d := range n.devices {
			if n.wasReset[d.Device.ID] && !n.lossy && d.Verdict.Has("xid-95") {
				t.Errorf("%s is not cured by its reset", d.Device.ID)
			}
		}
		counts := n.counts()
		keys := slices.Collect(maps.Keys(n.truth))
		for k := range counts {
			keys = append(keys, k)
		}
		for _, k := range keys {
			least := max(n.seen[health.WitnessSource][k], n.seen[health.WitnessNVML][k])
			if got := counts[k]; got < least || got > n.truth[k] || !n.lossy && got != n.truth[k] {
				t.Errorf("%+v counts %d times; of %d the source reported %d and NVML %d; losses: %v", k, got, n.truth[k],
					n.seen[health.WitnessSource][k], n.seen[health.WitnessNVML][k], n.lossy)
			}
		}
	})
}
