package memlimits

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"slices"
	"time"

	"go.uber.org/zap"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/health/driver"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/containers"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/deviceid"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/podresources"
)

// enforcer keeps the limits of the containers with one configuration. Its passes do not overlap.
type enforcer struct {
	*Follower
	config  Config
	snap    *health.Snapshot // of the newest pass; nil before the first
	held    <-chan struct{}  // closed when the holders have changed since the newest pass
	tick    <-chan time.Time
	log     changeLog
	driver  examinedDriver
	cgroups containers.Cgroups
	limits  map[target]limit     // of the containers that run
	absent  map[string]time.Time // when an ID had no control group: its container has ended

	hiddenErr error // why the control groups of pods are not visible
	lookedAt  time.Time
}

// target is a control group on a device.
type target struct {
	device health.DeviceID
	group  string // directory
}

// limit is what was read of a target.
type limit struct {
	reason string // why it is not in force; empty if it is
	bytes  uint64 // for which reason is
	read   time.Time
	valid  bool  // reason is of a read
	err    error // of the last read; it changes no valid reason

	used    uint64
	hasUsed bool
}

// notRunning is the reason of a container that was allocated and has not started, or has ended.
const notRunning = "no control group of the container was found"

// unreadable begins the reason of a container whose limits were not read.
const unreadable = "its limits cannot be read: "

// Pass examines the node and the containers once, and sets the limits that are not in force. Its result is incomplete if ctx ends.
func (e *enforcer) Pass(ctx context.Context) (r result) {
	now, snap := time.Now(), e.snap
	r.snapshot.Containers = e.containers(snap)
	if e.config.Enforcement != Driver {
		return r
	}
	names, namesErr := e.names.Read(ctx, e.config.PodLogs)
	var hangs error // the directory does; the containers of before are known
	if names.Containers != nil && errors.Is(namesErr, health.ErrLate) {
		hangs, namesErr = fmt.Errorf("metrics.processes.podLogs: %w", namesErr), nil
		r.snapshot.Err = hangs.Error()
	}
	findErr := e.canFind(cmp.Or(namesErr, names.ContainersErr), now)
	setErr := findErr
	if setErr == nil && !e.Admin {
		setErr = errors.New("it lacks CAP_SYS_ADMIN")
	}
	versionErr := e.cgroups.CheckVersion()
	if versionErr == nil {
		e.driver.examine(ctx, snap, now)
	}
	r.capabilities = e.driver.capabilities(snap, e.Hooks(), versionErr, setErr)
	if findErr != nil && r.capabilities.Hook {
		r.snapshot.Err = findErr.Error()
	}
	running := make(map[target]limit)
	byName := idsByName(names)
	for i := range r.snapshot.Containers {
		c := &r.snapshot.Containers[i]
		if c.judged() {
			continue
		}
		if c.Reason = r.capabilities.Driver[c.Device]; c.Reason != "" {
			continue
		}
		if findErr != nil {
			c.Reason = unreadable + findErr.Error()
			continue
		}
		if ctx.Err() != nil {
			return r
		}
		if err := e.enforce(c, byName[containers.Container{Namespace: c.Namespace, Pod: c.Pod, Name: c.Name}], running, now); err != nil {
			r.snapshot.Err = cmp.Or(r.snapshot.Err, err.Error())
		}
		if c.Reason == notRunning && hangs != nil {
			c.Reason = unreadable + hangs.Error()
		}
	}
	e.limits = running
	exists := func(id string) bool { _, exists := names.Containers[id]; return exists }
	e.cgroups.Keep(exists)
	maps.DeleteFunc(e.absent, func(id string, _ time.Time) bool { return !exists(id) })
	return r
}

// memoryOf returns the memory that a container holds by a unit or by a claim, and whether MPS limits the container; 0 if it holds none.
// The size of a unit is in its ID, so it is what the unit had when it was allocated.
func (e *enforcer) memoryOf(h podresources.Holder) (bytes uint64, byMPS bool) {
	if h.ByClaim() {
		return e.Claimed(h)
	}
	f := deviceid.Parse(h.DeviceID).Form()
	byMPS = f.Kind == deviceid.MemoryByMPS
	if byMPS || f.Kind == deviceid.Memory {
		bytes = f.Size << 20
	}
	return bytes, byMPS
}

// containers returns the containers that hold memory, by device. Those that MPS limits are judged. It may be called during a pass.
func (e *enforcer) containers(snap *health.Snapshot) (list []Container) {
	holders := e.Holders.Load().By
	for i := range snap.Devices {
		id := snap.Devices[i].Device.ID
		first := len(list)
		for _, h := range holders[id] { // sorted, so the holders of one container are adjacent
			bytes, byMPS := e.memoryOf(h)
			if bytes == 0 {
				continue
			}
			last := len(list) - 1
			if last < first || !heldBy(&list[last], h) {
				c := Container{Namespace: h.Namespace, Pod: h.Pod, Name: h.Container, Device: id, Resource: h.Resource, Enforcement: None}
				if byMPS {
					c.judgeMPS(snap.Devices[i].MPS)
				} else if e.config.Enforcement == MPS {
					c.Reason = "it was given its memory before MPS served the device"
				}
				list = append(list, c)
				last++
			}
			if !h.ByClaim() {
				list[last].Units++
			}
			list[last].Limit += bytes
		}
	}
	slices.SortStableFunc(list, func(a, b Container) int { return cmp.Compare(a.Device, b.Device) })
	return list
}

func heldBy(c *Container, h podresources.Holder) bool {
	return c.Namespace == h.Namespace && c.Pod == h.Pod && c.Name == h.Container
}

// judged reports whether the driver's limits do not matter to the container.
func (c *Container) judged() bool { return c.Enforcement != None || c.Reason != "" }

// matches reports whether o is the container with the same limit.
func (c *Container) matches(o Container) bool {
	return c.Device == o.Device && c.Namespace == o.Namespace && c.Pod == o.Pod && c.Name == o.Name && c.Limit == o.Limit
}

// judgeMPS sets the enforcement of a container that MPS limits. d is the daemon of its device, nil if MPS does not serve it.
func (c *Container) judgeMPS(d *health.MPSDaemon) {
	switch {
	case d == nil:
		c.Reason = "the MPS daemon has not been examined yet"
	case !d.Ready:
		c.Reason = "the MPS daemon is not ready: " + d.Reason
	default:
		c.Enforcement = MPS
	}
}

// canFind returns why the agent cannot find the containers and their control groups.
func (e *enforcer) canFind(namesErr error, now time.Time) error {
	if e.hiddenErr == nil || now.Sub(e.lookedAt) >= refresh { // a search that finds none is long
		e.hiddenErr, e.lookedAt = e.cgroups.CheckVisible(), now
	}
	holders := e.Holders.Load()
	switch {
	case e.hiddenErr != nil:
		return e.hiddenErr
	case holders.By == nil && !holders.Pending:
		return fmt.Errorf("the containers that hold devices are unknown: %s", holders.Err)
	case e.config.PodLogs == "":
		return errors.New("metrics.processes.podLogs: empty; the IDs of containers are not available")
	case namesErr != nil:
		return fmt.Errorf("metrics.processes.podLogs: %w", namesErr)
	}
	return nil
}

func idsByName(names containers.Names) map[containers.Container][]string {
	by := make(map[containers.Container][]string, len(names.Containers))
	for id, c := range names.Containers {
		by[c] = append(by[c], id)
	}
	return by
}

// enforce reads the limits of a container, sets them if they are not in force, and reads them back. The container has an ID for each of
// its starts, of which one runs. A call that fails returns its error, and leaves the last result.
func (e *enforcer) enforce(c *Container, ids []string, running map[target]limit, now time.Time) (err error) {
	reason, found := notRunning, false
	slices.SortFunc(ids, func(a, b string) int { return e.absent[a].Compare(e.absent[b]) }) // IDs that have ended come last
	for _, id := range ids {
		if at, absent := e.absent[id]; absent && (found || now.Sub(at) < refresh) {
			continue // a search is long
		}
		dir, missing := e.cgroups.Dir(id)
		if missing != nil {
			e.absent[id] = now
			continue
		}
		delete(e.absent, id)
		t := target{c.Device, containers.ProcessDir(dir)}
		l := e.limits[t]
		if l.bytes != c.Limit || now.Sub(l.read) >= refresh {
			l = e.update(t, l, c.Limit, now)
			if l.err != nil {
				if _, err := os.Stat(t.group); err != nil {
					e.absent[id] = now // it has just ended
					continue
				}
				delete(e.driver.examined, t.device) // the driver may not limit it any more
			}
		}
		running[t], found = l, true
		if reason == notRunning || l.reason != "" {
			reason = l.reason
		}
		err = cmp.Or(err, l.err)
		c.Used, c.HasUsed = c.Used+l.used, c.HasUsed || l.hasUsed
	}
	if c.Reason = reason; reason == "" {
		c.Enforcement = Driver
	}
	return err
}

// update reads the limits of a target, and sets them if they are not in force. The container keeps a tighter limit, which its
// own environment may have set.
//
// The soft limit is 0. It would reserve memory, and the kubelet gives each unit once, so the hard limits alone keep what is free for
// the others. A reservation can stay with the parent group after the container's group was removed.
func (e *enforcer) update(t target, l limit, bytes uint64, now time.Time) limit {
	if l.bytes != bytes {
		l = limit{bytes: bytes}
	}
	l.read, l.used, l.hasUsed = now, 0, false
	found, setErr, err := e.readAndSet(t, bytes)
	if l.err = err; err != nil {
		if !l.valid {
			l.reason = unreadable + reasonOf(err, t.device)
		}
		return l
	}
	l.valid, l.used, l.hasUsed, l.reason = true, found.Used, found.Hard != driver.NoMemoryLimit, ""
	switch {
	case found.Hard <= bytes:
	case found.Hard == driver.NoMemoryLimit:
		l.reason = fmt.Sprintf("expected a limit of %d MiB, found none", bytes>>20)
	default:
		l.reason = fmt.Sprintf("expected a limit of %d MiB, found %d MiB", bytes>>20, found.Hard>>20)
	}
	if setErr != nil {
		l.reason += ": " + reasonOf(setErr, t.device)
	}
	return l
}

// readAndSet reads the limits of a target. If the hard limit is too high, it sets the limits and reads them again.
func (e *enforcer) readAndSet(t target, bytes uint64) (found driver.MemoryLimits, setErr, err error) {
	found, err = e.readLimits(t)
	if err != nil || found.Hard <= bytes {
		return found, nil, err
	}
	if setErr = e.driver.limiter.SetLimits(t.device, t.group, 0, bytes); setErr != nil {
		return found, setErr, nil
	}
	if found, err = e.readLimits(t); err == nil && found.Hard <= bytes {
		e.Log.Info("memory limit set", zap.String("device", string(t.device)), zap.String("cgroup", t.group), zap.Uint64("bytes", bytes))
	}
	return found, nil, err
}

func (e *enforcer) readLimits(t target) (driver.MemoryLimits, error) {
	l, err := e.driver.limiter.Limits(t.device, t.group)
	if errors.Is(err, driver.ErrNoMemoryLimits) {
		return driver.MemoryLimits{Hard: driver.NoMemoryLimit}, nil
	}
	return l, err
}
