//go:build cluster

// Package cluster tests the Helm chart on a real cluster of one node: etcd, kube-apiserver, scheduler, controller
// manager, kubelet, containerd and Prometheus. It needs root and Linux; ./run starts it.
package cluster

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/gpu-node-agent/gpu-node-agent/e2e/internal/process"
)

// machineRole is this program as process 1 of its own machine.
const machineRole = "machine"

func TestMain(m *testing.M) {
	switch part := os.Getenv(process.RoleEnv); part {
	case "":
		os.Exit(startMachine())
	case machineRole:
		os.Exit(runTests(m))
	default:
		play(part)
	}
}

// workDir returns the directory of build results, the logs of the last run, and the state of the current one. It is
// below bin, which git ignores.
func workDir() (string, error) { return filepath.Abs(filepath.Join("..", "..", "bin", "e2e-cluster")) }

// lockDir locks the directory for this run until the file is closed or the process ends.
func lockDir(dir string) (*os.File, error) {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return nil, err
	}
	f, err := os.OpenFile(filepath.Join(dir, "lock"), os.O_RDWR|os.O_CREATE, 0o644)
	if err != nil {
		return nil, err
	}
	err = syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB)
	if errors.Is(err, syscall.EWOULDBLOCK) {
		holder, _ := io.ReadAll(f) // empty if it has not written yet
		err = fmt.Errorf("locked by another run: %s; each run needs its own clone", strings.TrimSpace(string(holder)))
	}
	if err == nil {
		err = f.Truncate(0)
	}
	if err == nil {
		_, err = fmt.Fprintf(f, "process %d, since %s\n", os.Getpid(), time.Now().Format(time.DateTime))
	}
	if err != nil {
		return nil, fmt.Errorf("%s: %w", dir, errors.Join(err, f.Close()))
	}
	return f, nil
}

// startMachine builds everything and starts the machine. When the machine or this process ends, the kernel kills everything
// in it.
func startMachine() int {
	// The kernel kills the machine when the thread that created it ends.
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
	lock, err := lockDir(dir)
	if err != nil {
		return fail("directory", err)
	}
	defer func() { _ = lock.Close() }()
	if err := errors.Join(os.RemoveAll(filepath.Join(dir, "state")), os.RemoveAll(filepath.Join(dir, "logs")),
		os.MkdirAll(filepath.Join(dir, "state"), 0o755), os.MkdirAll(filepath.Join(dir, "logs"), 0o755)); err != nil {
		return fail("directory", err)
	}
	defer func() { _ = os.RemoveAll(filepath.Join(dir, "state")) }() // otherwise the next run does
	if err := build(ctx, dir); err != nil {
		return fail("build", err)
	}
	g := &cgroups{name: fmt.Sprintf("%s%d", cgroupPrefix, os.Getpid())}
	removeMountPoints := func() {}
	defer func() { g.remove(); removeMountPoints() }()
	// Create the group first: then the end of another clone's run sees this one and keeps the mount points.
	if err := errors.Join(removeLeftovers(), g.create()); err != nil {
		return fail("cgroups", err)
	}
	if removeMountPoints, err = makeMountPoints(filepath.Join(dir, "mount-points")); err != nil {
		return fail("mount points", err)
	}
	self, err := os.Executable()
	if err != nil {
		return fail("machine", err)
	}
	cmd := exec.CommandContext(ctx, self, os.Args[1:]...)
	cmd.Env = append(os.Environ(), process.RoleEnv+"="+machineRole, cgroupEnv+"="+g.name)
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
		return fail("see the first failed step above; the logs are in "+logs, err)
	}
	fmt.Println("the logs are in", logs)
	return 0
}

// runTests runs the tests in the machine.
func runTests(m *testing.M) int {
	dir, err := workDir()
	if err == nil {
		theCluster, err = newCluster(dir)
	}
	if err == nil {
		err = theCluster.installCustomResources()
	}
	if err != nil {
		fmt.Fprintf(os.Stderr, "FAIL: cannot start the cluster: %v\n", err)
		return 1
	}
	return m.Run()
}
