package monitor

import (
	"context"
	"fmt"
	"time"

	"github.com/gpu-node-agent/gpu-node-agent/health"
)

// abandonAfter is how long the end of the process waits for a call that hangs.
const abandonAfter = time.Second

// watchdog supervises calls to a source, which may hang for as long as the driver does.
type watchdog struct {
	m      *Monitor
	calls  *health.Guard[struct{}, error]
	ending <-chan struct{} // closed when the process ends
}

func (m *Monitor) newWatchdog(stallAfter time.Duration, ending <-chan struct{}) watchdog {
	return watchdog{m, &health.Guard[struct{}, error]{Limit: stallAfter, KeepLate: true, Grace: abandonAfter}, ending}
}

func (w watchdog) processEnds() bool {
	select {
	case <-w.ending:
		return true
	default:
		return false
	}
}

// call calls f and waits for it without a limit, so that no second call runs beside it. After the limit it publishes the source as
// stalled. Only the end of the process abandons the call, with health.ErrAbandoned.
func call[T any](ctx context.Context, w watchdog, what string, f func(context.Context) (T, error)) (T, error) {
	var v T
	err, abandoned := w.calls.Call(w.ending, struct{}{}, func() (err error) {
		v, err = f(ctx)
		return err
	}, func() {
		w.m.reportSource(health.SourceStalled, fmt.Sprintf("%s has not returned within %v", what, w.calls.Limit))
	})
	if abandoned != nil { // v is still in use
		var none T
		return none, abandoned
	}
	return v, err
}
