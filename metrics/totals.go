package metrics

import (
	"context"
	"maps"
	"sync"
	"time"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/plugin"
)

// Totals follows the snapshots and keeps the ledger of them.
type Totals struct {
	config    *health.Latest[Config]
	snapshots *health.Latest[health.Snapshot]
	holders   func() plugin.Holders
	now       func() time.Time

	mu     sync.RWMutex // guards ledger: Run writes it, scrapes read it
	ledger ledger
}

// NewTotals returns totals of nothing yet. A stored Config must be valid.
func NewTotals(config *health.Latest[Config], snapshots *health.Latest[health.Snapshot], holders func() plugin.Holders) *Totals {
	return &Totals{config: config, snapshots: snapshots, holders: holders, now: time.Now}
}

// foldEvery is how often there is a fold without a new snapshot: time passes also while the source is away.
const foldEvery = 5 * time.Second

// Run follows until ctx ends.
func (t *Totals) Run(ctx context.Context) error {
	tick := time.NewTicker(foldEvery)
	defer tick.Stop()
	for {
		snapshot, changed := t.snapshots.Watch()
		t.fold(snapshot)
		select {
		case <-ctx.Done():
			return nil
		case <-changed:
		case <-tick.C:
		}
	}
}

func (t *Totals) fold(snapshot *health.Snapshot) {
	c := t.config.Load()
	if c == nil {
		return
	}
	o := observation{t.now(), snapshot, t.holders(), c.Window, c.IdleBelow}
	t.mu.Lock()
	defer t.mu.Unlock()
	t.ledger.fold(o)
}

// deviceView is what a scrape needs of a device's totals. Its maps are not modified.
type deviceView struct {
	known       bool
	unhealthy   float64 // seconds
	transitions [states]uint64
	xids        map[int]uint64 // in the window
	clocks      [len(clockEvents)]uint64
	all         *eventTotals // nil: no event yet
	checked     bool
	idle        map[user]idleness
}

// views returns the totals of these devices, in their order, and the histogram of the polls: all of one moment.
// What happened in the window is left out unless it is asked for.
func (t *Totals) views(devices []health.DeviceState, events bool) ([]deviceView, pollTotals) {
	t.mu.RLock()
	defer t.mu.RUnlock()
	views := make([]deviceView, len(devices))
	for i := range devices {
		views[i] = t.ledger.view(devices[i].Device.ID, events)
	}
	p := t.ledger.poll
	p.buckets = maps.Clone(p.buckets)
	return views, p
}

// view returns the totals of a device.
func (l *ledger) view(id health.DeviceID, events bool) deviceView {
	d, known := l.devices[id]
	v := deviceView{
		known: known, unhealthy: d.unhealthy.Seconds(), transitions: d.transitions, checked: d.checked, idle: d.idle, all: d.all,
	}
	if !events {
		return v
	}
	for i := range d.recent {
		b := &d.recent[i]
		for code, n := range b.xids {
			if v.xids == nil {
				v.xids = make(map[int]uint64)
			}
			v.xids[code] += n
		}
		for bit, n := range b.clocks {
			v.clocks[bit] += n
		}
	}
	return v
}
