package chaos

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"syscall"
	"time"
)

// blockLog stops reading the agent's standard error and makes the agent write more than fits into the pipe (64 KiB on
// Linux: pipe(7)).
func (w *world) blockLog(ctx context.Context) error {
	if w.logBlocked {
		return nil
	}
	w.log.blocked.Lock()
	w.logBlocked = true
	const lines, each = 1500, 150 // bytes at least
	ctx, cancel := context.WithTimeout(ctx, scaled(30*time.Second))
	defer cancel()
	for n := range lines {
		if err := w.Event(ctx, "{gpu: 0, temperature: 0}"); err != nil { // no change, but a log line
			return violated("log", "log is not read, and after %d lines, at least %d bytes: %v", n, n*each, err)
		}
	}
	return nil
}

// readLog reads the agent's standard error again.
func (w *world) readLog() {
	if w.logBlocked {
		w.logBlocked = false
		w.log.blocked.Unlock()
	}
}

// endBlocked ends an agent whose log is not read. The agent must exit in time without it.
func (w *world) endBlocked(ctx context.Context, how string) error {
	signal := syscall.SIGTERM
	if how == "kill" {
		signal = syscall.SIGKILL
	}
	if err := w.Signal(signal); err != nil {
		return err
	}
	pid := w.Pid()
	err := w.await(context.WithoutCancel(ctx), scaled(15*time.Second), func(context.Context) error {
		if exited, err := zombie(pid); err != nil || !exited {
			return violated("end", "log is not read, and the agent does not exit: %v", err)
		}
		return nil
	})
	w.readLog()
	if err == nil && how == "kill" {
		<-w.Exited()
	}
	return err
}

// zombie reports whether a process has exited and its parent has not waited for it (proc_pid_stat(5)).
func zombie(pid int) (bool, error) {
	text, err := os.ReadFile(filepath.Join("/proc", strconv.Itoa(pid), "stat"))
	if errors.Is(err, os.ErrNotExist) {
		return true, nil
	}
	if err != nil {
		return false, err
	}
	rest := bytes.Fields(text[bytes.LastIndexByte(text, ')')+1:])
	if len(rest) == 0 {
		return false, fmt.Errorf("/proc/%d/stat: %q", pid, text)
	}
	return rest[0][0] == 'Z', nil
}
