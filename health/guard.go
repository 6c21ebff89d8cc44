package health

import (
	"errors"
	"sync"
	"time"

	"github.com/gpu-node-agent/gpu-node-agent/health/wait"
)

// Guard makes calls that may hang for as long as the driver or a disk does. There is at most one call for a key at a time, so each hanging
// driver or disk costs one goroutine. Its users choose three things: whether the caller waits for a late call or goes on (late of Call),
// whether a late result counts (KeepLate), and what becomes of a call at the end (Grace, Wait).
//
//	user                       caller    late result  at the end
//	health/monitor             waits     counts       abandoned after 1 s
//	plugin/containers, passes  waits     dropped      waited for
//	plugin/containers, names   goes on   dropped      abandoned at once
//	plugin/cdi                 goes on   counts       waited for
//	health/nvml                goes on   dropped      abandoned at once
//	health/monitor, actions    waits     counts       waited for
//
// The monitor has nothing to do without its source, and must not lose a reading; the kubelet must not wait for it at the end. A pass over
// the containers is repeated soon, so a late result is dropped; it has the driver open until it returns, and a detach needs it closed. A
// pass without new names uses the earlier names; late names may be old when the next pass asks. The toolkit of CDI specs has other GPUs to
// ask, and its results do not age; it has the driver open, too. NVML's reader of properties has other GPUs to read, and its caller asks
// again. The reader of a recovery action has one GPU, and has the driver open.
//
// The users of CallOnce call a disk or the driver, as agent/mounts does; plugin/mps reads /proc. They go on, drop a late result, and
// abandon the call at once. plugin/mps waits 2 s for a program that it has killed.
//
// A Guard must not be copied after its first call.
type Guard[K comparable, T any] struct {
	Limit    time.Duration // a call that takes longer is late; 0: none is
	KeepLate bool          // a late result counts: if the caller went on, the next Call for the key returns it instead of making its call
	Grace    time.Duration // how long Call waits for a call after the end, and its result counts

	calls sync.WaitGroup
	mu    sync.Mutex // guards last
	last  map[K]*guardedCall[T]
}

// guardedCall is a call that runs, or whose result nobody has received yet.
type guardedCall[T any] struct {
	returned chan struct{}
	result   T // once returned is closed
}

var (
	// ErrLate is the error of a call that has not returned in time, or is not begun because an earlier one has not.
	ErrLate = errors.New("no answer in time")

	// ErrAbandoned is the error of a call that had not returned at the end.
	ErrAbandoned = errors.New("call abandoned: it had not returned at the end")
)

// Call makes a call and returns its result. When the call is late, the caller goes on with ErrLate; or if late is not nil, late runs and
// the caller waits. end is closed at the end, when nobody wants the result any more; then Call returns ErrAbandoned.
func (g *Guard[K, T]) Call(end <-chan struct{}, key K, call func() T, late func()) (result T, err error) {
	c := g.begin(key, call)
	if c == nil {
		return result, ErrLate
	}
	isLate := false
	var limit, abandon <-chan time.Time
	if g.Limit > 0 {
		limit = time.After(g.Limit)
	}
	for {
		select {
		case <-c.returned:
			g.forget(key, c)
			switch {
			case g.Grace == 0 && wait.Closed(end):
				return result, ErrAbandoned
			case isLate && !g.KeepLate:
				return result, ErrLate
			}
			return c.result, nil
		case <-limit:
			if late == nil {
				return result, ErrLate
			}
			isLate = true
			late()
		case <-end:
			if g.Grace == 0 {
				return result, ErrAbandoned
			}
			end, abandon = nil, time.After(g.Grace)
		case <-abandon:
			return result, ErrAbandoned
		}
	}
}

// CallOnce makes a single call. It goes on with ErrLate after limit, and with ErrAbandoned once end is closed; 0: there is no limit.
func CallOnce[T any](end <-chan struct{}, limit time.Duration, call func() T) (T, error) {
	g := Guard[struct{}, T]{Limit: limit}
	return g.Call(end, struct{}{}, call, nil)
}

// Wait waits until every call has returned.
func (g *Guard[K, T]) Wait() { g.calls.Wait() }

// begin begins a call, or returns the late one that counts. It returns nil while an earlier one for the key runs.
func (g *Guard[K, T]) begin(key K, call func() T) *guardedCall[T] {
	g.mu.Lock()
	defer g.mu.Unlock()
	if c := g.last[key]; c != nil {
		if !wait.Closed(c.returned) {
			return nil
		}
		if g.KeepLate {
			return c
		}
	}
	if g.last == nil {
		g.last = make(map[K]*guardedCall[T])
	}
	c := &guardedCall[T]{returned: make(chan struct{})}
	g.last[key] = c
	g.calls.Go(func() {
		defer close(c.returned)
		c.result = call()
	})
	return c
}

// forget forgets a call whose result was received.
func (g *Guard[K, T]) forget(key K, c *guardedCall[T]) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.last[key] == c {
		delete(g.last, key)
	}
}
