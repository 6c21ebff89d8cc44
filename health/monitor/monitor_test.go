package monitor

import (
	"context"
	"errors"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
	"go.uber.org/zap/zaptest/observer"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/internal/healthtest"
)

// script is a source that a test drives.
type script struct {
	mu      sync.Mutex // guards all below but wake
	openErr error
	pollErr error
	reading health.Reading
	xids    []health.XID  // of the next poll
	hang    chan struct{} // a poll waits for it, whatever its context says, as a driver does

	dieAfter int // that many polls a session fails; 0: it lives
	lived    int // polls of this session

	canDetach, detachErr error
	detachHang           chan struct{} // Detach waits for it

	opens, polls, closes int
	attaches, detaches   int
	live                 int    // sessions that are open now
	onClose              func() // nil: nothing
	inside, most         int    // calls at this moment, and the most there ever were
	wake                 chan struct{}
}

func newScript() *script {
	return &script{
		wake:    make(chan struct{}, 1),
		reading: health.Reading{Devices: []health.Device{healthtest.GPU0}, Samples: []health.Sample{{Device: "GPU-0", Presence: health.Present}}},
	}
}

// set changes what the source does.
func (s *script) set(change func(*script)) {
	s.mu.Lock()
	defer s.mu.Unlock()
	change(s)
}

// count reads a counter.
func (s *script) count(n *int) int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return *n
}

func (s *script) Open(context.Context) (health.Session, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.opens++
	if s.openErr != nil {
		return nil, s.openErr
	}
	s.lived = 0
	s.live++
	return s, nil
}

func (s *script) Poll(context.Context) (*health.Reading, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.polls++
	s.inside++
	s.most = max(s.most, s.inside)
	defer func() { s.inside-- }()
	if hang := s.hang; hang != nil {
		s.mu.Unlock()
		<-hang
		s.mu.Lock()
	}
	if s.pollErr != nil {
		return nil, s.pollErr
	}
	if s.lived++; s.dieAfter > 0 && s.lived > s.dieAfter {
		return nil, errors.New("the engine has died")
	}
	r := s.reading
	r.Samples = slices.Clone(r.Samples)
	for i := range r.Samples {
		r.Samples[i].At = time.Now()
		r.Samples[i].XIDs = s.xids
	}
	s.xids = nil
	return &r, nil
}

func (s *script) Wake() <-chan struct{} { return s.wake }

// Attach opens, and has the driver taken back before.
func (s *script) Attach(ctx context.Context) (health.Session, error) {
	s.set(func(s *script) { s.attaches++ })
	return s.Open(ctx)
}

func (s *script) CanDetach() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.canDetach
}

func (s *script) Detach(context.Context) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.detaches++
	if hang := s.detachHang; hang != nil {
		s.mu.Unlock()
		<-hang
		s.mu.Lock()
	}
	return s.detachErr
}

func (s *script) Close() error {
	var tell func()
	s.set(func(s *script) { s.closes++; s.live--; tell = s.onClose })
	if tell != nil {
		tell()
	}
	return nil
}

type bench struct {
	*script
	out    *health.Latest[health.Snapshot]
	m      *Monitor
	config *health.Latest[health.Config]
	source *health.Latest[Source]
	logs   *observer.ObservedLogs
	pod    atomic.Bool // has every device
	stop   func()
}

// monitor runs a monitor over a script, in a synctest bubble.
func monitor(t *testing.T) *bench {
	t.Helper()
	core, logs := observer.New(zapcore.InfoLevel)
	b := monitorWith(t, zap.New(core))
	b.logs = logs
	return b
}

// monitorWith is monitor with a log.
func monitorWith(t *testing.T, log *zap.Logger) *bench {
	t.Helper()
	b := &bench{script: newScript(), out: new(health.Latest[health.Snapshot]), config: new(health.Latest[health.Config]), source: new(health.Latest[Source])}
	c := health.DefaultConfig()
	b.config.Store(&c)
	b.source.Store(&Source{Open: b.Open, StallAfter: 10 * time.Second})
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	m := New(b.config, b.source, b.out, log)
	b.m = m
	b.pod.Store(true)
	m.SetHeld(func(health.DeviceID) bool { return b.pod.Load() })
	go func() { done <- m.Run(ctx) }()
	b.stop = func() {
		cancel()
		if err := <-done; err != nil {
			t.Errorf("Run: %v", err)
		}
	}
	return b
}

// cordoning is a configuration with these words in health.cordon.
func cordoning(words ...string) health.Config {
	c := health.DefaultConfig()
	c.Cordon = words
	return c
}

// pass lets time pass in a synctest bubble.
func pass(d time.Duration) {
	time.Sleep(d)   //nolint:forbidigo // the bubble's time
	synctest.Wait() // what was due at that moment too has been done
}

func (b *bench) shown() health.Source { return b.out.Load().Source }

func TestMonitorPollsAndWakes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := monitor(t)
		synctest.Wait()
		if s := b.out.Load(); s.Source.Status != health.SourceUp || len(s.Devices) != 1 || !s.Polled() {
			t.Fatalf("after the first poll: %+v", s)
		}
		pass(10*time.Second + time.Millisecond)
		if n := b.count(&b.polls); n != 11 {
			t.Fatalf("%d polls in 10 s, want 11", n)
		}
		b.wake <- struct{}{}
		synctest.Wait()
		if b.count(&b.polls) != 12 {
			t.Fatal("a wake did not poll at once")
		}
		b.stop()
		if b.opens != 1 || b.closes != 1 {
			t.Fatalf("%d opened, %d closed", b.opens, b.closes)
		}
	})
}

func TestMonitorReopensWithBackoff(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := monitor(t)
		synctest.Wait()
		b.set(func(s *script) {
			s.pollErr, s.openErr = errors.New("connection lost"), errors.New("connection refused")
		})
		pass(1500 * time.Millisecond) // one poll fails, one pause of 1 s begins
		if s := b.shown(); s.Status != health.SourceDown || s.Err != "connection lost" {
			t.Fatalf("source %+v", s)
		}
		if got := b.out.Load().Devices; len(got) != 1 || got[0].Verdict.State != health.Healthy {
			t.Fatalf("verdicts were not kept: %+v", got)
		}
		pass(10 * time.Minute)
		// 1+2+4+8+16+30+30…: about 20 in ten minutes.
		if n := b.count(&b.opens); n < 20 || n > 25 {
			t.Fatalf("%d attempts in ten minutes", n)
		}
		if n := b.logs.FilterMessage("the source is down").Len(); n != 2 {
			t.Fatalf("the cause was logged %d times, want once for each of two causes", n)
		}
		b.set(func(s *script) { s.pollErr, s.openErr = nil, nil })
		pass(31 * time.Second)
		if s := b.shown(); s.Status != health.SourceUp || s.Err != "" || s.Reconnects != 1 {
			t.Fatalf("source %+v", s)
		}
		b.stop()
	})
}

// An engine that gives a reading and dies is not opened each second: only one that has lived is missed so much.
func TestMonitorDoesNotHurryWhatDiesYoung(t *testing.T) {
	for name, c := range map[string]struct{ polls, least, most int }{
		"young": {1, 20, 25}, // as one that cannot be opened
		"old":   {60, 9, 11}, // after a minute each, with pauses of a second
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				b := monitor(t)
				b.set(func(s *script) { s.dieAfter = c.polls })
				pass(10 * time.Minute)
				if n := b.count(&b.opens); n < c.least || n > c.most {
					t.Errorf("opened %d times in ten minutes, want %d to %d", n, c.least, c.most)
				}
				b.stop()
			})
		})
	}
}

func TestMonitorShowsAStall(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := monitor(t)
		synctest.Wait()
		hang := make(chan struct{})
		b.set(func(s *script) { s.hang = hang })
		good := b.out.Load()
		pass(9 * time.Second)
		if s := b.shown(); s.Status != health.SourceUp {
			t.Fatalf("source %+v too early", s)
		}
		pass(time.Hour)
		s := b.out.Load()
		if s.Source.Status != health.SourceStalled || len(s.Devices) != 1 || s.Devices[0].Verdict.State != health.Healthy || s.At.Before(good.At) {
			t.Fatalf("snapshot %+v", s)
		}
		if most, opens := b.count(&b.most), b.count(&b.opens); most != 1 || opens != 1 {
			t.Fatalf("%d calls at once, %d opens: a stuck call must be waited for", most, opens)
		}
		b.set(func(s *script) { s.hang = nil })
		close(hang)
		synctest.Wait()
		if s := b.shown(); s.Status != health.SourceUp || s.Reconnects != 0 {
			t.Fatalf("source %+v", s)
		}
		b.stop()
	})
}

func TestMonitorEndsBesideAStuckCall(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := monitor(t)
		synctest.Wait()
		hang := make(chan struct{})
		b.set(func(s *script) { s.hang = hang })
		pass(2 * time.Second)
		begin := time.Now()
		b.stop()
		if took := time.Since(begin); took > 3*time.Second {
			t.Fatalf("took %v to end", took)
		}
		if n := b.count(&b.closes); n != 0 {
			t.Fatalf("closed %d times beside the call that hangs", n)
		}
		close(hang) // the bubble ends only with all its goroutines
	})
}

func TestMonitorFollowsTheSource(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := monitor(t)
		synctest.Wait()
		other := newScript()
		other.reading.Devices = []health.Device{healthtest.GPU1}
		other.reading.Samples[0].Device = healthtest.GPU1.ID
		b.source.Store(&Source{SourceID: health.SourceID{Inventory: "other"}, Open: other.Open, StallAfter: 10 * time.Second})
		synctest.Wait()
		s := b.out.Load()
		if closed, opened := b.count(&b.closes), other.count(&other.opens); closed != 1 || opened != 1 {
			t.Fatalf("closed %d, opened %d", closed, opened)
		}
		if len(s.Devices) != 1 || s.Devices[0].Device.ID != healthtest.GPU1.ID {
			t.Fatalf("devices of the old source stay: %+v", s.Devices)
		}
		b.stop()
	})
}

// A reload that opens the same source again forgets no GPU that has gone meanwhile.
func TestMonitorMissesAcrossAReload(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := monitor(t)
		synctest.Wait()
		b.set(func(s *script) { s.reading.Devices, s.reading.Samples = nil, nil })
		b.source.Store(&Source{Open: b.Open, StallAfter: 10 * time.Second})
		pass(health.DoubtDelay + time.Second)
		if d := b.out.Load().Devices; len(d) != 1 || d[0].Verdict.Cause() != health.CauseMissing {
			t.Fatalf("devices %+v", d)
		}
		b.stop()
	})
}

func TestMonitorFollowsTheConfig(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := monitor(t)
		b.set(func(s *script) { s.reading.Samples[0].Values = map[health.Field]float64{health.FieldGPUTemp: 80} })
		pass(1500 * time.Millisecond)
		if s := b.out.Load().Devices[0].Verdict.State; s != health.Healthy {
			t.Fatalf("state %v", s)
		}
		c := health.DefaultConfig()
		c.Temperature = 75
		b.config.Store(&c)
		synctest.Wait()
		if s := b.out.Load().Devices[0].Verdict.State; s != health.Degraded {
			t.Fatalf("state %v: the new limit is not in force", s)
		}
		b.stop()
	})
}

// An operator can cordon a GPU while its source is away or hangs, and take it back.
func TestMonitorCordonsWithoutASource(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := monitor(t)
		synctest.Wait()
		hang := make(chan struct{})
		b.set(func(s *script) { s.hang = hang })
		pass(time.Minute)
		if s := b.shown(); s.Status != health.SourceStalled {
			t.Fatalf("source %+v", s)
		}
		c := cordoning("0", "5", "GPU-x")
		b.config.Store(&c)
		synctest.Wait()
		s := b.out.Load()
		if v := s.Devices[0].Verdict; v.State != health.Unhealthy || v.Cause() != health.CauseCordoned || s.Source.Status != health.SourceStalled {
			t.Fatalf("%+v", s)
		}
		for _, more := range []string{"5", "GPU-x"} {
			line := b.logs.FilterMessage("no device of this node has this name").All()
			if len(line) != 1 || line[0].ContextMap()["key"] != "health.cordon" || !slices.Contains(line[0].ContextMap()["entries"].([]any), any(more)) {
				t.Errorf("%s: %v", more, line)
			}
		}
		// Another word for the same GPU is the one to take out.
		c = cordoning("GPU-0")
		b.config.Store(&c)
		synctest.Wait()
		if f := b.out.Load().Devices[0].Verdict.Findings; len(f) != 1 || !strings.Contains(f[0].Reason, `"GPU-0"`) || !f[0].Since.Equal(s.Devices[0].Verdict.Since) {
			t.Fatalf("%+v", f)
		}
		c = health.DefaultConfig()
		b.config.Store(&c)
		synctest.Wait()
		if v := b.out.Load().Devices[0].Verdict; v.State != health.Healthy {
			t.Fatalf("%+v", v)
		}
		b.set(func(s *script) { s.hang = nil })
		close(hang)
		b.stop()
	})
}

// Who holds a device is asked at every look.
func TestMonitorIsolates(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := monitor(t)
		b.set(func(s *script) { s.reading.Samples[0].Values = map[health.Field]float64{health.FieldRemapPending: 1} })
		c := health.DefaultConfig()
		c.IsolatePending = true
		b.config.Store(&c)
		pass(time.Minute)
		if v := b.out.Load().Devices[0].Verdict; v.State != health.Degraded {
			t.Fatalf("%+v while the pod runs", v)
		}
		b.pod.Store(false)
		pass(3 * c.Interval / 2)
		if v := b.out.Load().Devices[0].Verdict; v.State != health.Unhealthy || v.Cause() != health.CauseIsolated {
			t.Fatalf("%+v when the pod has ended", v)
		}
		b.stop()
	})
}

func TestMonitorLogsTransitionsOnly(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := monitor(t)
		pass(time.Minute)
		if n := b.logs.Len(); n != 2 { // the source is up, a device was found
			t.Fatalf("%d lines for an idle minute: %v", n, b.logs.All())
		}
		b.set(func(s *script) { s.xids = []health.XID{{Code: 79, At: time.Now()}} })
		b.wake <- struct{}{}
		pass(time.Minute)
		lines := b.logs.FilterMessage("device state").All()
		if len(lines) != 1 || b.logs.FilterMessage("XID").Len() != 1 {
			t.Fatalf("lines %v", b.logs.All())
		}
		f := lines[0].ContextMap()
		for key, want := range map[string]any{"device": "GPU-0", "state": "unhealthy", "was": "healthy", "cause": "xid-79"} {
			if f[key] != want {
				t.Errorf("%s is %v, want %v", key, f[key], want)
			}
		}
		b.stop()
	})
}
