// Package nodelock lets one agent at a time serve the devices of a node: the one that holds the lock of the kubelet's directory
// device-plugins. Another one measures, and waits.
package nodelock

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"sync"
	"syscall"
	"time"

	"go.uber.org/zap"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/health/filelock"
	"github.com/gpu-node-agent/gpu-node-agent/health/unixsock"
)

// Directory is the directory below the kubelet's that is locked. A kubelet deletes every file in it when it starts, but no directory, so
// the lock of the directory itself outlives the kubelet.
const Directory = "device-plugins"

// Socket is the name of the socket in Directory by which the holder tells who it is.
const Socket = "gpu-node-agent.sock"

// holderRoute is the request on Socket. It returns a Holder.
const holderRoute = "GET /holder"

// Holder is an agent that holds the lock.
type Holder struct {
	Pod    string `json:"pod"`    // the name of its pod, or of its host
	Config string `json:"config"` // the path of its configuration; empty: defaults
	PID    int    `json:"pid"`    // in its own PID namespace
}

// Self returns this process as a holder.
func Self() Holder {
	host, _ := os.Hostname() // in a pod, the pod's name
	return Holder{Pod: host, PID: os.Getpid()}
}

// State is whether this process may serve. It is immutable.
type State struct {
	KubeletDir string // of the lock that was requested
	Held       bool
	Reason     string  // why this process may not serve; empty if Held
	Waits      bool    // another process holds the lock
	Holder     *Holder // that process; nil if it does not tell
	Warning    string  // Held, but nothing keeps another agent from serving
}

// Lock is the lock of a node. The lock alone decides who serves.
type Lock struct {
	self Holder
	log  *zap.Logger
	poll time.Duration

	state     health.Latest[State] // never empty
	requested health.Latest[string]

	// These belong to Run.
	held    *filelock.Held // nil before the first; also of a directory that was replaced, until the new one is locked
	asked   time.Time      // when the holder was asked last
	acquire func(path string, flag int) (*filelock.Held, error)
}

// pollInterval is how often Run tries to acquire the lock, and checks that it has it.
const pollInterval = 100 * time.Millisecond

const (
	askInterval = time.Second            // between questions to the holder
	askTimeout  = 300 * time.Millisecond // for its answer
)

// New returns a lock that this process does not hold yet. It must run: see Run.
func New(self Holder, log *zap.Logger) *Lock {
	l := &Lock{self: self, log: log, poll: pollInterval, acquire: filelock.Acquire}
	l.state.Store(&State{Reason: aboutToAcquire})
	return l
}

// SetConfig sets the path of this process's configuration. Call it before Run.
func (l *Lock) SetConfig(path string) { l.self.Config = path }

// Faster divides the poll interval, for tests that play many sequences. Call it before Run.
func (l *Lock) Faster(n int) *Lock {
	l.poll /= time.Duration(n)
	return l
}

// State holds whether this process may serve. It is never empty. A nil Lock has none.
func (l *Lock) State() *health.Latest[State] {
	if l == nil {
		return nil
	}
	return &l.state
}

// Request asks Run for the lock of a kubelet's directory; "" is none. A process requests one directory. Once acquired, the lock is kept to
// the end of the process. It may be called for nil: there is one agent on the node.
func (l *Lock) Request(kubeletDir string) {
	if l == nil {
		return
	}
	if last := l.requested.Load(); last == nil || *last != kubeletDir {
		l.requested.Store(&kubeletDir)
	}
}

// In returns whether this process may serve in a kubelet's directory, as of State. A nil Lock is always held.
func (l *Lock) In(kubeletDir string) State {
	if l == nil {
		return State{KubeletDir: kubeletDir, Held: true}
	}
	if now := l.state.Load(); now.KubeletDir == kubeletDir {
		return *now
	}
	return State{Reason: aboutToAcquire}
}

const aboutToAcquire = "about to acquire the lock of the node"

// Run acquires the lock when it is requested, and again if the directory is replaced, until ctx ends. The lock stays: see Close.
func (l *Lock) Run(ctx context.Context) error {
	var serving sync.WaitGroup
	defer serving.Wait()
	stopServing := func() {}
	defer func() { stopServing() }()
	served := ""
	tick := time.NewTicker(l.poll)
	defer tick.Stop()
	for {
		dir, changed := l.requested.Watch()
		var ticks <-chan time.Time
		path := ""
		if dir != nil {
			l.step(ctx, *dir)
			if now := l.state.Load(); now.Held {
				path = filepath.Join(now.KubeletDir, Directory)
			}
			ticks = tick.C
		}
		if path != served {
			stopServing()
			stopServing, served = func() {}, path
			if path != "" {
				socketCtx, cancel := context.WithCancel(ctx)
				stopServing = cancel
				routes := unixsock.Routes{holderRoute: func(context.Context, []byte) (any, error) { return l.self, nil }}
				serving.Go(func() { _ = unixsock.Serve(socketCtx, filepath.Join(path, Socket), l.log, routes) })
			}
		}
		select {
		case <-ctx.Done():
			return nil
		case <-changed:
		case <-ticks:
		}
	}
}

// Close releases the lock. The end of the process does that too.
func (l *Lock) Close() { l.held.Release() }

// step acquires the lock of a kubelet's directory unless it is held.
func (l *Lock) step(ctx context.Context, kubeletDir string) {
	if kubeletDir == "" {
		if now := l.state.Load(); now.KubeletDir != "" && !now.Held {
			l.state.Store(&State{Reason: "plugin.enabled is false"})
		}
		return
	}
	path := filepath.Join(kubeletDir, Directory)
	if l.held.Of(path) {
		l.hold(kubeletDir)
		return
	}
	held, err := l.acquire(path, syscall.O_DIRECTORY)
	switch {
	case err == nil:
		l.held.Release()
		l.held = held
		l.hold(kubeletDir)
	case errors.Is(err, filelock.ErrLocked):
		l.wait(ctx, kubeletDir, path)
	case errors.Is(err, fs.ErrNotExist):
		if l.state.Load().Held {
			return // nobody can serve there until it is made again
		}
		l.set(State{KubeletDir: kubeletDir, Reason: fmt.Sprintf("plugin.kubeletDir: %v; set it to the kubelet's directory and mount that", err)})
	default:
		l.set(State{KubeletDir: kubeletDir, Reason: fmt.Sprintf("cannot lock the node: %v", err)})
	}
}

// hold stores that the lock of a directory is held.
func (l *Lock) hold(kubeletDir string) {
	next := State{KubeletDir: kubeletDir, Held: true}
	if unsupported := l.held.Unsupported(); unsupported != nil {
		next.Warning = fmt.Sprintf("%v; two agents could serve the same devices: run one on this node", unsupported)
	}
	l.set(next)
}

// wait stores that another process holds the lock of a directory.
func (l *Lock) wait(ctx context.Context, kubeletDir, path string) {
	now := time.Now()
	if last := l.state.Load(); last.Waits && now.Sub(l.asked) < askInterval {
		return
	}
	l.asked = now
	next := State{KubeletDir: kubeletDir, Waits: true, Reason: "another agent serves this node", Holder: Ask(ctx, path)}
	if h := next.Holder; h != nil {
		next.Reason += ": " + h.String()
	}
	next.Reason += "; waiting for its end"
	l.set(next)
}

// String describes a holder.
func (h Holder) String() string {
	text := fmt.Sprintf("%s (PID %d", h.Pod, h.PID)
	if h.Config != "" {
		text += ", " + h.Config
	}
	return text + ")"
}

// Ask returns who holds the lock of a directory device-plugins, nil if nobody answers. A socket without a process behind it is nobody's.
func Ask(ctx context.Context, path string) *Holder {
	ctx, cancel := context.WithTimeout(ctx, askTimeout)
	defer cancel()
	var h Holder
	if err := unixsock.Call(ctx, filepath.Join(path, Socket), holderRoute, nil, &h); err != nil || h.Pod == "" {
		return nil
	}
	return &h
}

// set stores a state, and logs it when it changes.
func (l *Lock) set(next State) {
	last := l.state.Load()
	if last.KubeletDir == next.KubeletDir && last.Held == next.Held && last.Reason == next.Reason && last.Warning == next.Warning {
		return
	}
	switch {
	case !next.Held:
		l.log.Warn("not serving the devices of this node", zap.String("reason", next.Reason))
	case next.Warning != "":
		l.log.Warn("the node is not locked", zap.String("reason", next.Warning))
	default:
		l.log.Info("holding the lock of the node", zap.String("kubeletDir", next.KubeletDir))
	}
	l.state.Store(&next)
}
