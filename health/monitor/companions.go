package monitor

import (
	"context"
	"errors"
	"sync"
	"time"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/health/wait"
)

// reasonDetached is why the event sources do not run during a detach.
const reasonDetached = "driver detached on request"

// companions are the event sources and the Beside functions of a source, and readActions, which run beside its sessions. They also run
// while no session can be opened, but never while the driver is detached.
type companions struct {
	cancel  context.CancelFunc
	stopped bool          // guarded by Monitor.mu
	ended   chan struct{} // closed when every function has returned, also the functions of earlier companions
}

// noCompanions returns companions that have ended.
func noCompanions() *companions {
	c := &companions{cancel: func() {}, stopped: true, ended: make(chan struct{})}
	close(c.ended)
	return c
}

// startCompanions starts the companions of a source, unless they run or a detach is requested. A function of earlier ones that
// hangs delays them only, and not the sessions. They run until ctx ends or stopCompanions is called.
func (m *Monitor) startCompanions(ctx context.Context, w watchdog, src *Source) {
	m.mu.Lock()
	defer m.unlock()
	if !m.companions.stopped || m.detach.detachRequested() {
		return
	}
	ctx, cancel := context.WithCancel(ctx)
	earlier := m.companions.ended
	c := &companions{cancel: cancel, ended: make(chan struct{})}
	m.companions = c
	m.showEvents(src, health.EventsStarting, "")
	m.store()
	receivers := make([]*eventReceiver, len(src.Events))
	for i, e := range src.Events {
		receivers[i] = &eventReceiver{m, c, i, e.Witness}
	}
	go func() {
		defer close(c.ended)
		defer cancel()
		select {
		case <-earlier:
		case <-time.After(w.calls.Limit):
			for i, e := range src.Events {
				if e.Run != nil {
					receivers[i].SetEvents(errors.New("the earlier events do not end: a call to the driver has not returned"))
				}
			}
			<-earlier
		}
		var all sync.WaitGroup
		for i, e := range src.Events {
			if e.Run != nil {
				all.Go(func() { e.Run(ctx, receivers[i]) })
			}
		}
		if src.RecoveryAction != nil {
			all.Go(func() { m.readActions(ctx, src.RecoveryAction) })
		}
		for _, run := range src.Beside {
			all.Go(func() { run(ctx) })
		}
		all.Wait()
	}()
}

// stopCompanions ends the companions without waiting for them.
func (m *Monitor) stopCompanions() {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.companions.stop()
}

// stop requires Monitor.mu.
func (c *companions) stop() {
	c.stopped = true
	c.cancel()
}

// awaitCompanions returns nil when no companion uses the driver any more, and an error if ctx ends before.
func (m *Monitor) awaitCompanions(ctx context.Context, w watchdog) error {
	m.mu.Lock()
	ended := m.companions.ended
	m.mu.Unlock()
	_, err := call(ctx, w, "releasing NVML", func(ctx context.Context) (struct{}, error) {
		if !wait.For(ctx, ended) {
			return struct{}{}, ctx.Err()
		}
		return struct{}{}, nil
	})
	return err
}
