package kube

import (
	"slices"
	"sync"
	"time"

	"github.com/gpu-node-agent/gpu-node-agent/health/wait"
)

const (
	// maxQueued limits the events that wait. If the API server is unreachable, the oldest are dropped.
	maxQueued = 256

	// eventTTL is after which time an event is dropped. The API server deletes events after an hour too.
	eventTTL = time.Hour

	// repeatInterval is the least time between two writes of one event. Repetitions in between raise its count.
	repeatInterval = time.Minute
)

// eventQueue holds the events to write, the oldest first. It is safe for concurrent use.
type eventQueue struct {
	mu      sync.Mutex // guards pending and dropped
	pending []event
	dropped uint64

	wake chan struct{} // holds a token after an add
}

func newEventQueue() *eventQueue { return &eventQueue{wake: make(chan struct{}, 1)} }

// add queues an event, or merges it into a queued one with the same key.
func (q *eventQueue) add(e event) {
	q.mu.Lock()
	defer q.mu.Unlock()
	i := slices.IndexFunc(q.pending, func(p event) bool { return p.key == e.key })
	if i >= 0 {
		q.pending[i].merge(e)
	} else {
		if len(q.pending) == maxQueued {
			q.pending = slices.Delete(q.pending, 0, 1)
			q.dropped++
		}
		q.pending = append(q.pending, e)
	}
	wait.Signal(q.wake)
}

// take removes and returns the first event that may be written now. If there is none, it returns after which time one
// may be written, negative if the queue is empty.
func (q *eventQueue) take(now time.Time, notBefore func(eventKey) time.Time) (e event, in time.Duration, ok bool) {
	q.mu.Lock()
	defer q.mu.Unlock()
	fresh := slices.DeleteFunc(q.pending, func(p event) bool { return now.Sub(p.last) > eventTTL })
	q.dropped += uint64(len(q.pending) - len(fresh))
	q.pending = fresh
	in = never
	for i, p := range q.pending {
		d := notBefore(p.key).Sub(now)
		if d <= 0 {
			q.pending = slices.Delete(q.pending, i, i+1)
			return p, 0, true
		}
		if in < 0 || d < in {
			in = d
		}
	}
	return event{}, in, false
}

// droppedCount returns how many events were dropped: too many or too old.
func (q *eventQueue) droppedCount() uint64 {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.dropped
}
