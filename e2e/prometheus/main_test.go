// Package prometheus tests the chart's dashboards and rules in a real Prometheus that scrapes the built agent while its
// simulated GPUs fail and recover.
package prometheus

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/gpu-node-agent/gpu-node-agent/e2e/internal/node"
)

// chart is the directory of the dashboards and the rules.
var chart = filepath.Join("..", "..", "charts", "gpu-node-agent")

// control is the path of the stand-in for nvidia-cuda-mps-control.
var control string

func TestMain(m *testing.M) {
	os.Exit(node.Main(m, func(dir string) (after func(), err error) {
		control = filepath.Join(dir, "nvidia-cuda-mps-control")
		build := exec.Command("go", "build", "-o", control, "./internal/mpstest/nvidia-cuda-mps-control")
		build.Dir = filepath.Join("..", "..")
		if out, err := build.CombinedOutput(); err != nil {
			return nil, fmt.Errorf("%v: %w\n%s", build, err, out)
		}
		return func() {}, nil
	}))
}

// tool returns the path of prometheus or promtool: installed, or unpacked by need.sh.
func tool(t *testing.T, name string) string {
	t.Helper()
	if path, err := exec.LookPath(name); err == nil {
		return path
	}
	path, err := filepath.Abs(filepath.Join("..", "..", "bin", "prometheus", "usr", "bin", name))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(path); err != nil {
		t.Fatalf("%s is neither in PATH nor at %s; e2e/prometheus/need.sh unpacks Debian's package there", name, path)
	}
	return path
}
