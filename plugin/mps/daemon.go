package mps

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"sync"
	"syscall"
	"time"

	"go.uber.org/zap"
	"golang.org/x/sys/unix"

	"github.com/gpu-node-agent/gpu-node-agent/health"
)

// Times of a daemon.
const (
	minBackoff = time.Second // between its death and the next start
	maxBackoff = 30 * time.Second
	settled    = time.Minute     // it has run without a fault for so long that the backoff starts again
	refusal    = 3 * time.Second // a program that does not support an option exits earlier

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

var errRestart = errors.New("restart requested")

// daemon keeps the control daemon of a device running until it is stopped.
type daemon struct {
	device    health.DeviceID
	mig       bool
	root      Root
	control   string
	modes     *ComputeModes // nil if the GPUs are simulated
	processes *processTable
	mounted   func() error // why the directories that containers mount are not there yet
	log       *zap.Logger

	stop     context.CancelCauseFunc // makes run stop the daemon
	stopped  chan struct{}           // closed when run has ended
	found    sync.Once               // closes searched
	searched chan struct{}           // closed when the status tells whether a process runs that is to be adopted
	restart  chan struct{}           // has a token if the daemon is to be killed; capacity 1

	lastPID int // of the process that ran last; for run only

	mu       sync.Mutex // guards what follows
	status   DaemonStatus
	unfinish error // why the stop is not complete
}

// runningDaemon is a process of the control daemon.
type runningDaemon struct {
	process
	output int64            // size of the output file before its start
	began  time.Time        // when it was started or adopted
	ended  chan struct{}    // closed after the process has ended
	state  *os.ProcessState // set when ended is closed; nil for an adopted process
}

// run keeps the control daemon running until ctx ends, then stops it. A daemon that runs already is adopted.
func (d *daemon) run(ctx context.Context) {
	defer close(d.stopped)
	keepRunning(ctx, d.serve, d.restart, d.report)
	err := d.end(context.WithoutCancel(ctx), context.Cause(ctx))
	if err != nil && d.publish(err) {
		d.log.Error("MPS control daemon stopped incompletely", zap.Error(err))
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.status.Stopping, d.unfinish = false, err
}

// keepRunning calls serve until ctx ends, with a backoff, which a token in restart ends.
func keepRunning(
	ctx context.Context, serve func(context.Context) (time.Duration, error), restart <-chan struct{}, report func(error, time.Duration),
) {
	for backoff := minBackoff; ctx.Err() == nil; backoff = min(2*backoff, maxBackoff) {
		ran, err := serve(ctx)
		switch {
		case ctx.Err() != nil:
			return
		case ran >= settled:
			backoff = minBackoff
		}
		report(err, backoff)
		if errors.Is(err, errRestart) {
			continue
		}
		select {
		case <-ctx.Done():
			return
		case <-restart:
		case <-time.After(backoff):
		}
	}
}

// report publishes why no process runs.
func (d *daemon) report(err error, backoff time.Duration) {
	if d.publish(err) {
		d.log.Warn("MPS control daemon does not run; restarting", zap.Error(err), zap.Duration("after", backoff))
	}
}

// publish publishes an error, and reports whether it is a new one.
func (d *daemon) publish(err error) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	changed := d.status.Error != err.Error()
	d.status.Error = err.Error()
	return changed
}

// publishEnd publishes that no process runs.
func (d *daemon) publishEnd() {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.status.PID, d.status.Started = 0, time.Time{}
}

// serve adopts or starts a control daemon, and waits until its process has ended. It returns for how long the process ran and why it
// ended. If ctx ends, the process continues.
func (d *daemon) serve(ctx context.Context) (time.Duration, error) {
	p, err := d.adopt(ctx)
	if err == nil && p != nil {
		return d.watch(ctx, p)
	}
	d.endSearch()
	if err != nil {
		return 0, err
	}
	program, err := exec.LookPath(d.control)
	if err != nil {
		return 0, fmt.Errorf("plugin.sharing.mps.control: %w; the driver has this program, which must be in the container of mps-daemon", err)
	}
	if err := d.prepare(ctx); err != nil {
		return 0, err
	}
	p, err = d.start(ctx, program, foregroundOption, multiUserOption)
	if err != nil {
		return 0, err
	}
	ran, err := d.watch(ctx, p)
	if ctx.Err() != nil || !p.refused(ran) {
		return ran, err
	}
	// Drivers before multi-user mode refuse the option. Another reason makes the second start fail too. Both are one start.
	d.lastPID = 0
	if p, err = d.start(ctx, program, foregroundOption); err != nil {
		return 0, err
	}
	return d.watch(ctx, p)
}

// refused reports whether the program ended as if it did not support an option, whatever its exit code.
func (p *runningDaemon) refused(ran time.Duration) bool {
	select {
	case <-p.ended:
		return ran < refusal && p.state.Exited()
	default:
		return false
	}
}

// adopt returns the control daemon that runs for the device already, nil if there is none. It kills servers without a daemon.
func (d *daemon) adopt(ctx context.Context) (*runningDaemon, error) {
	found, err := d.find(ctx)
	if err != nil {
		return nil, err
	}
	p := controlDaemon(found)
	if p == nil {
		return nil, d.kill(ctx, found)
	}
	r := &runningDaemon{process: *p, began: time.Now(), ended: make(chan struct{}), output: fileSize(d.outputFile())}
	go func() {
		defer close(r.ended)
		_ = awaitExit(context.WithoutCancel(ctx), p.pid)
	}()
	d.log.Info("adopted MPS control daemon", zap.Int("pid", p.pid))
	return r, nil
}

// find returns the processes of MPS for the device.
func (d *daemon) find(ctx context.Context) ([]process, error) {
	text, _ := os.ReadFile(d.root.pidFile(d.device)) // without it processes are found by their names
	return d.processes.find(ctx, d.root.PipeDir(d.device), d.control, number(bytes.TrimSpace(text)))
}

// controlDaemon returns the control daemon among the processes of a pipe directory, nil if there is none. MPS lets one run; a wrapper
// of the program is the leader of the group.
func controlDaemon(found []process) (daemon *process) {
	for i, p := range found {
		if !p.server && (daemon == nil || p.leader && !daemon.leader) {
			daemon = &found[i]
		}
	}
	return daemon
}

// prepare makes what a daemon needs, after all processes of the previous one have ended.
func (d *daemon) prepare(ctx context.Context) error {
	if err := d.mounted(); err != nil {
		return err
	}
	if err := d.root.prepareDirectories(d.device, d.log); err != nil {
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

// start starts the control program as a daemon. The process survives the Supervisor.
func (d *daemon) start(ctx context.Context, program string, options ...string) (*runningDaemon, error) {
	closeOnExec()
	cmd := exec.CommandContext(context.WithoutCancel(ctx), program, options...)
	cmd.Dir = "/"
	cmd.Env = append(environment(d.root, d.device), "CUDA_VISIBLE_DEVICES="+string(d.device))
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	// A file, not a pipe: the daemon must be able to write after the Supervisor has ended. Without a file it runs silently.
	r := &runningDaemon{began: time.Now(), ended: make(chan struct{}), output: fileSize(d.outputFile())}
	if output, err := os.OpenFile(d.outputFile(), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644); err == nil {
		defer func() { _ = output.Close() }()
		cmd.Stdout, cmd.Stderr = output, output
	} else {
		d.log.Warn("output of MPS control daemon is lost", zap.Error(err))
	}
	if err := cmd.Start(); err != nil {
		return nil, fmt.Errorf("cannot start the MPS control daemon: %w", err)
	}
	r.process = process{pid: cmd.Process.Pid, leader: true, multiUser: len(options) > 1, started: d.processes.startTime(cmd.Process.Pid)}
	if err := os.WriteFile(d.root.pidFile(d.device), fmt.Appendln(nil, r.pid), 0o644); err != nil {
		d.log.Warn("cannot record the process of the MPS control daemon; it is found by its name only", zap.Error(err))
	}
	go func() {
		defer close(r.ended)
		_ = cmd.Wait() // the state says more
		r.state = cmd.ProcessState
	}()
	d.log.Info("started MPS control daemon", zap.Int("pid", r.pid), zap.Bool("multiUser", r.multiUser))
	return r, nil
}

// watch publishes a process and waits until it has ended. It returns how long the process ran and why it ended.
func (d *daemon) watch(ctx context.Context, p *runningDaemon) (time.Duration, error) {
	d.mu.Lock()
	if d.lastPID != 0 && d.lastPID != p.pid {
		d.status.Restarts++
	}
	d.lastPID = p.pid
	select {
	case <-d.restart: // it was for the previous process
	default:
	}
	d.status.PID, d.status.Started, d.status.MultiUser, d.status.Error = p.pid, p.started, p.multiUser, ""
	d.mu.Unlock()
	d.endSearch()

	select {
	case <-ctx.Done():
		return time.Since(p.began), ctx.Err()
	case <-d.restart:
		d.log.Warn("killing MPS control daemon", zap.Int("pid", p.pid), zap.Error(errRestart))
		if err := d.kill(ctx, []process{p.process}); err != nil {
			return time.Since(p.began), err // the next attempt adopts it
		}
		d.publishEnd()
		return time.Since(p.began), errRestart
	case <-p.ended:
		ran := time.Since(p.began)
		d.publishEnd()
		if p.leader {
			_ = p.kill() // the rest of the group
		}
		return ran, d.exitError(p)
	}
}

// exitError describes how a process ended.
func (d *daemon) exitError(p *runningDaemon) error {
	text := "MPS control daemon ended"
	if p.state != nil {
		text += ": " + p.state.String()
	}
	if tail := lastLines(d.outputFile(), p.output); tail != "" {
		text += ": " + tail
	}
	return errors.New(text)
}

// kill kills processes and waits until they have ended.
func (d *daemon) kill(ctx context.Context, processes []process) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), killTimeout)
	defer cancel()
	var errs []error
	for _, p := range processes {
		errs = append(errs, p.kill())
	}
	for _, p := range processes {
		if err := awaitExit(ctx, p.pid); err != nil {
			errs = append(errs, fmt.Errorf("process %d of MPS does not end although it was killed; look for hung tasks in the kernel log", p.pid))
		} else if p.server && os.Getpid() == 1 {
			_, _ = unix.Wait4(p.pid, nil, unix.WNOHANG, nil) // process 1 inherits the servers of a dead daemon
		}
	}
	return errors.Join(errs...)
}

// end stops the control daemon and its servers, then sets the compute mode back.
func (d *daemon) end(ctx context.Context, cause error) error {
	d.mu.Lock()
	d.status.Stopping = true
	d.mu.Unlock()
	d.endSearch()
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
	found, err := d.find(ctx)
	if err != nil {
		return err
	}
	if p := controlDaemon(found); p != nil {
		d.log.Info("stopping MPS control daemon", zap.Int("pid", p.pid), zap.NamedError("reason", cause))
		d.quit(ctx, p.pid)
		if found, err = d.find(ctx); err != nil { // the servers of a daemon that does not respond outlive it
			return err
		}
	}
	return d.kill(ctx, found)
}

// quit asks a control daemon to end, first by the protocol, then by a signal.
func (d *daemon) quit(ctx context.Context, pid int) {
	quitCtx, cancel := context.WithTimeout(ctx, quitTimeout)
	defer cancel()
	command := fmt.Sprintf("quit -t %d", int(quitServers.Seconds()))
	if _, err := runControl(quitCtx, d.control, environment(d.root, d.device), command); err == nil && awaitExit(quitCtx, pid) == nil {
		return
	}
	// The process may have ended meanwhile, and its ID be another's.
	found, err := d.find(ctx)
	if err != nil || !slices.ContainsFunc(found, func(p process) bool { return p.pid == pid }) {
		return
	}
	termCtx, cancel := context.WithTimeout(ctx, termTimeout)
	defer cancel()
	if unix.Kill(pid, unix.SIGTERM) == nil {
		_ = awaitExit(termCtx, pid)
	}
}

func (d *daemon) endSearch() { d.found.Do(func() { close(d.searched) }) }

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
