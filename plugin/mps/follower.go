package mps

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"go.uber.org/zap"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/health/unixsock"
	"github.com/gpu-node-agent/gpu-node-agent/health/wait"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/offer"
)

const (
	statusTimeout = 2 * time.Second
	maxCommands   = 16 // runs of the control program at the same time

	stopPoll        = 500 * time.Millisecond
	stopLimit       = time.Minute
	stopUnreachable = 5 * time.Second
)

// Errors of TerminateClient.
var (
	ErrNotServed = errors.New("no MPS daemon serves the device")
	ErrNoClient  = errors.New("no such MPS client")
)

// Options configure a Follower. All fields are required.
type Options struct {
	Desired   *health.Latest[Desired] // empty until the devices are known: then no daemon is started or stopped
	Root      func() Root             // of the configuration in force; for Stop, which must not wait until the devices are known
	Simulated func() bool             // the GPUs are simulated: mps-daemon need not share /dev/shm
	Facts     func() offer.Facts
	Log       *zap.Logger
}

// Follower is the agent's part: it configures and judges the daemons.
type Follower struct {
	Options
	state health.Latest[health.MPSState]

	control command
	call    func(ctx context.Context, r Root, route string, body any) (Status, error)
	slots   chan struct{} // limits the runs of the control program

	poked chan struct{} // holds one: the devices are to be examined soon

	mu      sync.Mutex // guards the fields below
	err     string     // see Err
	desired Desired    // what Run follows
}

// NewFollower returns a follower, which does nothing before Run.
func NewFollower(o Options) *Follower {
	return &Follower{
		Options: o, call: callSupervisor, slots: make(chan struct{}, maxCommands), poked: make(chan struct{}, 1),
		control: func(ctx context.Context, program string, r Root, device health.DeviceID, command string) (string, error) {
			return runControl(ctx, program, environment(r, device), command)
		},
	}
}

// State returns the state of all daemons, as the Follower saw it last.
func (f *Follower) State() *health.Latest[health.MPSState] { return &f.state }

// Err returns why the daemons cannot be followed: mps-daemon cannot be reached or does not follow, or the control program does not
// run. It returns "" if there is no such reason, or no daemon is desired.
func (f *Follower) Err() string {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.err
}

// QueryStatus asks the Supervisor for its status.
func QueryStatus(ctx context.Context, r Root) (Status, error) {
	return callSupervisor(ctx, r, statusRoute, nil)
}

// CheckFormer returns an error if the process before this one had another root and MPS daemons run below it: containers with shares mount
// its directories, and a device cannot have two daemons.
func CheckFormer(root, former Root) error {
	if root == former {
		return nil
	}
	for _, id := range former.devices() {
		if _, ok := listener(former.PipeDir(id)); ok {
			return fmt.Errorf("plugin.sharing.mps.root: expected %s, got %s: the MPS daemon of %s runs there; set it back, or drain the node "+
				"and end mps-daemon", former, root, id)
		}
	}
	return nil
}

// callSupervisor sends a request, and returns the status if the route does.
func callSupervisor(ctx context.Context, r Root, route string, body any) (status Status, err error) {
	err = unixsock.Call(ctx, r.Socket(), route, body, &status)
	return status, err
}

// asker returns an examiner that can only send commands to the daemon of a device.
func (f *Follower) asker(device health.DeviceID) (*examiner, error) {
	if s := f.state.Load(); s == nil || s.Daemons[device] == nil {
		return nil, fmt.Errorf("%w: %s", ErrNotServed, device)
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	return &examiner{root: f.desired.Root, program: f.desired.Control, command: f.controlInTurn, spec: Spec{Device: device}}, nil
}

// Clients asks the daemon of a device for the clients of each of its servers, by PID.
func (f *Follower) Clients(ctx context.Context, device health.DeviceID) (map[int][]int, error) {
	e, err := f.asker(device)
	if err != nil {
		return nil, err
	}
	clients, err := e.allClients(ctx)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", device, err)
	}
	return clients, nil
}

// TerminateClient has the daemon of a device terminate a client: its CUDA calls fail from then on.
func (f *Follower) TerminateClient(ctx context.Context, device health.DeviceID, client int) error {
	e, err := f.asker(device)
	if err != nil {
		return err
	}
	clients, err := e.allClients(ctx)
	if err != nil {
		return fmt.Errorf("%s: %w", device, err)
	}
	var all []string
	for _, server := range slices.Sorted(maps.Keys(clients)) {
		if slices.Contains(clients[server], client) {
			if _, err = e.send(ctx, "terminate_client %d %d", server, client); err != nil {
				return fmt.Errorf("%s: client %d of server %d: %w", device, client, server, err)
			}
			f.poke()
			return nil
		}
		for _, pid := range clients[server] {
			all = append(all, fmt.Sprint(pid))
		}
	}
	if all == nil {
		return fmt.Errorf("%w: %s has no client", ErrNoClient, device)
	}
	return fmt.Errorf("%w: %s has no client %d; its clients are %s", ErrNoClient, device, client, strings.Join(all, ", "))
}

// poke has Run examine the devices soon.
func (f *Follower) poke() {
	wait.Signal(f.poked)
}

// controlInTurn runs the control program when fewer than maxCommands run.
func (f *Follower) controlInTurn(ctx context.Context, program string, r Root, device health.DeviceID, command string) (string, error) {
	select {
	case f.slots <- struct{}{}:
	case <-ctx.Done():
		return "", context.Cause(ctx)
	}
	defer func() { <-f.slots }()
	return f.control(ctx, program, r, device, command)
}

// Stop stops the daemons for a detach, and returns when none uses the driver any more, or after a limited time. No daemon runs
// until Run is called again. At the end of the process, the daemons continue.
func (f *Follower) Stop(ctx context.Context) {
	f.publishStopped()
	f.mu.Lock()
	f.err = ""
	f.mu.Unlock()
	root := f.Root()
	if !root.used() {
		return
	}
	stop := Follow{Version: followVersion, Stopped: true, Daemons: []followDaemon{}}
	for _, id := range root.devices() {
		stop.Daemons = append(stop.Daemons, newFollowDaemon(unknownSpec(id)))
	}
	ctx, cancel := context.WithTimeout(ctx, stopLimit)
	defer cancel()
	reached := time.Now()
	for {
		stop.Sent = sinceBoot()
		status, err := f.callWithin(ctx, root, followRoute, stop)
		if err == nil && status.Error != "" {
			err = errors.New(status.Error)
		}
		running := slices.DeleteFunc(status.Daemons, func(d DaemonStatus) bool { return d.PID == 0 && !d.Stopping })
		switch {
		case err == nil && len(running) == 0 && !status.Pending:
			f.Log.Info("MPS daemons stopped")
			return
		case err == nil:
			reached = time.Now()
		case time.Since(reached) >= stopUnreachable: // if mps-daemon hangs, it has the request, and follows that when it goes on
			f.Log.Error("cannot find out whether MPS daemons use the driver", zap.Error(err))
			return
		}
		if !wait.Sleep(ctx, stopPoll) {
			if len(running) > 0 || status.Pending {
				f.Log.Error("MPS daemons did not stop in time; they use the driver", zap.Any("daemons", running))
			}
			return
		}
	}
}

// publishStopped publishes that no daemon is ready, without findings: the detach is one.
func (f *Follower) publishStopped() {
	old := f.state.Load()
	if old == nil {
		return
	}
	stopped := make(map[health.DeviceID]*health.MPSDaemon, len(old.Daemons))
	for id, d := range old.Daemons {
		stopped[id] = &health.MPSDaemon{Leaving: d.Leaving, MultiUser: d.MultiUser, Reason: "stopped while the driver is detached"}
	}
	f.state.Store(&health.MPSState{Daemons: stopped})
}

// callWithin calls the Supervisor with a time limit.
func (f *Follower) callWithin(ctx context.Context, r Root, route string, body any) (Status, error) {
	ctx, cancel := context.WithTimeout(ctx, statusTimeout)
	defer cancel()
	return f.call(ctx, r, route, body)
}
