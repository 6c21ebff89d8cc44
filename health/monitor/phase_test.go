package monitor

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/health/judge"
)

func TestPhaseObserve(t *testing.T) {
	type read struct {
		earlier, later time.Duration
		measured       bool
	}
	const ms = time.Millisecond
	for name, tt := range map[string]struct {
		reads     []read
		after, by time.Duration // zero: unknown
	}{
		"no read":                    {nil, 0, 0},
		"no measurement":             {[]read{{0, 500 * ms, false}}, 0, 0},
		"a measurement":              {[]read{{0, 500 * ms, true}}, 0, 500 * ms},
		"reads far apart":            {[]read{{0, 900 * ms, true}}, 0, 0},
		"in the first half":          {[]read{{0, 500 * ms, true}, {1000 * ms, 1250 * ms, true}}, 1000 * ms, 1250 * ms},
		"in the second half":         {[]read{{0, 500 * ms, true}, {1000 * ms, 1250 * ms, false}}, 1250 * ms, 1500 * ms},
		"not at the end":             {[]read{{0, 500 * ms, true}, {1400 * ms, 1700 * ms, false}}, 1000 * ms, 1400 * ms},
		"periods later":              {[]read{{0, 500 * ms, true}, {10000 * ms, 10250 * ms, true}}, 10000 * ms, 10250 * ms},
		"around the end of a period": {[]read{{800 * ms, 1300 * ms, true}, {1800 * ms, 2100 * ms, false}}, 2100 * ms, 2300 * ms},
		"a narrow phase stays":       {[]read{{0, 50 * ms, true}, {1000 * ms, 1025 * ms, true}}, 1000 * ms, 1050 * ms},
		"jitter later":               {[]read{{0, 100 * ms, true}, {1100 * ms, 1600 * ms, true}}, 1000 * ms, 1100 * ms},
		"jitter earlier":             {[]read{{0, 100 * ms, true}, {500 * ms, 980 * ms, true}}, 1000 * ms, 1100 * ms},
		"later than jitter":          {[]read{{0, 100 * ms, true}, {1150 * ms, 1600 * ms, true}}, 1150 * ms, 1600 * ms},
		"earlier than jitter":        {[]read{{0, 100 * ms, true}, {500 * ms, 950 * ms, true}}, 500 * ms, 950 * ms},
		"a stalled engine":           {[]read{{0, 100 * ms, true}, {900 * ms, 1400 * ms, false}}, 1000 * ms, 1100 * ms},
	} {
		t.Run(name, func(t *testing.T) {
			begin := time.Now()
			var p phase
			for _, r := range tt.reads {
				p.observe(begin.Add(r.earlier), begin.Add(r.later), r.measured)
			}
			if tt.by == 0 {
				if p.known() {
					t.Errorf("phase from %v to %v", p.after.Sub(begin), p.by.Sub(begin))
				}
				return
			}
			p.shift(begin.Add((tt.after + tt.by) / 2))
			if after, by := p.after.Sub(begin), p.by.Sub(begin); after != tt.after || by != tt.by {
				t.Errorf("phase from %v to %v, want %v to %v", after, by, tt.after, tt.by)
			}
		})
	}
}

// engine is a source that measures at a phase of its own, with jitter, and a record of its reads. Its own clock may step.
type engine struct {
	*fakeSource
	mu      sync.Mutex // guards the fields below
	random  *rand.Rand
	phase   time.Time // an undisturbed measurement
	period  time.Duration
	drift   time.Duration // by which a period is longer
	jitter  time.Duration
	clock   time.Duration // by which its clock is ahead
	stalled bool
	blank   bool // no values
	next    time.Time
	newest  time.Time // the latest measurement
	reads   []time.Time
	polls   []time.Time
	ages    []time.Duration // of the measurements in polls
}

func newEngine(s *fakeSource, seed uint64) *engine {
	random := rand.New(rand.NewPCG(seed, 0)) //nolint:gosec // the same in each run
	e := &engine{fakeSource: s, random: random, period: time.Second, jitter: 50 * time.Millisecond}
	e.move()
	return e
}

// move changes the phase.
func (e *engine) move() {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.phase = time.Now().Add(-time.Second - time.Duration(e.random.Int64N(int64(time.Second))))
	e.plan()
}

// plan determines the next measurement. e.mu is held.
func (e *engine) plan() {
	e.phase = e.phase.Add(e.period + e.drift)
	e.next = e.phase.Add(time.Duration(e.random.Int64N(int64(e.jitter) + 1)))
}

// upTo returns a random time that is shorter than d.
func (e *engine) upTo(d time.Duration) time.Duration {
	e.mu.Lock()
	defer e.mu.Unlock()
	return time.Duration(e.random.Int64N(int64(d)))
}

func (e *engine) change(f func()) {
	e.mu.Lock()
	defer e.mu.Unlock()
	f()
}

// measured returns when the engine has measured, by its clock. e.mu is held.
func (e *engine) measured() time.Time {
	now := time.Now()
	e.reads = append(e.reads, now)
	for !e.next.After(now) {
		if !e.stalled {
			e.newest = e.next.Add(e.clock)
		}
		e.plan()
	}
	if e.blank {
		return time.Time{}
	}
	return e.newest
}

func (e *engine) Poll(ctx context.Context) (*health.Reading, error) {
	r, err := e.fakeSource.Poll(ctx)
	if err != nil {
		return nil, err
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	r.Measured = e.measured()
	e.polls = append(e.polls, time.Now())
	e.ages = append(e.ages, time.Since(e.newest.Add(-e.clock)))
	return r, nil
}

func (e *engine) ReadAllXIDs() {}

func (e *engine) XIDsChanged(context.Context) (bool, time.Time, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	return false, e.measured(), nil
}

// forget forgets the reads, polls and ages so far.
func (e *engine) forget() {
	e.change(func() { e.reads, e.polls, e.ages = nil, nil, nil })
}

// most returns the largest number of reads in any second. A check that sees an XID and the poll that follows at once are one read.
func (e *engine) most() (most int) {
	e.mu.Lock()
	defer e.mu.Unlock()
	reads := slices.Compact(slices.Clone(e.reads))
	for i, last := range reads {
		first := slices.IndexFunc(reads, func(t time.Time) bool { return last.Sub(t) < time.Second })
		most = max(most, i-first+1)
	}
	return most
}

// widest returns the longest time between two reads.
func (e *engine) widest() (gap time.Duration) {
	e.mu.Lock()
	defer e.mu.Unlock()
	for i, at := range e.reads[1:] {
		gap = max(gap, at.Sub(e.reads[i]))
	}
	return gap
}

// closest returns the least time between two polls.
func (e *engine) closest() time.Duration {
	e.mu.Lock()
	defer e.mu.Unlock()
	gap := time.Hour
	for i, at := range e.polls[1:] {
		gap = min(gap, at.Sub(e.polls[i]))
	}
	return gap
}

// farthest returns the longest time between two polls.
func (e *engine) farthest() time.Duration {
	e.mu.Lock()
	defer e.mu.Unlock()
	gap := time.Duration(0)
	for i, at := range e.polls[1:] {
		gap = max(gap, at.Sub(e.polls[i]))
	}
	return gap
}

// oldest returns the age that p percent of the values do not exceed.
func (e *engine) oldest(p int) time.Duration {
	e.mu.Lock()
	defer e.mu.Unlock()
	ages := slices.Sorted(slices.Values(e.ages))
	return ages[(len(ages)-1)*p/100]
}

func (e *engine) count(of *[]time.Time) int {
	e.mu.Lock()
	defer e.mu.Unlock()
	return len(*of)
}

func runTestWithEngine(t *testing.T, seed uint64, interval time.Duration, test func(t *testing.T, h *harness, e *engine)) {
	t.Helper()
	runTest(t, func(t *testing.T, h *harness) {
		h.configure(func(c *judge.Config) { c.Interval = interval })
		e := newEngine(h.fakeSource, seed)
		src := *h.source.Load()
		src.Open = func(ctx context.Context) (health.Session, error) {
			e.move() // a new session has new watches
			_, err := h.Open(ctx)
			return e, err
		}
		h.source.Store(&src)
		synctest.Wait()
		test(t, h, e)
	})
}

// learning is how long the monitor takes to learn a phase.
const learning = 15 * time.Second

// pollRate is what polls at an interval may cost, and how old the values are that they return.
type pollRate struct {
	interval    time.Duration
	reads, most int           // per 1000 s at most; in any second
	middle, all time.Duration // ages of the values that half of the polls and all of them do not exceed
}

// Polls follow the engine's measurements, whatever their phase, and no interval changes the rate.
func TestPollsFollowMeasurements(t *testing.T) {
	for _, tt := range []pollRate{
		{time.Second, 2150, 3, 150 * time.Millisecond, 250 * time.Millisecond},
		{2 * time.Second, 2150, 3, 150 * time.Millisecond, 250 * time.Millisecond},
		{5 * time.Second, 2150, 3, 150 * time.Millisecond, 250 * time.Millisecond},
		{10 * time.Second, 2150, 3, 150 * time.Millisecond, 250 * time.Millisecond},
		{time.Minute, 2150, 3, 150 * time.Millisecond, 250 * time.Millisecond},
		{1500 * time.Millisecond, 3100, 3, 150 * time.Millisecond, 250 * time.Millisecond},
		{500 * time.Millisecond, 2150, 3, 700 * time.Millisecond, 750 * time.Millisecond},
		{700 * time.Millisecond, 2900, 3, 700 * time.Millisecond, 1100 * time.Millisecond},
		{300 * time.Millisecond, 3600, 5, 600 * time.Millisecond, 1100 * time.Millisecond},
	} {
		for seed := range uint64(3) {
			t.Run(fmt.Sprintf("%v/%d", tt.interval, seed), func(t *testing.T) {
				runTestWithEngine(t, seed, tt.interval, func(t *testing.T, _ *harness, e *engine) {
					e.checkRate(t, tt)
				})
			})
		}
	}
}

// checkRate checks reads and polls while the phase is learned, and for 1000 s after.
func (e *engine) checkRate(t *testing.T, tt pollRate) {
	t.Helper()
	advance(learning + tt.interval)
	if gap := e.widest(); gap > maxXIDGap+minReadGap && tt.interval >= time.Second {
		t.Errorf("at first: no read for %v", gap)
	}
	if n := e.most(); n > tt.most {
		t.Errorf("at first: %d reads in a second, want at most %d", n, tt.most)
	}
	e.forget()
	advance(1000 * time.Second)
	polls, want := e.count(&e.polls), int(1000*time.Second/tt.interval)
	if polls < want*98/100-1 || polls > want*101/100+1 {
		t.Errorf("%d polls, want about %d", polls, want)
	}
	if gap := e.widest(); gap > maxXIDGap+minReadGap && tt.interval >= time.Second {
		t.Errorf("no read for %v", gap)
	}
	if gap := e.closest(); gap < tt.interval/2 {
		t.Errorf("polls %v apart", gap)
	}
	if n := e.count(&e.reads); n > tt.reads {
		t.Errorf("%d reads, want at most %d", n, tt.reads)
	}
	if n := e.most(); n > tt.most {
		t.Errorf("%d reads in a second, want at most %d", n, tt.most)
	}
	if middle, all := e.oldest(50), e.oldest(100); middle > tt.middle || all > tt.all {
		t.Errorf("polls returned values %v old, and at most %v", middle, all)
	}
}

// follows checks that polls return fresh values, within the time that it takes to learn the phase.
func (e *engine) follows(t *testing.T, when string) {
	t.Helper()
	e.mostlyFollows(t, when, 100)
}

// mostlyFollows checks percent of the polls.
func (e *engine) mostlyFollows(t *testing.T, when string, percent int) {
	t.Helper()
	advance(learning)
	e.forget()
	advance(100 * time.Second)
	if middle, most := e.oldest(50), e.oldest(percent); middle > 150*time.Millisecond || most > 250*time.Millisecond {
		t.Errorf("%s: polls returned values %v old, and at most %v", when, middle, most)
	}
	e.limited(t, when)
}

// limited checks the number of reads since forget.
func (e *engine) limited(t *testing.T, when string) {
	t.Helper()
	e.mu.Lock()
	begin := e.reads[0]
	e.mu.Unlock()
	seconds := int(time.Since(begin)/time.Second) + 1
	if n := e.count(&e.reads); n > seconds*215/100+2 || e.most() > 3 {
		t.Errorf("%s: %d reads in %d s, %d in one", when, n, seconds, e.most())
	}
	if n := e.count(&e.polls); n < seconds*98/100-2 || n > seconds*101/100+2 {
		t.Errorf("%s: %d polls in %d s", when, n, seconds)
	}
}

func TestPhaseIsLearnedAgain(t *testing.T) {
	for name, disturb := range map[string]func(h *harness, e *engine){
		"reconnect": func(h *harness, _ *engine) {
			h.set(func(s *fakeSource) { s.pollErr = errors.New("engine died") })
			advance(2 * time.Second)
			h.set(func(s *fakeSource) { s.pollErr = nil })
			advance(5 * time.Second)
		},
		"another phase": func(_ *harness, e *engine) { e.move() },
		"a step of the engine's clock back": func(_ *harness, e *engine) {
			e.change(func() { e.clock -= time.Hour })
			e.move()
		},
		"a step of the engine's clock ahead": func(_ *harness, e *engine) {
			e.change(func() { e.clock += time.Hour })
			e.move()
		},
		"missing values": func(_ *harness, e *engine) {
			e.change(func() { e.blank = true })
			e.move()
			advance(20 * time.Second)
			e.change(func() { e.blank = false })
		},
		"an engine that stalled": func(_ *harness, e *engine) {
			e.change(func() { e.stalled = true })
			advance(20 * time.Second)
			e.change(func() { e.stalled = false })
			e.move()
		},
		"a call that hung": func(h *harness, e *engine) {
			resume := h.hangPolls()
			advance(20 * time.Second)
			resume()
			e.move()
		},
		"a machine that is less loaded": func(_ *harness, e *engine) { e.change(func() { e.jitter = 0 }) },
	} {
		t.Run(name, func(t *testing.T) {
			runTestWithEngine(t, 1, time.Second, func(t *testing.T, h *harness, e *engine) {
				e.follows(t, "at first")
				for i := range 3 {
					disturb(h, e)
					e.follows(t, fmt.Sprint("again ", i))
				}
			})
		})
	}
}

func TestPhaseDrifts(t *testing.T) {
	for _, drift := range []time.Duration{-time.Millisecond, -200 * time.Microsecond, 200 * time.Microsecond, time.Millisecond} {
		t.Run(fmt.Sprint(drift), func(t *testing.T) {
			runTestWithEngine(t, 1, time.Second, func(t *testing.T, _ *harness, e *engine) {
				e.change(func() { e.drift = drift })
				for i := range 10 {
					e.mostlyFollows(t, fmt.Sprint(i), 90)
				}
			})
		})
	}
}

// Polls at an interval of whole periods drift with the engine, instead of keeping the average by a gap of another length.
func TestPollsDriftWithPhase(t *testing.T) {
	const interval = 2 * time.Second
	for _, drift := range []time.Duration{-time.Millisecond, time.Millisecond} {
		t.Run(fmt.Sprint(drift), func(t *testing.T) {
			runTestWithEngine(t, 1, interval, func(t *testing.T, _ *harness, e *engine) {
				e.change(func() { e.drift = drift })
				advance(learning)
				e.forget()
				advance(2000 * time.Second) // two periods of drift
				if shortest, longest := e.closest(), e.farthest(); shortest < interval*3/4 || longest > interval*5/4 {
					t.Errorf("polls between %v and %v apart", shortest, longest)
				}
			})
		})
	}
}

// Polls and checks keep their times while nothing tells when the engine measures.
func TestPollsWithoutMeasurements(t *testing.T) {
	for name, disturb := range map[string]func(e *engine){
		"no values":       func(e *engine) { e.blank = true },
		"no measurements": func(e *engine) { e.stalled = true },
	} {
		t.Run(name, func(t *testing.T) {
			runTestWithEngine(t, 1, time.Second, func(t *testing.T, _ *harness, e *engine) {
				for _, before := range []time.Duration{0, 1200 * time.Millisecond, 2300 * time.Millisecond, learning} {
					e.change(func() { e.blank, e.stalled = false, false })
					e.move()
					advance(before)
					e.change(func() { disturb(e) })
					advance(3 * time.Second)
					e.forget()
					advance(200 * time.Second)
					e.limited(t, fmt.Sprint("after ", before))
				}
			})
		})
	}
}

// Values that are missing for a moment tell nothing about the phase.
func TestPhaseOutlastsMissingValues(t *testing.T) {
	runTestWithEngine(t, 1, time.Second, func(t *testing.T, _ *harness, e *engine) {
		advance(learning)
		for range 10 {
			e.change(func() { e.blank = true })
			advance(e.upTo(3 * time.Second))
			e.change(func() { e.blank = false })
			advance(time.Second)
			e.forget()
			advance(3 * time.Second)
			if oldest := e.oldest(100); oldest > 200*time.Millisecond {
				t.Errorf("a poll returned values %v old", oldest)
			}
		}
	})
}

// A check before the poll that an event has asked for does not put it off.
func TestCheckBeforePollOfEvent(t *testing.T) {
	runTestWithEngine(t, 1, time.Second, func(t *testing.T, h *harness, e *engine) {
		for range 200 {
			e.move() // and so with checks at any time
			advance(e.upTo(3 * time.Second))
			h.m.wakePoll()
			advance(2 * eventPollDelay)
			polls := e.count(&e.polls)
			h.m.wakePoll()
			advance(eventPollGap)
			if e.count(&e.polls) == polls {
				t.Errorf("no poll within %v of an event", eventPollGap)
			}
		}
	})
}

// A poll that comes early, as after a change of the configuration, does not put off the next one.
func TestPollAfterEarlyPoll(t *testing.T) {
	for _, interval := range []time.Duration{
		300 * time.Millisecond, 700 * time.Millisecond, time.Second, 1500 * time.Millisecond,
		10 * time.Second,
	} {
		t.Run(fmt.Sprint(interval), func(t *testing.T) {
			runTestWithEngine(t, 1, interval, func(t *testing.T, h *harness, e *engine) {
				advance(learning + interval)
				e.forget()
				for range 100 {
					advance(interval + e.upTo(2*interval))
					h.configure(func(c *judge.Config) { c.Interval = interval })
				}
				e.mu.Lock()
				defer e.mu.Unlock()
				for i, at := range e.polls[1:] {
					if gap, most := at.Sub(e.polls[i]), interval+min(interval, time.Second); gap > most {
						t.Errorf("polls %v apart, want at most %v", gap, most)
					}
				}
			})
		})
	}
}

// Other clients can have the engine measure more often.
func TestEngineThatMeasuresMoreOften(t *testing.T) {
	for _, period := range []time.Duration{100 * time.Millisecond, 300 * time.Millisecond, 500 * time.Millisecond} {
		t.Run(fmt.Sprint(period), func(t *testing.T) {
			runTestWithEngine(t, 1, time.Second, func(t *testing.T, _ *harness, e *engine) {
				e.change(func() { e.period, e.jitter = period, period/10 })
				advance(learning)
				e.forget()
				advance(100 * time.Second)
				e.limited(t, "more often")
				e.change(func() { e.period, e.jitter = time.Second, 50*time.Millisecond })
				e.follows(t, "once a second again")
			})
		})
	}
}

// A source that measures in its polls is polled once per interval from the end of the poll before, and no more often.
func TestPollsOfSourceWithoutPhase(t *testing.T) {
	runTestWithWatcher(t, func(t *testing.T, h *harness, w *fakeWatcher) {
		for _, interval := range []time.Duration{time.Second, 700 * time.Millisecond, 10 * time.Second} {
			h.configure(func(c *judge.Config) { c.Interval = interval })
			synctest.Wait()
			advance(interval)
			polls, checks := h.count(&h.polls), w.checks.Load()
			advance(10*interval + time.Millisecond)
			gaps := int64((interval + maxXIDGap - 1) / maxXIDGap)
			if p, c := h.count(&h.polls)-polls, w.checks.Load()-checks; p != 10 || c != 10*(gaps-1) {
				t.Errorf("interval %v: %d polls and %d checks in ten intervals, want 10 and %d", interval, p, c, 10*(gaps-1))
			}
		}
	})
}

// recorder is an engine that records XIDs in a thread with a phase of its own.
type recorder struct {
	*engine
	delay    time.Duration // from a measurement, but for jitter
	recorded time.Time     // an XID that no poll has returned; zero if there is none
	code     int           // of that XID
	rows     []health.XIDRow
	took     []time.Duration
}

// record records an XID at the phase of the thread.
func (e *recorder) record(code int) {
	e.mu.Lock()
	at := e.phase.Add(e.delay + time.Duration(e.random.Int64N(int64(e.jitter)+1)))
	e.mu.Unlock()
	advance(time.Until(at))
	e.change(func() { e.recorded, e.code = time.Now(), code })
}

func (e *recorder) XIDsChanged(ctx context.Context) (bool, time.Time, error) {
	_, measured, err := e.engine.XIDsChanged(ctx)
	e.mu.Lock()
	defer e.mu.Unlock()
	return !e.recorded.IsZero(), measured, err
}

func (e *recorder) Poll(ctx context.Context) (*health.Reading, error) {
	r, err := e.engine.Poll(ctx)
	if err != nil {
		return nil, err
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	if !e.recorded.IsZero() {
		xid := health.XID{Code: e.code, At: e.recorded.Add(e.clock)}
		if health.InKernelLog(e.code) {
			xid.At = xid.At.Add(-time.Duration(e.random.Int64N(int64(time.Second)))) // when the kernel logged it
		}
		e.rows = append(e.rows, health.XIDRow{Code: xid.Code, At: xid.At.UnixMicro()})
		e.took = append(e.took, time.Since(e.recorded))
		e.recorded = time.Time{}
	}
	r.Samples[0].Rows = slices.Clone(e.rows)
	return r, nil
}

// The checks after an XID expect the next one at the same phase, whatever the engine's clock does.
func TestXIDsOfOnePhase(t *testing.T) {
	for delay := range 10 {
		t.Run(fmt.Sprint(delay), func(t *testing.T) {
			runTest(t, func(t *testing.T, h *harness) {
				e := &recorder{engine: newEngine(h.fakeSource, uint64(delay)), delay: time.Duration(delay) * 100 * time.Millisecond}
				src := *h.source.Load()
				src.Open = func(ctx context.Context) (health.Session, error) {
					_, err := h.Open(ctx)
					return e, err
				}
				h.source.Store(&src)
				advance(learning)
				for i := range 60 {
					if i%20 == 0 {
						e.change(func() { e.clock += time.Duration(e.random.Int64N(int64(time.Hour))) })
					}
					advance(e.upTo(5 * time.Second))
					e.record([]int{48, 79}[i%2])
					advance(time.Second)
				}
				if delay == 0 {
					e.forget()
					advance(100 * time.Second)
					e.limited(t, "an XID when the engine measures")
				}
				slices.Sort(e.took)
				if n := len(e.took); n != 60 || e.took[n/2] > 150*time.Millisecond || e.took[n-2] > 600*time.Millisecond || e.most() > 3 {
					t.Errorf("%d XIDs after %v, at most %v; %d reads in a second", n, e.took[n/2], e.took[n-2], e.most())
				}
				advance(xidPhaseLasts)
				e.forget()
				advance(100 * time.Second)
				e.limited(t, "long after the XIDs")
			})
		})
	}
}
