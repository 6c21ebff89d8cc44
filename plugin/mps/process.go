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
	"sync"
	"time"

	"github.com/prometheus/procfs"
	"golang.org/x/sys/unix"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/health/wait"
)

// The variables of MPS.
const (
	pipeVariable = "CUDA_MPS_PIPE_DIRECTORY"
	logVariable  = "CUDA_MPS_LOG_DIRECTORY"
)

// The name and options of MPS's control program.
const (
	controlName      = "nvidia-cuda-mps-control"
	foregroundOption = "-f"
	multiUserOption  = "-multiuser-server"
)

// environment returns the environment of a run of the control program for a device. Variables of CUDA that the caller happens to have
// would change what the program does.
func environment(r Root, id health.DeviceID) []string {
	env := slices.DeleteFunc(os.Environ(), func(v string) bool { return strings.HasPrefix(v, "CUDA_") })
	return append(env, pipeVariable+"="+r.PipeDir(id), logVariable+"="+r.LogDir(id))
}

// closeOnExec keeps open files from the next child. Files that Go opens have O_CLOEXEC; files that NVML opens may not. Linux before 5.11
// lacks the call.
func closeOnExec() { _ = unix.CloseRange(3, math.MaxUint32, unix.CLOSE_RANGE_CLOEXEC) }

// startTime returns when a process started, zero if unknown or if it does not run. A process can make it block.
func startTime(pid int) time.Time {
	proc, err := procfs.NewProc(pid)
	if err != nil {
		return time.Time{}
	}
	stat, err := proc.Stat()
	if err != nil {
		return time.Time{}
	}
	seconds, err := stat.StartTime()
	if err != nil {
		return time.Time{}
	}
	return time.UnixMilli(int64(seconds * 1000))
}

// orphans ends what dead control daemons have left: their servers, which keep the device, so that the next daemon cannot start one. This
// process is a subreaper: the kernel makes it the parent of what its children leave, in whatever group or session that is. A server is a
// child of its daemon while that lives. The process ID of a child is no other's until its parent has waited for it.
type orphans struct{ mu sync.Mutex } // held between a look at a child and its wait

const orphanPoll = 20 * time.Millisecond

// end kills all orphans and waits until they have ended.
func (o *orphans) end(ctx context.Context) error {
	tick := time.NewTicker(orphanPoll)
	defer tick.Stop()
	for {
		left, err := o.kill()
		if err != nil || len(left) == 0 {
			return err
		}
		if !wait.For(ctx, tick.C) {
			return errHung(left[0])
		}
	}
}

func errHung(pid int) error {
	return fmt.Errorf("process %d of MPS does not end although it was killed; look for hung tasks in the kernel log", pid)
}

// kill kills the orphans and returns the ones that have not ended. It reads no file of a process: a process can block its readers.
func (o *orphans) kill() (left []int, err error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	all, err := procfs.AllProcs()
	if err != nil {
		return nil, err
	}
	ownSession, err := unix.Getsid(0)
	if err != nil {
		return nil, err
	}
	for _, p := range all {
		session, sessionErr := unix.Getsid(p.PID)
		group, groupErr := unix.Getpgid(p.PID)
		switch {
		case sessionErr != nil || groupErr != nil: // it has ended
			continue
		case session != ownSession && os.Getpid() == 1: // process 1 also inherits what others have started, such as kubectl exec
			continue
		case session == ownSession && (group == p.PID || group == unix.Getpgrp()): // started by this process; by a library of it
			continue
		}
		if ended, err := unix.Wait4(p.PID, nil, unix.WNOHANG, nil); err != nil || ended != 0 { // no child, or it has ended
			continue
		}
		left = append(left, p.PID)
		_ = unix.Kill(p.PID, unix.SIGKILL)
	}
	return left, nil
}

// controlSocket and controlLock are files of a control daemon in its pipe directory.
const (
	controlSocket = "control"
	controlLock   = "control_lock"
)

// listener returns the process that listens at the control socket of a pipe directory. The kernel knows it: pid is 0 if it does not, or if
// the process is outside of this PID namespace. ok is false if nobody listens.
func listener(pipe string) (pid int, ok bool) {
	address := &unix.SockaddrUnix{Name: filepath.Join(pipe, controlSocket)}
	for _, kind := range []int{unix.SOCK_STREAM, unix.SOCK_SEQPACKET} { // NVIDIA does not document which
		fd, err := unix.Socket(unix.AF_UNIX, kind|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
		if err != nil {
			return 0, true // unknown: as if somebody did
		}
		err = unix.Connect(fd, address)
		if err == nil {
			if peer, peerErr := unix.GetsockoptUcred(fd, unix.SOL_SOCKET, unix.SO_PEERCRED); peerErr == nil {
				pid = int(peer.Pid)
			}
		}
		_ = unix.Close(fd)
		switch {
		case err == nil, errors.Is(err, unix.EAGAIN): // its queue is full
			return pid, true
		case !errors.Is(err, unix.EPROTOTYPE):
			return 0, false
		}
	}
	return 0, false
}
