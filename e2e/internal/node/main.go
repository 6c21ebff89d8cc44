// Package node runs a kubelet's device manager and an agent with simulated GPUs in a test's directory.
package node

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
)

// binary is the path of the agent: $AGENT_BIN, or built by Main.
var binary string //nolint:gochecknoglobals // nothing else leads from TestMain to a test

// Main runs the tests of a package two levels below the module's root, and returns the exit code. It provides the
// agent's binary first; before may start other programs with a directory for their files.
func Main(m *testing.M, before func(dir string) (after func(), err error)) int {
	dir, err := os.MkdirTemp("", "gpu-node-agent-e2e")
	if err == nil {
		defer func() { _ = os.RemoveAll(dir) }()
		binary, err = agent(dir)
	}
	if err == nil {
		err = redirectKlog()
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

// agent returns the path of the agent, which it builds into dir unless AGENT_BIN is set.
func agent(dir string) (string, error) {
	path := os.Getenv("AGENT_BIN")
	switch {
	case path == "":
		path = filepath.Join(dir, "gpu-node-agent")
		build := exec.Command("go", "build", "-o", path, ".") //nolint:noctx // it exits
		build.Dir = filepath.Join("..", "..")
		if out, err := build.CombinedOutput(); err != nil {
			return "", fmt.Errorf("%v: %w\n%s", build, err, out)
		}
	case !filepath.IsAbs(path):
		return "", errors.New("AGENT_BIN must be an absolute path: tests run in their own directory")
	}
	return path, nil
}

// Host returns a loopback address that depends on the process, since all of 127.0.0.0/8 is local. A free port of
// 127.0.0.1 could be taken by another test program before it is used, or while its user restarts.
func Host() string {
	pid := os.Getpid() // below 1<<22: proc_sys_kernel(5)
	return fmt.Sprintf("127.%d.%d.%d", 64+pid>>16, pid>>8&0xff, pid&0xff)
}
