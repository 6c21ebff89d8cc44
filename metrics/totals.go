package metrics

import (
	"context"
	"maps"
	"sync"
	"time"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/metrics/processes"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/podresources"
)

// Totals accumulates what a single snapshot does not contain: times, transitions, events and poll durations.
type Totals struct {
	TotalsInputs
	now   func() time.Time
	saved health.Latest[[]byte] // of Saved

	// Of the last saved idle times; Run uses them.
	published   savedIdleTimes
	publishedAt time.Time

	mu          sync.RWMutex // guards accumulator: Run writes it, scrapes read it
	accumulator accumulator
}

// TotalsInputs provides the data of Totals. All functions must return quickly.
type TotalsInputs struct {
	Config    *health.Latest[Config] // a stored Config must be valid
	Snapshots *health.Latest[health.Snapshot]
	Holders   func() podresources.Holders
	Processes func() *processes.Snapshot // nil: they are not measured
	Identity  func() Identity            // nil: none
}

// NewTotals returns empty totals, which Run updates.
func NewTotals(in TotalsInputs) *Totals { return &Totals{TotalsInputs: in, now: time.Now} }

// updateInterval is the maximum time between updates: time also counts while the source provides no new snapshot.
const updateInterval = 5 * time.Second

// Run follows the snapshots until ctx ends.
func (t *Totals) Run(ctx context.Context) error {
	tick := time.NewTicker(updateInterval)
	defer tick.Stop()
	for {
		snapshot, changed := t.Snapshots.Watch()
		t.update(snapshot)
		t.save(false)
		select {
		case <-ctx.Done():
			t.save(true)
			return nil
		case <-changed:
		case <-tick.C:
		}
	}
}

func (t *Totals) update(snapshot *health.Snapshot) {
	c := t.Config.Load()
	if c == nil {
		return
	}
	o := observation{at: t.now(), snapshot: snapshot, holders: t.Holders(), window: c.Window, idleBelow: c.IdleBelow}
	if t.Processes != nil {
		o.processes = t.Processes()
	}
	if t.Identity != nil {
		o.identity = t.Identity()
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	t.accumulator.update(o)
}

// deviceTotalsView is a consistent copy of a device's totals for a scrape, without recent, which updates modify.
type deviceTotalsView struct {
	deviceTotals
	exists         bool
	xidsInWindow   map[int]uint64
	clocksInWindow [len(clockEvents)]uint64
}

// views returns the totals of devices, in their order, and the poll durations at the same moment. It counts the events
// in the window only if withEvents is set.
func (t *Totals) views(devices []health.DeviceState, withEvents bool) ([]deviceTotalsView, pollHistogram) {
	t.mu.RLock()
	defer t.mu.RUnlock()
	views := make([]deviceTotalsView, len(devices))
	for i := range devices {
		views[i] = t.accumulator.view(devices[i].Device.ID, withEvents)
	}
	h := t.accumulator.durations
	h.buckets = maps.Clone(h.buckets)
	return views, h
}

func (a *accumulator) view(id health.DeviceID, withEvents bool) deviceTotalsView {
	d, exists := a.devices[id]
	v := deviceTotalsView{deviceTotals: d, exists: exists}
	v.recent = nil
	if !withEvents {
		return v
	}
	for i := range d.recent {
		for code, n := range d.recent[i].xids {
			v.xidsInWindow = addCount(v.xidsInWindow, code, n)
		}
		for bit, n := range d.recent[i].clocks {
			v.clocksInWindow[bit] += n
		}
	}
	return v
}
