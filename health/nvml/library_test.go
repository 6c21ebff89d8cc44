//go:build cgo && linux

package nvml

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/gpu-node-agent/gpu-node-agent/health/driver"
)

// childVariable makes the test binary a program that uses NVML and prints the results.
const childVariable = "GNA_TEST_NVML"

func child() int {
	if os.Getenv("GNA_TEST_EVENTS") != "" {
		return childEvents()
	}
	library := nvml.New()
	_, ret := library.DeviceGetCount() // before the library is loaded
	fmt.Println("count before:", int(ret))
	library, release, err := Use()
	if err != nil {
		_, pathErr := Path()
		fmt.Println("no path:", errors.Is(pathErr, errNotLoaded))
		fmt.Println("use:", err)
		return 0
	}
	defer release()
	count, ret := library.DeviceGetCount()
	fmt.Println("count:", count, int(ret))
	device, ret := library.DeviceGetHandleByIndex(0)
	fmt.Println("handle:", int(ret))
	fmt.Println("values:", int(device.GetFieldValues(make([]nvml.FieldValue, 1))))
	_, ret = library.SystemGetCudaDriverVersion() // the scripted library does not have it
	fmt.Println("cuda:", int(ret))
	limits := memoryLimiter{&use{library, release}}
	fmt.Println("limits:", limits.Supported(gpu0) == nil)
	mode, err := ComputeMode(gpu0)
	fmt.Println("compute mode:", mode, err, SetComputeMode(gpu0, driver.ComputeModeExclusiveProcess))
	return 0
}

// runChild runs this test binary as a program with libraries from dir only.
func runChild(t *testing.T, dir string) (out string, code int) {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), os.Args[0])
	cmd.Env = append(os.Environ(), childVariable+"=1", "LD_LIBRARY_PATH="+dir)
	b, err := cmd.CombinedOutput()
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) {
		t.Fatal(err)
	}
	return string(b), cmd.ProcessState.ExitCode()
}

// TestLibraryMissing checks that calls without the library, with one that is no library, and of functions that it lacks return
// errors. Without symbols.c they end the process.
func TestLibraryMissing(t *testing.T) {
	t.Setenv("NVML_SCRIPT_DRIVER", "615.10")
	t.Setenv("NVML_SCRIPT_STATE", t.TempDir()) // the compute mode outlives a process
	invalid, older, complete := t.TempDir(), t.TempDir(), t.TempDir()
	if err := os.WriteFile(invalid+"/"+soname, []byte("not a library"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(compile(older, "-DLACK_FIELD_VALUES", "-DLACK_MEMORY_LIMITS"), compile(complete)); err != nil {
		t.Fatal(err)
	}
	const missing, noPath = "count before: 13\n", "no path: true\n"
	for _, tt := range []struct{ name, dir, want string }{
		{"no library", t.TempDir(), missing + noPath + "use: cannot load libnvidia-ml.so.1: libnvidia-ml.so.1: cannot open shared object file"},
		{"invalid", invalid, missing + noPath + "use: cannot load libnvidia-ml.so.1: " + invalid + "/libnvidia-ml.so.1: file too short"},
		{"older", older, missing + "count: 8 0\nhandle: 0\nvalues: 13\ncuda: 13\nlimits: false\ncompute mode: Default <nil> <nil>\n"},
		{"complete", complete, missing +
			"count: 8 0\nhandle: 0\nvalues: 0\ncuda: 13\nlimits: true\ncompute mode: Exclusive_Process <nil> <nil>\n"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if out, code := runChild(t, tt.dir); code != 0 || !strings.HasPrefix(out, tt.want) {
				t.Errorf("exit code %d and\n%swant\n%s", code, out, tt.want)
			}
		})
	}
}

// TestUseShares checks that users share one library, and that each release ends one use.
func TestUseShares(t *testing.T) {
	lib := newLibrary(t)
	library, first, err := Use()
	if err != nil {
		t.Fatal(err)
	}
	again, second, err := Use()
	if err != nil {
		t.Fatal(err)
	}
	if again != library {
		t.Error("the library is loaded twice")
	}
	first()
	first()
	if n := lib.Number("inits"); n != 1 {
		t.Errorf("%d Inits after one of two releases, want 1", n)
	}
	if _, ret := library.DeviceGetCount(); ret != nvml.SUCCESS {
		t.Error(Error(ret))
	}
	second()
	if _, ret := library.DeviceGetCount(); ret != nvml.ERROR_UNINITIALIZED {
		t.Errorf("after the last release: %v", Error(ret))
	}
}

func TestUseWithoutDriver(t *testing.T) {
	lib := newLibrary(t)
	lib.Do("unload")
	var code Error
	if _, _, err := Use(); !errors.As(err, &code) || nvml.Return(code) != nvml.ERROR_DRIVER_NOT_LOADED {
		t.Errorf("Use: %v, want NVML error 9", err)
	}
	lib.Do("load")
	_, release, err := Use()
	if err != nil {
		t.Fatal(err)
	}
	release()
}

func TestPath(t *testing.T) {
	if path, err := Path(); err != nil || !filepath.IsAbs(path) || filepath.Base(path) != soname {
		t.Errorf("%q, %v", path, err)
	}
}
