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
	started    time.Time // of the first update
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
	started   time.Time // of the first observation
	window    time.Duration
	idleBelow float64
}

// deviceTotals holds the totals of a device.
type deviceTotals struct {
	state         health.State
	unhealthy     time.Duration
	transitions   [numStates]uint64      // into each state
	counted       map[int]health.Tally   // Device.XIDs.Codes at the last update
	recent        []eventBucket          // oldest first
	clockBits     uint64                 // the last measured clock events
	clockMeasured bool                   // clock events have been measured
	healthChecked bool                   // DCGM's health checks have run
	idle          map[container]idleTime // by holder; not modified once stored
	holdersAt     time.Time              // when its holders were last known

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

// instanceXIDs are the XIDs of a GPU instance in one update. Each of its compute instances has them, but they count once. In the newest
// sample, equal XIDs are the same one. Of earlier samples, which were skipped, only the counts are known: the compute instance with the
// highest count has them all.
type instanceXIDs struct {
	newest  map[health.XID]uint64 // how often each was reported; its Times is 0
	skipped map[int]uint64
}

// add adds the XIDs of a compute instance with one number. It returns how many of them no other compute instance has. newest are the XIDs
// of its newest sample.
func (i instanceXIDs) add(code int, added uint64, newest []health.XID) (fresh uint64) {
	skipped := added
	for _, x := range newest {
		if x.Code != code || skipped == 0 {
			continue
		}
		n := min(uint64(x.Count()), skipped)
		skipped -= n
		x.Times = 0
		if before := i.newest[x]; n > before {
			i.newest[x] = n
			fresh += n - before
		}
	}
	if others := i.skipped[code]; skipped > others {
		fresh += skipped - others
		i.skipped[code] = skipped
	}
	return fresh
}

// update adds what has happened since the last update.
func (a *accumulator) update(o observation) {
	if !o.snapshot.Polled() {
		return
	}
	elapsed := time.Duration(0)
	if a.lastUpdate.IsZero() {
		a.started = o.at
	} else {
		elapsed = max(0, o.at.Sub(a.lastUpdate))
	}
	o.started = a.started
	newPoll := o.snapshot.At.After(a.lastPollAt)
	a.updatePolls(o.snapshot.Source)
	previous, instances := a.devices, make(map[entityKey]instanceXIDs)
	a.devices = make(map[health.DeviceID]deviceTotals, len(o.snapshot.Devices))
	for i := range o.snapshot.Devices {
		d := &o.snapshot.Devices[i]
		t, exists := previous[d.Device.ID]
		sinceUpdate := elapsed
		if !exists {
			t, sinceUpdate = deviceTotals{state: d.Verdict.State}, 0 // which is no transition
		}
		t.updateState(d, sinceUpdate)
		t.expireEvents(o)
		if newPoll {
			t.updateMeasurements(d, o)
		}
		t.updateXIDs(d, o, instances)
		t.updateIdle(d, o, sinceUpdate, a.restored)
		a.devices[d.Device.ID] = t
	}
	a.lastUpdate, a.lastPollAt = o.at, o.snapshot.At
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

// updateMeasurements adds the clock events of a new poll.
func (t *deviceTotals) updateMeasurements(d *health.DeviceState, o observation) {
	t.healthChecked = t.healthChecked || d.Sample.Checked
	if v, measured := d.Sample.Values[health.FieldClocksEvents]; measured {
		t.updateClocks(uint64(v), o)
	}
}

// updateXIDs adds the XIDs since the last update; at first, those since the agent's start. It compares counts, because
// snapshots may be skipped. Event sources report XIDs between two polls.
func (t *deviceTotals) updateXIDs(d *health.DeviceState, o observation, instances map[entityKey]instanceXIDs) {
	for code, is := range d.XIDs.Codes {
		added := is.Total - min(is.Total, t.counted[code].Total)
		if added > 0 && d.Device.Kind == health.KindMIG {
			key := entityKeyOf(&d.Device)
			if instances[key].newest == nil {
				instances[key] = instanceXIDs{map[health.XID]uint64{}, map[int]uint64{}}
			}
			added = instances[key].add(code, added, d.Sample.XIDs)
		}
		if added > 0 {
			b := t.currentBucket(o)
			b.xids = addCount(b.xids, code, added)
			t.xids = addCount(maps.Clone(t.xids), code, added) // scrapes may be reading the stored map
		}
	}
	t.counted = d.XIDs.Codes // immutable
}

// addCount adds n to the count of code. It creates a nil map.
func addCount(counts map[int]uint64, code int, n uint64) map[int]uint64 {
	if counts == nil {
		counts = make(map[int]uint64)
	}
	counts[code] += n
	return counts
}

// updateClocks adds the current clock events to the window, and the ones that have just begun to the totals. Events of the first
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
