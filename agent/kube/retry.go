package kube

import (
	"context"
	"time"

	"github.com/gpu-node-agent/gpu-node-agent/health/backoff"
)

// The bounds of the pause between two attempts; see backoff.Backoff.
const (
	minBackoff = time.Second
	maxBackoff = time.Minute
)

// never is a wait without an end.
const never time.Duration = -1

func newBackoff() backoff.Backoff { return backoff.Backoff{Min: minBackoff, Max: maxBackoff} }

// await waits until the channel is ready or the time is over; a negative time has no end. It returns false if ctx ended first.
func await(ctx context.Context, c <-chan struct{}, d time.Duration) bool {
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
