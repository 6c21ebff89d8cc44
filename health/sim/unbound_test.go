package sim

import (
	"slices"
	"testing"
	"testing/synctest"

	"github.com/gpu-node-agent/gpu-node-agent/health"
)

// An unbound GPU is detached until the source is opened again; then it is not listed, and the others are numbered without it.
func TestUnboundGPU(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		cfg := DefaultConfig()
		cfg.Profile = "h100-8-mig"
		s, err := New(cfg, nil)
		if err != nil {
			t.Fatal(err)
		}
		all := listedGPUs(t, s)
		open, err := s.Open(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		three, yes, no := 3, true, false
		if err := s.inject(Event{GPU: &three, Unbound: &yes}); err != nil {
			t.Fatal(err)
		}
		r, err := open.Poll(t.Context())
		if err != nil || len(r.Devices) == 0 {
			t.Fatal(err)
		}
		for _, sample := range r.Samples {
			want := health.Present
			if i := slices.IndexFunc(r.Devices, func(d health.Device) bool { return d.ID == sample.Device }); r.Devices[i].Index == 3 {
				want = health.Detached
			}
			if sample.Presence != want {
				t.Errorf("%s is %v, want %v", sample.Device, sample.Presence, want)
			}
		}
		_ = open.Close()
		if got := listedGPUs(t, s); !slices.Equal(got, slices.Delete(slices.Clone(all), 3, 4)) {
			t.Errorf("listed: %v of %v", got, all)
		}
		if err := s.inject(Event{GPU: &three, Unbound: &no}); err != nil {
			t.Fatal(err)
		}
		if got := listedGPUs(t, s); !slices.Equal(got, all) {
			t.Errorf("bound again: %v", got)
		}
		if len(s.OnBus()) != len(all) {
			t.Errorf("on the bus: %v", s.OnBus())
		}
	})
}

// listedGPUs opens a source and returns the GPUs that it lists, which must be numbered from 0, each before its MIG devices.
func listedGPUs(t *testing.T, s *Source) (gpus []health.DeviceID) {
	t.Helper()
	ses, err := s.Open(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = ses.Close() }()
	r, err := ses.Poll(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	for _, d := range r.Devices {
		if d.Kind == health.KindGPU {
			if d.Index != len(gpus) {
				t.Errorf("GPU %s has index %d, want %d", d.ID, d.Index, len(gpus))
			}
			gpus = append(gpus, d.ID)
		} else if d.Index != len(gpus)-1 || d.Parent != gpus[len(gpus)-1] {
			t.Errorf("%+v is listed after GPU %d", d, len(gpus)-1)
		}
	}
	if len(r.Samples) != len(r.Devices) {
		t.Errorf("%d samples of %d devices", len(r.Samples), len(r.Devices))
	}
	return gpus
}
