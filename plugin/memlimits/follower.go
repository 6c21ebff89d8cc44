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
type Open func() (limiter health.MemoryLimiter, release func(), err error)

// Follower finds out what the node can enforce and keeps the limits of containers, while memory sharing is configured.
type Follower struct {
	Options
	capabilities health.Latest[Capabilities]
	latest       health.Latest[Snapshot]
}

// New returns a Follower.
func New(o Options) *Follower { return &Follower{Options: o} }

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
	for ctx.Err() == nil {
		c, same, cancel := health.WatchPart(ctx, f.Config, func(c *Config) Config { return *c })
		if f.capabilities.Load() != nil { // after a detach, the driver can be another one
			f.capabilities.Store(&Capabilities{})
		}
		if c.Enforcement != "" {
			f.follow(same, c, open)
		} else {
			<-same.Done()
		}
		cancel()
	}
}

// follow follows the containers with a configuration until ctx ends.
func (f *Follower) follow(ctx context.Context, c Config, open Open) {
	e := &enforcer{
		Options: &f.Options, config: c, driver: driver{open: open}, cgroups: containers.Cgroups{Root: f.CgroupRoot},
		absent: make(map[string]time.Time),
	}
	calls := health.Guard[struct{}, result]{Limit: callLimit}
	defer e.driver.close()
	defer calls.Wait()
	defer f.latest.Store(nil) // before Wait, which may take as long as the driver hangs
	tick := time.NewTicker(refresh)
	defer tick.Stop()
	var log changeLog
	publish := func(r result) {
		if old := f.capabilities.Load(); old == nil || !reflect.DeepEqual(*old, r.capabilities) {
			f.capabilities.Store(&r.capabilities)
		}
		if old := f.latest.Load(); old == nil || !reflect.DeepEqual(*old, r.snapshot) {
			f.latest.Store(&r.snapshot)
		}
		log.write(f.Log, r)
	}
	for ctx.Err() == nil {
		_, held := f.Holders.Watch() // the kubelet is asked every two seconds, and after each allocation
		snap, polled := f.Snapshots.Watch()
		if snap.Polled() {
			polled = nil
			r, err := calls.Call(ctx.Done(), struct{}{}, func() result { return e.pass(ctx, snap) }, func() { publish(f.late(e, snap)) })
			if err == nil {
				publish(r)
			}
		}
		select {
		case <-ctx.Done():
		case <-polled:
		case <-held:
		case <-tick.C:
		}
	}
}

// late returns the result of a pass that has not returned in time: what was read last of the containers, without what changes with
// time. e is in use.
func (f *Follower) late(e *enforcer, snap *health.Snapshot) (r result) {
	r.snapshot.Err = fmt.Sprintf("no answer within %v; the driver does not answer, or metrics.processes.podLogs cannot be read", callLimit)
	var read []Container
	if last := f.latest.Load(); last != nil {
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
	if last := f.capabilities.Load(); last != nil {
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

// result is that of a pass.
type result struct {
	capabilities Capabilities
	snapshot     Snapshot
}

// changeLog logs changes of results.
type changeLog struct {
	err     string
	reasons map[health.DeviceID]string
	broken  map[target]string // by container: why its limit is not in force although the driver could
}

func (l *changeLog) write(log *zap.Logger, r result) {
	if r.snapshot.Err != l.err {
		if l.err = r.snapshot.Err; l.err != "" {
			log.Warn("cannot read memory limits", zap.String("error", l.err))
		} else {
			log.Info("reading memory limits again")
		}
	}
	changed := make(map[string][]string) // devices by reason
	for id, reason := range r.capabilities.Driver {
		if before, logged := l.reasons[id]; !logged || before != reason {
			changed[reason] = append(changed[reason], string(id))
		}
	}
	for reason, ids := range changed {
		slices.Sort(ids)
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
