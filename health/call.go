package health

import (
	"context"
	"time"
)

// Call runs a call that may hang for as long as the driver does, and returns when it has returned. done receives its result. A call that
// takes longer than limit has failed: late runs then, and its result is dropped. If ctx ends before the call returns, ended runs, and
// done and late do not.
func Call[T any](ctx context.Context, limit time.Duration, call func() T, done func(T), late, ended func()) {
	result := make(chan T, 1)
	go func() { result <- call() }()
	timer := time.NewTimer(limit)
	defer timer.Stop()
	end, isLate := ctx.Done(), false
	for {
		select {
		case v := <-result:
			if !isLate && ctx.Err() == nil {
				done(v)
			}
			return
		case <-timer.C:
			if isLate = true; ctx.Err() == nil {
				late()
			}
		case <-end:
			end = nil
			ended()
		}
	}
}
