package memlimits

import (
	"context"
	"fmt"
	"maps"
	"reflect"
	"slices"
	"time"

	"go.uber.org/zap"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/health/driver"
	"github.com/gpu-node-agent/gpu-node-agent/health/grouped"
	"github.com/gpu-node-agent/gpu-node-agent/health/logonce"
	"github.com/gpu-node-agent/gpu-node-agent/health/wait"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/containers"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/podresources"
)

// Config is what the Follower follows of the configuration.
type Config struct {
	Enforcement Enforcement // Driver: if the node can; "": memory is not shared, and the Follower does nothing
	PodLogs     string      // the kubelet's directory of container logs; "" for none
}

// Options configure a Follower. All fields are required.
type Options struct {
	Config    *health.Latest[Config]
	Snapshots *health.Latest[health.Snapshot]
	Holders   *health.Latest[podresources.Holders] // never empty

	// Claimed returns the memory that a container has by a claim, and whether MPS limits the container to it; 0 for a whole device.
	Claimed func(podresources.Holder) (bytes uint64, byMPS bool)

	// Hooks returns the devices for which a hook of the container toolkit applies the limits in a container's environment.
	Hooks func() map[health.DeviceID]bool

	CgroupRoot string // where the host's control groups are mounted
	Admin      bool   // the agent has the capability that the driver demands for setting limits, CAP_SYS_ADMIN
	Log        *zap.Logger
}

// Open gives the driver's limits and a function that releases them.
type Open func() (limiter driver.MemoryLimiter, release func(), err error)

// Follower finds out what the node can enforce and keeps the limits of containers, while memory sharing is configured.
type Follower struct {
	Options
	names        *containers.NamesReader
	capabilities health.Latest[Capabilities]
	latest       health.Latest[Snapshot]
}

// New returns a Follower.
func New(o Options) *Follower { return &Follower{Options: o, names: containers.NewNamesReader()} }

// Capabilities holds what the node can enforce, nil until it was examined. While the driver is detached, the last ones stay; Run
// examines all devices again.
func (f *Follower) Capabilities() *health.Latest[Capabilities] { return &f.capabilities }

// Latest holds the memory of the containers, nil while memory sharing is off or the driver is detached.
func (f *Follower) Latest() *health.Latest[Snapshot] { return &f.latest }

const (
	refresh   = 10 * time.Second // between two reads of a container's limits
	callLimit = 5 * time.Second  // a pass that takes longer has failed

	// Between two examinations of a device without limits.
	minRetry = 2 * time.Second
	maxRetry = 5 * time.Minute
)

// Run follows the configuration until ctx ends. It returns when the driver's limits are released: not before a call that hangs has
// returned.
func (f *Follower) Run(ctx context.Context, open Open) {
	containers.Follow(ctx, f.Config, callLimit, func(c Config) (containers.Examiner[result], bool) {
		if f.capabilities.Load() != nil { // after a detach, the driver can be another one
			f.capabilities.Store(&Capabilities{})
		}
		return &enforcer{
			Follower: f, config: c, driver: examinedDriver{open: open}, cgroups: containers.Cgroups{Root: f.CgroupRoot},
			absent: make(map[string]time.Time), tick: time.Tick(refresh),
		}, c.Enforcement != ""
	})
}

// Next waits for the first poll, and then for a change of the holders or the tick. The kubelet is asked every two seconds, and after each
// allocation.
func (e *enforcer) Next(ctx context.Context) bool {
	if e.snap != nil {
		select {
		case <-ctx.Done():
		case <-e.held:
		case <-e.tick:
		}
	}
	for ctx.Err() == nil {
		var polled <-chan struct{}
		_, e.held = e.Holders.Watch()
		if e.snap, polled = e.Snapshots.Watch(); e.snap.Polled() {
			return true
		}
		wait.For(ctx, polled)
	}
	return false
}

// Publish publishes a result that differs from the last one.
func (e *enforcer) Publish(r result) {
	if old := e.capabilities.Load(); old == nil || !reflect.DeepEqual(*old, r.capabilities) {
		e.capabilities.Store(&r.capabilities)
	}
	if old := e.latest.Load(); old == nil || !reflect.DeepEqual(*old, r.snapshot) {
		e.latest.Store(&r.snapshot)
	}
	e.log.write(e.Log, r)
}

// Clear withdraws the memory of the containers. What the node can enforce stays.
func (e *enforcer) Clear() { e.latest.Store(nil) }

// Close releases the driver's limits.
func (e *enforcer) Close() { e.driver.close() }

// Late returns the result of a pass that has not returned in time: what was read last of the containers, without what changes with
// time.
func (e *enforcer) Late() (r result) {
	snap := e.snap
	r.snapshot.Err = fmt.Sprintf("no answer within %v; the driver does not answer", callLimit)
	var read []Container
	if last := e.latest.Load(); last != nil {
		read = last.Containers
	}
	r.snapshot.Containers = e.containers(snap)
	for i := range r.snapshot.Containers {
		c := &r.snapshot.Containers[i]
		if c.judged() {
			continue
		}
		c.Reason = unreadable + r.snapshot.Err
		if j := slices.IndexFunc(read, c.matches); j >= 0 {
			c.Enforcement, c.Reason = read[j].Enforcement, read[j].Reason
		}
	}
	r.capabilities.Driver = make(map[health.DeviceID]string)
	if last := e.capabilities.Load(); last != nil {
		r.capabilities.Hook = last.Hook
		maps.Copy(r.capabilities.Driver, last.Driver)
	}
	for i := range snap.Devices {
		id := snap.Devices[i].Device.ID
		if _, examined := r.capabilities.Driver[id]; !examined {
			r.capabilities.Driver[id] = r.snapshot.Err
		}
	}
	return r
}

// result is the result of a pass.
type result struct {
	capabilities Capabilities
	snapshot     Snapshot
}

// changeLog logs changes of results.
type changeLog struct {
	err     logonce.State
	reasons map[health.DeviceID]string
	broken  map[target]string // by container: why its limit is not in force although the driver could
}

func (l *changeLog) write(log *zap.Logger, r result) {
	switch err := r.snapshot.Err; {
	case !l.err.Changed(err):
	case err != "":
		log.Warn("cannot read memory limits", zap.String("error", err))
	default:
		log.Info("reading memory limits again")
	}
	var changed grouped.Texts // reasons with devices
	for _, id := range slices.Sorted(maps.Keys(r.capabilities.Driver)) {
		reason := r.capabilities.Driver[id]
		if before, logged := l.reasons[id]; !logged || before != reason {
			changed.Add(reason, string(id))
		}
	}
	for reason, ids := range changed.All() {
		if reason == "" {
			log.Info("the driver limits the memory of containers", zap.Strings("devices", ids), zap.Bool("hook", r.capabilities.Hook))
		} else {
			log.Warn("the driver does not limit the memory of containers", zap.Strings("devices", ids), zap.String("reason", reason))
		}
	}
	l.reasons = r.capabilities.Driver
	broken := make(map[target]string)
	for i := range r.snapshot.Containers {
		c := &r.snapshot.Containers[i]
		if c.Reason == "" || c.Reason == notRunning || r.capabilities.Driver[c.Device] != "" {
			continue
		}
		t := target{c.Device, c.Namespace + "/" + c.Pod + "/" + c.Name}
		if broken[t] = c.Reason; l.broken[t] != c.Reason {
			log.Warn("the memory limit of a container is not in force", zap.String("device", string(c.Device)), zap.String("container", t.group),
				zap.Uint64("limit", c.Limit), zap.String("reason", c.Reason))
		}
	}
	l.broken = broken
}
