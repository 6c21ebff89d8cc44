package monitor

import (
	"errors"
	"fmt"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/health/judge"
	"github.com/gpu-node-agent/gpu-node-agent/internal/healthtest"
)

// reportStates reports both GPUs, each with a healthy or a blank sample.
func (h *harness) reportStates(gpu0, gpu1 health.Presence) {
	sample := func(d health.Device, p health.Presence) health.Sample {
		if p == health.Present {
			return of(d, healthtest.Present())
		}
		return of(d, healthtest.Blank(p))
	}
	h.report(sample(healthtest.GPU0, gpu0), sample(healthtest.GPU1, gpu1))
}

// runTestWithTwoGPUs runs a test with two GPUs, of which GPU-0 has had an XID 95.
func runTestWithTwoGPUs(t *testing.T, test func(t *testing.T, h *harness)) {
	t.Helper()
	runTest(t, func(t *testing.T, h *harness) {
		h.reportStates(health.Present, health.Present)
		advance(time.Second)
		h.reportGPU0(healthtest.Present(healthtest.XIDs(95)))
		advance(time.Second)
		h.reportStates(health.Present, health.Present)
		advance(2 * time.Second)
		h.wantCauses(t, "at first", health.SourceUp, "xid-95", "")
		test(t, h)
	})
}

// A source that loses all GPUs at once counts as down, and the GPUs keep their findings. After OutageDelay the GPUs are missing,
// but as a group: their return clears no finding and does not count as a trip.
func TestMonitorDelaysOutage(t *testing.T) {
	type step struct {
		reported  []health.Presence // nil: no GPU is listed
		wait      time.Duration
		status    health.SourceStatus
		gpu0Cause string
		gpu1Cause string
	}
	const up, down, accepted = health.SourceUp, health.SourceDown, judge.OutageDelay + 3*time.Second
	both := func(gpu0, gpu1 health.Presence) []health.Presence { return []health.Presence{gpu0, gpu1} }
	present, oneLost := both(health.Present, health.Present), both(health.Present, health.Lost)
	for name, steps := range map[string][]step{
		"empty inventory": {
			{nil, time.Second, down, "xid-95", ""},
			{nil, 7 * time.Second, down, "xid-95", ""},
			{present, 2 * time.Second, up, "xid-95", ""},
		},
		"empty inventory after one GPU was lost": slices.Concat([]step{{oneLost, 3 * time.Second, up, "xid-95", "lost"}}, slices.Repeat([]step{
			{nil, 5 * time.Second, down, "xid-95", "lost"}, {oneLost, 2 * time.Second, up, "xid-95", "lost"},
		}, 3), []step{
			{both(health.Lost, health.Lost), 3 * time.Second, up, "lost,xid-95", "lost"}, {nil, 5 * time.Second, down, "lost,xid-95", "lost"},
		}),
		"lost for a moment": slices.Repeat([]step{
			{both(health.Lost, health.Lost), 1300 * time.Millisecond, down, "xid-95", ""}, {present, 2 * time.Second, up, "xid-95", ""},
		}, 4),
		"loss accepted": slices.Repeat([]step{
			{both(health.Lost, health.Lost), accepted, up, "lost,xid-95", "lost"}, {present, 2 * time.Second, up, "xid-95", ""},
		}, 4),
		"empty inventory accepted": slices.Repeat([]step{
			{nil, accepted, up, "missing,xid-95", "missing"}, {present, 2 * time.Second, up, "xid-95", ""},
		}, 4),
		"common loss changes its cause": slices.Concat([]step{{nil, accepted, up, "missing,xid-95", "missing"}}, slices.Repeat([]step{
			{both(health.Detached, health.Detached), 3 * time.Second, up, "xid-95,detached", "detached"},
			{nil, 3 * time.Second, up, "missing,xid-95", "missing"},
		}, 4), []step{{present, 2 * time.Second, up, "xid-95", ""}}),
	} {
		t.Run(name, func(t *testing.T) {
			runTestWithTwoGPUs(t, func(t *testing.T, h *harness) {
				for i, s := range steps {
					if h.report(); s.reported != nil {
						h.reportStates(s.reported[0], s.reported[1])
					}
					advance(s.wait)
					h.wantCauses(t, fmt.Sprint("step ", i), s.status, s.gpu0Cause, s.gpu1Cause)
				}
			})
		})
	}
}

func TestNewSessionDelaysOutageAgain(t *testing.T) {
	runTestWithTwoGPUs(t, func(t *testing.T, h *harness) {
		h.report()
		advance(2 * time.Second)
		h.set(func(s *fakeSource) { s.dieAfter = 1; s.sessionPolls = 1 })
		advance(time.Minute)
		h.set(func(s *fakeSource) { s.dieAfter = 0 })
		advance(5 * time.Second)
		h.wantCauses(t, "first readings of a session", health.SourceDown, "xid-95", "")
	})
}

// Entities beside the devices are of the last reading, also if it is delayed, and end with a source that measures others.
func TestEntitiesOfLastReading(t *testing.T) {
	runTestWithTwoGPUs(t, func(t *testing.T, h *harness) {
		wantSwitches := func(when string, want int) {
			t.Helper()
			if got := len(h.out.Load().Entities); got != want {
				t.Errorf("%s: %d entities, want %d", when, got, want)
			}
		}
		for n := range 3 {
			h.set(func(s *fakeSource) { s.reading.Entities = make([]health.Entity, n) })
			advance(2 * time.Second)
			wantSwitches("GPUs present", n)
		}
		h.report()
		h.set(func(s *fakeSource) { s.reading.Entities = s.reading.Entities[:1] })
		advance(2 * time.Second)
		wantSwitches("delayed reading", 1)
		other := newFakeSource()
		other.openErr = errors.New("no libdcgm.so.4")
		h.source.Store(other.source(sourceID("sim a", true)))
		synctest.Wait()
		wantSwitches("other source", 0)
	})
}

// XIDs count at once in a delayed reading.
func TestDelayedReadingReportsXIDs(t *testing.T) {
	runTestWithTwoGPUs(t, func(t *testing.T, h *harness) {
		h.reportStates(health.Lost, health.Detached)
		h.reportXID(119)
		advance(2 * time.Second)
		h.wantCauses(t, "delayed", health.SourceDown, "xid-95,xid-119", "xid-119")
	})
}

// An XID 79 of an event source confirms the loss of its GPU, whether it comes before the outage or during it.
func TestEventConfirmsLoss(t *testing.T) {
	for _, name := range []string{"before", "during"} {
		t.Run(name, func(t *testing.T) {
			runTestWithEvents(t, func(t *testing.T, h *harness, f *fakeEvents) {
				h.reportStates(health.Present, health.Present)
				advance(2 * time.Second)
				if name == "before" {
					f.xid(79)
					advance(5 * time.Second)
				}
				h.reportStates(health.Lost, health.Lost)
				advance(2 * time.Second)
				if name == "during" {
					h.wantCauses(t, "lost", health.SourceDown, "", "")
					f.xid(79)
					synctest.Wait()
					h.wantCauses(t, "fallen off the bus", health.SourceDown, "xid-79", "")
					advance(2 * time.Second)
				}
				h.wantCauses(t, "confirmed", health.SourceDown, "xid-79,lost", "")
				h.reportStates(health.Present, health.Present)
				advance(2 * time.Second)
				h.wantCauses(t, "back", health.SourceUp, "xid-79", "")
			})
		})
	}
}

// An engine at another address of the same node may list nothing at first.
func TestNewEngineWithEmptyInventory(t *testing.T) {
	runTestWithTwoGPUs(t, func(t *testing.T, h *harness) {
		h.report()
		src := *h.source.Load()
		src.Inventory = "dcgm other:5555"
		h.source.Store(&src)
		advance(15 * time.Second)
		h.reportStates(health.Present, health.Present)
		advance(5 * time.Second)
		h.wantCauses(t, "listed", health.SourceUp, "xid-95", "")
	})
}

// A reload of the driver resets every GPU. Unknown values are not evidence of one.
func TestDriverReload(t *testing.T) {
	runTestWithTwoGPUs(t, func(t *testing.T, h *harness) {
		load := ""
		src := *h.source.Load()
		src.DriverLoad = func() string {
			h.mu.Lock()
			defer h.mu.Unlock()
			return load
		}
		h.source.Store(&src)
		for _, c := range []struct {
			driver, load string
			xid          bool
			want         string
		}{
			{"580.95.05", "7", false, "xid-95"},
			{"", "", false, "xid-95"},
			{"580.95.05", "7", false, "xid-95"},
			{"", "7", false, "xid-95"},
			{"590.10.01", "7", false, ""},
			{"590.10.01", "7", true, "xid-119"},
			{"590.10.01", "", false, "xid-119"},
			{"590.10.01", "9", false, ""},
		} {
			h.set(func(s *fakeSource) {
				s.reading.Versions.Driver = c.driver
				load = c.load
			})
			if c.xid {
				h.report(of(healthtest.GPU0, healthtest.Present()))
				h.reportXID(119)
				advance(time.Second)
				h.reportStates(health.Present, health.Present)
			}
			advance(3 * time.Second)
			h.wantCauses(t, "with driver "+c.driver+" and load "+c.load, health.SourceUp, c.want, "")
		}
	})
}
