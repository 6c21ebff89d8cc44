package monitor

import (
	"slices"
	"sync"
	"time"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/health/wait"
)

// maxQueued is the length of a queue above which an event merges with any earlier event that is alike. So the number of different XIDs
// limits the queue, and no XID is lost.
const maxQueued = 1024

// queuedEvent is an XID or a recovery action.
type queuedEvent struct {
	health.Event
	read *driverAction // the recovery action; nil if the driver has only reported that it changed

	// Set when the event was first looked at, and no device matched.
	waitsSince time.Time
	polls      uint64 // Source.Polls at that time
}

// eventQueue holds XIDs and recovery actions that are not judged yet, oldest first.
type eventQueue struct {
	arrived chan struct{} // holds one

	mu     sync.Mutex // guards queued
	queued []queuedEvent
}

func newEventQueue() *eventQueue { return &eventQueue{arrived: make(chan struct{}, 1)} }

// add appends an event. It does not block.
func (q *eventQueue) add(e queuedEvent) {
	q.mu.Lock()
	q.queued = appendEvent(q.queued, e)
	q.mu.Unlock()
	q.wake()
}

// wake has the queue looked at again.
func (q *eventQueue) wake() {
	wait.Signal(q.arrived)
}

// take returns all events and leaves the queue empty.
func (q *eventQueue) take() []queuedEvent {
	q.mu.Lock()
	defer q.mu.Unlock()
	all := q.queued
	q.queued = nil
	return all
}

// appendEvent appends e to q, or merges it with an event that is alike: with the last one, or, if q is long, with any.
func appendEvent(q []queuedEvent, e queuedEvent) []queuedEvent {
	for i, old := range slices.Backward(q) {
		if old.alike(&e) && (old.XID.Detail == e.XID.Detail || len(q) >= maxQueued) {
			e.XID.Times = e.XID.Count() + old.XID.Count()
			e.waitsSince, e.polls = old.waitsSince, old.polls
			q = slices.Delete(q, i, i+1)
			break
		}
		if len(q) < maxQueued {
			break
		}
	}
	return append(q, e)
}

// alike reports whether one entry can stand for both events.
func (e *queuedEvent) alike(f *queuedEvent) bool {
	return e.Kind == f.Kind && e.GPU == f.GPU && e.GI == f.GI && e.CI == f.CI &&
		e.XID.Code == f.XID.Code && e.XID.Witness == f.XID.Witness && e.read == f.read
}
