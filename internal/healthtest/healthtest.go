// Package healthtest has devices, samples and readings for tests that judge, and runs components in synctest bubbles and packages of tests.
package healthtest

import (
	"context"
	"flag"
	"maps"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/goleak"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/health/judge"
)

// Epoch is the time of At(0).
var Epoch = time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC) //nolint:gochecknoglobals // a constant

// At returns a time in seconds since Epoch.
func At(seconds int) time.Time { return Epoch.Add(time.Duration(seconds) * time.Second) }

// Two GPUs; the first has two MIG devices.
//
//nolint:gochecknoglobals // constants
var (
	GPU0 = health.Device{ID: "GPU-0", Kind: health.KindGPU, Index: 0}
	GPU1 = health.Device{ID: "GPU-1", Kind: health.KindGPU, Index: 1}
	MIG0 = health.Device{ID: "MIG-0", Kind: health.KindMIG, Parent: "GPU-0", Index: 0, GI: 1}
	MIG1 = health.Device{ID: "MIG-1", Kind: health.KindMIG, Parent: "GPU-0", Index: 0, GI: 2, MIGIndex: 1}
)

// Present returns a sample of a healthy GPU, changed by edit.
func Present(edit ...func(*health.Sample)) health.Sample {
	s := health.Sample{Presence: health.Present, Values: map[health.Field]float64{
		health.FieldRecoveryAction: 0, health.FieldGPUTemp: 40, health.FieldRemapFailed: 0, health.FieldRemapPending: 0,
		health.FieldUnrepairable: 0,
	}}
	for _, e := range edit {
		e(&s)
	}
	return s
}

// Value sets a field of a sample.
func Value(f health.Field, v float64) func(*health.Sample) {
	return func(s *health.Sample) { s.Values[f] = v }
}

// XIDs adds XIDs to a sample.
func XIDs(codes ...int) func(*health.Sample) {
	return func(s *health.Sample) {
		for _, c := range codes {
			s.XIDs = append(s.XIDs, health.XID{Code: c})
		}
	}
}

// Blank returns a sample without values.
func Blank(p health.Presence) health.Sample { return health.Sample{Presence: p} }

// Checked returns a sample with the result of DCGM's health checks.
func Checked(incidents ...health.Incident) health.Sample {
	s := Present()
	s.Checked, s.Incidents = true, incidents
	return s
}

// Reading returns a reading of devices, each with its sample in samples; the default is a healthy one.
func Reading(seconds int, samples map[health.DeviceID]health.Sample, devices ...health.Device) (*health.Reading, time.Time) {
	r := &health.Reading{Devices: devices}
	for _, d := range devices {
		s, ok := samples[d.ID]
		if !ok {
			s = Present()
			if d.Kind == health.KindMIG {
				s = Blank(health.Present)
			}
		}
		s.Device, s.At = d.ID, At(seconds)
		r.Samples = append(r.Samples, s)
	}
	return r, At(seconds)
}

// JudgeReading judges a reading and derives the verdicts.
func JudgeReading(
	c judge.Config, before []health.DeviceState, r *health.Reading, rc judge.ReadingContext, now time.Time,
) []health.DeviceState {
	return judge.View(c, judge.Measure(c, before, r, rc, now), judge.ViewContext{}, now)
}

// Judge judges a Reading and derives the verdicts.
func Judge(
	c judge.Config, before []health.DeviceState, seconds int, held health.Held, samples map[health.DeviceID]health.Sample,
	devices ...health.Device,
) []health.DeviceState {
	r, now := Reading(seconds, samples, devices...)
	judged := judge.Measure(c, before, r, judge.ReadingContext{XIDHistory: true}, now)
	return judge.View(c, judged, judge.ViewContext{Held: held}, now)
}

// WantStates checks the states of all devices.
func WantStates(t *testing.T, devices []health.DeviceState, want map[health.DeviceID]health.State) {
	t.Helper()
	got := make(map[health.DeviceID]health.State)
	for _, d := range devices {
		got[d.Device.ID] = d.Verdict.State
	}
	if !maps.Equal(got, want) {
		t.Fatalf("got %v, want %v", got, want)
	}
}

// Run calls run in a synctest bubble until stop is called. stop may be called again.
func Run(t *testing.T, run func(context.Context) error) (stop func()) {
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- run(ctx) }()
	synctest.Wait()
	return sync.OnceFunc(func() {
		cancel()
		if err := <-done; err != nil {
			t.Errorf("Run: %v", err)
		}
	})
}

// Advance lets time pass in a synctest bubble, and waits until every goroutine in it is blocked.
func Advance(d time.Duration) {
	time.Sleep(d) //nolint:forbidigo // the bubble's time
	synctest.Wait()
}

// Main runs the tests of a package. They wait for timers and the disk most of the time, so more of them run at once than there are
// processors. They may leave no goroutine.
func Main(m *testing.M) {
	flag.Parse()
	if err := flag.Set("test.parallel", "8"); err != nil {
		panic(err)
	}
	goleak.VerifyTestMain(m)
}

// Counted returns a ledger with counted XIDs. newest is the newest of them, zero for none.
func Counted(counts map[int]uint64, newest health.XID) health.Ledger {
	l := health.Ledger{Codes: make(map[int]health.Tally), Last: newest.Code}
	for code, n := range counts {
		l.Codes[code] = health.Tally{Total: n, Newest: health.XID{Code: code}}
	}
	if newest.Code != 0 {
		t := l.Codes[newest.Code]
		t.Newest = newest
		l.Codes[newest.Code] = t
	}
	return l
}

// WithDetail returns a ledger with the detail of the newest XID with a number.
func WithDetail(l health.Ledger, code int, d health.XIDDetail) health.Ledger {
	l.Codes = maps.Clone(l.Codes)
	t := l.Codes[code]
	t.Newest.Detail = d
	l.Codes[code] = t
	return l
}
