package sim

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/gpu-node-agent/gpu-node-agent/health"
)

func TestXIDsThatNobodyPollsAreCounted(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		cfg := DefaultConfig()
		cfg.Loop = time.Second
		cfg.Scenario = []Event{ev(t, 0, `{gpu: 0, xid: 13}`)}
		src := newSource(t, cfg)
		ses := open(t, src)
		pass(3*maxPending*time.Second - time.Millisecond)
		if err := src.inject(ev(t, 0, `{gpu: 0, xid: 31}`)); err != nil {
			t.Fatal(err)
		}
		if n := len(src.gpus[0].pending); n > maxPending+1 {
			t.Errorf("%d entries wait; want %d", n, maxPending+1)
		}
		counts := map[int]int{}
		var last health.XID
		for woken(ses) {
			for _, x := range sampleOf(t, poll(t, ses), 0).XIDs {
				if x.At.Before(last.At) {
					t.Fatalf("%v comes after %v", x, last)
				}
				counts[x.Code]++
				last = x
			}
		}
		if counts[13] != 3*maxPending || counts[31] != 1 || last.Code != 31 {
			t.Errorf("%v, the last %d; want %d of 13, and the last 31", counts, last.Code, 3*maxPending)
		}
	})
}

// TestFlood: a reading has so many, and the rest comes at once.
func TestFlood(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		src := newSource(t, DefaultConfig())
		ses := open(t, src)
		if err := src.inject(ev(t, 0, `{gpu: 2, xid: 31, times: 10000}`)); err != nil {
			t.Fatal(err)
		}
		var polls, n int
		for ; woken(ses); polls++ {
			got := len(sampleOf(t, poll(t, ses), 2).XIDs)
			if got > maxTaken {
				t.Errorf("%d XIDs in one reading", got)
			}
			n += got
		}
		if n != 10000 || polls != 10 {
			t.Errorf("%d XIDs in %d polls; want 10000 in 10", n, polls)
		}
	})
}

func TestClockStartsWithTheFirstOpen(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		cfg := DefaultConfig()
		cfg.Scenario = []Event{ev(t, time.Minute, `{gpu: 0, lost: true}`)}
		src := newSource(t, cfg)
		pass(time.Hour) // does not count
		first := open(t, src)
		pass(30 * time.Second)
		_ = first.Close()
		if src.timer.Stop() {
			t.Error("without a session the timer runs on")
		}
		pass(29 * time.Second) // counts
		second := open(t, src)
		if s := sampleOf(t, poll(t, second), 0); s.Presence != health.Present {
			t.Errorf("after 59 s GPU 0 is %v", s.Presence)
		}
		pass(time.Second)
		if s := sampleOf(t, poll(t, second), 0); s.Presence != health.Lost || !woken(second) {
			t.Errorf("after 60 s GPU 0 is %v; want lost, and a wake", s.Presence)
		}
	})
}

func TestSourceDown(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		cfg := DefaultConfig()
		cfg.Scenario = []Event{ev(t, 5*time.Second, `{source: down}`), ev(t, 10*time.Second, `{source: up}`)}
		src := newSource(t, cfg)
		ses := open(t, src)
		poll(t, ses)
		<-ses.Wake()
		if r, err := ses.Poll(t.Context()); !errors.Is(err, errDown) || r != nil {
			t.Errorf("Poll gave %v, %v; want %v", r, err, errDown)
		}
		if again, err := src.Open(t.Context()); !errors.Is(err, errDown) || again != nil {
			t.Errorf("Open gave %v, %v; want %v", again, err, errDown)
		}
		pass(5 * time.Second)
		// A connection that broke stays broken.
		if _, err := ses.Poll(t.Context()); !errors.Is(err, errDown) {
			t.Errorf("the old session's Poll: %v; want %v", err, errDown)
		}
		poll(t, open(t, src))
	})
}

func TestLoopBringsTheSourceBack(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		cfg := DefaultConfig()
		cfg.Loop = 10 * time.Second
		cfg.Scenario = []Event{ev(t, 8*time.Second, `{source: stalled}`)}
		ses := open(t, newSource(t, cfg))
		start := time.Now()
		for lap := 1; lap < 4; lap++ {
			pass(8 * time.Second)
			poll(t, ses)
			if got, want := time.Since(start), time.Duration(lap)*cfg.Loop; got != want {
				t.Errorf("a stalled Poll ended after %v; want the loop's end, %v", got, want)
			}
		}
	})
}

func TestSourceStalled(t *testing.T) {
	for _, tt := range []struct {
		after string // what ends the stall
		want  error
	}{{"up", nil}, {"down", errDown}} {
		synctest.Test(t, func(t *testing.T) {
			cfg := DefaultConfig()
			cfg.Scenario = []Event{ev(t, 5*time.Second, `{source: stalled}`), ev(t, 65*time.Second, `{source: `+tt.after+`}`)}
			src := newSource(t, cfg)
			ses := open(t, src)
			start := time.Now()
			<-ses.Wake()

			// The context ends one call, the source's change the other two.
			ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
			defer cancel()
			if _, err := ses.Poll(ctx); !errors.Is(err, context.DeadlineExceeded) || time.Since(start) != 15*time.Second {
				t.Errorf("Poll ended after %v with %v; want the deadline after 15 s", time.Since(start), err)
			}
			ctx, cancel = context.WithTimeout(t.Context(), 10*time.Second)
			defer cancel()
			if again, err := src.Open(ctx); !errors.Is(err, context.DeadlineExceeded) || again != nil || time.Since(start) != 25*time.Second {
				t.Errorf("Open ended after %v with %v, %v; want the deadline after 25 s", time.Since(start), again, err)
			}
			opened := make(chan error)
			go func() {
				again, err := src.Open(t.Context())
				if err == nil {
					_ = again.Close()
				}
				opened <- err
			}()
			if _, err := ses.Poll(t.Context()); !errors.Is(err, tt.want) || time.Since(start) != 65*time.Second {
				t.Errorf("Poll ended after %v with %v; want %v after 65 s", time.Since(start), err, tt.want)
			}
			if err := <-opened; !errors.Is(err, tt.want) || time.Since(start) != 65*time.Second {
				t.Errorf("Open ended after %v with %v; want %v after 65 s", time.Since(start), err, tt.want)
			}
		})
	}
}

func TestCloseReleasesAPoll(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		src := newSource(t, DefaultConfig())
		ses := open(t, src)
		if err := src.inject(ev(t, 0, `{source: stalled}`)); err != nil {
			t.Fatal(err)
		}
		polled := make(chan error)
		go func() {
			_, err := ses.Poll(t.Context())
			polled <- err
		}()
		synctest.Wait()
		for range 2 { // twice is once
			if err := ses.Close(); err != nil {
				t.Error(err)
			}
		}
		if err := <-polled; !errors.Is(err, errClosed) {
			t.Errorf("the Poll that waited: %v; want %v", err, errClosed)
		}
		if _, err := ses.Poll(t.Context()); !errors.Is(err, errClosed) {
			t.Errorf("a Poll after Close: %v; want %v", err, errClosed)
		}
		if src.users != 0 || len(src.sessions) != 0 {
			t.Errorf("%d users and %d sessions are left", src.users, len(src.sessions))
		}
	})
}

func TestAPersonsEventsLieOverTheScenario(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		cfg := DefaultConfig()
		cfg.Loop = 10 * time.Second
		cfg.Scenario = []Event{
			ev(t, 2*time.Second, `{gpu: 0, lost: true, temperature: 90}`),
			ev(t, 4*time.Second, `{gpu: 0, lost: false}`),
			ev(t, 6*time.Second, `{source: down}`),
		}
		src := newSource(t, cfg)
		inject := func(s string) {
			t.Helper()
			if err := src.inject(ev(t, 0, s)); err != nil {
				t.Fatal(err)
			}
		}
		inject(`{source: up}`) // so that the scenario cannot take it down
		ses := open(t, src)
		inject(`{gpu: 0, lost: false, xid: 13}`)
		inject(`{gpu: 1, lost: true}`)
		if !woken(ses) {
			t.Error("a person's event did not wake")
		}
		for at := range 35 {
			r := poll(t, ses)
			if s := sampleOf(t, r, 0); s.Presence != health.Present || (len(s.XIDs) == 1) != (at == 0) {
				t.Errorf("after %d s GPU 0 is %v with XIDs %v; want what the person set", at, s.Presence, s.XIDs)
			}
			if s := sampleOf(t, r, 1); s.Presence != health.Lost {
				t.Errorf("after %d s GPU 1 is %v; want lost across loops", at, s.Presence)
			}
			// What the person did not touch is the scenario's.
			if got := sampleOf(t, r, 0).Values[health.FieldGPUTemp]; (got == 90) != (at%10 >= 2) {
				t.Errorf("after %d s GPU 0 has %v °C", at, got)
			}
			pass(time.Second)
		}
		inject(`{gpu: 1, lost: false}`)
		if s := sampleOf(t, poll(t, ses), 1); s.Presence != health.Present {
			t.Errorf("set otherwise, GPU 1 is %v", s.Presence)
		}
		inject(`{source: down}`)
		pass(time.Minute)
		if _, err := ses.Poll(t.Context()); !errors.Is(err, errDown) {
			t.Errorf("Poll: %v; want %v whatever the scenario says", err, errDown)
		}
	})
}

func TestInjectKnowsTheMachine(t *testing.T) {
	src := newSource(t, profileConfig("l4-1"))
	err := src.inject(ev(t, 0, `{gpu: 3, xid: 79}`))
	if want := "gpu: 3 is not a GPU of profile l4-1, which has only 0"; err == nil || err.Error() != want {
		t.Errorf("got %v; want %s", err, want)
	}
}
