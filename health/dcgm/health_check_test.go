//go:build cgo && linux

package dcgm

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"go.uber.org/zap"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/health/dcgm/internal/script"
)

func TestIncidents(t *testing.T) {
	b := newFixture(t, 2)
	b.lib.Incident(script.GPU, 1, 0x10, 20, 80, "Row remap failed on GPU 0") // the text can name another GPU
	b.lib.Incident(script.GPU, 1, 0x1, 10, 3, "Detected 1000 PCIe replays")
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
		if got := samples[gpuID(1)].Incidents; !slices.Equal(got, want) {
			t.Errorf("%s: incidents of GPU 1: %v, want %v", when, got, want)
		}
		if got := samples[gpuID(0)].Incidents; len(got) != 0 {
			t.Errorf("%s: incidents of GPU 0: %v", when, got)
		}
	}
	check("first poll", samples, true)
	check("health poll", b.pollAfter(time.Second, 2), false)
	b.lib.Fail("dcgmHealthCheck", errTimeout, 1)
	incidents := want
	want = nil // none is current
	check("failed check", b.pollAfter(10*time.Second, 2), false)
	want = incidents
	check("next check", b.pollAfter(10*time.Second, 2), true)
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
					ignored := func(i health.Incident) bool { return i.Code == 11 || i.Code == 3 && blind }
					if s.Checked == blind || slices.ContainsFunc(s.Incidents, ignored) {
						t.Errorf("after %d s: %s: checked %v, %v", second, s.Device, s.Checked, s.Incidents)
					}
				}
				measured, got := r.Samples[1].Incidents, r.Samples[2].Incidents
				if (len(measured) == 1) != (len(gpus) == 1) || len(got) != 1 || got[0].Code != 80 {
					t.Errorf("after %d s: incidents %v, earlier ones %v", second, measured, got)
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
		{[]string{"inforom", "thermal", "power", "driver", "memory", "connectx"}, 0x13d0, ""},
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

// IMEX is a health system from DCGM 4.6.1 on, and a part of NVLink before. Its incidents name no GPU.
func TestIMEX(t *testing.T) {
	const imex, down = 122, 14 // DCGM_FR_IMEX_UNHEALTHY, DCGM_FR_NVLINK_DOWN
	for name, engine := range map[string]struct{ system, refused uint32 }{
		"4.6.1": {0x2000, 0}, "before": {0x2, 0}, "before, refuses unknown systems": {0x2, 0x2000},
	} {
		for _, tt := range []struct {
			systems   []string
			set       uint32
			imex, gpu bool
		}{
			{[]string{"all"}, 0xffffffff, true, true},
			{[]string{"nvlink"}, 0x2002, true, true},
			{[]string{"imex"}, 0x2002, true, false},
			{[]string{"imex", "nvlink"}, 0x2002, true, true},
			{[]string{"memory"}, 0x10, false, false},
		} {
			t.Run(fmt.Sprint(name, tt.systems), func(t *testing.T) {
				b := newFixture(t, 2)
				b.lib.RefuseSystems(engine.refused)
				b.lib.Incident(0, 0, uint(engine.system), 20, imex, "IMEX daemon is not ready")
				b.lib.Incident(script.GPU, 1, 0x2, 20, down, "NVLink 3 is down")
				cfg := testConfig()
				cfg.HealthSystems = tt.systems
				samples, r := b.open(cfg).poll()
				if want := tt.set &^ engine.refused; b.lib.Systems()&0x3fff != want&0x3fff {
					t.Errorf("DCGM checks systems %#x, want %#x", b.lib.Systems(), want)
				}
				var want []health.Incident
				if tt.imex {
					want = []health.Incident{{System: "imex", Code: imex, Severity: health.SeverityFail, Message: "IMEX daemon is not ready"}}
				}
				if !slices.Equal(r.Incidents, want) {
					t.Errorf("incidents of no GPU: %v, want %v", r.Incidents, want)
				}
				if got := samples[gpuID(1)].Incidents; (len(got) == 1 && got[0].Code == down) != tt.gpu {
					t.Errorf("incidents of GPU 1: %v", got)
				}
				if r.Checks.Status != health.ChecksUp || !samples[gpuID(0)].Checked {
					t.Errorf("checks %+v", r.Checks)
				}
			})
		}
	}
}

// More of DCGM's errors (dcgm_structs.h).
const errVersion, errNotSupported, errModule = -12, -6, -33

// A health check that DCGM refuses to set or to read fails no poll. It is tried again with growing pauses, after a change of
// the inventory and in a new session.
func TestHealthChecksDown(t *testing.T) {
	for function, reason := range map[string]string{"dcgmHealthSet": "setting", "dcgmHealthCheck": "reading"} {
		for name, code := range map[string]int{
			"version mismatch": errVersion, "no module": errModule, "not supported": errNotSupported,
			"timeout": errTimeout,
		} {
			t.Run(function+", "+name, func(t *testing.T) {
				b := newFixture(t, 2)
				b.lib.Incident(script.GPU, 1, 0x10, 20, 80, "Row remap failed")
				b.lib.Fail(function, code, -1)
				b.open(hostConfig())
				b.wantChecksDown("first poll", reason)

				tries := b.lib.Calls(function)
				b.add(5*time.Second - time.Millisecond) // no pause is shorter than 5 s
				if b.poll(); b.lib.Calls(function) != tries {
					t.Error("tried again within 5 s")
				}
				b.wantGrowingPauses(function, reason, 8)

				b.xid(script.GPU, 1, 79, b.clock.now())
				if s := b.pollAfter(10*time.Second, 2)[gpuID(1)]; !slices.Equal(xidCodes(s.XIDs), []int{79}) {
					t.Errorf("XIDs %v", s.XIDs)
				}
				b.lib.Fail("", 0, 0)
				b.addGPUs(3)
				b.pollAfter(10*time.Second, 3)
				b.add(confirmDelay) // the inventory changes
				b.sampleGPUs(3)
				samples, r := b.poll()
				if r.Checks != (health.Checks{Status: health.ChecksUp}) || len(samples[gpuID(1)].Incidents) != 1 || !samples[gpuID(2)].Checked {
					t.Errorf("checks %+v, %+v", r.Checks, samples[gpuID(1)])
				}
			})
		}
	}
}

// wantChecksDown polls a session with a host engine, and checks that only the health checks are down.
func (b *fixture) wantChecksDown(when, reason string) {
	b.t.Helper()
	_, r := b.poll()
	c := r.Checks
	if c.Status != health.ChecksDown || !strings.Contains(c.Err, reason) || !strings.Contains(c.Err, "4.6.0") ||
		!strings.Contains(c.Err, "4.5.2") {
		b.t.Errorf("%s: checks %+v, want %s", when, c, reason)
	}
	for _, s := range r.Samples {
		if s.Checked || len(s.Incidents) > 0 || s.Presence != health.Present || s.Values[health.FieldRecoveryAction] != 0 ||
			s.Values[health.FieldGPUTemp] == 0 {
			b.t.Errorf("%s: %+v", when, s)
		}
	}
}

// wantGrowingPauses polls every ten seconds until the failing function was tried n times, and checks the pauses between the tries. One try
// has failed before.
func (b *fixture) wantGrowingPauses(function, reason string, n int) {
	b.t.Helper()
	const interval = 10 * time.Second // of polls
	var triedAt []time.Duration
	tries := b.lib.Calls(function)
	for after := time.Duration(0); len(triedAt) < n && after < time.Hour; after += interval {
		b.add(interval)
		b.sampleGPUs(2)
		b.wantChecksDown(fmt.Sprint("after ", after), reason)
		if n := b.lib.Calls(function); n != tries {
			triedAt, tries = append(triedAt, after), n
		}
	}
	for i, longest := 1, 2*minCheckPause; i < n; i, longest = i+1, min(2*longest, maxCheckPause) {
		if pause := triedAt[i] - triedAt[i-1]; pause < longest/2 || pause > longest+interval {
			b.t.Errorf("tried at %v, want the last %v after up to %v", triedAt[:i+1], pause, longest)
		}
	}
}

// A check that succeeds makes the next pause short again, although many have failed before.
func TestHealthCheckPauseAfterSuccess(t *testing.T) {
	b := newFixture(t, 2)
	b.lib.Fail("dcgmHealthCheck", errTimeout, -1)
	b.open(hostConfig())
	b.wantChecksDown("first poll", "reading")
	b.wantGrowingPauses("dcgmHealthCheck", "reading", 7)
	b.lib.Fail("", 0, 0)
	b.add(maxCheckPause)
	b.sampleGPUs(2)
	if _, r := b.poll(); r.Checks.Status != health.ChecksUp {
		t.Fatalf("checks %+v", r.Checks)
	}
	b.lib.Fail("dcgmHealthCheck", errTimeout, 1)
	b.add(10 * time.Second)
	b.sampleGPUs(2)
	b.wantChecksDown("failed again", "reading")
	b.add(minCheckPause)
	b.sampleGPUs(2)
	if _, r := b.poll(); r.Checks.Status != health.ChecksUp {
		t.Errorf("not tried again within %v: %+v", minCheckPause, r.Checks)
	}
}

// The pause after a failed attempt begins with its end: DCGM may take a minute to fail.
func TestHealthChecksDownSlowly(t *testing.T) {
	for function, want := range map[string][]int{"dcgmHealthSet": {0, 0, 1}, "dcgmHealthCheck": {1, 0, 1}} {
		b := newFixture(t, 1)
		b.lib.Fail(function, errTimeout, -1)
		b.open(testConfig())
		ended := b.lib.Calls(function)
		b.session.now = func() time.Time {
			n := b.lib.Calls(function)
			b.add(time.Duration(n-ended)*time.Minute + time.Millisecond)
			ended = n
			return b.clock.now()
		}
		for i, want := range want {
			b.session.now()
			b.sampleGPUs(1)
			b.fullAt, b.inventoryDirty = time.Time{}, i == 2 // the inventory changes
			before := ended
			if _, r := b.poll(); r.Checks.Status != health.ChecksDown {
				t.Errorf("%s: %+v", function, r.Checks)
			}
			if got := b.lib.Calls(function) - before; got != want {
				t.Errorf("%s, poll %d: %d calls, want %d", function, i, got, want)
			}
		}
		b.close()
	}
}

// A version mismatch that no session survives names the versions too.
func TestVersionMismatchEndsOpen(t *testing.T) {
	b := newFixture(t, 1)
	for _, function := range []string{"dcgmGetEntityGroupEntities", "dcgmFieldGroupCreate", "dcgmWatchFields"} {
		b.lib.Fail(function, errVersion, -1)
		_, err := Open(t.Context(), hostConfig(), zap.NewNop())
		if err == nil || !strings.Contains(err.Error(), "libdcgm 4.6.0, host engine 4.5.2); install the same version") {
			t.Errorf("%s: %v", function, err)
		}
	}
}

// A failure of one check is over with the next poll that measures everything.
func TestHealthCheckFailsOnce(t *testing.T) {
	b := startFixture(t, 1)
	b.lib.Fail("dcgmHealthCheck", errTimeout, 1)
	for i, want := range []bool{false, true, true} {
		if s := b.pollAfter(10*time.Second, 1)[gpuID(0)]; s.Checked != want {
			t.Errorf("poll %d: checked %v", i, s.Checked)
		}
	}
}

func TestSystemNames(t *testing.T) {
	for bits, want := range map[uint32]string{
		0x1: "pcie", 0x2: "nvlink", 0x2000: "imex", 0x10: "memory", 0x400: "nvswitch", 0x800: "nvswitch", 0xffffffff: "xid", 0x100000: "0x100000",
	} {
		if got := systemName(bits); got != want {
			t.Errorf("%#x is %s, want %s", bits, got, want)
		}
	}
}
