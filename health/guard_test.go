package health

import (
	"errors"
	"slices"
	"strconv"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"
)

// guardTest makes the calls of one key.
type guardTest struct {
	*testing.T
	g              Guard[string, int]
	end            chan struct{}
	begun, running atomic.Int32
}

// begin makes a call that takes a time and returns its number, from 1. If waits is set, the caller waits for a late call. It reports what
// the caller observes, and after which time Call returns.
func (g *guardTest) begin(takes time.Duration, waits bool) (result int, observed []string, after time.Duration) {
	g.Helper()
	var late func()
	if waits {
		late = func() { observed = append(observed, "late") }
	}
	started := time.Now()
	result, err := g.g.Call(g.end, "key", func() int {
		if g.running.Add(1) > 1 {
			g.Error("two calls at once")
		}
		defer g.running.Add(-1)
		number := g.begun.Add(1)
		<-time.After(takes)
		return int(number)
	}, late)
	switch {
	case err == nil:
		observed = append(observed, "result")
	case errors.Is(err, ErrLate):
		observed = append(observed, "ErrLate")
	case errors.Is(err, ErrAbandoned):
		observed = append(observed, "ErrAbandoned")
	default:
		g.Error(err)
	}
	if err != nil && result != 0 {
		g.Errorf("result %d with %v", result, err)
	}
	return result, observed, time.Since(started)
}

func runGuardTest(t *testing.T, g *guardTest, test func(*guardTest)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		g.T, g.end, g.g.Limit = t, make(chan struct{}), 10*time.Second
		test(g)
		g.g.Wait()
		if n := g.running.Load(); n != 0 {
			t.Errorf("%d calls run after Wait", n)
		}
	})
}

func TestGuardCall(t *testing.T) {
	const never = time.Hour
	for name, test := range map[string]struct {
		waits, keepLate bool
		grace           time.Duration
		takes, ends     time.Duration // from the start
		want            []string
		after           time.Duration
	}{
		"waits, in time":            {true, false, 0, time.Second, never, []string{"result"}, time.Second},
		"waits, late":               {true, false, 0, time.Minute, never, []string{"late", "ErrLate"}, time.Minute},
		"waits, late, counts":       {true, true, 0, time.Minute, never, []string{"late", "result"}, time.Minute},
		"waits, ends":               {true, true, 0, 5 * time.Second, time.Second, []string{"ErrAbandoned"}, time.Second},
		"waits, late, ends":         {true, true, 0, time.Minute, 30 * time.Second, []string{"late", "ErrAbandoned"}, 30 * time.Second},
		"waits, ends, within grace": {true, true, 2 * time.Second, 5 * time.Second, 4 * time.Second, []string{"result"}, 5 * time.Second},
		"waits, ends, late within grace": {
			true, true, 2 * time.Second, 11 * time.Second, 9500 * time.Millisecond, []string{"late", "result"}, 11 * time.Second,
		},
		"waits, ends, beyond grace": {true, true, time.Second, 5 * time.Second, 2 * time.Second, []string{"ErrAbandoned"}, 3 * time.Second},
		"goes on, in time":          {false, false, 0, time.Second, never, []string{"result"}, time.Second},
		"goes on, late":             {false, false, 0, time.Minute, never, []string{"ErrLate"}, 10 * time.Second},
		"goes on, late, counts":     {false, true, 0, time.Minute, never, []string{"ErrLate"}, 10 * time.Second},
		"goes on, ends":             {false, false, 0, 5 * time.Second, time.Second, []string{"ErrAbandoned"}, time.Second},
	} {
		t.Run(name, func(t *testing.T) {
			runGuardTest(t, &guardTest{g: Guard[string, int]{KeepLate: test.keepLate, Grace: test.grace}}, func(g *guardTest) {
				ending := time.AfterFunc(test.ends, func() { close(g.end) })
				defer ending.Stop()
				if _, got, after := g.begin(test.takes, test.waits); !slices.Equal(got, test.want) || after != test.after {
					g.Errorf("%q after %v", got, after)
				}
			})
		})
	}
}

// After a call was given up, no second call begins for its key. A call for another key does.
func TestGuardWhileCallHangs(t *testing.T) {
	runGuardTest(t, &guardTest{}, func(g *guardTest) {
		g.begin(time.Minute, false)
		for _, waits := range []bool{false, true} {
			if _, got, after := g.begin(0, waits); !slices.Equal(got, []string{"ErrLate"}) || after != 0 || g.begun.Load() != 1 {
				g.Errorf("%q after %v, %d calls", got, after, g.begun.Load())
			}
		}
		if n, err := g.g.Call(g.end, "other", func() int { return 7 }, nil); n != 7 || err != nil {
			g.Errorf("other key: %d, %v", n, err)
		}
	})
}

// The caller that goes on gets a late result with the next call if it counts, and the result of a new call if it is dropped. In both cases
// the call after that is a new one.
func TestGuardLateResult(t *testing.T) {
	for keepLate, want := range map[bool][]int{true: {1, 2, 3}, false: {2, 3, 4}} {
		runGuardTest(t, &guardTest{g: Guard[string, int]{KeepLate: keepLate}}, func(g *guardTest) {
			g.begin(time.Minute, false)
			g.g.Wait()
			var got []int
			for range want {
				n, _, _ := g.begin(time.Second, false)
				got = append(got, n)
			}
			if !slices.Equal(got, want) {
				g.Errorf("keepLate %v: got the results of the calls %v, want %v", keepLate, got, want)
			}
		})
	}
}

// Without a limit no call is late.
func TestGuardWithoutLimit(t *testing.T) {
	runGuardTest(t, &guardTest{}, func(g *guardTest) {
		g.g.Limit = 0
		if n, _, after := g.begin(time.Hour, false); n != 1 || after != time.Hour {
			g.Errorf("result %d after %v", n, after)
		}
	})
}

// After the end no result counts without Grace, although the call has returned.
func TestGuardAfterEnd(t *testing.T) {
	runGuardTest(t, &guardTest{g: Guard[string, int]{KeepLate: true}}, func(g *guardTest) {
		for i := range 50 {
			end := make(chan struct{})
			n, err := g.g.Call(end, strconv.Itoa(i), func() int { <-time.After(time.Minute); return 1 }, func() {
				g.g.Wait()
				close(end) // before the caller has noticed that the call has returned
			})
			if n != 0 || !errors.Is(err, ErrAbandoned) {
				g.Fatalf("%d, %v", n, err)
			}
		}
	})
}

// The end of a call does not hide another call that was begun for its key after it had returned.
func TestGuardCallers(t *testing.T) {
	runGuardTest(t, &guardTest{}, func(g *guardTest) {
		_, _ = g.g.Call(g.end, "key", func() int { <-time.After(time.Minute); return 1 }, func() {
			g.g.Wait() // only this caller has not noticed yet that the call has returned
			g.begin(time.Hour, false)
		})
		if _, got, _ := g.begin(0, false); !slices.Equal(got, []string{"ErrLate"}) {
			g.Errorf("beside a call: %q", got)
		}
	})
}
