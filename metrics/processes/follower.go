package processes

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"time"

	"go.uber.org/zap"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/health/driver"
	"github.com/gpu-node-agent/gpu-node-agent/health/logonce"
	"github.com/gpu-node-agent/gpu-node-agent/health/wait"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/containers"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/podresources"
)

// Options configure a Follower. All fields but PodByUID are required.
type Options struct {
	Config    *health.Latest[Config]
	Snapshots *health.Latest[health.Snapshot]                    // for the devices
	Holders   func() podresources.Holders                        // of the devices
	PodByUID  func(uid string) (namespace, name string, ok bool) // of the API server; nil without it
	Log       *zap.Logger
}

// Source lists processes.
type Source struct {
	Open     Open
	Interval time.Duration // between measurements
	Limit    time.Duration // a measurement that takes longer has failed

	// AllProcesses means that the lists have the processes of all containers. Otherwise an empty list is no evidence.
	AllProcesses bool
}

// Follower measures the processes while metrics.processes is enabled.
type Follower struct {
	Options
	names  *containers.NamesReader
	latest health.Latest[Snapshot]
}

// New returns a Follower.
func New(o Options) *Follower { return &Follower{Options: o, names: containers.NewNamesReader()} }

// Latest holds the newest measurement, nil while nothing is measured.
func (f *Follower) Latest() *health.Latest[Snapshot] { return &f.latest }

// Measure follows the configuration and measures until ctx ends. It returns when the source is released: not before a call that
// hangs has returned.
func (f *Follower) Measure(ctx context.Context, s Source) {
	containers.Follow(ctx, f.Config, s.Limit, func(c Config) (containers.Examiner[*Snapshot], bool) {
		return &measurement{Follower: f, config: c, source: s}, c.Enabled
	})
}

// Next waits for an interval, and before the first measurement for devices and holders.
func (m *measurement) Next(ctx context.Context) bool {
	if m.tick == nil {
		m.awaitDevices(ctx)
		m.awaitHolders(ctx)
		m.tick = time.Tick(m.source.Interval)
		return ctx.Err() == nil
	}
	wait.For(ctx, m.tick)
	return ctx.Err() == nil
}

// Late returns the snapshot of a measurement that has failed.
func (m *measurement) Late() *Snapshot {
	return &Snapshot{Err: fmt.Sprintf("no measurement within %v; the driver does not answer", m.source.Limit)}
}

// Publish publishes a measurement, nil if nothing was measured.
func (m *measurement) Publish(s *Snapshot) {
	m.latest.Store(s)
	m.log.write(m.Log, s)
}

// Clear withdraws the measurement.
func (m *measurement) Clear() { m.latest.Store(nil) }

// holdersTimeout limits how long the first measurement waits for the kubelet. Without it each start of the agent would show all
// processes without a pod for an interval.
const holdersTimeout = 5 * time.Second

// awaitHolders waits until the holders are known.
func (m *measurement) awaitHolders(ctx context.Context) {
	tick := time.Tick(100 * time.Millisecond)
	for timeout := time.After(holdersTimeout); m.Holders().By == nil; {
		select {
		case <-ctx.Done():
			return
		case <-timeout:
			return
		case <-tick:
		}
	}
}

// changeLog logs the changes of a snapshot's error and warning.
type changeLog struct{ err, warning logonce.State }

func (l *changeLog) write(log *zap.Logger, s *Snapshot) {
	if s == nil {
		return
	}
	switch {
	case !l.err.Changed(s.Err):
	case s.Err != "":
		log.Warn("cannot measure processes", zap.String("error", s.Err))
	default:
		log.Info("measuring processes again")
	}
	if s.Warning != "" && l.warning.Changed(s.Warning) { // once, although a process that comes and goes would bring it back each time
		log.Warn("processes may lack their pod", zap.String("error", s.Warning))
	}
}

// measurement measures with one configuration and one source.
type measurement struct {
	*Follower
	config Config
	source Source
	tick   <-chan time.Time // nil before the first measurement
	log    changeLog

	list    driver.ProcessLister // nil while the source is not open
	release func()

	unreadable int // number of consecutive measurements in which no process had a readable control group
}

// Close closes the source.
func (m *measurement) Close() {
	if m.list != nil {
		m.release()
		m.list, m.release = nil, nil
	}
}

// Pass returns a measurement, nil if there is no device yet. After an error it opens the source again next time.
func (m *measurement) Pass(ctx context.Context) *Snapshot {
	devices := m.devices()
	if len(devices) == 0 {
		return nil
	}
	reading, err := m.read(ctx, devices)
	if err == nil && len(reading.Measured) == 0 {
		err = errNothingListed
	}
	if err != nil {
		m.Close()
		return &Snapshot{Err: err.Error()}
	}
	s := &Snapshot{ProcessReading: *reading}
	s.Measured = slices.Compact(slices.Sorted(slices.Values(reading.Measured)))
	s.Processes = mergeProcesses(reading, devices)
	if !m.source.AllProcesses {
		s.Measured = slices.DeleteFunc(s.Measured, func(id health.DeviceID) bool {
			return !slices.ContainsFunc(s.Processes, func(p driver.Process) bool { return p.Device == id })
		})
		if len(s.Measured) == 0 {
			return &Snapshot{Err: hiddenProcesses}
		}
	}
	var names containers.Names
	if len(s.Processes) > 0 {
		names, err = m.names.Read(ctx, m.config.PodLogs)
	}
	a := attribution{
		cgroup:   func(pid int) (string, error) { return containers.ReadCgroup(m.config.Proc, pid) },
		podByUID: m.PodByUID, names: names, holders: m.Holders(), related: relatedDevices(devices),
	}
	s.Usage, s.WithoutPod = a.usage(s.Processes)
	s.Containers = a.containers
	s.Warning = m.warning(s, &a, err)
	return s
}

// warning returns why processes may lack their pod. namesErr is the error of NamesReader.Read.
func (m *measurement) warning(s *Snapshot, a *attribution, namesErr error) string {
	m.unreadable++
	if n := s.WithoutPod[ReasonUnreadable]; n == 0 || n < len(s.Processes) {
		m.unreadable = 0
	}
	switch {
	case m.unreadable > 2: // not only a process that has just ended
		return fmt.Sprintf("metrics.processes.proc: %s has none of the processes; expected the procfs of the host", m.config.Proc)
	case namesErr != nil:
		return "metrics.processes.podLogs: " + namesErr.Error()
	case s.WithoutPod[ReasonUnknownPod] > 0 && m.config.PodLogs == "":
		return "metrics.processes.podLogs: empty, and the API server names no pods; set it, or metrics.podUID"
	case s.WithoutPod[ReasonUnknownPod] > 0:
		return fmt.Sprintf("metrics.processes.podLogs: %s has no directory for some of the pods", m.config.PodLogs)
	case a.intruder != "":
		return "used without being held: " + a.intruder
	}
	return ""
}

var errNothingListed = errors.New("the driver lists the processes of no device")

// hiddenProcesses is the error of lists that are empty and may not have all processes. NVIDIA's driver omits processes that have no
// PID in the caller's PID namespace (open-gpu-kernel-modules, gpuGetProcWithObject).
const hiddenProcesses = "no process is listed, and the driver hides processes outside the agent's PID namespace; run the agent in the " +
	"host's: hostPID"

// awaitDevices waits until there are devices. Without it the first measurement would be an interval late.
func (m *measurement) awaitDevices(ctx context.Context) {
	for ctx.Err() == nil {
		_, changed := m.Snapshots.Watch()
		if len(m.devices()) > 0 {
			return
		}
		wait.For(ctx, changed)
	}
}

func (m *measurement) devices() []health.Device {
	s := m.Snapshots.Load()
	if s == nil {
		return nil
	}
	devices := make([]health.Device, len(s.Devices))
	for i := range s.Devices {
		devices[i] = s.Devices[i].Device
	}
	return devices
}

func (m *measurement) read(ctx context.Context, devices []health.Device) (*driver.ProcessReading, error) {
	if m.list == nil {
		list, release, err := m.source.Open()
		if err != nil {
			return nil, err
		}
		m.list, m.release = list, release
	}
	return m.list(ctx, devices)
}

// InHostPIDNamespace reports whether the agent is in the initial PID namespace, whose number is fixed in Linux (PROC_PID_INIT_INO
// in linux/proc_ns.h).
func InHostPIDNamespace() bool {
	link, err := os.Readlink("/proc/self/ns/pid")
	return err == nil && link == "pid:[4026531836]"
}
