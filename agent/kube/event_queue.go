package kube

import (
	"slices"
	"sync"
	"time"
)

const (
	// maxPending bounds the events that wait: an outage of the API server costs the oldest.
	maxPending = 256

	// eventLife is how long an event is of interest: the API server forgets it after an hour too.
	eventLife = time.Hour

	// again is the least time between two writes of the same event: what happens meanwhile raises its count.
	again = time.Minute
)

// queue holds what is still to be written, the oldest first.
type queue struct {
	mu      sync.Mutex // guards pending and dropped
	pending []happening
	dropped uint64

	wake chan struct{} // holds one token if something was added
}

func newQueue() *queue { return &queue{wake: make(chan struct{}, 1)} }

// add adds a happening, or counts it with one that waits already.
func (q *queue) add(h happening) {
	q.mu.Lock()
	defer q.mu.Unlock()
	i := slices.IndexFunc(q.pending, func(p happening) bool { return p.key == h.key })
	if i >= 0 {
		p := &q.pending[i]
		if h.last.After(p.last) {
			p.message, p.last = h.message, h.last
		}
		if h.first.Before(p.first) {
			p.first = h.first
		}
		if p.name == "" {
			p.name = h.name
		}
		p.count += h.count
	} else {
		if len(q.pending) == maxPending {
			q.pending = slices.Delete(q.pending, 0, 1)
			q.dropped++
		}
		q.pending = append(q.pending, h)
	}
	select {
	case q.wake <- struct{}{}:
	default:
	}
}

// take takes the first that may be written now out of the queue. If there is none, it returns how long it
// is until there may be one, negative for ever.
func (q *queue) take(now time.Time, notBefore func(happeningKey) time.Time) (h happening, in time.Duration, ok bool) {
	q.mu.Lock()
	defer q.mu.Unlock()
	fresh := slices.DeleteFunc(q.pending, func(p happening) bool { return now.Sub(p.last) > eventLife })
	q.dropped += uint64(len(q.pending) - len(fresh))
	q.pending = fresh
	in = -1
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
	return happening{}, in, false
}

// lost returns how many events were given up because they were too many or too old.
func (q *queue) lost() uint64 {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.dropped
}
