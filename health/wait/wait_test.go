package wait

import (
	"context"
	"testing"
	"testing/synctest"
	"time"
)

func TestFor(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		c := make(chan int, 1)
		time.AfterFunc(time.Second, func() { c <- 1 })
		start := time.Now()
		if !For(ctx, c) || time.Since(start) != time.Second {
			t.Errorf("after %v", time.Since(start))
		}
		time.AfterFunc(time.Second, func() { close(c) })
		if !For(ctx, c) || time.Since(start) != 2*time.Second {
			t.Errorf("closed: after %v", time.Since(start))
		}
		time.AfterFunc(time.Second, cancel)
		if For[int](ctx, nil) || time.Since(start) != 3*time.Second {
			t.Errorf("ended: after %v", time.Since(start))
		}
	})
}

func TestSleep(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		start := time.Now()
		if !Sleep(ctx, time.Minute) || time.Since(start) != time.Minute {
			t.Errorf("after %v", time.Since(start))
		}
		time.AfterFunc(time.Second, cancel)
		if Sleep(ctx, time.Minute) || time.Since(start) != time.Minute+time.Second {
			t.Errorf("ended: after %v", time.Since(start))
		}
	})
}

func TestSignal(t *testing.T) {
	c := make(chan struct{}, 1)
	for range 3 {
		Signal(c)
	}
	if <-c; len(c) != 0 {
		t.Errorf("%d more tokens", len(c))
	}
	Signal(c)
	if len(c) != 1 {
		t.Error("no token after one was taken")
	}
}

func TestClosed(t *testing.T) {
	c := make(chan struct{})
	if Closed(c) || Closed[int](nil) {
		t.Error("an open channel is closed")
	}
	if close(c); !Closed(c) {
		t.Error("not closed")
	}
}
