package metrics

import (
	"maps"
	"time"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/plugin"
)

// ledger sums up what no single snapshot tells. It is a fold: it knows no clock and calls nobody, and what
// it holds follows from the sequence of what it was given. Devices and containers that are gone are
// forgotten, so that it does not grow.
type ledger struct {
	at      time.Time // of the last fold
	polled  time.Time // the poll that was folded last
	polls   uint64    // Source.Polls at the last fold
	devices map[health.DeviceID]deviceTotals
	poll    pollTotals
}

// deviceTotals is what is summed up of one device. A map keeps what is larger than 128 bytes in a piece of memory of its
// own.
type deviceTotals struct {
	state       health.State
	unhealthy   time.Duration
	transitions [states]uint64    // into each state
	seenXIDs    map[int]uint64    // the device's counts at the last fold
	recent      []bucket          // oldest first
	clockBits   uint64            // the clock events at the last fold that knew them
	clocked     bool              // there was one
	checked     bool              // DCGM's own health checks were made once
	idle        map[user]idleness // by who holds it; not modified once here
	all         *eventTotals      // nil: no event yet; not modified once here
}

// eventTotals are the events since a device is known.
type eventTotals struct {
	xids   map[int]uint64
	clocks [len(clockEvents)]uint64 // how often each began
}

// byXID and begun return the counts; none if there was no event yet.
func (e *eventTotals) byXID() map[int]uint64 {
	if e == nil {
		return nil
	}
	return e.xids
}

func (e *eventTotals) begun() (clocks [len(clockEvents)]uint64) {
	if e == nil {
		return clocks
	}
	return e.clocks
}

const states = int(health.Unhealthy) + 1

// user is a container that holds a device.
type user struct{ namespace, pod, container string }

func userOf(h plugin.Holder) user { return user{h.Namespace, h.Pod, h.Container} }

// idleness is how long a container has held a device without using it.
type idleness struct {
	known bool          // utilization was measured since it has the device
	total time.Duration // in all
	last  time.Duration // since the device was last busy
}

// bucket is what was seen in a part of the window. A window of a fixed number of them stays small whatever
// the interval of the polls is.
type bucket struct {
	from   time.Time
	xids   map[int]uint64
	clocks [len(clockEvents)]uint64
}

// bucketsPerWindow is how finely old events leave the window.
const bucketsPerWindow = 60

// pollTotals is a histogram of what polls took.
type pollTotals struct {
	count   uint64
	sum     float64
	buckets map[float64]uint64 // cumulative
}

// pollBounds are the histogram's bounds in seconds: a healthy poll takes milliseconds, a sick driver seconds.
func pollBounds() []float64 { return []float64{.001, .005, .01, .05, .1, .5, 1, 5, 10} }

// observation is what a fold is given.
type observation struct {
	at        time.Time
	snapshot  *health.Snapshot
	holders   plugin.Holders
	window    time.Duration
	idleBelow float64
}

// fold adds what has happened since the last fold.
func (l *ledger) fold(o observation) {
	if !o.snapshot.Polled() {
		return
	}
	passed := time.Duration(0)
	if !l.at.IsZero() {
		passed = max(0, o.at.Sub(l.at))
	}
	fresh := o.snapshot.At.After(l.polled)
	l.foldPoll(o.snapshot.Source)
	before, shared := l.devices, make(map[event]bool)
	l.devices = make(map[health.DeviceID]deviceTotals, len(o.snapshot.Devices))
	for i := range o.snapshot.Devices {
		d := &o.snapshot.Devices[i]
		t, known := before[d.Device.ID]
		since := passed
		if !known {
			t, since = newDeviceTotals(d), 0
		}
		t.foldState(d, since)
		if t.expire(o); fresh {
			t.foldEvents(d, o, shared)
		}
		t.foldIdle(d, o, since)
		l.devices[d.Device.ID] = t
	}
	l.at, l.polled = o.at, o.snapshot.At
}

// newDeviceTotals begins with a device as it is first seen: that is no transition. XIDs of the first sample
// are news, others are not.
func newDeviceTotals(d *health.DeviceState) deviceTotals {
	seen := maps.Clone(d.XIDCounts)
	for _, x := range d.Sample.XIDs {
		if seen[x.Code] > 0 {
			seen[x.Code]--
		}
	}
	return deviceTotals{state: d.Verdict.State, seenXIDs: seen}
}

// foldState counts time that began unhealthy: it is so until the opposite is known, also while the source is
// away.
func (t *deviceTotals) foldState(d *health.DeviceState, passed time.Duration) {
	if t.state == health.Unhealthy {
		t.unhealthy += passed
	}
	if d.Verdict.State != t.state {
		t.state = d.Verdict.State
		t.transitions[t.state]++
	}
}

// expire forgets what has left the window.
func (t *deviceTotals) expire(o observation) {
	for len(t.recent) > 0 && !t.recent[0].from.Add(o.window).After(o.at) {
		t.recent = t.recent[1:]
	}
}

// event is an XID of a GPU instance. It is one event though all compute instances in it have reported it.
type event struct {
	place
	health.XID
}

// foldEvents notes XIDs and clock events of a poll that was not seen before. XIDs are told by their counts:
// snapshots may be skipped. Those that a device before this one had too, which shared knows, are not new.
func (t *deviceTotals) foldEvents(d *health.DeviceState, o observation, shared map[event]bool) {
	t.checked = t.checked || d.Sample.Checked
	if v, measured := d.Sample.Values[health.FieldClocksEvents]; measured {
		t.foldClocks(uint64(v), o)
	}
	twice := make(map[int]uint64)
	if d.Device.Kind == health.KindMIG {
		of := placeOf(&d.Device)
		for _, x := range d.Sample.XIDs {
			if shared[event{of, x}] {
				twice[x.Code]++
			}
		}
		for _, x := range d.Sample.XIDs {
			shared[event{of, x}] = true
		}
	}
	for code, n := range d.XIDCounts {
		more := n - min(n, t.seenXIDs[code])
		if more -= min(more, twice[code]); more > 0 {
			b := t.bucket(o)
			if b.xids == nil {
				b.xids = make(map[int]uint64)
			}
			b.xids[code] += more
			t.all = t.all.copied()
			t.all.xids[code] += more
		}
	}
	t.seenXIDs = d.XIDCounts // never modified once stored
}

// copied returns totals that can be added to: scrapes may have the old ones.
func (e *eventTotals) copied() *eventTotals {
	next := &eventTotals{maps.Clone(e.byXID()), e.begun()}
	if next.xids == nil {
		next.xids = make(map[int]uint64)
	}
	return next
}

// foldClocks notes which clock events there are, and which have begun. Those that a device is first seen with began
// before.
func (t *deviceTotals) foldClocks(bits uint64, o observation) {
	for bit := range len(clockEvents) {
		if bits&(1<<bit) == 0 {
			continue
		}
		t.bucket(o).clocks[bit]++
		if t.clocked && t.clockBits&(1<<bit) == 0 {
			t.all = t.all.copied()
			t.all.clocks[bit]++
		}
	}
	t.clockBits, t.clocked = bits, true
}

// bucket returns the one of now.
func (t *deviceTotals) bucket(o observation) *bucket {
	from := o.at.Truncate(o.window / bucketsPerWindow)
	if n := len(t.recent); n == 0 || t.recent[n-1].from.Before(from) {
		t.recent = append(t.recent, bucket{from: from})
	}
	return &t.recent[len(t.recent)-1]
}

// foldIdle counts time for each container that holds the device. A device that is not measured now is
// neither busy nor idle, and one without utilization, as under MIG, never is. While the kubelet does not
// tell who holds what, nobody is forgotten.
func (t *deviceTotals) foldIdle(d *health.DeviceState, o observation, passed time.Duration) {
	if o.holders.By == nil && o.holders.Err != "" {
		return
	}
	util, measured := d.Sample.Values[health.FieldGPUUtil]
	measured = measured && o.snapshot.Source.Status == health.SourceUp
	var idle map[user]idleness
	for _, h := range o.holders.By[d.Device.ID] {
		u := userOf(h)
		if _, done := idle[u]; done {
			continue // it holds several replicas
		}
		if idle == nil {
			idle = make(map[user]idleness)
		}
		i, held := t.idle[u]
		switch {
		case !measured:
		case util >= o.idleBelow:
			i.known, i.last = true, 0
		default:
			i.known = true
			if held {
				i.total += passed
				i.last += passed
			}
		}
		idle[u] = i
	}
	t.idle = idle
}

// foldPoll notes what the last poll took. Of polls that were skipped only the newest is known.
func (l *ledger) foldPoll(s health.Source) {
	if s.Polls == l.polls {
		return
	}
	l.polls = s.Polls
	took := s.PollTook.Seconds()
	l.poll.count++
	l.poll.sum += took
	if l.poll.buckets == nil {
		l.poll.buckets = make(map[float64]uint64)
	}
	for _, bound := range pollBounds() {
		if took <= bound {
			l.poll.buckets[bound]++
		} else {
			l.poll.buckets[bound] += 0
		}
	}
}
