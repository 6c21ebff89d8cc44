package health

import "sync"

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
