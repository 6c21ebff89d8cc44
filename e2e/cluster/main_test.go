//go:build cluster

// Package cluster holds the Helm chart against a real cluster of one node: etcd, kube-apiserver, scheduler,
// controller manager, kubelet, containerd, and Prometheus. It needs root and Linux; ./run starts it.
package cluster

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"runtime"
	"syscall"
	"testing"
)

// insideRole is this program again, as process 1 of a machine of its own.
const insideRole = "machine"

func TestMain(m *testing.M) {
	switch part := os.Getenv(role); part {
	case "":
		os.Exit(outside())
	case insideRole:
		os.Exit(inside(m))
	default:
		play(part)
	}
}

// workDir holds what is built, the logs of the last run, and the state of one that goes on. It is below bin, which
// git does not see.
func workDir() (string, error) { return filepath.Abs(filepath.Join("..", "..", "bin", "e2e-cluster")) }

// outside builds all that is needed and starts the machine. When that ends, by itself or because this process is
// killed, the kernel ends everything in it.
func outside() int {
	// The kernel kills the machine when the thread that has made it ends.
	runtime.LockOSThread()
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	fail := func(step string, err error) int {
		fmt.Fprintf(os.Stderr, "FAIL: %s: %v\n", step, err)
		return 1
	}
	if err := requirements(); err != nil {
		return fail("requirements", err)
	}
	dir, err := workDir()
	if err != nil {
		return fail("directory", err)
	}
	g := cgroups{name: fmt.Sprintf("gpu-node-agent-e2e-%d", os.Getpid())}
	if err := errors.Join(os.RemoveAll(filepath.Join(dir, "state")), os.RemoveAll(filepath.Join(dir, "logs")),
		os.MkdirAll(filepath.Join(dir, "state"), 0o755), os.MkdirAll(filepath.Join(dir, "logs"), 0o755)); err != nil {
		return fail("directory", err)
	}
	defer os.RemoveAll(filepath.Join(dir, "state"))
	if err := build(ctx, dir); err != nil {
		return fail("build", err)
	}
	unmake, err := makeMountPoints()
	defer unmake()
	if err != nil {
		return fail("mount points", err)
	}
	defer g.remove()
	if err := g.make(); err != nil {
		return fail("cgroups", err)
	}
	self, err := os.Executable()
	if err != nil {
		return fail("machine", err)
	}
	cmd := exec.CommandContext(ctx, self, os.Args[1:]...)
	cmd.Env = append(os.Environ(), role+"="+insideRole, cgroupEnv+"="+g.name)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = nil, os.Stdout, os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags: syscall.CLONE_NEWNS | syscall.CLONE_NEWPID | syscall.CLONE_NEWNET | syscall.CLONE_NEWUTS | syscall.CLONE_NEWIPC,
		Pdeathsig:  syscall.SIGKILL, Setpgid: true,
	}
	err = cmd.Run()
	logs := filepath.Join(dir, "logs")
	switch {
	case ctx.Err() != nil:
		return fail("interrupted", ctx.Err())
	case err != nil:
		return fail("see the first step above that failed; the logs are in "+logs, err)
	}
	fmt.Println("the logs are in", logs)
	return 0
}

// inside runs the tests in the machine.
func inside(m *testing.M) int {
	dir, err := workDir()
	if err == nil {
		theCluster, err = newCluster(dir)
	}
	if err == nil {
		err = theCluster.installCustomResources()
	}
	if err != nil {
		fmt.Fprintf(os.Stderr, "FAIL: the cluster does not start: %v\n", err)
		return 1
	}
	return m.Run()
}
