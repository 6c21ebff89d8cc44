//go:build cgo && linux

package memlimits

import (
	"bufio"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/health/driver"
	"github.com/gpu-node-agent/gpu-node-agent/health/nvml"
)

// nvmlScript names the socket of the scripted libnvidia-ml.so.1, in the process that uses it.
const nvmlScript = "NVML_SCRIPT"

// TestFollowerWithNVML tests the Follower with go-nvml and the scripted libnvidia-ml.so.1. It runs itself again with that library.
func TestFollowerWithNVML(t *testing.T) {
	if os.Getenv(nvmlScript) != "" {
		testFollowerWithNVML(t)
		return
	}
	dir := t.TempDir()
	if out, err := exec.CommandContext(t.Context(), "../../health/nvml/testdata/build-libnvidia-ml", dir).CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	cmd := exec.CommandContext(t.Context(), os.Args[0], "-test.run=^TestFollowerWithNVML$", "-test.v")
	cmd.Env = append(os.Environ(), "LD_LIBRARY_PATH="+dir, nvmlScript+"="+filepath.Join(dir, "script"))
	if out, err := cmd.CombinedOutput(); err != nil || !strings.Contains(string(out), "--- PASS: TestFollowerWithNVML") {
		t.Errorf("%v\n%s", err, out)
	}
}

func testFollowerWithNVML(t *testing.T) {
	if _, err := nvml.Path(); err != nil { // the library listens from now on
		t.Fatal(err)
	}
	do := func(format string, args ...any) string {
		t.Helper()
		c, err := net.Dial("unix", os.Getenv(nvmlScript))
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = c.Close() }()
		fmt.Fprintf(c, format+"\n", args...)
		reply, err := bufio.NewReader(c).ReadString('\n')
		if err != nil {
			t.Fatal(err)
		}
		return strings.TrimSpace(reply)
	}
	gpu := func(i int) health.DeviceID {
		return health.DeviceID(fmt.Sprintf("GPU-%08d-0000-0000-0000-000000000000", i))
	}
	for name, test := range map[string]struct {
		driver string
		want   Enforcement
	}{"615": {"615.10.02", Driver}, "610": {"610.1", None}} {
		t.Run(name, func(t *testing.T) {
			do("driver %s", test.driver)
			n := newNode(t)
			n.open = nvml.OpenMemoryLimits
			n.setDevices(test.driver, gpu(0), gpu(1))
			n.launch()
			dir := n.run("one", 1)
			do("used 1 %d %s", 7*gib, dir)
			n.hold(gpu(1), "one", 10)
			n.await(func(s *Snapshot) bool { return len(s.Containers) == 1 })
			c := n.Latest().Load().Containers[0]
			if limited := test.want == Driver; c.Enforcement != test.want || (c.Reason == "") != limited || c.HasUsed != limited ||
				limited && c.Used != 7*gib {
				t.Errorf("%+v", c)
			}
			want := fmt.Sprintf("0 %d", driver.NoMemoryLimit)
			if test.want == Driver {
				want = fmt.Sprint("0 ", 10*gib)
			}
			if got := do("limits 1 %s", dir); got != want {
				t.Errorf("the driver has %q, want %q", got, want)
			}
			n.stop()
			if inits := do("inits"); inits != "0" {
				t.Errorf("%s Inits are left", inits)
			}
		})
	}
}
