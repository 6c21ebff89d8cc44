package plugin

import (
	"sync"

	"github.com/gpu-node-agent/gpu-node-agent/health"
)

// layoutCache builds the layout of the newest configuration, snapshot and holders once for all readers: every stream and
// call, the audit and the manager. It passes the state of the previous layout to the next, so that newLayout is pure.
type layoutCache struct {
	cfg       *health.Latest[Config]
	snapshots *health.Latest[health.Snapshot]
	holders   *health.Latest[Holders]

	mu          sync.Mutex // guards the fields below
	last        *layout
	lastHolders *Holders // of last
}

func newLayoutCache(cfg *health.Latest[Config], snapshots *health.Latest[health.Snapshot], holders *health.Latest[Holders]) *layoutCache {
	return &layoutCache{cfg: cfg, snapshots: snapshots, holders: holders, last: &layout{}}
}

// current returns the newest layout. It is empty until there are a configuration and a snapshot.
func (l *layoutCache) current() *layout {
	l.mu.Lock()
	defer l.mu.Unlock()
	// Loaded under the mutex, so that no older layout replaces a newer one.
	cfg, snap, holders := l.cfg.Load(), l.snapshots.Load(), l.holders.Load()
	if cfg != l.last.cfg || snap != l.last.snap || holders != l.lastHolders {
		in := layoutInput{cfg: cfg, snap: snap, before: l.last.uniform}
		if holders != nil {
			in.holders = holders.By
		}
		next := newLayout(in)
		l.last, l.lastHolders = &next, holders
	}
	return l.last
}

// changes are channels that close when an input of the layout changes.
type changes struct{ cfg, snap, holders <-chan struct{} }

// watch must precede current, so that no change is missed.
func (l *layoutCache) watch() (c changes) {
	_, c.cfg = l.cfg.Watch()
	_, c.snap = l.snapshots.Watch()
	_, c.holders = l.holders.Watch()
	return c
}
