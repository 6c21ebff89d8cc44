//go:build cgo && linux

package nvml

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/health/driver"
	"github.com/gpu-node-agent/gpu-node-agent/health/nvml/internal/script"
)

const (
	gpu0 = health.DeviceID("GPU-00000000-0000-0000-0000-000000000000")
	mig0 = health.DeviceID("MIG-00000000-0001-0000-0000-000000000000")
	gpu9 = health.DeviceID("GPU-00000009-0000-0000-0000-000000000000")
)

func openLimits(t *testing.T, driver string) (script.Library, driver.MemoryLimiter) {
	t.Helper()
	lib := newLibrary(t)
	lib.Do("driver %s", driver)
	limits, release, err := OpenMemoryLimits()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(release)
	return lib, limits
}

// expectResult checks that an error is NVML's of a number, and that it names each text.
func expectResult(t *testing.T, err error, code nvml.Return, names ...string) {
	t.Helper()
	if !isCode(err, code) {
		t.Errorf("%v; want NVML error %d", err, int(code))
		return
	}
	for _, name := range names {
		if !strings.Contains(err.Error(), name) {
			t.Errorf("%v; want an error that names %s", err, name)
		}
	}
}

func TestMemoryLimits(t *testing.T) {
	lib, m := openLimits(t, "615.10")
	cgroup := filepath.Join(t.TempDir(), "container")
	make := func() {
		t.Helper()
		if err := os.Mkdir(cgroup, 0o750); err != nil {
			t.Fatal(err)
		}
	}
	expectNone := func(when string) {
		t.Helper()
		if limits, err := m.Limits(gpu0, cgroup); !errors.Is(err, driver.ErrNoMemoryLimits) {
			t.Errorf("%s: %+v, %v; want ErrNoMemoryLimits", when, limits, err)
		}
	}
	expect := func(want driver.MemoryLimits) {
		t.Helper()
		if got, err := m.Limits(gpu0, cgroup); err != nil || got != want {
			t.Errorf("%+v, %v; want %+v", got, err, want)
		}
	}
	set := func(soft, hard uint64) {
		t.Helper()
		if err := m.SetLimits(gpu0, cgroup, soft, hard); err != nil {
			t.Error(err)
		}
	}

	_, err := m.Limits(gpu0, cgroup)
	expectResult(t, err, nvml.ERROR_OPERATING_SYSTEM, getMemoryLimits, cgroup, string(gpu0))
	expectResult(t, m.SetLimits(gpu0, cgroup, 0, 1), nvml.ERROR_OPERATING_SYSTEM, setMemoryLimits, cgroup, string(gpu0))
	make()
	expectNone("new cgroup")
	set(10<<30, 20<<30)
	expect(driver.MemoryLimits{Soft: 10 << 30, Hard: 20 << 30})
	lib.Do("used 0 %d %s", 7<<30, cgroup)
	expect(driver.MemoryLimits{Soft: 10 << 30, Hard: 20 << 30, Used: 7 << 30})
	set(0, 1<<30)
	expect(driver.MemoryLimits{Hard: 1 << 30, Used: 7 << 30})
	set(1<<30, driver.NoMemoryLimit)
	expect(driver.MemoryLimits{Soft: 1 << 30, Hard: driver.NoMemoryLimit, Used: 7 << 30})

	// The driver refuses these and keeps what was set.
	expectResult(t, m.SetLimits(gpu0, cgroup, 2, 1), nvml.ERROR_INVALID_ARGUMENT, setMemoryLimits, cgroup)
	expectResult(t, m.SetLimits(gpu0, cgroup, 0, 81<<30), nvml.ERROR_INVALID_ARGUMENT, setMemoryLimits, cgroup)
	lib.Do("fail %s 0 %d 1", setMemoryLimits, int(nvml.ERROR_NO_PERMISSION))
	expectResult(t, m.SetLimits(gpu0, cgroup, 0, 1), nvml.ERROR_NO_PERMISSION, setMemoryLimits, cgroup, "CAP_SYS_ADMIN")
	expect(driver.MemoryLimits{Soft: 1 << 30, Hard: driver.NoMemoryLimit, Used: 7 << 30})

	set(0, driver.NoMemoryLimit)
	expectNone("limits removed")
	if limits, _ := m.Limits(gpu0, cgroup); limits.Used != 7<<30 {
		t.Errorf("limits removed: %+v; want the used memory", limits)
	}
	set(0, 1<<30)
	if err := os.RemoveAll(cgroup); err != nil {
		t.Fatal(err)
	}
	make()
	expectNone("cgroup made again")

	// The GPU and not its limits is missing.
	if _, err := m.Limits(gpu9, cgroup); errors.Is(err, driver.ErrNoMemoryLimits) {
		t.Error(err)
	} else {
		expectResult(t, err, nvml.ERROR_NOT_FOUND, "nvmlDeviceGetHandleByUUID", string(gpu9))
	}
}

func TestMemoryLimitsSupported(t *testing.T) {
	for name, tt := range map[string]struct {
		driver, command string
		id              health.DeviceID
		code            nvml.Return // SUCCESS: any error
		names           []string    // of the error; nil: supported
	}{
		"driver 615":      {"615.10", "", gpu0, nvml.SUCCESS, nil},
		"older driver":    {"610.43.02", "", gpu0, nvml.ERROR_FUNCTION_NOT_FOUND, []string{"615", "610.43.02"}},
		"unsupported GPU": {"615.10", "fail nvmlDeviceGetMemoryLimits_v1 0 3 -1", gpu0, nvml.ERROR_NOT_SUPPORTED, []string{string(gpu0)}},
		"lost GPU":        {"615.10", "lost 0", gpu0, nvml.ERROR_GPU_IS_LOST, []string{string(gpu0)}},
		"no cgroups":      {"615.10", "fail nvmlDeviceGetMemoryLimits_v1 0 17 -1", gpu0, nvml.ERROR_OPERATING_SYSTEM, []string{"/sys/fs/cgroup"}},
		"MIG device":      {"615.10", "mig 0 0 1 0", mig0, nvml.SUCCESS, []string{string(mig0)}},
		"unknown GPU":     {"615.10", "", gpu9, nvml.ERROR_NOT_FOUND, []string{string(gpu9)}},
	} {
		t.Run(name, func(t *testing.T) {
			lib, m := openLimits(t, tt.driver)
			if tt.command != "" {
				lib.Do("%s", tt.command)
			}
			err := m.Supported(tt.id)
			switch {
			case tt.names == nil && err != nil:
				t.Error(err)
			case tt.names != nil && err == nil:
				t.Error("supported")
			case tt.code != nvml.SUCCESS:
				expectResult(t, err, tt.code, tt.names...)
			case err != nil && !strings.Contains(err.Error(), tt.names[0]):
				t.Errorf("%v; want an error that names %s", err, tt.names)
			}
			if n := lib.Number("calls %s", setMemoryLimits); n != 0 {
				t.Errorf("%d calls of %s", n, setMemoryLimits)
			}
		})
	}
}

// The driver was unloaded and loaded again, as for a reset of the GPU.
func TestMemoryLimitsAfterDriverReload(t *testing.T) {
	lib, m := openLimits(t, "615.10")
	lib.Do("unload")
	expectResult(t, m.Supported(gpu0), nvml.ERROR_UNKNOWN, string(gpu0))
	expectResult(t, m.Supported(gpu0), nvml.ERROR_DRIVER_NOT_LOADED, string(gpu0))
	if n := lib.Number("inits"); n != 0 {
		t.Errorf("%d Inits without a driver", n)
	}
	lib.Do("load")
	if err := m.Supported(gpu0); err != nil {
		t.Error(err)
	}
}
