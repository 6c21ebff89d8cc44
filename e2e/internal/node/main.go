// Package node is a test's machine: a directory in place of /var/lib/kubelet, a kubelet's device manager and an agent
// with simulated GPUs, which come and go.
package node

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
)

// binary is the agent: $AGENT_BIN, or what Main builds from this repository.
var binary string //nolint:gochecknoglobals // nothing else leads from TestMain to a test

// Main runs the tests of a package in a directory two levels down, and returns the program's exit code. Before them
// it has the agent, and what before starts with a directory for its files.
func Main(m *testing.M, before func(dir string) (after func(), err error)) int {
	dir, err := os.MkdirTemp("", "gpu-node-agent-e2e")
	if err == nil {
		defer func() { _ = os.RemoveAll(dir) }()
		binary, err = agent(dir)
	}
	if err == nil && before != nil {
		var after func()
		if after, err = before(dir); err == nil {
			defer after()
		}
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 2
	}
	return m.Run()
}

// agent is the path of the agent, which it builds into dir if it has to.
func agent(dir string) (string, error) {
	path := os.Getenv("AGENT_BIN")
	switch {
	case path == "":
		path = filepath.Join(dir, "gpu-node-agent")
		build := exec.Command("go", "build", "-o", path, ".") //nolint:noctx // it ends by itself
		build.Dir = filepath.Join("..", "..")
		if out, err := build.CombinedOutput(); err != nil {
			return "", fmt.Errorf("%v: %w\n%s", build, err, out)
		}
	case !filepath.IsAbs(path):
		return "", errors.New("AGENT_BIN must be an absolute path: tests run in their own directory")
	}
	return path, nil
}

// Host is an address of this machine that no other test program has, as all of 127.0.0.0/8 is this machine's. A free
// port of 127.0.0.1 would be anybody's until it is used, and again while what uses it restarts.
func Host() string {
	pid := os.Getpid() // below 1<<22: proc_sys_kernel(5)
	return fmt.Sprintf("127.%d.%d.%d", 64+pid>>16, pid>>8&0xff, pid&0xff)
}
