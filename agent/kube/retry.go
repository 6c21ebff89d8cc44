package kube

import (
	"context"
	"time"
)

// The pause between two attempts doubles from the minimum to the maximum.
const (
	minBackoff = time.Second
	maxBackoff = time.Minute
)

// never is a wait without an end.
const never time.Duration = -1

// backoff is a growing pause between attempts.
type backoff struct{ last time.Duration }

// next returns the next pause.
func (b *backoff) next() time.Duration {
	b.last = min(max(2*b.last, minBackoff), maxBackoff)
	return b.last
}

// wait pauses, and returns false if ctx ended first.
func (b *backoff) wait(ctx context.Context) bool { return Wait(ctx, nil, b.next()) }

// Wait waits until the channel is ready or the time is over; a negative time has no end. It returns false if ctx ended
// first.
func Wait(ctx context.Context, c <-chan struct{}, d time.Duration) bool {
	var timeout <-chan time.Time
	if d >= 0 {
		t := time.NewTimer(d)
		defer t.Stop()
		timeout = t.C
	}
	select {
	case <-ctx.Done():
		return false
	case <-c:
	case <-timeout:
	}
	return true
}
