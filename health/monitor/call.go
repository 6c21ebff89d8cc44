package monitor

import (
	"context"
	"fmt"
	"time"

	"github.com/gpu-node-agent/gpu-node-agent/health"
)

// caller makes calls that may hang.
type caller struct {
	m          *Monitor
	stallAfter time.Duration
	ending     <-chan struct{} // closed when the process ends
}

// call makes a call and waits for it, however long it takes: there is never a second one beside it. If it
// takes longer than stallAfter, the source is shown as stalled. Only the end of the process leaves it behind.
func call[T any](ctx context.Context, c caller, what string, f func(context.Context) (T, error)) (T, error) {
	type result struct {
		v   T
		err error
	}
	done := make(chan result, 1)
	go func() {
		v, err := f(ctx)
		done <- result{v, err}
	}()
	stalled := time.NewTimer(c.stallAfter)
	defer stalled.Stop()
	ending := c.ending
	var abandon <-chan time.Time
	for {
		select {
		case r := <-done:
			return r.v, r.err
		case <-stalled.C:
			c.m.trouble(health.SourceStalled, fmt.Sprintf("%s has not returned within %v", what, c.stallAfter))
		case <-ending:
			ending, abandon = nil, time.After(abandonAfter)
		case <-abandon:
			var none T
			return none, errAbandoned
		}
	}
}
