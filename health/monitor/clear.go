package monitor

import (
	"time"

	"go.uber.org/zap"

	"github.com/gpu-node-agent/gpu-node-agent/health"
)

// Clear ends findings of a device as health.Clear does, and publishes the result. It returns the causes that it cleared.
func (m *Monitor) Clear(id health.DeviceID, cause string) ([]string, error) {
	m.mu.Lock()
	defer m.unlock()
	c, now, before := m.currentConfig(), time.Now(), m.now.Devices
	devices, causes, err := health.Clear(c, before, m.now.Source.Status == health.SourceUp, id, cause)
	if err != nil {
		return nil, err
	}
	// Decisions that depend on a cleared finding end now, because the next poll may be far away.
	m.now.Devices = health.View(c, devices, m.viewContext(), now)
	m.logLater(func() {
		m.log.Warn("cleared by an operator", zap.String("device", string(id)), zap.Strings("causes", causes))
	})
	m.logChangesLater(before, m.now.Devices)
	m.store()
	return causes, nil
}
