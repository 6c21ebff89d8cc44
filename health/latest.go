package health

import (
	"context"
	"reflect"
	"sync"

	"github.com/gpu-node-agent/gpu-node-agent/health/wait"
)

// Latest holds the newest value of a T and wakes the goroutines that wait for a newer one. It has no subscribers and no
// queue: a slow reader skips values and delays no one. The zero Latest is empty.
type Latest[T any] struct {
	mu      sync.Mutex // guards value and changed
	value   *T
	changed chan struct{} // closed when value is replaced; nil until the first Watch
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

// Watch returns the newest value, nil before the first Store, and a channel that closes when a newer value is stored.
func (l *Latest[T]) Watch() (*T, <-chan struct{}) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.changed == nil {
		l.changed = make(chan struct{})
	}
	return l.value, l.changed
}

// WatchPart returns a part of the newest value, and a context that ends with ctx or when that part changes. It waits for the
// first value; if ctx ends before, the part is zero. The caller must call cancel.
func WatchPart[T any, P comparable](ctx context.Context, l *Latest[T], part func(*T) P) (P, context.Context, context.CancelFunc) {
	same, cancel := context.WithCancel(ctx)
	v, changed := l.Watch()
	for ; v == nil; v, changed = l.Watch() {
		if !wait.For(ctx, changed) {
			var none P
			return none, same, cancel
		}
	}
	now := part(v)
	go func() {
		defer cancel()
		for {
			if !wait.For(same, changed) {
				return
			}
			if v, changed = l.Watch(); part(v) != now {
				return
			}
		}
	}()
	return now, same, cancel
}

// Replaceable is a Latest.
type Replaceable interface {
	replaced() <-chan struct{}
}

// replaced returns a channel that closes when a newer value is stored. A nil Latest never has one.
func (l *Latest[T]) replaced() <-chan struct{} {
	if l == nil {
		return nil
	}
	_, changed := l.Watch()
	return changed
}

// Wake returns a channel that receives after any of the values was replaced, until ctx ends. It holds one token: a loop that loads the
// values after each receive misses none, and runs once for several that were replaced meanwhile.
func Wake(ctx context.Context, values ...Replaceable) <-chan struct{} {
	wake := make(chan struct{}, 1)
	cases := []reflect.SelectCase{{Dir: reflect.SelectRecv, Chan: reflect.ValueOf(ctx.Done())}}
	for _, v := range values {
		cases = append(cases, reflect.SelectCase{Dir: reflect.SelectRecv, Chan: reflect.ValueOf(v.replaced())})
	}
	go func() {
		for {
			i, _, _ := reflect.Select(cases)
			if i == 0 {
				return
			}
			cases[i].Chan = reflect.ValueOf(values[i-1].replaced()) // before the token, so that the value loaded after it is watched
			wait.Signal(wake)
		}
	}()
	return wake
}
