//go:build cgo && linux

package dcgm

import (
	"context"
	"fmt"

	"github.com/NVIDIA/go-dcgm/pkg/dcgm"
)

// listener turns DCGM's policy callbacks into wake-ups. They are no more than that: DCGM sends one per
// GPU in 5 s at most, sends old ones, and another client can silence them (5, 6, 7).
type listener struct {
	cancel context.CancelFunc
	done   chan struct{} // closed when the goroutine has ended
}

// listen registers for XIDs on all GPUs. Register without Set: go-dcgm's ListenForPolicyViolations
// would also set thresholds, for all clients of the engine.
func listen(ctx context.Context, called func()) (*listener, error) {
	ctx, cancel := context.WithCancel(context.WithoutCancel(ctx)) // it outlives the call to Open
	violations, err := dcgm.WatchPolicyViolationsForGroup(ctx, dcgm.GroupAllGPUs(), dcgm.XidPolicy)
	if err != nil {
		cancel()
		return nil, fmt.Errorf("register for XID callbacks: %w", err)
	}
	l := &listener{cancel: cancel, done: make(chan struct{})}
	go func() {
		defer close(l.done)
		for range violations {
			called()
		}
	}()
	return l, nil
}

// noGroup is no group: engines number groups from 0 up and their special ones from 0x7fffffff down.
const noGroup = 0x7ffff000

// stop returns when go-dcgm has unregistered. It does so in a goroutine of its own that cannot be
// waited for, reads its global connection there, and so races with the next Init. It closes the channel
// under a lock that it holds until it is done; a registration takes the same lock, and one for a group
// that does not exist is refused by the engine.
func (l *listener) stop() {
	l.cancel()
	<-l.done
	var group dcgm.GroupHandle
	group.SetHandle(noGroup)
	ctx, cancel := context.WithCancel(context.Background())
	violations, err := dcgm.WatchPolicyViolationsForGroup(ctx, group, dcgm.XidPolicy)
	cancel()
	if err == nil {
		for range violations { // until it is closed
		}
	}
}
