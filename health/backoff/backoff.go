// Package backoff has the pauses between attempts. It imports nothing of this project but health/wait, so every package can use it.
package backoff

import (
	"context"
	"math/rand/v2"
	"time"

	"github.com/gpu-node-agent/gpu-node-agent/health/wait"
)

// Backoff is a pause between attempts that doubles from Min to Max. Each pause is shortened at random by up to half, because what fails for
// one node often fails for thousands at once, such as the API server. So an attempt may follow after Min/2, and none follows later than
// after Max.
//
// The fields may change between two pauses. A Backoff without a pause is as after Reset.
type Backoff struct {
	Min, Max time.Duration

	full time.Duration // the last pause before it was shortened; zero before the first
}

// Next returns the next pause.
func (b *Backoff) Next() time.Duration {
	b.full = min(max(2*b.full, b.Min), b.Max)
	return b.full - rand.N(b.full/2+1) //nolint:gosec // not a secret
}

// Reset makes the next pause start at Min again.
func (b *Backoff) Reset() { b.full = 0 }

// Wait waits for the next pause. It returns false if ctx ended first.
func (b *Backoff) Wait(ctx context.Context) bool {
	return wait.Sleep(ctx, b.Next())
}
