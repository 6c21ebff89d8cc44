package kube

import (
	"context"
	"testing"
	"testing/synctest"
	"time"
)

// The pauses of many nodes spread over a fifth of the time.
func TestJitter(t *testing.T) {
	const d = time.Minute
	shortest, longest := d, d
	for range 10000 {
		v := jitter(d)
		shortest, longest = min(shortest, v), max(longest, v)
	}
	if shortest < d*90/100 || shortest > d*91/100 || longest < d*109/100 || longest > d*110/100 {
		t.Errorf("from %v to %v", shortest, longest)
	}
}

func TestWait(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ready, ended := make(chan struct{}), make(chan struct{})
		time.AfterFunc(time.Minute, func() { close(ready) })
		for _, c := range []struct {
			c    <-chan struct{}
			d    time.Duration
			want time.Duration
			ok   bool
		}{
			{nil, 0, 0, true},
			{nil, time.Second, time.Second, true},
			{ready, 10 * time.Second, 10 * time.Second, true},
			{ready, never, 49 * time.Second, true},
			{ready, time.Hour, 0, true},
			{nil, never, 40 * time.Second, false},
			{ended, time.Hour, 0, false},
		} {
			ctx, cancel := context.WithCancel(t.Context())
			if !c.ok {
				time.AfterFunc(c.want, cancel)
			}
			began := time.Now()
			if ok := await(ctx, c.c, c.d); ok != c.ok || time.Since(began) != c.want {
				t.Errorf("%v: %v after %v", c, ok, time.Since(began))
			}
			cancel()
		}
	})
}
