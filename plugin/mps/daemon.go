package mps

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"time"

	"go.uber.org/zap"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/health/backoff"
	"github.com/gpu-node-agent/gpu-node-agent/health/wait"
)

// Times of a daemon.
const (
	minBackoff = time.Second // the bounds of the pause between its death and the next start; see backoff.Backoff
	maxBackoff = 30 * time.Second
	settled    = time.Minute     // it has run without a fault for so long that the backoff starts again
	refusal    = 3 * time.Second // a program that does not support an option exits earlier

	readTimeout = time.Second // for a file in /proc

	// A stop takes no longer than the sum of these and the driver, which is less than the 30 s of a pod.
	quitServers = 5 * time.Second // for the servers to end before the daemon ends them
	quitTimeout = 8 * time.Second // for the daemon to answer quit
	termTimeout = 3 * time.Second
	killTimeout = 5 * time.Second
)

// The causes of a daemon's stop.
var (
	errLeft     = errors.New("MPS no longer serves the device")
	errDetached = errors.New("an operator detached the driver")
	errShutdown = errors.New("mps-daemon is stopping")
)

var (
	errRestart = errors.New("restart requested")
	errForeign = errors.New("another MPS daemon, which mps-daemon has not started, runs for the device")
)

// daemon keeps the control daemon of a device running until it is stopped.
type daemon struct {
	device  health.DeviceID
	mig     bool
	root    Root
	control string
	modes   *ComputeModes // nil if the GPUs are simulated
	orphans *orphans
	mounted func() error // why the directories that containers mount are not there yet
	log     *zap.Logger

	stop    context.CancelCauseFunc // makes run stop the daemon
	stopped chan struct{}           // closed when run has ended
	restart chan struct{}           // has a token if the daemon is to be killed; capacity 1

	startTimes health.Guard[struct{}, time.Time] // of a foreign daemon: a process can block its readers
	process    *controlProcess                   // that was started last; nil if none was; for run only, like lastPID
	lastPID    int                               // of the process that ran last

	mu       sync.Mutex // guards what follows
	status   DaemonStatus
	unfinish error // why the stop is not complete
}

// controlProcess is a control daemon that this process has started. os.Process signals it by its pidfd, and so no other process.
type controlProcess struct {
	*os.Process
	multiUser bool
	output    int64 // size of the output file before its start
	began     time.Time
	ended     chan struct{}    // closed after the process has ended
	state     *os.ProcessState // set when ended is closed
}

// await waits until the process has ended. Its error is the cause of ctx's end.
func (p *controlProcess) await(ctx context.Context) error {
	if !wait.For(ctx, p.ended) {
		return context.Cause(ctx)
	}
	return nil
}

// refused reports whether the program ended as if it did not support an option, whatever its exit code.
func (p *controlProcess) refused(ran time.Duration) bool {
	return wait.Closed(p.ended) && ran < refusal && p.state.Exited()
}

// run keeps the control daemon running until ctx ends, then stops it.
func (d *daemon) run(ctx context.Context) {
	keepRunning(ctx, d.serve, d.restart, d.report)
	err := d.end(context.WithoutCancel(ctx), context.Cause(ctx))
	if err != nil && d.publish(err) {
		d.log.Error("MPS control daemon stopped incompletely", zap.Error(err))
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.status.Stopping, d.unfinish = false, err
	close(d.stopped)
}

// keepRunning calls serve until ctx ends, with a backoff, which a token in restart ends.
func keepRunning(
	ctx context.Context, serve func(context.Context) (time.Duration, error), restart <-chan struct{}, report func(error, time.Duration),
) {
	for retry := (backoff.Backoff{Min: minBackoff, Max: maxBackoff}); ctx.Err() == nil; {
		ran, err := serve(ctx)
		switch {
		case ctx.Err() != nil:
			return
		case ran >= settled:
			retry.Reset()
		}
		pause := retry.Next()
		report(err, pause)
		if errors.Is(err, errRestart) {
			continue
		}
		select {
		case <-ctx.Done():
			return
		case <-restart:
		case <-time.After(pause):
		}
	}
}

// report publishes why no process runs.
func (d *daemon) report(err error, pause time.Duration) {
	if d.publish(err) {
		d.log.Warn("MPS control daemon does not run; restarting", zap.Error(err), zap.Duration("after", pause))
	}
}

// publish publishes an error, and reports whether it is a new one.
func (d *daemon) publish(err error) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	changed := d.status.Error != err.Error()
	d.status.Error, d.status.Foreign = err.Error(), errors.Is(err, errForeign)
	return changed
}

// publishEnd publishes that no process runs.
func (d *daemon) publishEnd() {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.status.PID, d.status.Started = 0, time.Time{}
}

// serve starts a control daemon, and waits until its process has ended. It returns for how long the process ran and why it ended. If ctx
// ends, the process continues.
func (d *daemon) serve(ctx context.Context) (time.Duration, error) {
	if err := d.kill(ctx); err != nil { // the previous one
		return 0, err
	}
	program, err := exec.LookPath(d.control)
	if err != nil {
		return 0, fmt.Errorf("plugin.sharing.mps.control: %w; the driver has this program, which must be in the container of mps-daemon", err)
	}
	_, other := listener(d.root.PipeDir(d.device))
	if err := d.prepare(ctx, !other); err != nil {
		return 0, err
	}
	other = other || d.current().Foreign
	if err := d.start(ctx, program, foregroundOption, multiUserOption); err != nil {
		return 0, err
	}
	ran, err := d.watch(ctx, other)
	if ctx.Err() != nil || errors.Is(err, errForeign) || !d.process.refused(ran) {
		return ran, err
	}
	// Drivers before multi-user mode refuse the option. Another reason makes the second start fail too. Both are one start.
	d.lastPID = 0
	if err := d.start(ctx, program, foregroundOption); err != nil {
		return 0, err
	}
	return d.watch(ctx, other)
}

// prepare makes what a daemon needs, after all processes of the previous one have ended. clean removes what that has left.
func (d *daemon) prepare(ctx context.Context, clean bool) error {
	if err := d.mounted(); err != nil {
		return err
	}
	if err := d.root.prepareDirectories(d.device, clean, d.log); err != nil {
		return err
	}
	if d.modes != nil && !d.mig { // a GPU in MIG mode has the default mode only
		d.announce("setting the compute mode; the driver has not answered yet")
		if err := d.modes.makeExclusive(d.root, d.device); err != nil {
			return err
		}
	}
	return ctx.Err()
}

// announce publishes what the next step waits for.
func (d *daemon) announce(text string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.status.Error == "" {
		d.status.Error = text
	}
}

// start starts the control program as a daemon.
func (d *daemon) start(ctx context.Context, program string, options ...string) error {
	closeOnExec()
	cmd := exec.CommandContext(context.WithoutCancel(ctx), program, options...)
	cmd.Dir = "/"
	cmd.Env = append(environment(d.root, d.device), "CUDA_VISIBLE_DEVICES="+string(d.device))
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	// To a file, of which exitError shows the end. Without it the daemon runs silently.
	p := &controlProcess{multiUser: len(options) > 1, began: time.Now(), ended: make(chan struct{}), output: fileSize(d.outputFile())}
	if output, err := os.OpenFile(d.outputFile(), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644); err == nil {
		defer func() { _ = output.Close() }()
		cmd.Stdout, cmd.Stderr = output, output
	} else {
		d.log.Warn("output of MPS control daemon is lost", zap.Error(err))
	}
	if err := cmd.Start(); err != nil {
		return fmt.Errorf("cannot start the MPS control daemon: %w", err)
	}
	p.Process, d.process = cmd.Process, p
	go func() {
		defer close(p.ended)
		_ = cmd.Wait() // the state says more
		p.state = cmd.ProcessState
	}()
	d.log.Info("started MPS control daemon", zap.Int("pid", p.Pid), zap.Bool("multiUser", p.multiUser))
	return nil
}

// watch publishes the process and waits until it has ended. It returns how long the process ran and why it ended. If there may be another
// daemon, this one refuses to start, or takes the socket over. Until that is decided, the other daemon answers.
func (d *daemon) watch(ctx context.Context, other bool) (time.Duration, error) {
	p := d.process
	if other {
		decided, cancel := context.WithTimeout(ctx, refusal)
		err := p.await(decided)
		cancel()
		switch {
		case err == nil:
			return time.Since(p.began), d.exitError(p)
		case ctx.Err() != nil:
			_ = d.kill(ctx) // end asks by the socket
			return time.Since(p.began), ctx.Err()
		}
	}
	d.publishStart(p)
	select {
	case <-ctx.Done():
		return time.Since(p.began), ctx.Err()
	case <-d.restart:
		d.log.Warn("killing MPS control daemon", zap.Int("pid", p.Pid), zap.Error(errRestart))
		if err := d.kill(ctx); err != nil {
			return time.Since(p.began), err // the next attempt tries again
		}
		d.publishEnd()
		return time.Since(p.began), errRestart
	case <-p.ended:
		ran := time.Since(p.began)
		d.publishEnd()
		_ = d.orphans.end(ctx) // the next attempt reports why that fails
		err := d.exitError(p)
		if errors.Is(err, errForeign) {
			d.lastPID = 0 // it did not start
		}
		return ran, err
	}
}

// publishStart publishes that a process runs.
func (d *daemon) publishStart(p *controlProcess) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.lastPID != 0 && d.lastPID != p.Pid {
		d.status.Restarts++
	}
	d.lastPID = p.Pid
	select {
	case <-d.restart: // it was for the previous process
	default:
	}
	d.status.PID, d.status.Started, d.status.MultiUser = p.Pid, p.began, p.multiUser
	d.status.Error, d.status.Foreign = "", false
}

// exitError describes how a process ended.
func (d *daemon) exitError(p *controlProcess) error {
	text := "MPS control daemon ended: " + p.state.String()
	if tail := lastLines(d.outputFile(), p.output); tail != "" {
		text += ": " + tail
		if strings.Contains(strings.ToLower(tail), alreadyRunning) {
			return d.describeForeign()
		}
	}
	return errors.New(text)
}

// alreadyRunning is what the control program writes if another daemon has the lock of the pipe directory.
const alreadyRunning = "already running"

// describeForeign describes the daemon that keeps this one from starting. Nobody knows whose it is, so people have to end it.
func (d *daemon) describeForeign() error {
	pipe := d.root.PipeDir(d.device)
	pid, _ := listener(pipe)
	if pid == 0 {
		lock := filepath.Join(pipe, controlLock)
		return fmt.Errorf("%w: a process that cannot be identified has locked %s; to end it, run on the node: fuser -k %[2]s", errForeign, lock)
	}
	return fmt.Errorf("%w: process %d, started at %s, serves %s; to end it with its servers, run on the node: pkill -KILL -P %[2]d; kill "+
		"-KILL %[2]d",
		errForeign, pid, d.foreignStart(pid), pipe)
}

// foreignStart returns when a process started, as text.
func (d *daemon) foreignStart(pid int) string {
	t, _ := d.startTimes.Call(nil, struct{}{}, func() time.Time { return startTime(pid) }, nil)
	if t.IsZero() {
		return "an unknown time"
	}
	return t.UTC().Format(time.RFC3339)
}

// kill kills the control daemon, if it runs, and what it has left, and waits until all have ended.
func (d *daemon) kill(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), killTimeout)
	defer cancel()
	if p := d.process; p != nil {
		_ = p.Kill() // it may have ended
		if p.await(ctx) != nil {
			return errHung(p.Pid)
		}
	}
	return d.orphans.end(ctx)
}

// leave has the daemon stopped.
func (d *daemon) leave(cause error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if !wait.Closed(d.stopped) {
		d.status.Stopping = true
		d.stop(cause)
	}
}

// end stops the control daemon and its servers, then sets the compute mode back.
func (d *daemon) end(ctx context.Context, cause error) error {
	for {
		err := d.endProcesses(ctx, cause)
		if err == nil {
			break
		}
		if d.publish(err) {
			d.log.Error("cannot stop MPS control daemon; retrying", zap.Error(err))
		}
		<-time.After(killTimeout)
	}
	d.publishEnd()
	if d.modes != nil {
		if err := d.modes.setBack(d.root, d.device); err != nil {
			return err
		}
	}
	if errors.Is(cause, errLeft) {
		return os.RemoveAll(filepath.Dir(d.root.PipeDir(d.device)))
	}
	return nil
}

// endProcesses ends the control daemon and its servers, in an orderly way if they respond.
func (d *daemon) endProcesses(ctx context.Context, cause error) error {
	if p := d.process; p != nil && p.Signal(syscall.Signal(0)) == nil {
		d.log.Info("stopping MPS control daemon", zap.Int("pid", p.Pid), zap.NamedError("reason", cause))
		d.quit(ctx, p)
	}
	return d.kill(ctx) // the servers of a daemon that does not respond outlive it
}

// quit asks the control daemon to end, first by the protocol, then by a signal.
func (d *daemon) quit(ctx context.Context, p *controlProcess) {
	quitCtx, cancel := context.WithTimeout(ctx, quitTimeout)
	defer cancel()
	command := fmt.Sprintf("quit -t %d", int(quitServers.Seconds()))
	if _, err := runControl(quitCtx, d.control, environment(d.root, d.device), command); err == nil && p.await(quitCtx) == nil {
		return
	}
	termCtx, cancelTerm := context.WithTimeout(ctx, termTimeout)
	defer cancelTerm()
	if p.Signal(syscall.SIGTERM) == nil {
		_ = p.await(termCtx)
	}
}

// current returns the published status.
func (d *daemon) current() DaemonStatus {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.status
}

// unfinished returns why the stop of an ended run is not complete, nil if it is.
func (d *daemon) unfinished() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.unfinish
}

// outputFile returns the path of what the daemon writes to standard output and standard error.
func (d *daemon) outputFile() string { return filepath.Join(d.root.LogDir(d.device), outputLog) }
