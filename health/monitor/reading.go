package monitor

import (
	"cmp"
	"os"
	"slices"
	"strconv"
	"syscall"
	"time"

	"go.uber.org/zap"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/health/catalog"
	"github.com/gpu-node-agent/gpu-node-agent/health/judge"
)

// applyReading judges a reading, publishes the result and logs the changes.
func (m *Monitor) applyReading(r *health.Reading) {
	m.mu.Lock()
	defer m.unlock()
	now, before := time.Now(), m.now.Devices
	m.setAway(len(r.Devices) == 0 && len(before) > 0, now) // an engine that started without a driver has no XIDs either
	m.now.Entities = r.Entities
	reloaded, rememberDriver := m.driverReloaded(r.Versions.Driver)
	rc := judge.ReadingContext{
		FirstReading: m.now.Source.Polls == 0, DriverReloaded: reloaded, NewInventory: m.newInventory && len(r.Devices) > 0,
		XIDHistory: m.history, Witnesses: m.witnesses(),
	}
	var delayed string
	m.now.Devices, delayed = m.outageFilter.Measure(m.currentConfig(), before, r, rc, now)
	if delayed != "" {
		m.applyDelayed(before, delayed, now)
		return
	}
	rememberDriver()
	m.newInventory = m.newInventory && !rc.NewInventory
	m.detach = m.detach.devicesRead(someUnread(m.now.Devices))
	if m.now.Source.Status != health.SourceUp {
		m.logLater(func() {
			m.log.Info("source up", zap.Int("devices", len(r.Devices)), zap.String("driver", r.Versions.Driver),
				zap.String("dcgm", r.Versions.DCGM), zap.String("engine", r.Versions.Engine))
		})
		m.loggedCause.Clear()
	}
	m.now.At = now
	m.bind()
	m.now.Source.Versions = r.Versions
	m.applyChecks(r, now)
	m.now.Source.Reconnects = m.sessions - 1
	m.now.Source.Polls++
	m.now.Source.PollTook = m.pollDuration
	setStatus(&m.now.Source, health.SourceUp, "", now)
	m.store()
	if len(m.unjudged) > 0 {
		m.events.wake() // a device that they wait for may be listed now
	}
}

// applyDelayed publishes what counts in a reading that the filter delays: all but the presence of its GPUs. The source counts as
// down. m.mu is held.
func (m *Monitor) applyDelayed(before []health.DeviceState, reason string, now time.Time) {
	if m.loggedCause.Changed(reason) {
		m.logLater(func() { m.log.Warn("source down", zap.String("cause", reason)) })
	}
	values := make(map[health.DeviceID]map[health.Field]float64, len(before))
	for _, d := range before {
		values[d.Device.ID] = d.Sample.Values
	}
	for i := range m.now.Devices { // the latest values stay for a while, as with any source that is down
		if s := &m.now.Devices[i].Sample; s.Presence == health.PresenceUnknown && len(s.Values) == 0 {
			s.Values = values[s.Device]
		}
	}
	setStatus(&m.now.Source, health.SourceDown, reason, now)
	m.storeJudged()
}

// observe judges events. m.mu is held.
func (m *Monitor) observe(before []health.DeviceState, events []judge.Observation, reloaded bool, now time.Time) {
	rc := judge.ReadingContext{DriverReloaded: reloaded, Witnesses: m.witnesses()}
	m.now.Devices = judge.Observe(m.currentConfig(), before, events, rc, now)
}

// witnesses returns the event sources that are on. m.mu is held.
func (m *Monitor) witnesses() (on []health.Witness) {
	for _, e := range m.now.Source.Events {
		if e.Status != health.EventsOff {
			on = append(on, e.Witness)
		}
	}
	return on
}

// viewContext requires m.mu.
func (m *Monitor) viewContext() judge.ViewContext {
	return judge.ViewContext{Held: m.held, Detach: m.detach.Detachment, MPS: m.mpsState()}
}

// driverReloaded reports whether the driver was loaded again, or another version of it, since remember was last called. Unknown values are
// not evidence. m.mu is held.
func (m *Monitor) driverReloaded(version string) (reloaded bool, remember func()) {
	source, load := &m.now.Source, ""
	if src := m.source.Load(); src != nil && src.DriverLoad != nil {
		load = src.DriverLoad()
	}
	differs := func(before, now string) bool { return before != "" && now != "" && before != now }
	reloaded = differs(m.driverVersion, version) || differs(source.DriverLoad, load)
	return reloaded, func() {
		source.DriverLoad = cmp.Or(load, source.DriverLoad)
		m.driverVersion = cmp.Or(version, m.driverVersion)
		if reloaded {
			m.logLater(func() { m.log.Info("driver reloaded, which reset every GPU", zap.String("driver", version)) })
		}
	}
}

// DriverLoad identifies the loaded NVIDIA kernel module, "" if none is loaded. A reload within a boot changes it: it is the
// inode number of the module's directory in sysfs, which the kernel creates at each load and numbers upwards (Linux,
// fs/kernfs/dir.c: __kernfs_new_node). This follows from the kernel's source and was not tried with NVIDIA's module. If the
// number did not change, the agent would overlook a reload, which is the safe error.
func DriverLoad() string { return inode("/sys/module/nvidia") }

func inode(path string) string {
	info, err := os.Stat(path)
	if err != nil {
		return ""
	}
	stat, ok := info.Sys().(*syscall.Stat_t)
	if !ok {
		return ""
	}
	return strconv.FormatUint(stat.Ino, 10)
}

// applyChecks publishes the state of DCGM's health checks and the incidents that name no device, and logs the changes. Without
// a result of the checks, the incidents stay as they are. m.mu is held.
func (m *Monitor) applyChecks(r *health.Reading, now time.Time) {
	s, checks := &m.now.Source, r.Checks
	if checks.Status == health.ChecksUnknown {
		return
	}
	checks.Since = s.Checks.Since
	if before := s.Checks.Status; checks.Status != before {
		checks.Since = now
		m.logLater(func() {
			switch {
			case checks.Status == health.ChecksDown:
				m.log.Warn("health checks down; keeping the incidents", zap.String("cause", checks.Err))
			case before == health.ChecksDown:
				m.log.Info("health checks " + checks.Status.String())
			}
		})
	}
	s.Checks = checks
	if checks.Status == health.ChecksDown {
		return
	}
	before := s.Incidents
	s.Incidents = r.Incidents
	m.logIncidents(r.Incidents, before, "incident of no GPU")
	m.logIncidents(before, r.Incidents, "incident of no GPU ended")
}

// logIncidents logs the incidents that have no equal, by code and severity, among the others. m.mu is held.
func (m *Monitor) logIncidents(incidents, others []health.Incident, message string) {
	for _, i := range incidents {
		same := func(o health.Incident) bool { return o.Code == i.Code && o.Severity == i.Severity }
		if !slices.ContainsFunc(others, same) {
			m.logLater(func() {
				m.log.Warn(message, zap.String("system", i.System), zap.String("incident", catalog.LookupIncident(i.Code).Name),
					zap.Stringer("severity", i.Severity), zap.String("message", i.Message))
			})
		}
	}
}
