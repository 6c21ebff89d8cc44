package monitor

import (
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/internal/healthtest"
)

// lists has the source list these GPUs from now on, each with its sample.
func (b *bench) lists(samples ...health.Sample) {
	b.set(func(s *script) {
		s.reading.Devices, s.reading.Samples = nil, nil
		for _, sample := range samples {
			for _, d := range []health.Device{healthtest.GPU0, healthtest.GPU1} {
				if d.ID == sample.Device {
					s.reading.Devices = append(s.reading.Devices, d)
				}
			}
			s.reading.Samples = append(s.reading.Samples, sample)
		}
	})
}

// shows is a sample of a device.
func shows(id health.DeviceID, s health.Sample) health.Sample {
	s.Device = id
	return s
}

// twoGPUs is a monitor of two GPUs, of which the first has had an XID 95.
func twoGPUs(t *testing.T) *bench {
	t.Helper()
	b := monitor(t)
	pass(2 * time.Second)
	b.lists(shows("GPU-0", healthtest.Present()), shows("GPU-1", healthtest.Present()))
	pass(time.Second)
	b.lists(shows("GPU-0", healthtest.Present()))
	b.set(func(s *script) { s.xids = []health.XID{{Code: 95, At: time.Now()}} })
	pass(time.Second)
	b.lists(shows("GPU-0", healthtest.Present()), shows("GPU-1", healthtest.Present()))
	pass(2 * time.Second)
	b.want(t, "at first", health.SourceUp, "xid-95", "")
	return b
}

// want checks the source and the causes of GPU-0 and GPU-1, each by commas.
func (b *bench) want(t *testing.T, when string, source health.SourceStatus, causes ...string) {
	t.Helper()
	s := b.out.Load()
	if s.Source.Status != source || source == health.SourceUp && s.Source.Err != "" || source == health.SourceDown && s.Source.Err == "" {
		t.Errorf("%s: the source is %v, %q; want %v", when, s.Source.Status, s.Source.Err, source)
	}
	if len(s.Devices) != len(causes) {
		t.Fatalf("%s: %d devices, want %d", when, len(s.Devices), len(causes))
	}
	for i, d := range s.Devices {
		if got := strings.Join(d.Verdict.Causes(), ","); got != causes[i] {
			t.Errorf("%s: %s has %q, want %q", when, d.Device.ID, got, causes[i])
		}
	}
}

// An engine that was started without a driver lists no GPU, and says nothing of those that there are.
func TestEmptyListIsDoubted(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := twoGPUs(t)
		defer b.stop()
		b.lists()
		for range 8 {
			pass(time.Second)
			b.want(t, "while no GPU is listed", health.SourceDown, "xid-95", "")
		}
		b.lists(shows("GPU-0", healthtest.Present()), shows("GPU-1", healthtest.Present()))
		pass(2 * time.Second)
		b.want(t, "after it", health.SourceUp, "xid-95", "")
	})
}

// A GPU that was lost before is lost all the while.
func TestEmptyListAndALostGPU(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := twoGPUs(t)
		defer b.stop()
		b.lists(shows("GPU-0", healthtest.Present()), shows("GPU-1", healthtest.Blank(health.Lost)))
		pass(3 * time.Second)
		for range 3 {
			b.lists()
			pass(5 * time.Second)
			b.want(t, "while no GPU is listed", health.SourceDown, "xid-95", "lost")
			b.lists(shows("GPU-0", healthtest.Present()), shows("GPU-1", healthtest.Blank(health.Lost)))
			pass(2 * time.Second)
			b.want(t, "after it", health.SourceUp, "xid-95", "lost")
		}
		b.lists(shows("GPU-0", healthtest.Blank(health.Lost)), shows("GPU-1", healthtest.Blank(health.Lost)))
		pass(3 * time.Second)
		b.lists()
		pass(5 * time.Second)
		b.want(t, "when all were lost", health.SourceDown, "xid-95,lost", "lost")
	})
}

// Believed, it is no fault of any GPU: the return of all cures none of them and is no trip.
func TestEmptyListIsBelievedInTheEnd(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := twoGPUs(t)
		defer b.stop()
		for range 4 {
			b.lists()
			pass(health.OutageDelay + 3*time.Second)
			b.want(t, "when it is believed", health.SourceUp, "xid-95,missing", "missing")
			b.lists(shows("GPU-0", healthtest.Present()), shows("GPU-1", healthtest.Present()))
			pass(2 * time.Second)
			b.want(t, "when all are back", health.SourceUp, "xid-95", "")
		}
	})
}

// Another word for why all are gone makes it nobody's own fault either.
func TestCommonLossStaysCommon(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := twoGPUs(t)
		defer b.stop()
		b.lists()
		pass(health.OutageDelay + 3*time.Second)
		for range 4 {
			b.lists(shows("GPU-0", healthtest.Blank(health.Detached)), shows("GPU-1", healthtest.Blank(health.Detached)))
			pass(3 * time.Second)
			b.want(t, "detached", health.SourceUp, "xid-95,detached", "detached")
			b.lists()
			pass(3 * time.Second)
			b.want(t, "missing again", health.SourceUp, "xid-95,missing", "missing")
		}
		b.lists(shows("GPU-0", healthtest.Present()), shows("GPU-1", healthtest.Present()))
		pass(2 * time.Second)
		b.want(t, "back", health.SourceUp, "xid-95", "")
	})
}

func TestDoubtIsForgottenWithTheSession(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := twoGPUs(t)
		defer b.stop()
		b.lists()
		pass(2 * time.Second)
		b.set(func(s *script) { s.dieAfter = 1; s.lived = 1 })
		pass(time.Minute)
		b.set(func(s *script) { s.dieAfter = 0 })
		pass(5 * time.Second)
		b.want(t, "one reading of a new session", health.SourceDown, "xid-95", "")
	})
}

// What a reading in doubt says of XIDs and of lost GPUs counts at once.
func TestDoubtHidesNoFault(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := twoGPUs(t)
		defer b.stop()
		b.lists(shows("GPU-0", healthtest.Blank(health.Lost)), shows("GPU-1", healthtest.Blank(health.Detached)))
		b.set(func(s *script) { s.xids = []health.XID{{Code: 119, At: time.Now()}} })
		pass(2 * time.Second)
		b.want(t, "in doubt", health.SourceDown, "xid-95,xid-119,lost", "xid-119")
	})
}

// An engine at another address of the same machine may list nothing at first.
func TestEmptyListAfterAReload(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := twoGPUs(t)
		defer b.stop()
		b.want(t, "before", health.SourceUp, "xid-95", "")
		b.set(func(s *script) { s.reading = health.Reading{} })
		src := *b.source.Load()
		src.Inventory = "dcgm other:5555"
		b.source.Store(&src)
		pass(15 * time.Second)
		b.lists(shows("GPU-0", healthtest.Present()), shows("GPU-1", healthtest.Present()))
		pass(5 * time.Second)
		b.want(t, "after", health.SourceUp, "xid-95", "")
	})
}

// A driver that was loaded anew has reset every GPU. What is not known of it is no evidence.
func TestDriverReload(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := twoGPUs(t)
		defer b.stop()
		load := ""
		src := *b.source.Load()
		src.DriverLoad = func() string {
			b.mu.Lock()
			defer b.mu.Unlock()
			return load
		}
		b.source.Store(&src)
		for _, c := range []struct {
			driver, load string
			xids         []health.XID
			want         string
		}{
			{"580.95.05", "7", nil, "xid-95"},
			{"", "", nil, "xid-95"},
			{"580.95.05", "7", nil, "xid-95"},
			{"", "7", nil, "xid-95"},
			{"590.10.01", "7", nil, ""},
			{"590.10.01", "7", []health.XID{{Code: 119}}, "xid-119"},
			{"590.10.01", "", nil, "xid-119"},
			{"590.10.01", "9", nil, ""},
		} {
			b.set(func(s *script) {
				s.reading.Versions.Driver, s.xids = c.driver, nil
				load = c.load
			})
			if c.xids != nil {
				b.lists(shows("GPU-0", healthtest.Present()))
				b.set(func(s *script) { s.xids = c.xids })
				pass(time.Second)
				b.lists(shows("GPU-0", healthtest.Present()), shows("GPU-1", healthtest.Present()))
			}
			pass(3 * time.Second)
			b.want(t, "with driver "+c.driver+" and load "+c.load, health.SourceUp, c.want, "")
		}
	})
}
