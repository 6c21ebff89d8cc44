// Package process runs the programs of a test: the agent, Prometheus and the components of Kubernetes.
package process

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"time"
)

// RoleEnv is the environment variable that makes a test's binary run as a component of Kubernetes. The binary contains
// their code anyway, and linking separate programs takes time.
const RoleEnv = "GPU_NODE_AGENT_E2E_ROLE"

// stopTimeout is how long a program may take to exit after SIGTERM: the chart's terminationGracePeriodSeconds.
const stopTimeout = 15 * time.Second

// Process is a running program. It ends at the latest with this process.
type Process struct {
	cmd    *exec.Cmd
	log    string // path of its output, or ""
	exited chan struct{}
	err    error // exit error; read it after exited is closed
}

// Start starts a command.
func Start(cmd *exec.Cmd) (*Process, error) {
	// A process group, so that its children end with it.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	cmd.WaitDelay = time.Second // its children may hold its output open
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	p := &Process{cmd: cmd, exited: make(chan struct{})}
	go func() {
		p.err = cmd.Wait()
		close(p.exited)
	}()
	return p, nil
}

// StartLogged starts a command and appends its output to a file.
func StartLogged(log string, cmd *exec.Cmd) (*Process, error) {
	out, err := os.OpenFile(log, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return nil, err
	}
	defer func() { _ = out.Close() }() // the process has its own descriptor
	cmd.Stdout, cmd.Stderr = out, out
	p, err := Start(cmd)
	if err == nil {
		p.log = log
	}
	return p, err
}

// StartRole starts this program in another role, in the directory of its log.
func StartRole(role, log string, args ...string) (*Process, error) {
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	cmd := exec.Command(self, args...) //nolint:noctx // Kill ends it with all that it has started
	cmd.Env, cmd.Dir = append(os.Environ(), RoleEnv+"="+role), filepath.Dir(log)
	return StartLogged(log, cmd)
}

// Signal sends a signal to the process only.
func (p *Process) Signal(s os.Signal) error { return p.cmd.Process.Signal(s) }

// Stop sends SIGTERM, as a service manager does, and returns an error unless the process exits with status 0.
func (p *Process) Stop() error {
	_ = p.Signal(syscall.SIGTERM) // fails if it has exited
	select {
	case <-p.exited:
		return p.err
	case <-time.After(stopTimeout):
		p.Kill()
		return fmt.Errorf("still running %v after SIGTERM", stopTimeout)
	}
}

// Kill kills the process group and waits for the process.
func (p *Process) Kill() {
	_ = syscall.Kill(-p.cmd.Process.Pid, syscall.SIGKILL) // fails if it has exited
	<-p.exited
}

// Await waits until holds returns nil, and returns the time that took. It fails after patience, or when a process in
// need exits.
func Await(ctx context.Context, timeout time.Duration, holds func(context.Context) error, need ...*Process) (time.Duration, error) {
	start := time.Now()
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	lastErr := errors.New("no check finished")
	for {
		err := holds(ctx)
		if err == nil {
			return time.Since(start), nil
		}
		if ctx.Err() == nil { // otherwise err may only report the end of ctx
			lastErr = err
		}
		for _, p := range need {
			select {
			case <-p.exited:
				return 0, fmt.Errorf("%w; %s", lastErr, p.exitMessage())
			default:
			}
		}
		select {
		case <-ctx.Done():
			return 0, fmt.Errorf("not within %v: %w", timeout, lastErr)
		case <-time.After(50 * time.Millisecond):
		}
	}
}

// exitMessage describes how the process exited, with the end of its log.
func (p *Process) exitMessage() string {
	text, _ := os.ReadFile(p.log) // no log reads as an empty one
	result := "status 0"
	if p.err != nil {
		result = p.err.Error()
	}
	return fmt.Sprintf("%s exited: %s\n%s", filepath.Base(cmp.Or(p.log, p.cmd.Path)), result, text[max(0, len(text)-4000):])
}
