package mps

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/gpu-node-agent/gpu-node-agent/health"
)

// Limits of a run of the control program.
const (
	controlTimeout   = 10 * time.Second // without an answer the daemon hangs
	controlKillDelay = 2 * time.Second  // for the program to end after SIGKILL
	maxAnswer        = 64 << 10         // bytes
	maxQuoted        = 300              // bytes of an answer in an error
)

// Why a command was not executed. Each says something else about the daemon.
var (
	errNoDaemon = errors.New("no MPS control daemon answers at its pipe directory") // it does not run, or its socket is missing
	errNoAnswer = errors.New("the MPS control daemon does not answer")              // it hangs
	errRefused  = errors.New("the MPS control daemon refuses the command")          // it answers
	errProgram  = errors.New("cannot run the control program")                      // nothing: it was not asked
)

// runControl runs the control program with one command, so that answers cannot be mixed up.
func runControl(ctx context.Context, program string, env []string, command string) (answer string, err error) {
	ctx, cancel := context.WithTimeoutCause(ctx, controlTimeout, errNoAnswer)
	defer cancel()
	var stdout, stderr boundedBuffer
	calls := health.Guard[struct{}, error]{Grace: controlKillDelay}
	err, abandoned := calls.Call(ctx.Done(), struct{}{}, func() error {
		// Pdeathsig is sent when the thread ends that started the program.
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		closeOnExec()
		cmd := exec.CommandContext(ctx, program) //nolint:gosec // of the configuration
		cmd.Env, cmd.Stdin, cmd.Stdout, cmd.Stderr = env, strings.NewReader(command+"\n"), &stdout, &stderr
		cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
		cmd.Cancel = func() error {
			if err := cmd.Process.Kill(); err != nil { // it has ended: its group may be another's
				return err
			}
			return syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL)
		}
		cmd.WaitDelay = controlKillDelay / 2
		return cmd.Run()
	}, nil)
	if abandoned != nil { // the program does not end even by SIGKILL
		return "", context.Cause(ctx)
	}
	return controlResult(string(stdout.text), string(stderr.text), err, context.Cause(ctx))
}

// controlResult returns the answer, or one of the errors above. interrupted is why the run was ended, nil if it was not.
func controlResult(stdout, stderr string, err, interrupted error) (string, error) {
	exit, exited := errors.AsType[*exec.ExitError](err)
	text := quote(stdout + "\n" + stderr)
	switch lower := strings.ToLower(text); {
	case strings.Contains(lower, "cannot find mps control daemon"):
		return "", errNoDaemon
	case err == nil && !refuses(strings.ToLower(stdout)):
		return strings.TrimSpace(stdout), nil
	case interrupted != nil:
		return "", interrupted
	case err == nil:
		return "", fmt.Errorf("%w: %s", errRefused, text)
	case exited && exit.Exited():
		return "", fmt.Errorf("%w: exit code %d: %s", errRefused, exit.ExitCode(), text)
	case errors.Is(err, exec.ErrNotFound) || errors.Is(err, os.ErrNotExist) || errors.Is(err, os.ErrPermission):
		return "", fmt.Errorf("%w: plugin.sharing.mps.control: %w", errProgram, err)
	}
	return "", fmt.Errorf("%w: %w", errProgram, err) // killed by somebody else, or no memory
}

// refuses reports whether an answer is a refusal. The documentation does not list them, and not each has an exit code.
func refuses(answer string) bool {
	return slices.ContainsFunc([]string{
		"unknown", "unrecognized", "invalid", "error", "fail", "not found", "not supported", "cannot", "usage:", "does not exist", "no such",
	}, func(text string) bool { return strings.Contains(answer, text) })
}

// lacksCommand reports whether an error means that the control program does not have the command.
func lacksCommand(err error) bool {
	text := strings.ToLower(fmt.Sprint(err))
	return errors.Is(err, errRefused) && (strings.Contains(text, "unknown") || strings.Contains(text, "unrecognized"))
}

// quote returns the beginning of an answer on one line.
func quote(text string) string {
	text = strings.Join(strings.Fields(strings.ToValidUTF8(text, "?")), " ")
	if len(text) > maxQuoted {
		text = strings.ToValidUTF8(text[:maxQuoted], "") + "…"
	}
	return text
}

// boundedBuffer keeps the first maxAnswer bytes and discards the rest.
type boundedBuffer struct{ text []byte }

func (b *boundedBuffer) Write(p []byte) (int, error) {
	b.text = append(b.text, p[:min(len(p), maxAnswer-len(b.text))]...)
	return len(p), nil
}
