package monitor

import (
	"slices"
	"time"

	"go.uber.org/zap"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/health/judge"
	"github.com/gpu-node-agent/gpu-node-agent/health/statefile"
)

// Restore continues from the saved state of an earlier process. If a detach is in force, Restore publishes the devices as
// withheld, and no session is opened until Attach or the time limit. Call it before Run.
func (m *Monitor) Restore(r statefile.Restored) {
	m.mu.Lock()
	defer m.unlock()
	m.restored = r
	m.now.Devices, m.logged, m.newInventory, m.history = r.Devices, r.Devices, !r.Missed, r.History
	m.restoreBindings(r.Bindings)
	m.now.Source.DriverLoad = r.DriverLoad
	d := r.Detachment
	if !d.InForce() {
		if d.Over { // the earlier process may have ended before it asked the host engine
			m.detach.engine = engineUnknown
		}
		return
	}
	m.now.Source.Kind, m.now.Source.Inventory, m.now.At = r.Source, r.Inventory, r.Polled
	m.logLater(func() { m.log.Warn("driver stays detached as before the restart", zap.Time("until", d.Until)) })
	d.Undecided = false
	m.now.Source.Status, m.now.Source.Since = health.SourceDetached, d.Since
	m.setDetachment(detachment{Detachment: d, requests: 1, followed: 1}, time.Now())
}

// AwaitRestore has the monitor accept RestoreLate: the saved state could not be read yet. Call it before Run, instead of Restore.
func (m *Monitor) AwaitRestore() {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.unrestored = true
}

// RestoreLate is Restore while the monitor runs. What this process has seen is newer than the saved state.
func (m *Monitor) RestoreLate(r statefile.Restored) {
	m.mu.Lock()
	defer m.unlock()
	if !m.unrestored {
		return
	}
	m.unrestored = false
	m.restored, m.history = r, r.History
	source, now := &m.now.Source, time.Now()
	saved := r.Devices
	if !r.Missed {
		m.newInventory = m.newInventory || source.Polls == 0
		if source.Polls > 0 { // saved devices that the source does not list may have been removed
			saved = slices.DeleteFunc(slices.Clone(saved), func(s health.DeviceState) bool {
				return !slices.ContainsFunc(m.now.Devices, func(d health.DeviceState) bool { return d.Device.ID == s.Device.ID })
			})
		}
	}
	reloaded := r.DriverLoad != "" && source.DriverLoad != "" && r.DriverLoad != source.DriverLoad
	if source.DriverLoad == "" {
		source.DriverLoad = r.DriverLoad
	}
	m.restoreBindings(r.Bindings)
	late := judge.LateState{Devices: saved, DriverReloaded: reloaded, XIDHistory: r.History}
	devices, unjudged := judge.RestoreLate(m.currentConfig(), m.now.Devices, late, now)
	m.observe(devices, append([]judge.Observation{{}}, unjudged...), false, now)
	m.bind()
	m.storeJudged()
	switch d := r.Detachment; {
	case d.InForce() && !m.detach.InForce() && m.detach.requests == 0:
		m.logLater(func() { m.log.Warn("detaching the driver, as before the restart", zap.Time("until", d.Until)) })
		m.setDetachment(m.detach.detach(now, d.Until.Sub(now), m.hasHostEngine()), now)
	case d.Over:
		m.attach("a detach of before the restart is over")
	}
}

// exchangeDevices replaces the devices by the saved devices of another source, which measures other devices. Publishing the old ones until
// the new source is up would offer devices that do not exist. m.now is still of the old source.
func (m *Monitor) exchangeDevices(to health.SourceID) {
	m.mu.Lock()
	defer m.unlock()
	m.restored = m.restored.Exchange(&m.now, m.history, to, time.Now())
	removed := m.logged
	m.logLater(func() { logChanges(m.log, removed, nil) })
	m.now.Devices, m.logged, m.now.At, m.now.Source.Versions = m.restored.Devices, m.restored.Devices, time.Time{}, health.Versions{}
	m.now.Entities, m.now.Bindings = nil, m.restored.Bindings
	m.unjudged, m.unknownGPUs = nil, make(map[string]bool) // events that waited for a GPU of the other source
	clear(m.actions)
	m.history, m.driverVersion, m.now.Source.DriverLoad = m.restored.History, "", m.restored.DriverLoad
	m.now.Source.Checks, m.now.Source.Incidents = health.Checks{}, nil
}
