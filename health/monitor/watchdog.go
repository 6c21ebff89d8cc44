package monitor

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/gpu-node-agent/gpu-node-agent/health"
)

// abandonAfter is how long the end of the process waits for a call that hangs.
const abandonAfter = time.Second

var errAbandoned = errors.New("call abandoned: it hangs and the process ends")

// watchdog supervises calls to a source, which may hang for as long as the driver does.
type watchdog struct {
	m          *Monitor
	stallAfter time.Duration
	ending     <-chan struct{} // closed when the process ends
}

func (w watchdog) processEnds() bool {
	select {
	case <-w.ending:
		return true
	default:
		return false
	}
}

// call calls f and waits for it without a limit, so that no second call runs beside it. After stallAfter it publishes the
// source as stalled. Only the end of the process abandons the call.
func call[T any](ctx context.Context, w watchdog, what string, f func(context.Context) (T, error)) (T, error) {
	type result struct {
		v   T
		err error
	}
	done := make(chan result, 1)
	go func() {
		v, err := f(ctx)
		done <- result{v, err}
	}()
	stalled := time.NewTimer(w.stallAfter)
	defer stalled.Stop()
	ending := w.ending
	var abandon <-chan time.Time
	for {
		select {
		case r := <-done:
			return r.v, r.err
		case <-stalled.C:
			w.m.reportSource(health.SourceStalled, fmt.Sprintf("%s has not returned within %v", what, w.stallAfter))
		case <-ending:
			ending, abandon = nil, time.After(abandonAfter)
		case <-abandon:
			var zero T
			return zero, errAbandoned
		}
	}
}
