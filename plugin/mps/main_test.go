package mps

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strconv"
	"syscall"
	"testing"

	"go.uber.org/zap"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/health/driver"
	"github.com/gpu-node-agent/gpu-node-agent/health/durable"
	"github.com/gpu-node-agent/gpu-node-agent/internal/mpstest"
)

// The variables of a Supervisor in a process of its own, which a test can kill.
const (
	testRoot    = "MPS_TEST_ROOT"
	testControl = "MPS_TEST_CONTROL"
	testModes   = "MPS_TEST_MODES"
	testMount   = "MPS_TEST_MOUNT"
)

func TestMain(m *testing.M) {
	if root := os.Getenv(testRoot); root != "" {
		os.Exit(superviseUntilSignal(Root(root)))
	}
	if pipe := os.Getenv(testImpostor); pipe != "" {
		os.Exit(impersonate(pipe))
	}
	os.Exit(mpstest.Main(m))
}

func superviseUntilSignal(root Root) int {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer stop()
	log, err := zap.NewDevelopment(zap.AddStacktrace(zap.PanicLevel))
	if err != nil {
		panic(err)
	}
	s := Supervisor{
		Root: root, Control: os.Getenv(testControl), ComputeModes: fileModes(os.Getenv(testModes)),
		MountShm: os.Getenv(testMount) != "", Log: log,
	}
	if err := s.Run(ctx); err != nil {
		log.Error("failed", zap.Error(err))
		return 1
	}
	return 0
}

// startProcess starts a Supervisor in a process of its own, which ends with the test.
func (n *node) startProcess(configure ...func(*exec.Cmd)) *exec.Cmd {
	n.t.Helper()
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), testRoot+"="+string(n.root), testControl+"="+n.program.Path, testModes+"="+n.modes)
	cmd.Stdout, cmd.Stderr = n.t.Output(), n.t.Output()
	for _, f := range configure {
		f(cmd)
	}
	if err := cmd.Start(); err != nil {
		n.t.Fatal(err)
	}
	n.t.Cleanup(func() { killProcess(cmd) })
	return cmd
}

// killProcess kills a process and waits for its end.
func killProcess(cmd *exec.Cmd) {
	_ = cmd.Process.Kill()
	_, _ = cmd.Process.Wait()
}

// fileModes returns compute modes that several processes share: a file per GPU in a directory. A file "failure" makes each call fail,
// and "kill-before" or "kill-after" kills the process that sets a mode.
func fileModes(dir string) *ComputeModes {
	failure := func() error {
		text, err := os.ReadFile(filepath.Join(dir, "failure"))
		if err != nil {
			return nil //nolint:nilerr // no failure
		}
		return errors.New(string(text))
	}
	kill := func(file string) {
		if _, err := os.Stat(filepath.Join(dir, file)); err == nil {
			_ = syscall.Kill(os.Getpid(), syscall.SIGKILL)
			select {}
		}
	}
	return &ComputeModes{
		Get: func(gpu health.DeviceID) (driver.ComputeMode, error) {
			text, err := os.ReadFile(filepath.Join(dir, string(gpu)))
			if errors.Is(err, fs.ErrNotExist) {
				return driver.ComputeModeDefault, failure()
			}
			n, parseErr := strconv.Atoi(string(text))
			return driver.ComputeMode(n), errors.Join(err, parseErr, failure())
		},
		Set: func(gpu health.DeviceID, mode driver.ComputeMode) error {
			kill("kill-before")
			defer kill("kill-after")
			_, err := durable.Options{}.Replace(filepath.Join(dir, string(gpu)), fmt.Append(nil, int32(mode)))
			return errors.Join(failure(), err)
		},
	}
}
