package metrics

import (
	"maps"
	"time"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/metrics/processes"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/podresources"
)

// accumulator derives totals from a sequence of observations. It is pure: it reads no clock and calls nothing. It
// forgets devices and containers that are no longer observed, so its size is bounded.
type accumulator struct {
	lastUpdate time.Time
	lastPollAt time.Time
	polls      uint64 // Source.Polls at the last update
	devices    map[health.DeviceID]deviceTotals
	restored   savedIdleTimes // of the previous process, until their containers are observed
	durations  pollHistogram
}

// observation is the input of an update.
type observation struct {
	at        time.Time
	snapshot  *health.Snapshot
	holders   podresources.Holders
	processes *processes.Snapshot // nil if they are not measured
	identity  Identity
	window    time.Duration
	idleBelow float64
}

// deviceTotals holds the totals of a device.
type deviceTotals struct {
	state         health.State
	unhealthy     time.Duration
	transitions   [numStates]uint64      // into each state
	xidCounts     map[int]uint64         // Device.XIDCounts at the last update
	recent        []eventBucket          // oldest first
	clockBits     uint64                 // the last measured clock events
	clockMeasured bool                   // clock events have been measured
	healthChecked bool                   // DCGM's health checks have run
	idle          map[container]idleTime // by holder; not modified once stored

	// The events since the device was first observed.
	xids   map[int]uint64           // by number; not modified once stored
	clocks [len(clockEvents)]uint64 // the number of times that each clock event began
}

const numStates = int(health.Unhealthy) + 1

// container is a container that holds a device.
type container struct{ namespace, pod, name string }

func containerOf(h podresources.Holder) container { return container{h.Namespace, h.Pod, h.Container} }

// eventBucket counts the events in a part of the window.
type eventBucket struct {
	from   time.Time
	xids   map[int]uint64
	clocks [len(clockEvents)]uint64
}

// bucketsPerWindow bounds the number of buckets regardless of the poll interval. It is also the resolution with which
// old events leave the window.
const bucketsPerWindow = 60

// pollHistogram is a histogram of poll durations.
type pollHistogram struct {
	count   uint64
	sum     float64
	buckets map[float64]uint64 // cumulative, by upper bound
}

// pollBounds returns the bounds of the histogram in seconds: a poll takes milliseconds, with a faulty driver seconds.
func pollBounds() []float64 { return []float64{.001, .005, .01, .05, .1, .5, 1, 5, 10} }

// deviceXID identifies an XID of a GPU instance, which counts once although each of its compute instances reports it.
type deviceXID struct {
	entityKey
	health.XID
}

// update adds what has happened since the last update.
func (a *accumulator) update(o observation) {
	if !o.snapshot.Polled() {
		return
	}
	elapsed := time.Duration(0)
	if !a.lastUpdate.IsZero() {
		elapsed = max(0, o.at.Sub(a.lastUpdate))
	}
	newPoll := o.snapshot.At.After(a.lastPollAt)
	a.updatePolls(o.snapshot.Source)
	previous, counted := a.devices, make(map[deviceXID]bool)
	a.devices = make(map[health.DeviceID]deviceTotals, len(o.snapshot.Devices))
	for i := range o.snapshot.Devices {
		d := &o.snapshot.Devices[i]
		t, exists := previous[d.Device.ID]
		sinceUpdate := elapsed
		if !exists {
			t, sinceUpdate = newDeviceTotals(d), 0
		}
		t.updateState(d, sinceUpdate)
		t.expireEvents(o)
		if newPoll {
			t.updateEvents(d, o, counted)
		}
		t.updateIdle(d, o, sinceUpdate, a.restored)
		a.devices[d.Device.ID] = t
	}
	a.lastUpdate, a.lastPollAt = o.at, o.snapshot.At
}

// newDeviceTotals starts with a device's current state, which does not count as a transition. XIDs of its first sample
// count as new; earlier ones do not.
func newDeviceTotals(d *health.DeviceState) deviceTotals {
	counts := maps.Clone(d.XIDCounts)
	for _, x := range d.Sample.XIDs {
		if counts[x.Code] > 0 {
			counts[x.Code]--
		}
	}
	return deviceTotals{state: d.Verdict.State, xidCounts: counts}
}

// updateState adds the elapsed time if the device was unhealthy at its start. A state lasts until the next one is known,
// also while the source is down.
func (t *deviceTotals) updateState(d *health.DeviceState, elapsed time.Duration) {
	if t.state == health.Unhealthy {
		t.unhealthy += elapsed
	}
	if d.Verdict.State != t.state {
		t.state = d.Verdict.State
		t.transitions[t.state]++
	}
}

// expireEvents removes the buckets that have left the window.
func (t *deviceTotals) expireEvents(o observation) {
	for len(t.recent) > 0 && !t.recent[0].from.Add(o.window).After(o.at) {
		t.recent = t.recent[1:]
	}
}

// updateEvents adds the XIDs and clock events of a new poll. It compares XID counts, because polls may be skipped. It
// ignores XIDs in counted, which another device of the same GPU instance has reported, and adds the device's to it.
func (t *deviceTotals) updateEvents(d *health.DeviceState, o observation, counted map[deviceXID]bool) {
	t.healthChecked = t.healthChecked || d.Sample.Checked
	if v, measured := d.Sample.Values[health.FieldClocksEvents]; measured {
		t.updateClocks(uint64(v), o)
	}
	duplicates := make(map[int]uint64)
	if d.Device.Kind == health.KindMIG {
		key := entityKeyOf(&d.Device)
		for _, x := range d.Sample.XIDs {
			if counted[deviceXID{key, x}] {
				duplicates[x.Code]++
			}
		}
		for _, x := range d.Sample.XIDs {
			counted[deviceXID{key, x}] = true
		}
	}
	for code, n := range d.XIDCounts {
		added := n - min(n, t.xidCounts[code])
		if added -= min(added, duplicates[code]); added > 0 {
			b := t.currentBucket(o)
			b.xids = addCount(b.xids, code, added)
			t.xids = addCount(maps.Clone(t.xids), code, added) // scrapes may be reading the stored map
		}
	}
	t.xidCounts = d.XIDCounts // immutable
}

// addCount adds n to the count of code. It creates a nil map.
func addCount(counts map[int]uint64, code int, n uint64) map[int]uint64 {
	if counts == nil {
		counts = make(map[int]uint64)
	}
	counts[code] += n
	return counts
}

// updateClocks adds the current clock events to the window, and those that have begun to the totals. Events of the first
// measurement began earlier.
func (t *deviceTotals) updateClocks(bits uint64, o observation) {
	for bit := range len(clockEvents) {
		if bits&(1<<bit) == 0 {
			continue
		}
		t.currentBucket(o).clocks[bit]++
		if t.clockMeasured && t.clockBits&(1<<bit) == 0 {
			t.clocks[bit]++
		}
	}
	t.clockBits, t.clockMeasured = bits, true
}

// currentBucket returns the bucket for the time of the observation.
func (t *deviceTotals) currentBucket(o observation) *eventBucket {
	from := o.at.Truncate(o.window / bucketsPerWindow)
	if n := len(t.recent); n == 0 || t.recent[n-1].from.Before(from) {
		t.recent = append(t.recent, eventBucket{from: from})
	}
	return &t.recent[len(t.recent)-1]
}

// updatePolls adds the duration of the last poll. Of several polls since the last update it adds only the newest.
func (a *accumulator) updatePolls(s health.Source) {
	if s.Polls == a.polls {
		return
	}
	a.polls = s.Polls
	duration := s.PollTook.Seconds()
	a.durations.count++
	a.durations.sum += duration
	if a.durations.buckets == nil {
		a.durations.buckets = make(map[float64]uint64)
	}
	for _, bound := range pollBounds() {
		n := a.durations.buckets[bound]
		if duration <= bound {
			n++
		}
		a.durations.buckets[bound] = n
	}
}
