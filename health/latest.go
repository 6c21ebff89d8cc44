package health

import (
	"context"
	"sync"
)

// Latest holds the newest value of something and wakes those who wait for a newer one. There are no
// subscribers and no queue: a slow reader skips values and holds nobody up. The zero Latest is empty.
type Latest[T any] struct {
	mu      sync.Mutex // guards value and changed, which belong together
	value   *T
	changed chan struct{} // closed when value is replaced; nil until somebody asks
}

// Store replaces the value, which must not be modified afterwards.
func (l *Latest[T]) Store(v *T) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.value = v
	if l.changed != nil {
		close(l.changed)
		l.changed = nil
	}
}

// Load returns the newest value, nil before the first Store.
func (l *Latest[T]) Load() *T {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.value
}

// Watch returns the newest value, nil before the first Store, and a channel that closes when a newer one
// has been stored.
func (l *Latest[T]) Watch() (*T, <-chan struct{}) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.changed == nil {
		l.changed = make(chan struct{})
	}
	return l.value, l.changed
}

// While returns a part of the newest value, and a context that ends with ctx, or as soon as that part of the
// value is another. It waits for the first value; if ctx ends before, the part is zero. The caller ends it
// with cancel.
func While[T any, P comparable](ctx context.Context, l *Latest[T], part func(*T) P) (P, context.Context, context.CancelFunc) {
	same, cancel := context.WithCancel(ctx)
	v, changed := l.Watch()
	for ; v == nil; v, changed = l.Watch() {
		select {
		case <-ctx.Done():
			var none P
			return none, same, cancel
		case <-changed:
		}
	}
	now := part(v)
	go func() {
		defer cancel()
		for {
			select {
			case <-same.Done():
				return
			case <-changed:
			}
			if v, changed = l.Watch(); part(v) != now {
				return
			}
		}
	}()
	return now, same, cancel
}
