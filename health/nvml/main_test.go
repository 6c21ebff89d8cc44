//go:build cgo && linux

package nvml

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"go.uber.org/goleak"

	"github.com/gpu-node-agent/gpu-node-agent/health/nvml/internal/script"
)

func TestMain(m *testing.M) {
	if os.Getenv(childVariable) != "" {
		os.Exit(child())
	}
	os.Exit(run(m))
}

func run(m *testing.M) int {
	dir, err := os.MkdirTemp("", "libnvidia-ml")
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	defer func() { _ = os.RemoveAll(dir) }()
	err = compile(dir)
	if err == nil {
		process.mu.Lock()
		err = load(filepath.Join(dir, soname)) // go-nvml finds the loaded library by its soname
		process.mu.Unlock()
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "the scripted libnvidia-ml.so.1:", err)
		return 1
	}
	return m.Run()
}

// compile builds the scripted libnvidia-ml.so.1 in a directory.
func compile(dir string, flags ...string) error {
	if out, err := exec.Command("testdata/build-libnvidia-ml", append([]string{dir}, flags...)...).CombinedOutput(); err != nil {
		return fmt.Errorf("%w\n%s", err, out)
	}
	return nil
}

// newLibrary resets the scripted library. The cleanup checks that the test left nothing open.
func newLibrary(t testing.TB) script.Library {
	t.Helper()
	lib := script.Find(t)
	t.Cleanup(func() {
		lib.Do("release")
		if test, ok := t.(*testing.T); ok {
			goleak.VerifyNone(test)
		}
		if sets, inits := lib.Number("sets"), lib.Number("inits"); sets != 0 || inits != 0 {
			t.Errorf("%d sets of events and %d Inits are left", sets, inits)
		}
	})
	return lib
}
