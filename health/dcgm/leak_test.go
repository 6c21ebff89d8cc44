//go:build cgo && linux

package dcgm

import (
	"context"
	"os"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/gpu-node-agent/gpu-node-agent/health"
)

// footprint counts the resources that a connection could leak.
type footprint struct{ threads, descriptors, goroutines int }

func measureFootprint(t *testing.T) footprint {
	t.Helper()
	return footprint{count(t, "/proc/self/task"), count(t, "/proc/self/fd"), runtime.NumGoroutine()}
}

func count(t *testing.T, dir string) int {
	t.Helper()
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	return len(entries)
}

// expectNoLeak expects no increase after many rounds, except of a few threads of the runtime.
func expectNoLeak(t *testing.T, rounds int, round func()) {
	t.Helper()
	for range 20 {
		round()
	}
	before := measureFootprint(t)
	for range rounds {
		round()
	}
	var now footprint
	// The runtime counts a goroutine for a moment after its end, also after synctest.Wait has seen the end.
	for range 1000 {
		if now = measureFootprint(t); now.threads <= before.threads+10 && now.descriptors <= before.descriptors &&
			now.goroutines <= before.goroutines {
			t.Logf("before %+v, after %d rounds %+v", before, rounds, now)
			return
		}
		runtime.Gosched()
	}
	t.Errorf("%+v after %d rounds, %+v before", now, rounds, before)
}

// libdcgm would leak the resources of a connection with a policy registration (OBSERVED.md#registration-leak).
func TestReconnectsLeakNothing(t *testing.T) {
	const rounds = 1000
	cfg := hostConfig()
	cfg.Fields = append(cfg.Fields, fieldSwitchTemp, fieldGPULinkCRCs, fieldCoreUtil)
	testMonitor(t, 2, cfg, func(c *monitorFixture) {
		c.addHardware()
		expectNoLeak(t, rounds, func() {
			c.lib.Fail("*", errNotConnected, -1)
			c.wait(time.Second)
			if s := c.out.Load().Source.Status; s != health.SourceDown {
				t.Fatalf("dead engine: source %v", s)
			}
			c.lib.Fail("", 0, 0)
			for s := 0; c.out.Load().Source.Status != health.SourceUp; s++ {
				if s > 30 { // the maximum backoff
					t.Fatal("engine alive: source not up")
				}
				c.wait(time.Second)
			}
			c.sampleGPUs(c.n)
		})
		c.wait(3 * time.Second) // their first reading is taken beside a poll
		if n := len(c.out.Load().Entities); n != 2+2+1+2 {
			t.Errorf("%d entities", n)
		}
		if n := c.out.Load().Source.Reconnects; n != 20+rounds {
			t.Errorf("%d reconnects", n)
		}
		c.expect("end", health.Healthy, health.Healthy)
	})
}

func TestDetachesLeakNothing(t *testing.T) {
	const rounds = 200
	testMonitor(t, 2, testConfig(), func(c *monitorFixture) {
		expectNoLeak(t, rounds, func() {
			c.detach(time.Hour)
			if c.lib.Initialized() || c.lib.Leaked() != 0 {
				t.Fatalf("detached: initialized %v, %d left", c.lib.Initialized(), c.lib.Leaked())
			}
			if a, err := c.m.Attach(context.Background()); err != nil || a.Status != health.SourceUp {
				t.Fatalf("%+v, %v", a, err)
			}
			c.pass(2, nil)
		})
		c.expectCalls("dcgmStartEmbedded", 1+20+rounds)
		c.expect("end", health.Healthy, health.Healthy)
	})
}

// Close ignores that DCGM does not watch global fields, and returns other errors (OBSERVED.md#global-fields).
func TestCloseIgnoresUnwatchedGlobalFields(t *testing.T) {
	b := newFixture(t, 2)
	s, err := open(t.Context(), testConfig(), b.log, b.clock.now)
	if err != nil {
		t.Fatal(err)
	}
	b.lib.Fail("dcgmUnwatchFields", errTimeout, 1)
	if err := s.Close(); err == nil || !strings.Contains(err.Error(), "Timeout") {
		t.Errorf("Close with a failing DCGM: %v", err)
	}
	b.lib.Fail("", 0, 0)
	b.open(testConfig()).poll()
	b.close()

	b.open(testConfig()).poll()
	unwatched := 0
	for _, remove := range slices.Backward(b.watches.cleanup) {
		if err := remove(); err != nil && isResult(err, errNotWatched) {
			unwatched++
		} else if err != nil {
			t.Error(err)
		}
	}
	if unwatched != 1 {
		t.Errorf("%d cleanups return it, want 1 for the inventory", unwatched)
	}
	b.watches = &watches{}
}
