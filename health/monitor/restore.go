package monitor

import (
	"time"

	"go.uber.org/zap"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/health/statefile"
)

// Restore continues from the saved state of an earlier process. If a detach is in force, Restore publishes the devices as
// withheld, and no session is opened until Attach or the time limit. Call it before Run.
func (m *Monitor) Restore(r statefile.Restored) {
	m.mu.Lock()
	defer m.unlock()
	m.restored = r
	m.now.Devices, m.newInventory, m.history = r.Devices, !r.Missed, r.History
	m.now.Source.DriverLoad = r.DriverLoad
	d := r.Detachment
	if !d.InForce() {
		m.detach.engineAttach = d.Over // the earlier process may have ended before it asked the host engine
		return
	}
	m.now.Source.Kind, m.now.Source.Inventory, m.now.At = r.Source, r.Inventory, r.Polled
	m.logLater(func() { m.log.Warn("driver stays detached as before the restart", zap.Time("until", d.Until)) })
	restored := detachment{state: detached, since: d.Since, until: d.Until, term: d.For, engineUnasked: d.EngineUnasked}
	m.showDetached(restored, d.Since)
	m.setDetachment(restored.request(), time.Now())
}

// exchangeDevices replaces the devices by those saved of another source, which measures other devices. Publishing the old
// ones until the new source is up would offer devices that do not exist. m.now is still of the old source.
func (m *Monitor) exchangeDevices(to health.SourceID) {
	m.mu.Lock()
	defer m.unlock()
	m.restored = m.restored.Exchange(&m.now, m.history, to, time.Now())
	m.logChangesLater(m.now.Devices, nil)
	m.now.Devices, m.now.At, m.now.Source.Versions = m.restored.Devices, time.Time{}, health.Versions{}
	m.now.Entities = nil
	m.unjudged, m.unknownGPUs = nil, make(map[string]bool) // those that waited for a GPU of the other source
	m.history, m.driverVersion, m.now.Source.DriverLoad = m.restored.History, "", m.restored.DriverLoad
	m.now.Source.Checks, m.now.Source.Incidents = health.Checks{}, nil
}
