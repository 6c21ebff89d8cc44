package mps

import (
	"context"
	"errors"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"github.com/prometheus/procfs"
	"golang.org/x/sys/unix"

	"github.com/gpu-node-agent/gpu-node-agent/health"
)

// The variables of MPS.
const (
	pipeVariable = "CUDA_MPS_PIPE_DIRECTORY"
	logVariable  = "CUDA_MPS_LOG_DIRECTORY"
)

// The names and options of MPS's programs.
const (
	controlName      = "nvidia-cuda-mps-control"
	serverName       = "nvidia-cuda-mps-server"
	foregroundOption = "-f"
	multiUserOption  = "-multiuser-server"
)

// environment returns the environment of a run of the control program for a device. Variables of CUDA that the caller happens to have
// would change what the program does.
func environment(r Root, id health.DeviceID) []string {
	env := slices.DeleteFunc(os.Environ(), func(v string) bool { return strings.HasPrefix(v, "CUDA_") })
	return append(env, pipeVariable+"="+r.PipeDir(id), logVariable+"="+r.LogDir(id))
}

// closeOnExec keeps open files from the next child. Those of Go have O_CLOEXEC, those that NVML opens may not. Linux before 5.11 lacks
// the call.
func closeOnExec() { _ = unix.CloseRange(3, math.MaxUint32, unix.CLOSE_RANGE_CLOEXEC) }

// process is a running process of MPS.
type process struct {
	pid       int
	server    bool // an MPS server; else a control daemon
	leader    bool // of its process group
	multiUser bool
	started   time.Time
}

// processTable finds the processes of MPS.
type processTable struct {
	proc  string        // procfs
	busy  chan struct{} // has a token while the table is read; capacity 1
	reads atomic.Uint64 // that have ended
}

func newProcessTable(proc string) *processTable {
	return &processTable{proc: proc, busy: make(chan struct{}, 1)}
}

// tableTimeout limits a read of the process table: the kernel blocks readers of the environment of some hung processes.
const tableTimeout = 5 * time.Second

var errTableTimeout = errors.New("cannot read the processes: a process blocks its files in /proc; look for hung tasks in the kernel log")

// begin waits until no other read of the table runs. A node can have dozens of devices, so the timeout is not for all the reads before
// this one, but for one that does not end. The caller must call end.
func (t *processTable) begin(ctx context.Context) error {
	for {
		ended := t.reads.Load()
		select {
		case t.busy <- struct{}{}:
			return nil
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-time.After(tableTimeout):
			if t.reads.Load() == ended {
				return errTableTimeout
			}
		}
	}
}

func (t *processTable) end() {
	t.reads.Add(1)
	<-t.busy
}

// find returns the control daemons and servers whose pipe directory is dir. recorded is the process ID of a control daemon that may
// have another name than the control program: a script has that of its interpreter, and the configuration may name another one now.
func (t *processTable) find(ctx context.Context, dir, control string, recorded int) ([]process, error) {
	if err := t.begin(ctx); err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeoutCause(ctx, tableTimeout, errTableTimeout)
	defer cancel()
	type result struct {
		processes []process
		err       error
	}
	results := make(chan result, 1)
	go func() {
		defer t.end()
		processes, err := t.read(dir, control, recorded)
		results <- result{processes, err}
	}()
	select {
	case r := <-results:
		return r.processes, r.err
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	}
}

func (t *processTable) read(dir, control string, recorded int) (found []process, err error) {
	fs, err := procfs.NewFS(t.proc)
	if err != nil {
		return nil, err
	}
	all, err := fs.AllProcs()
	if err != nil {
		return nil, err
	}
	for _, proc := range all {
		// A process may end at any point: it is none of those that run. The name comes first: the kernel gives it without access to
		// the memory of the process, which may block.
		if name, err := proc.Comm(); err != nil || name != commOf(serverName) && name != commOf(control) && proc.PID != recorded {
			continue
		}
		env, err := proc.Environ()
		if err != nil || !slices.Contains(env, pipeVariable+"="+dir) {
			continue
		}
		if p, ok := classify(proc); ok {
			found = append(found, p)
		}
	}
	return found, nil
}

// commOf returns the name that the kernel has of a program's processes.
func commOf(program string) string {
	const maxComm = 15 // bytes
	name := filepath.Base(program)
	return name[:min(len(name), maxComm)]
}

// classify returns what an MPS process is. One that only sends a command to a control daemon is none.
func classify(proc procfs.Proc) (p process, ok bool) {
	args, err := proc.CmdLine()
	if err != nil || len(args) == 0 {
		return process{}, false
	}
	p = process{
		pid: proc.PID, server: strings.HasPrefix(filepath.Base(args[0]), serverName),
		multiUser: slices.Contains(args, multiUserOption),
	}
	if !p.server && !slices.Contains(args, foregroundOption) && !slices.Contains(args, "-d") {
		return process{}, false
	}
	stat, err := proc.Stat()
	if err != nil || stat.State == "Z" {
		return process{}, false
	}
	p.leader = stat.PGRP == p.pid
	p.started = startTime(stat)
	return p, true
}

// startTime returns when a process started, zero if unknown.
func startTime(stat procfs.ProcStat) time.Time {
	seconds, err := stat.StartTime()
	if err != nil {
		return time.Time{}
	}
	return time.UnixMilli(int64(seconds * 1000))
}

// startTime returns when a process started, as find does; zero if it does not run.
func (t *processTable) startTime(pid int) time.Time {
	fs, err := procfs.NewFS(t.proc)
	if err != nil {
		return time.Time{}
	}
	proc, err := fs.Proc(pid)
	if err != nil {
		return time.Time{}
	}
	stat, err := proc.Stat()
	if err != nil {
		return time.Time{}
	}
	return startTime(stat)
}

// kill kills a process, and its group if it leads one.
func (p process) kill() error {
	pid := p.pid
	if p.leader {
		pid = -pid
	}
	if err := unix.Kill(pid, unix.SIGKILL); err != nil && !errors.Is(err, unix.ESRCH) {
		return fmt.Errorf("kill %d: %w", p.pid, err)
	}
	return nil
}

// awaitExit waits until a process, which need not be a child, has exited. Its error is the cause of ctx's end.
func awaitExit(ctx context.Context, pid int) error {
	fd, err := unix.PidfdOpen(pid, 0)
	switch {
	case errors.Is(err, unix.ESRCH):
		return nil
	case err != nil: // Linux before 5.3, or seccomp
		return pollExit(ctx, pid)
	}
	if err := unix.SetNonblock(fd, true); err != nil {
		_ = unix.Close(fd)
		return pollExit(ctx, pid)
	}
	file := os.NewFile(uintptr(fd), "pidfd")
	defer func() { _ = file.Close() }()
	conn, err := file.SyscallConn()
	if err != nil {
		return err
	}
	stop := context.AfterFunc(ctx, func() { _ = file.SetReadDeadline(time.Unix(1, 0)) })
	defer stop()
	err = conn.Read(func(fd uintptr) bool {
		n, err := unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, 0)
		return err == nil && n > 0
	})
	switch {
	case err != nil && ctx.Err() != nil:
		return context.Cause(ctx)
	case err != nil: // that is no exit
		return pollExit(ctx, pid)
	}
	return nil
}

// pollExit is awaitExit without pidfds.
func pollExit(ctx context.Context, pid int) error {
	tick := time.NewTicker(time.Second)
	defer tick.Stop()
	for {
		if err := unix.Kill(pid, 0); errors.Is(err, unix.ESRCH) {
			return nil
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}
