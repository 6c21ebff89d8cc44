//go:build cgo && linux

package dcgm

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/NVIDIA/go-dcgm/pkg/dcgm"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/health/dcgm/internal/script"
)

func TestIncidents(t *testing.T) {
	b := newFixture(t, 2)
	b.lib.Incident(script.GPU, 1, 0x10, 20, 80, "Row remap failed on GPU 0") // the text can name another GPU
	b.lib.Incident(script.GPU, 1, 0x1, 10, 3, "Detected 1000 PCIe replays")
	b.lib.Incident(0, 0, 0x2, 20, 122, "IMEX") // without a GPU
	b.lib.Incident(script.GI, 1, 0x10, 20, 4, "of an instance with the number of a GPU")
	samples, _ := b.open(testConfig()).poll()
	want := []health.Incident{
		{System: "memory", Code: 80, Severity: health.SeverityFail, Message: "Row remap failed on GPU 0"},
		{System: "pcie", Code: 3, Severity: health.SeverityWarn, Message: "Detected 1000 PCIe replays"},
	}
	check := func(when string, samples map[health.DeviceID]health.Sample, checked bool) {
		t.Helper()
		if got := samples[gpuID(1)].Checked; got != checked {
			t.Errorf("%s: checked %v, want %v", when, got, checked)
		}
		if got := samples[gpuID(1)].Incidents; fmt.Sprint(got) != fmt.Sprint(want) {
			t.Errorf("%s: incidents of GPU 1: %v, want %v", when, got, want)
		}
		if got := samples[gpuID(0)].Incidents; len(got) != 0 {
			t.Errorf("%s: incidents of GPU 0: %v", when, got)
		}
	}
	check("first poll", samples, true)
	check("health poll", b.pollAfter(time.Second, 2), false)
	b.lib.Fail("dcgmHealthCheck", errTimeout, 1)
	check("failed check", b.pollAfter(10*time.Second, 2), false)
	b.lib.Incident(0, 0, 0, 0, 0, "")
	want = nil
	check("cleared", b.pollAfter(10*time.Second, 2), true)
}

// A GPU that DCGM does not measure keeps its incidents; DCGM's warning that it cannot read the power is ignored
// (OBSERVED.md#blind-engine).
func TestHealthCheckOfUnmeasuredGPUs(t *testing.T) {
	for name, gpus := range map[string][]uint{"no GPU measured": {0, 1, 2}, "one GPU not measured": {2}} {
		t.Run(name, func(t *testing.T) {
			b := newFixture(t, 3)
			b.lib.Incident(script.GPU, 2, 0x10, 20, 80, "Row remap failed")
			cfg := testConfig()
			cfg.Interval = time.Second // every poll runs the check
			b.open(cfg).poll()
			for _, gpu := range gpus {
				b.lib.Incident(script.GPU, gpu, 0x40, 10, 11, "Cannot reliably read the power usage")
			}
			b.lib.Incident(script.GPU, 1, 0x1, 10, 3, "Detected 1000 PCIe replays")
			seconds, err := b.pollUntilFailure(func() {
				b.sampleGPUs(3)
				b.blankGPUs(gpus...)
			}, func(second int, r *health.Reading) {
				for _, s := range r.Samples {
					blind := len(gpus) == 3 || s.Device == gpuID(2)
					if s.Checked == blind {
						t.Errorf("after %d s: %s: checked %v", second, s.Device, s.Checked)
					}
					for _, i := range s.Incidents {
						if i.Code == 11 || i.Code == 3 && blind {
							t.Errorf("after %d s: %s: %v", second, s.Device, i)
						}
					}
				}
				if got := r.Samples[2].Incidents; len(got) != 1 || got[0].Code != 80 {
					t.Errorf("after %d s: earlier incidents %v", second, got)
				}
				if got := r.Samples[1].Incidents; (len(got) == 1) != (len(gpus) == 1) {
					t.Errorf("after %d s: incidents of a measured GPU: %v", second, got)
				}
			})
			if errors.Is(err, errBlind) != (len(gpus) == 3) || err != nil && (seconds < 3 || seconds > 20) {
				t.Errorf("after %d s: %v", seconds, err)
			}
		})
	}
}

func TestHealthSystems(t *testing.T) {
	for _, tt := range []struct {
		names   []string
		mask    uint32
		invalid string
	}{
		{nil, 0xffffffff, ""},
		{[]string{"all"}, 0xffffffff, ""},
		{[]string{"none"}, 0, ""},
		{[]string{"pcie", "memory", "nvswitch"}, 0x1 | 0x10 | 0xc00, ""},
		{[]string{"inforom", "thermal", "power", "driver", "nvlink", "connectx"}, 0x13c2, ""},
		{[]string{"pcie", "gpu"}, 0, `"gpu"`},
		{[]string{"all", "pcie"}, 0, `"all"`},
		{[]string{"none", "none"}, 0, `"none"`},
	} {
		t.Run(fmt.Sprint(tt.names), func(t *testing.T) {
			b := newFixture(t, 1)
			b.lib.Incident(script.GPU, 0, 0x10, 20, 80, "Row remap failed")
			cfg := testConfig()
			cfg.HealthSystems = tt.names
			if tt.invalid != "" {
				_, err := Open(t.Context(), cfg, b.log)
				if err == nil || !strings.Contains(err.Error(), tt.invalid) {
					t.Errorf("error %v, want one with %s", err, tt.invalid)
				}
				return
			}
			b.open(cfg)
			if got := b.lib.Systems(); got != tt.mask {
				t.Errorf("DCGM checks systems %#x, want %#x", got, tt.mask)
			}
			samples, _ := b.poll()
			s := samples[gpuID(0)]
			if !s.Checked || (len(s.Incidents) == 1) != (tt.mask != 0) {
				t.Errorf("checked %v, incidents %v", s.Checked, s.Incidents)
			}
			if n := b.lib.Calls("dcgmHealthCheck"); (n > 0) != (tt.mask != 0) {
				t.Errorf("%d health checks", n)
			}
		})
	}
	if err := ValidateHealthSystems(nil); err == nil {
		t.Error("an empty list is valid")
	}
}

func TestSystemNames(t *testing.T) {
	for bits, want := range map[dcgm.HealthSystem]string{
		0x1: "pcie", 0x2: "nvlink", 0x10: "memory", 0x400: "nvswitch", 0x800: "nvswitch", 0xffffffff: "xid", 0x100000: "0x100000",
	} {
		if got := systemName(bits); got != want {
			t.Errorf("%#x is %s, want %s", uint32(bits), got, want)
		}
	}
}
