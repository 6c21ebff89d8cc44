package health

import (
	"context"
	"sync"
	"testing"
)

func TestLatestWatch(t *testing.T) {
	var l Latest[int]
	if v, _ := l.Watch(); v != nil || l.Load() != nil {
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
		t.Fatalf("got %v, want the stored value", v)
	}
	select {
	case <-changed:
		t.Fatal("the channel closed without a newer value")
	default:
	}
}

// A reader that alternates between watching and waiting always sees the newest value.
func TestLatestWatchConcurrent(*testing.T) {
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

func TestWatchPart(t *testing.T) {
	type pair struct{ watched, other int }
	var l Latest[pair]
	ended, end := context.WithCancel(t.Context())
	end()
	if part, same, cancel := WatchPart(ended, &l, func(p *pair) int { return p.watched }); part != 0 || same.Err() == nil {
		t.Fatal("the context did not end with its parent")
	} else {
		cancel()
	}
	go l.Store(&pair{1, 1})
	part, same, cancel := WatchPart(t.Context(), &l, func(p *pair) int { return p.watched })
	defer cancel()
	if part != 1 {
		t.Fatalf("got %d", part)
	}
	l.Store(&pair{1, 2})
	l.Store(&pair{1, 3})
	if same.Err() != nil {
		t.Fatal("the context ended although the part is unchanged")
	}
	l.Store(&pair{2, 3})
	<-same.Done()

	_, same, cancel = WatchPart(t.Context(), &l, func(p *pair) int { return p.watched })
	cancel()
	<-same.Done()
}
