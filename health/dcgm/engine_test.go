//go:build cgo && linux

package dcgm

import (
	"os"
	"os/signal"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/health/dcgm/internal/script"
)

// An engine without a driver never looks for it again, so the session restarts it (OBSERVED.md#empty-engine).
func TestEmptyEngineIsRestarted(t *testing.T) {
	b := newFixture(t, 0)
	b.open(testConfig())
	if _, r := b.poll(); len(r.Devices) != 0 || len(r.Samples) != 0 {
		t.Fatalf("devices without a driver: %+v", r)
	}
	b.expectChanged("no driver", false)
	b.add(retryInterval)
	b.poll()
	b.expectCalls("dcgmStartEmbedded", 2)
	b.addGPUs(2)
	b.add(retryInterval)
	b.poll()
	b.add(confirmDelay)
	if b.poll(); len(b.devices) != 2 {
		t.Errorf("%d devices with the driver, want 2", len(b.devices))
	}
}

// The session works without the calls that an older engine refuses.
func TestOlderEngineLacksCalls(t *testing.T) {
	for _, function := range []string{
		"dcgmHostengineVersionInfo", "dcgmHealthSet", "dcgmHealthCheck",
		"dcgmProfGetSupportedMetricGroups", "dcgmGetDeviceTopology",
	} {
		t.Run(function, func(t *testing.T) {
			b := newFixture(t, 2)
			b.lib.Fail(function, errNoFunction, -1)
			cfg := hostConfig()
			cfg.Fields = append(cfg.Fields, 1001)
			b.open(cfg).poll()
			b.add(time.Second)
			b.xid(script.GPU, 1, 79, b.clock.now())
			s := b.pollAfter(10*time.Second, 2)[gpuID(1)]
			if !slices.Equal(xidCodes(s.XIDs), []int{79}) || s.Values[health.FieldGPUTemp] != 41 || s.Presence != health.Present {
				t.Errorf("sample %+v", s)
			}
			if n := b.lib.Calls(function); n == 0 {
				t.Error("the function was not called")
			}
			b.lib.Fail("", 0, 0)
		})
	}
}

// The first call that a hung engine ends after a minute ends the session, so that no other call waits
// (OBSERVED.md#hung-engine).
func TestPollTimeoutEndsSession(t *testing.T) {
	calls := []string{
		"dcgmEntitiesGetLatestValues", "dcgmGetEntityGroupEntities", "dcgmGetGpuInstanceHierarchy", "dcgmGetValuesSince_v2",
		"dcgmGetGpuStatus", "dcgmHealthCheck", "dcgmGroupDestroy", "dcgmUnwatchFields",
	}
	for name, later := range map[string]time.Duration{"health poll": time.Second, "full poll": 10 * time.Second} {
		t.Run(name, func(t *testing.T) {
			b := startFixture(t, 2)
			b.add(later)
			count := func() (n int) {
				for _, function := range calls {
					n += b.lib.Calls(function)
				}
				return n
			}
			b.lib.Fail("*", errTimeout, -1)
			before := count()
			if _, err := b.Poll(t.Context()); err == nil || !strings.Contains(err.Error(), "Timeout") {
				t.Fatalf("Poll of a hung engine: %v", err)
			}
			b.close()
			if n := count() - before; n != 1 {
				t.Errorf("%d calls timed out, want 1", n)
			}
			b.expectCalls("dcgmStopEmbedded", 1)
		})
	}
}

// The agent handles SIGTERM and SIGHUP with an embedded engine too.
func TestEngineKeepsSignalHandlers(t *testing.T) {
	hup := make(chan os.Signal, 1)
	signal.Notify(hup, syscall.SIGHUP)
	defer signal.Stop(hup)
	b := newFixture(t, 1)
	before := b.lib.Handlers()
	expectSame := func(when string) {
		t.Helper()
		for i, handler := range b.lib.Handlers() {
			if handler != before[i] {
				t.Errorf("%s: handler of %v changed", when, syscall.Signal(i+1))
			}
		}
		if err := syscall.Kill(os.Getpid(), syscall.SIGHUP); err != nil {
			t.Fatal(err)
		}
		<-hup
	}
	b.open(testConfig()).poll()
	expectSame("engine started")
	b.close()
	expectSame("engine stopped")
}
