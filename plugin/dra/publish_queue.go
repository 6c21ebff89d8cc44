package dra

import (
	"context"
	"errors"
	"math/rand/v2"
	"time"

	"k8s.io/client-go/util/workqueue"
	"k8s.io/dynamic-resource-allocation/resourceslice"
)

// The pause between two tries doubles from the minimum to the maximum. Each is shortened at random by up to half, because an API server
// that comes back has thousands of nodes.
const (
	minPause        = 100 * time.Millisecond
	maxPause        = 5 * time.Second
	maxRefusedPause = 30 * time.Second // while the agent lacks a right or the API server lacks the API
)

// backoff counts failed tries.
type backoff struct{ tries int }

// next returns the pause after a failed try.
func (b *backoff) next(err error) time.Duration {
	longest := maxPause
	if r := reasonOf(err); r == reasonForbidden || r == reasonUnsupported {
		longest = maxRefusedPause
	}
	pause := min(minPause<<min(b.tries, 16), longest)
	b.tries++
	return pause - rand.N(pause/2)
}

// sliceQueue is the queue of the controller of ResourceSlices. It retries within seconds, where the library waits up to 1,000, and it
// knows what the controller has written: the controller calls Forget after a success and AddRateLimited after a failure. All methods
// but those of the embedded queue are called by the controller's one worker.
type sliceQueue struct {
	workqueue.TypedDelayingInterface[string]
	p     *publisher
	ready context.Context //nolint:containedctx // ends with the first update, or when the publisher stops
	open  func()          // ends ready

	pauses backoff
	op     operation // the present try: of the node's pool, or of another one
	err    error     // of the present try
}

func newSliceQueue(ctx context.Context, p *publisher) *sliceQueue {
	q := &sliceQueue{TypedDelayingInterface: workqueue.NewTypedDelayingQueue[string](), p: p}
	q.ready, q.open = context.WithCancel(ctx)
	return q
}

// Get returns the next pool. It waits for the first update: before, the controller would delete the slices of the last run.
func (q *sliceQueue) Get() (pool string, shutdown bool) {
	<-q.ready.Done()
	stopped := false
	q.p.change(func() { stopped = q.p.applied == nil })
	if stopped {
		return "", true // without an update
	}
	pool, shutdown = q.TypedDelayingInterface.Get()
	q.op, q.err = opCleanUp, nil
	if pool == q.p.node {
		q.op = opSync
		q.p.change(func() { q.p.started = q.p.applied })
	}
	return pool, shutdown
}

// handleError is the controller's ErrorHandler.
func (q *sliceQueue) handleError(ctx context.Context, err error, _ string) {
	if ctx.Err() != nil {
		return
	}
	q.err = err
	q.p.fail(q.op, err)
	if dropped, ok := errors.AsType[*resourceslice.DroppedFieldsError](err); ok {
		q.p.change(func() { q.p.started.dropped = true })
		q.p.setLacks(q.p.lacks.Load().without(dropped.DisabledFeatures()))
	}
}

// AddAfter adds a pool after a pause of at least a millisecond: the controller compares times strictly, and would run without a pause while
// the clock does not advance.
func (q *sliceQueue) AddAfter(pool string, pause time.Duration) {
	q.TypedDelayingInterface.AddAfter(pool, max(pause, time.Millisecond))
}

// AddRateLimited adds a pool after a failure.
func (q *sliceQueue) AddRateLimited(pool string) { q.AddAfter(pool, q.pauses.next(q.err)) }

// Forget ends the retries of the pool that Get returned last.
func (q *sliceQueue) Forget(string) {
	q.pauses = backoff{}
	if q.err != nil { // the library does not retry what is invalid or was dropped
		return
	}
	q.p.change(func() {
		if q.op == opSync {
			if q.p.started.dropped { // the API server has what the controller desires since, which is not the pool
				return
			}
			q.p.synced = q.p.started.pool
			if q.p.synced == q.p.desired.Load() && len(q.p.refusals) == 0 {
				q.p.published = time.Now()
			}
		}
		q.p.failures.recovered(q.op, len(q.p.refusals) == 0, q.p.log)
	})
}

// NumRequeues returns the number of tries since the last success.
func (q *sliceQueue) NumRequeues(string) int { return q.pauses.tries }
