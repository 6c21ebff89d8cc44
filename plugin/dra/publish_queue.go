package dra

import (
	"context"
	"errors"
	"time"

	"k8s.io/client-go/util/workqueue"
	"k8s.io/dynamic-resource-allocation/resourceslice"

	"github.com/gpu-node-agent/gpu-node-agent/health/backoff"
)

// The bounds of the pause between two tries; see backoff.Backoff.
const (
	minPause        = 100 * time.Millisecond
	maxPause        = 5 * time.Second
	maxRefusedPause = 30 * time.Second // while the agent lacks a right or the API server lacks the API
)

// retryPauses are the pauses between tries.
type retryPauses struct{ backoff.Backoff }

// after returns the pause after a failed try.
func (p *retryPauses) after(err error) time.Duration {
	p.Min, p.Max = minPause, maxPause
	if r := reasonOf(err); r == reasonForbidden || r == reasonUnsupported {
		p.Max = maxRefusedPause
	}
	return p.Next()
}

// sliceQueue is the queue of the controller of ResourceSlices. It retries within seconds, where the library waits up to 1,000, and it
// knows what the controller has written: the controller calls Forget after a success and AddRateLimited after a failure. Only the
// controller's one worker calls these methods; others call the methods of the embedded queue.
type sliceQueue struct {
	workqueue.TypedDelayingInterface[string]
	p     *publisher
	ready context.Context //nolint:containedctx // ends with the first update, or when the publisher stops
	open  func()          // ends ready

	pauses retryPauses
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
func (q *sliceQueue) AddRateLimited(pool string) { q.AddAfter(pool, q.pauses.after(q.err)) }

// Forget ends the retries of the pool that Get returned last.
func (q *sliceQueue) Forget(string) {
	q.pauses.Reset()
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

// NumRequeues is what a queue must have. The controller does not call it.
func (q *sliceQueue) NumRequeues(string) int { return 0 }
