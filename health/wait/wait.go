// Package wait has the waits of loops and what wakes them. It imports nothing of this project, so every package can use it.
package wait

import (
	"context"
	"time"
)

// For waits until a channel receives or is closed. It returns false if ctx ended first; if both have happened, it may return either.
func For[T any](ctx context.Context, c <-chan T) bool {
	select {
	case <-ctx.Done():
		return false
	case <-c:
		return true
	}
}

// Sleep waits for a time. It returns false if ctx ended first.
func Sleep(ctx context.Context, d time.Duration) bool {
	timer := time.NewTimer(d)
	defer timer.Stop()
	return For(ctx, timer.C)
}

// Signal puts a token into a channel of capacity 1, unless it has one: a loop that receives from it runs once more, and does then what came
// up before.
func Signal(c chan<- struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}

// Closed reports whether a channel that nobody sends to is closed.
func Closed[T any](c <-chan T) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}
