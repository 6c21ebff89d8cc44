package metrics

import (
	"context"
	"maps"
	"sync"
	"time"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/podresources"
)

// Totals accumulates what a single snapshot does not contain: times, transitions, events and poll durations.
type Totals struct {
	config    *health.Latest[Config]
	snapshots *health.Latest[health.Snapshot]
	holders   func() podresources.Holders
	now       func() time.Time

	mu          sync.RWMutex // guards accumulator: Run writes it, scrapes read it
	accumulator accumulator
}

// NewTotals returns empty totals, which Run updates. A stored Config must be valid.
func NewTotals(config *health.Latest[Config], snapshots *health.Latest[health.Snapshot], holders func() podresources.Holders) *Totals {
	return &Totals{config: config, snapshots: snapshots, holders: holders, now: time.Now}
}

// updateInterval is the maximum time between updates: time also counts while the source provides no new snapshot.
const updateInterval = 5 * time.Second

// Run follows the snapshots until ctx ends.
func (t *Totals) Run(ctx context.Context) error {
	tick := time.NewTicker(updateInterval)
	defer tick.Stop()
	for {
		snapshot, changed := t.snapshots.Watch()
		t.update(snapshot)
		select {
		case <-ctx.Done():
			return nil
		case <-changed:
		case <-tick.C:
		}
	}
}

func (t *Totals) update(snapshot *health.Snapshot) {
	c := t.config.Load()
	if c == nil {
		return
	}
	o := observation{t.now(), snapshot, t.holders(), c.Window, c.IdleBelow}
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
