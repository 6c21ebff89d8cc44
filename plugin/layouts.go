package plugin

import (
	"sync"

	"github.com/gpu-node-agent/gpu-node-agent/health"
)

// layouts makes a layout of the newest configuration, snapshot and holders. All who show one share it: every stream and
// call of the kubelet's, the audit and the manager see the same layout, and it is made once. It hands to each layout what
// arrange has to know of the one before, so that arrange is pure.
type layouts struct {
	cfg       *health.Latest[Config]
	snapshots *health.Latest[health.Snapshot]
	holders   *health.Latest[Holders]

	mu   sync.Mutex // guards everything below
	last *arrangement
	held *Holders // that last was made of; like its cfg and its snap not modified once stored
}

func newLayouts(cfg *health.Latest[Config], snapshots *health.Latest[health.Snapshot], holders *health.Latest[Holders]) *layouts {
	return &layouts{cfg: cfg, snapshots: snapshots, holders: holders, last: &arrangement{}}
}

// newest returns the layout as it is now. It is empty before there is a configuration and a snapshot.
func (l *layouts) newest() *arrangement {
	l.mu.Lock()
	defer l.mu.Unlock()
	// Loaded under the mutex, so that no older layout replaces a newer one.
	cfg, snap, holders := l.cfg.Load(), l.snapshots.Load(), l.holders.Load()
	if cfg != l.last.cfg || snap != l.last.snap || holders != l.held {
		in := layoutInput{cfg: cfg, snap: snap, before: l.last.Single}
		if holders != nil {
			in.holders = holders.By
		}
		a := arrange(in)
		l.last, l.held = &a, holders
	}
	return l.last
}

// changes are channels that close when there is something newer to make a layout of.
type changes struct{ cfg, snap, holders <-chan struct{} }

// watch must come before newest, so that no change falls between.
func (l *layouts) watch() (c changes) {
	_, c.cfg = l.cfg.Watch()
	_, c.snap = l.snapshots.Watch()
	_, c.holders = l.holders.Watch()
	return c
}
