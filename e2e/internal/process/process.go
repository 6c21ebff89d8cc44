// Package process runs the programs of a test: the agent, Prometheus, and the parts of Kubernetes.
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

// Role is the variable that makes a test's own binary one of the parts of Kubernetes: it holds their code anyway, and
// there are fewer programs to be linked.
const Role = "GPU_NODE_AGENT_E2E_ROLE"

// grace is how long a program may take to end when it is told to: what the chart gives the agent's pod.
const grace = 15 * time.Second

// Process is a program that runs. It ends with this process, if not before.
type Process struct {
	cmd    *exec.Cmd
	log    string // the file that has what it says, or ""
	exited chan struct{}
	err    error // how it ended; to be read when exited is closed
}

// Start starts a command.
func Start(cmd *exec.Cmd) (*Process, error) {
	// A group of its own, so that whatever it starts ends with it.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	cmd.WaitDelay = time.Second // what it has started may hold its output
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

// Logged starts a command, and appends what it says to a file.
func Logged(log string, cmd *exec.Cmd) (*Process, error) {
	out, err := os.OpenFile(log, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return nil, err
	}
	defer func() { _ = out.Close() }() // the process has its own
	cmd.Stdout, cmd.Stderr = out, out
	p, err := Start(cmd)
	if err == nil {
		p.log = log
	}
	return p, err
}

// Play starts this very program in another role, in the directory of its log.
func Play(role, log string, args ...string) (*Process, error) {
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	cmd := exec.Command(self, args...) //nolint:noctx // Kill ends it with all that it has started
	cmd.Env, cmd.Dir = append(os.Environ(), Role+"="+role), filepath.Dir(log)
	return Logged(log, cmd)
}

// Signal sends a signal to the process alone.
func (p *Process) Signal(s os.Signal) error { return p.cmd.Process.Signal(s) }

// Stop ends it as its service manager would, and returns an error unless it has ended with status 0.
func (p *Process) Stop() error {
	_ = p.Signal(syscall.SIGTERM) // an error: it has ended already
	select {
	case <-p.exited:
		return p.err
	case <-time.After(grace):
		p.Kill()
		return fmt.Errorf("it still ran %v after SIGTERM", grace)
	}
}

// Kill ends it at once, with all that it has started, and waits until it is gone.
func (p *Process) Kill() {
	_ = syscall.Kill(-p.cmd.Process.Pid, syscall.SIGKILL) // an error: it has ended already
	<-p.exited
}

// Await waits until something holds, and returns how long that took. It gives up after patience, or when one of the
// processes has ended without which it cannot come to hold.
func Await(ctx context.Context, patience time.Duration, holds func(context.Context) error, need ...*Process) (time.Duration, error) {
	began := time.Now()
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	why := errors.New("it was never looked at to the end")
	for {
		err := holds(ctx)
		if err == nil {
			return time.Since(began), nil
		}
		if ctx.Err() == nil { // else the error may say only that
			why = err
		}
		for _, p := range need {
			select {
			case <-p.exited:
				return 0, fmt.Errorf("%w; %s", why, p.ended())
			default:
			}
		}
		select {
		case <-ctx.Done():
			return 0, fmt.Errorf("not within %v: %w", patience, why)
		case <-time.After(50 * time.Millisecond):
		}
	}
}

// ended says how it ended, with the end of its log if it has one.
func (p *Process) ended() string {
	text, _ := os.ReadFile(p.log) // nothing is as good as an error
	how := "status 0"
	if p.err != nil {
		how = p.err.Error()
	}
	return fmt.Sprintf("%s has ended: %s\n%s", filepath.Base(cmp.Or(p.log, p.cmd.Path)), how, text[max(0, len(text)-4000):])
}
