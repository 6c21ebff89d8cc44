package monitor

import (
	"time"

	"go.uber.org/zap"

	"github.com/gpu-node-agent/gpu-node-agent/health"
)

// Clear is health.Clear of the devices as they are now. It returns the causes that it has dropped.
func (m *Monitor) Clear(id health.DeviceID, cause string) ([]string, error) {
	m.mu.Lock()
	defer m.unlock()
	var c health.Config
	config := m.config.Load()
	if config != nil {
		c = *config
	}
	now, before := time.Now(), m.now.Devices
	after, dropped, err := health.Clear(c, before, config != nil && m.now.Source.Status == health.SourceUp, id, cause, now)
	if err != nil {
		return nil, err
	}
	if config != nil { // what was decided for its sake ends too, though no poll may come
		after = health.Decide(c, before, after, m.held, m.release.detachment(), now)
	}
	m.now.Devices = after
	m.logLater(func() {
		m.log.Warn("cleared by an operator", zap.String("device", string(id)), zap.Strings("causes", dropped))
	})
	m.logChangesLater(before, m.now.Devices)
	m.store()
	return dropped, nil
}
