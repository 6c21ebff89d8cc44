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

// blockLog lets nobody read the agent's standard error, and has the agent write more than a pipe takes (64 KiB on Linux:
// pipe(7)) and the reader of it has taken already.
func (w *world) blockLog(ctx context.Context) error {
	if w.blocked {
		return nil
	}
	w.log.blocked.Lock()
	w.blocked = true
	const lines, each = 1500, 150 // each at least so many bytes
	ctx, cancel := context.WithTimeout(ctx, slow(30*time.Second))
	defer cancel()
	for n := range lines {
		if err := w.Event(ctx, "{gpu: 0, temperature: 0}"); err != nil { // nothing, with a line about it
			return violated("log", "nobody reads it, and after %d lines, %d bytes or more: %v", n, n*each, err)
		}
	}
	return nil
}

// readLog has the agent's standard error read again.
func (w *world) readLog() {
	if w.blocked {
		w.blocked = false
		w.log.blocked.Unlock()
	}
}

// endBlocked ends an agent whose log nobody reads: it is gone in time, and only then is its log read.
func (w *world) endBlocked(ctx context.Context, how string) error {
	signal := syscall.SIGTERM
	if how == "kill" {
		signal = syscall.SIGKILL
	}
	if err := w.Signal(signal); err != nil {
		return err
	}
	pid := w.Pid()
	err := w.await(context.WithoutCancel(ctx), slow(15*time.Second), func(context.Context) error {
		if gone, err := zombie(pid); err != nil || !gone {
			return violated("end", "nobody reads its log, and it does not end: %v", err)
		}
		return nil
	})
	w.readLog()
	if err == nil && how == "kill" {
		<-w.Exited()
	}
	return err
}

// zombie tells whether a process has ended and nobody has waited for it yet (proc_pid_stat(5)).
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
