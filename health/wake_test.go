package health

import (
	"context"
	"math/rand/v2"
	"runtime"
	"sync"
	"testing"
	"testing/synctest"
)

func TestWake(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var a Latest[int]
		var b Latest[string]
		var none *Latest[int]
		ctx, cancel := context.WithCancel(t.Context())
		wake := Wake(ctx, &a, none, &b)
		woken := func() bool {
			synctest.Wait()
			select {
			case <-wake:
				return true
			default:
				return false
			}
		}
		if woken() {
			t.Error("woken by nothing")
		}
		a.Store(new(1))
		if !woken() || woken() {
			t.Error("not woken once by one value")
		}
		for range 3 {
			a.Store(new(2))
			b.Store(new("x"))
			synctest.Wait()
		}
		if !woken() || woken() {
			t.Error("not woken once by several values")
		}
		cancel()
		synctest.Wait()
		if a.Store(new(3)); woken() {
			t.Error("woken after the end")
		}
	})
}

// A loop that loads the values after each token ends with the newest.
func TestWakeMissesNothing(t *testing.T) {
	for seed := range uint64(50) {
		var values [3]Latest[int]
		ctx, cancel := context.WithCancel(t.Context())
		wake := Wake(ctx, &values[0], &values[1], &values[2])
		var stores sync.WaitGroup
		for i := range values {
			r := rand.New(rand.NewPCG(seed, uint64(i)))
			stores.Go(func() {
				for n := range 100 {
					values[i].Store(new(n))
					for range r.IntN(3) {
						runtime.Gosched()
					}
				}
			})
		}
		for left := len(values); left > 0; {
			<-wake
			left = len(values)
			for i := range values {
				if v := values[i].Load(); v != nil && *v == 99 {
					left--
				}
			}
		}
		stores.Wait()
		cancel()
	}
}

// Loops that come and go leave no goroutine behind: the bubble would not end.
func TestWakeEndsWithContext(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var v Latest[int]
		for range 10_000 {
			ctx, cancel := context.WithCancel(t.Context())
			Wake(ctx, &v)
			cancel()
		}
	})
}
