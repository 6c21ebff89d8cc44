package mps

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"os"
	"slices"
	"sync"
	"time"

	"go.uber.org/zap"
	"golang.org/x/sys/unix"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/health/filelock"
	"github.com/gpu-node-agent/gpu-node-agent/health/unixsock"
	"github.com/gpu-node-agent/gpu-node-agent/health/wait"
)

// Times of a Supervisor.
const (
	applyInterval = 5 * time.Second // between checks of what runs
	retryInterval = time.Minute     // between attempts to complete a stop
	lockInterval  = time.Second     // between attempts to become the only Supervisor
	stopTimeout   = 25 * time.Second
)

// Supervisor runs the control daemons that the Follower wants. It starts and ends none before the Follower has told what to run. It is the
// parent of all processes that it signals: a daemon of an earlier Supervisor, which must not survive that, is a foreign one.
type Supervisor struct {
	Root         Root
	Control      string        // the control program: a path, or a name to search in PATH
	Version      string        // of the program
	ComputeModes *ComputeModes // nil if the GPUs are simulated
	MountShm     bool          // mount what Root.ShmDir needs; else only make the directory
	Log          *zap.Logger

	orphans   orphans
	changed   chan struct{} // has a token when a daemon was stopped, or others are to run; capacity 1
	retriedAt time.Time     // for follow only

	mu      sync.Mutex // guards what follows
	daemons map[health.DeviceID]*daemon
	follows *Follow         // nil before the first
	applied *Follow         // the newest that the daemons follow
	sender  sender          // of follows
	refused map[string]bool // why others were refused, as logged
	shmErr  error           // why Root.ShmDir is not /dev/shm of the daemons
}

// Run runs daemons until ctx ends, then stops them. While another Supervisor runs in Root, Run waits.
func (s *Supervisor) Run(ctx context.Context) error {
	s.daemons, s.changed, s.refused = make(map[health.DeviceID]*daemon), make(chan struct{}, 1), make(map[string]bool)
	if err := unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0); err != nil {
		return fmt.Errorf("cannot become the parent of what MPS daemons leave: %w", err)
	}
	if err := os.MkdirAll(string(s.Root), 0o755); err != nil {
		return fmt.Errorf("plugin.sharing.mps.root: %w", err)
	}
	lock, err := s.lock(ctx)
	if err != nil || lock == nil {
		return err
	}
	defer func() { _ = lock.Close() }()

	serveCtx, stopServing := context.WithCancel(context.WithoutCancel(ctx))
	served := make(chan error, 1)
	limit := unixsock.BodyLimit{Route: followRoute, Bytes: maxFollow}
	go func() { served <- unixsock.Serve(serveCtx, s.Root.Socket(), s.Log, s.routes(), limit) }()
	go s.Root.boundLogs(serveCtx, s.Log) // a disk that does not answer stops only this
	s.follow(ctx)
	err = s.stopAll()
	stopServing()
	return errors.Join(err, <-served)
}

// lock makes this the only Supervisor of Root. It returns nil if ctx ends before.
func (s *Supervisor) lock(ctx context.Context) (*os.File, error) {
	path := s.Root.lockFile()
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, fmt.Errorf("plugin.sharing.mps.root: %w", err)
	}
	tick := time.NewTicker(lockInterval)
	defer tick.Stop()
	for waits := false; ; waits = true {
		err := filelock.Lock(f)
		switch {
		case err == nil:
			return f, nil
		case !errors.Is(err, filelock.ErrLocked):
			_ = f.Close()
			return nil, err
		case !waits:
			s.Log.Warn("waiting: another mps-daemon runs on this node", zap.String("lock", path))
		}
		if !wait.For(ctx, tick.C) {
			return nil, f.Close()
		}
	}
}

// follow runs what it is told until ctx ends.
func (s *Supervisor) follow(ctx context.Context) {
	s.Log.Info("waiting for the agent, which tells what to run")
	tick := time.NewTicker(applyInterval)
	defer tick.Stop()
	for {
		s.prepareShm()
		s.apply(ctx)
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		case <-s.changed:
		}
	}
}

// prepareShm makes Root.ShmDir, and mounts it if it is to be mounted.
func (s *Supervisor) prepareShm() {
	dir := s.Root.ShmDir()
	err := makeDirectory(dir, os.ModeSticky|0o777)
	if err == nil {
		err = checkShm(dir)
		if err != nil && s.MountShm {
			err = cmp.Or(mountShm(dir), checkShm(dir))
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if err != nil && (s.shmErr == nil || s.shmErr.Error() != err.Error()) {
		s.Log.Warn("MPS clients cannot share memory with the daemons", zap.Error(err))
	}
	s.shmErr = err
}

// mounted returns why Root.ShmDir, which is to be mounted, is not.
func (s *Supervisor) mounted() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.MountShm {
		return s.shmErr
	}
	return nil
}

// apply starts the daemons that are desired, and stops the others, without waiting.
func (s *Supervisor) apply(ctx context.Context) {
	s.mu.Lock()
	defer s.mu.Unlock()
	follows := s.follows
	if s.applied = follows; follows == nil {
		return
	}
	first := s.retriedAt.IsZero()
	retry := first || time.Since(s.retriedAt) >= retryInterval
	desired := make(map[health.DeviceID]followDaemon, len(follows.Daemons))
	for _, d := range follows.Daemons {
		desired[d.Device] = d
	}
	failures := make(map[health.DeviceID]error)
	for id, d := range s.daemons {
		_, wanted := desired[id]
		switch {
		case wait.Closed(d.stopped):
			err := d.unfinished()
			if err == nil || !follows.Stopped && (wanted || retry) {
				delete(s.daemons, id)
				failures[id] = err
			}
		case !wanted:
			d.leave(errLeft)
		case follows.Stopped:
			d.leave(errDetached)
		}
	}
	if first || retry && !follows.Stopped { // during a detach the driver is left alone
		s.retriedAt = time.Now()
		for _, id := range s.Root.devices() {
			_, wanted := desired[id]
			if _, runs := s.daemons[id]; !runs && !wanted {
				s.start(ctx, followDaemon{Device: id}, failures[id]).leave(errLeft)
			} else if !runs && follows.Stopped {
				s.start(ctx, desired[id], nil).leave(errDetached)
			}
		}
	}
	if follows.Stopped {
		return
	}
	for id, d := range desired {
		if _, runs := s.daemons[id]; !runs {
			s.start(ctx, d, failures[id])
		}
	}
}

// start starts a daemon, which runs until its stop is called. failure is why the previous one could not be stopped; it is not logged
// again. The caller holds s.mu.
func (s *Supervisor) start(ctx context.Context, desired followDaemon, failure error) *daemon {
	ctx, stop := context.WithCancelCause(context.WithoutCancel(ctx)) // stopAll stops it
	d := &daemon{
		device: desired.Device, mig: desired.MIG, root: s.Root, control: s.Control, modes: s.ComputeModes, orphans: &s.orphans,
		mounted: s.mounted,
		log:     s.Log.With(zap.String("device", string(desired.Device))),
		stop:    stop, stopped: make(chan struct{}), restart: make(chan struct{}, 1), status: DaemonStatus{Device: desired.Device},
		startTimes: health.Guard[struct{}, time.Time]{Limit: readTimeout},
	}
	if failure != nil {
		d.status.Error = failure.Error()
	}
	s.daemons[d.device] = d
	go func() {
		d.run(ctx)
		wait.Signal(s.changed)
	}()
	return d
}

// stopAll stops all daemons.
func (s *Supervisor) stopAll() error {
	s.mu.Lock()
	daemons := slices.Collect(maps.Values(s.daemons))
	s.mu.Unlock()
	for _, d := range daemons {
		d.leave(errShutdown)
	}
	timeout := time.NewTimer(stopTimeout)
	defer timeout.Stop()
	for _, d := range daemons {
		select {
		case <-d.stopped:
		case <-timeout.C:
			return fmt.Errorf("MPS control daemons did not stop in %v", stopTimeout)
		}
	}
	return nil
}

func (s *Supervisor) routes() unixsock.Routes {
	return unixsock.Routes{
		statusRoute:  func(context.Context, []byte) (any, error) { return s.status(), nil },
		followRoute:  func(ctx context.Context, body []byte) (any, error) { return s.accept(unixsock.Peer(ctx), body), nil },
		restartRoute: unixsock.JSON(func(_ context.Context, r Restart) (any, error) { return nil, s.restart(r.Device) }),
	}
}

// accept takes over what a process wants to run. If it is refused, nothing changes, and the status says why.
func (s *Supervisor) accept(pid int, body []byte) Status {
	err := s.takeOver(pid, body)
	status := s.status()
	if err != nil {
		status.Error = err.Error()
	}
	return status
}

func (s *Supervisor) takeOver(pid int, body []byte) error {
	next, err := parseFollow(body)
	s.mu.Lock()
	defer s.mu.Unlock()
	if err == nil {
		err = s.check(pid, &next)
	}
	switch {
	case err != nil:
		if text := err.Error(); !s.refused[text] {
			if len(s.refused) >= maxRefused {
				clear(s.refused)
			}
			s.refused[text] = true
			s.Log.Error("refusing what to run; the daemons continue", zap.Error(err))
		}
		return err
	case next.same(s.follows):
		s.follows.Sent = next.Sent
	default:
		s.follows = &next
		wait.Signal(s.changed)
	}
	return nil
}

// maxRefused limits the remembered refusals.
const maxRefused = 16

// check refuses what another process sends, until the one that sent the newest has ended: agents of one node must not take turns. It also
// refuses what was overtaken, and what has waited for so long that its sender has given up and may have decided otherwise; the sender of a
// stop has not. Who has only sent a stop, for a detach, may send nothing more, and keeps no other from it. The caller holds s.mu.
func (s *Supervisor) check(pid int, next *Follow) error {
	if pid != 0 && s.sender.pid != 0 && pid != s.sender.pid && !s.sender.ended() {
		return fmt.Errorf("process %d tells mps-daemon what to run, and process %d may not until that has ended", s.sender.pid, pid)
	}
	age := sinceBoot() - next.Sent
	if s.follows != nil && next.Sent <= s.follows.Sent || age < 0 || age > statusTimeout && !next.Stopped {
		return errors.New("a newer request has overtaken it, or it has waited too long")
	}
	if pid != 0 && !next.Stopped && (pid != s.sender.pid || s.sender.ended()) {
		s.sender.close()
		s.sender = openSender(pid)
	}
	return nil
}

// sender is a process, by a file descriptor that names no other process when that has ended.
type sender struct {
	pid int
	fd  int // negative without one, as before Linux 5.3
}

func openSender(pid int) sender {
	fd, err := unix.PidfdOpen(pid, 0)
	if err != nil {
		fd = -1
	}
	return sender{pid, fd}
}

// ended reports whether the process has ended; by the file descriptor, whether or not its parent has noticed.
func (s sender) ended() bool {
	if s.fd < 0 {
		return errors.Is(unix.Kill(s.pid, 0), unix.ESRCH)
	}
	n, err := unix.Poll([]unix.PollFd{{Fd: int32(s.fd), Events: unix.POLLIN}}, 0) //nolint:gosec // a descriptor
	return err == nil && n > 0
}

func (s sender) close() {
	if s.pid != 0 && s.fd >= 0 {
		_ = unix.Close(s.fd)
	}
}

func (s *Supervisor) status() Status {
	s.mu.Lock()
	defer s.mu.Unlock()
	status := Status{Version: s.Version, Pending: s.applied != s.follows, Daemons: make([]DaemonStatus, 0, len(s.daemons))}
	if s.follows != nil {
		status.Follows = new(*s.follows)
	}
	if s.shmErr != nil {
		status.Shm = s.shmErr.Error()
	}
	for _, d := range s.daemons {
		status.Daemons = append(status.Daemons, d.current())
	}
	slices.SortFunc(status.Daemons, func(a, b DaemonStatus) int { return cmp.Compare(a.Device, b.Device) })
	return status
}

// restart has a daemon killed and started again, or started before its backoff ends.
func (s *Supervisor) restart(id health.DeviceID) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	d := s.daemons[id]
	if d == nil || d.current().Stopping {
		return unixsock.WithStatus(http.StatusNotFound, fmt.Errorf("device %q: mps-daemon runs no daemon for it", id))
	}
	wait.Signal(d.restart)
	return nil
}
