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
	"github.com/gpu-node-agent/gpu-node-agent/health/judge"
	"github.com/gpu-node-agent/gpu-node-agent/internal/healthtest"
)

// fakeSource is a source, and its session, that a test controls.
type fakeSource struct {
	mu      sync.Mutex // guards the fields below, except wake
	openErr error
	pollErr error
	reading health.Reading
	xids    []health.XID  // of the next poll
	hang    chan struct{} // polls block on it and ignore their context, as a driver does

	dieAfter     int // polls until a session fails; 0: never
	sessionPolls int // of the current session

	canDetach, detachErr, attachErr error
	detachHang                      chan struct{} // Detach blocks on it
	attachUnanswered                bool          // Attach blocks until its context ends

	opens, polls, closes int
	attaches, detaches   int
	openSessions         int
	onClose              func()
	calls, mostCalls     int // that run now, and the maximum
	wake                 chan struct{}
}

func newFakeSource() *fakeSource {
	return &fakeSource{
		wake: make(chan struct{}, 1),
		reading: health.Reading{
			Devices: []health.Device{healthtest.GPU0}, Samples: []health.Sample{{Device: "GPU-0", Presence: health.Present}},
		},
	}
}

func (s *fakeSource) set(change func(*fakeSource)) {
	s.mu.Lock()
	defer s.mu.Unlock()
	change(s)
}

func (s *fakeSource) count(n *int) int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return *n
}

// hangPolls makes polls block until the function that it returns is called.
func (s *fakeSource) hangPolls() (resume func()) {
	hang := make(chan struct{})
	s.set(func(s *fakeSource) { s.hang = hang })
	return sync.OnceFunc(func() {
		s.set(func(s *fakeSource) { s.hang = nil })
		close(hang)
	})
}

func (s *fakeSource) Open(context.Context) (health.Session, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.opens++
	if s.openErr != nil {
		return nil, s.openErr
	}
	s.sessionPolls = 0
	s.openSessions++
	return s, nil
}

func (s *fakeSource) Poll(context.Context) (*health.Reading, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	began := time.Now()
	s.polls++
	s.calls++
	s.mostCalls = max(s.mostCalls, s.calls)
	defer func() { s.calls-- }()
	s.block(s.hang)
	if s.pollErr != nil {
		return nil, s.pollErr
	}
	if s.sessionPolls++; s.dieAfter > 0 && s.sessionPolls > s.dieAfter {
		return nil, errors.New("engine died")
	}
	r := s.reading
	r.Samples = slices.Clone(r.Samples)
	for i := range r.Samples {
		r.Samples[i].At = began
		r.Samples[i].XIDs = s.xids
	}
	s.xids = nil
	return &r, nil
}

func (s *fakeSource) block(hang chan struct{}) {
	if hang != nil {
		s.mu.Unlock()
		<-hang
		s.mu.Lock()
	}
}

func (s *fakeSource) Wake() <-chan struct{} { return s.wake }

func (s *fakeSource) Attach(ctx context.Context) (health.Session, error) {
	var err error
	var unanswered bool
	s.set(func(s *fakeSource) { s.attaches++; err, unanswered = s.attachErr, s.attachUnanswered })
	if unanswered {
		<-ctx.Done()
		err = ctx.Err()
	}
	if err != nil {
		return nil, err
	}
	return s.Open(ctx)
}

func (s *fakeSource) CanDetach() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.canDetach
}

func (s *fakeSource) Detach(context.Context) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.detaches++
	s.block(s.detachHang)
	return s.detachErr
}

func (s *fakeSource) Close() error {
	var onClose func()
	s.set(func(s *fakeSource) { s.closes++; s.openSessions--; onClose = s.onClose })
	if onClose != nil {
		onClose()
	}
	return nil
}

// source returns the fake as the source of a monitor.
func (s *fakeSource) source(id health.SourceID) *Source {
	return &Source{SourceID: id, Open: s.Open, StallAfter: 10 * time.Second}
}

// harness runs a monitor of a fakeSource in a synctest bubble.
type harness struct {
	*fakeSource
	out    *health.Latest[health.Snapshot]
	m      *Monitor
	config *health.Latest[judge.Config]
	source *health.Latest[Source]
	mps    *health.Latest[health.MPSState]
	logs   *observer.ObservedLogs
	held   atomic.Bool // whether pods hold the devices
	stop   func()      // may be called again
}

// runTest runs a test with a running monitor.
func runTest(t *testing.T, test func(t *testing.T, h *harness)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		core, logs := observer.New(zapcore.InfoLevel)
		h := newHarness(zap.New(core))
		h.logs = logs
		h.start(t)
		defer func() { h.stop() }()
		test(t, h)
	})
}

func newHarness(log *zap.Logger) *harness {
	h := &harness{
		fakeSource: newFakeSource(),
		out:        new(health.Latest[health.Snapshot]), config: new(health.Latest[judge.Config]), source: new(health.Latest[Source]),
		mps: new(health.Latest[health.MPSState]),
	}
	h.configure(func(*judge.Config) {})
	h.source.Store(h.fakeSource.source(health.SourceID{}))
	h.m = New(h.config, h.source, h.out, log)
	h.m.SetMPS(h.mps)
	h.held.Store(true)
	h.m.SetHeld(func(health.DeviceID) bool { return h.held.Load() })
	return h
}

func (h *harness) start(t *testing.T) { h.stop = healthtest.Run(t, h.m.Run) }

// configure changes the default configuration.
func (h *harness) configure(change func(*judge.Config)) {
	c := judge.DefaultConfig()
	change(&c)
	h.config.Store(&c)
}

func (h *harness) cordon(refs ...string) {
	h.configure(func(c *judge.Config) { c.Cordon = refs })
}

// useHostEngine replaces the source by one with a host engine.
func (h *harness) useHostEngine() {
	src := h.fakeSource.source(health.SourceID{})
	src.Attach = h.Attach
	h.source.Store(src)
	advance(5 * time.Second)
}

func advance(d time.Duration) { healthtest.Advance(d) }

func (h *harness) status() health.Source { return h.out.Load().Source }

func (h *harness) verdict() health.Verdict { return h.out.Load().Devices[0].Verdict }

// trips returns the number of trips of the first device.
func (h *harness) trips() int { return len(h.out.Load().Devices[0].Memory.Trips) }

// causes returns the causes of the first device, separated by commas.
func (h *harness) causes() string { return strings.Join(h.verdict().Causes(), ",") }

// wantCauses checks the source and the causes of each device, separated by commas.
func (h *harness) wantCauses(t *testing.T, when string, status health.SourceStatus, causes ...string) {
	t.Helper()
	s := h.out.Load()
	if s.Source.Status != status || status == health.SourceUp && s.Source.Err != "" || status == health.SourceDown && s.Source.Err == "" {
		t.Errorf("%s: source %v %q, want %v", when, s.Source.Status, s.Source.Err, status)
	}
	var got []string
	for _, d := range s.Devices {
		got = append(got, strings.Join(d.Verdict.Causes(), ","))
	}
	if !slices.Equal(got, causes) {
		t.Fatalf("%s: causes %q, want %q", when, got, causes)
	}
}

// report sets the samples of later readings, and their devices.
func (h *harness) report(samples ...health.Sample) {
	h.set(func(s *fakeSource) {
		s.reading.Devices, s.reading.Samples = nil, nil
		for _, sample := range samples {
			for _, d := range []health.Device{healthtest.GPU0, healthtest.MIG0, healthtest.GPU1} {
				if d.ID == sample.Device {
					s.reading.Devices = append(s.reading.Devices, d)
				}
			}
			s.reading.Samples = append(s.reading.Samples, sample)
		}
	})
}

// reportGPU0 sets the sample of GPU-0; its XIDs are in the next reading only.
func (h *harness) reportGPU0(sample health.Sample) {
	xids := sample.XIDs
	for i := range xids {
		xids[i].At = time.Now()
	}
	sample.XIDs = nil
	h.report(of(healthtest.GPU0, sample))
	h.set(func(s *fakeSource) { s.xids = xids })
}

// reportXID puts an XID into the next reading, for all devices.
func (h *harness) reportXID(code int) {
	h.set(func(s *fakeSource) { s.xids = []health.XID{{Code: code, At: time.Now()}} })
}

func of(d health.Device, s health.Sample) health.Sample {
	s.Device = d.ID
	return s
}

// detach calls Detach, which must succeed.
func (h *harness) detach(t *testing.T, limit time.Duration) DetachResult {
	t.Helper()
	r, err := h.m.Detach(t.Context(), limit)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

// attach calls Attach, which must return a result.
func (h *harness) attach(t *testing.T) AttachResult {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Hour)
	defer cancel()
	r, err := h.m.Attach(ctx)
	if err != nil {
		t.Error(err)
	}
	return r
}

// withhold calls Withhold, which must succeed.
func (h *harness) withhold(t *testing.T) *Withholding {
	t.Helper()
	w, err := h.m.Withhold(time.Hour)
	if err != nil {
		t.Fatal(err)
	}
	return w
}
