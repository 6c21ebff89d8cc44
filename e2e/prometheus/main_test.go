// Package prometheus holds the chart's dashboards and rules against a real Prometheus that scrapes the built agent
// while its simulated GPUs break and recover.
package prometheus

import (
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"k8s.io/klog/v2"

	"github.com/gpu-node-agent/gpu-node-agent/e2e/internal/binary"
)

// agentBinary is the program under test: $AGENT_BIN, or what TestMain builds from this repository.
var agentBinary string

// chart is where the dashboards and the rules are.
var chart = filepath.Join("..", "..", "charts", "gpu-node-agent")

func TestMain(m *testing.M) {
	flag.Parse()
	os.Exit(run(m))
}

func run(m *testing.M) int {
	fail := func(err error) int {
		fmt.Fprintln(os.Stderr, err)
		return 2
	}
	dir, err := os.MkdirTemp("", "gpu-node-agent-e2e")
	if err != nil {
		return fail(err)
	}
	defer os.RemoveAll(dir)
	if agentBinary, err = binary.Agent(dir); err != nil {
		return fail(err)
	}
	flags := flag.NewFlagSet("klog", flag.ContinueOnError)
	klog.InitFlags(flags)
	klog.SetOutput(io.Discard) // the kubelet's log
	if err := flags.Parse([]string{"-logtostderr=false", "-stderrthreshold=FATAL"}); err != nil {
		return fail(err)
	}
	return m.Run()
}

// tool returns the path of prometheus or promtool: the system's, or what need.sh has unpacked.
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
		t.Fatalf("%s is not installed: neither in PATH nor at %s; e2e/prometheus/need.sh unpacks Debian's package there", name, path)
	}
	return path
}
