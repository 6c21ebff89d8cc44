package health

import (
	"sync"
	"testing"
)

func TestLatestWakesWhoWaits(t *testing.T) {
	var l Latest[int]
	if v, _ := l.Watch(); v != nil {
		t.Fatalf("empty Latest holds %v", *v)
	}
	_, changed := l.Watch()
	_, other := l.Watch()
	one := 1
	l.Store(&one)
	<-changed
	<-other
	v, changed := l.Watch()
	if v != &one || l.Load() != &one {
		t.Fatalf("got %v, want the value that was stored", v)
	}
	select {
	case <-changed:
		t.Fatal("woken without a newer value")
	default:
	}
}

// A reader that watches, and then waits, misses no value that is the newest.
func TestLatestIsNeverMissed(*testing.T) {
	var l Latest[int]
	const last = 2000
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() {
			for {
				v, changed := l.Watch()
				if v != nil && *v == last {
					return
				}
				<-changed
			}
		})
	}
	for i := 1; i <= last; i++ {
		l.Store(&i)
	}
	wg.Wait()
}
