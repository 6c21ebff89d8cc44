package monitor

import (
	"go.uber.org/zap"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/health/judge"
)

// Clear ends findings of a device as health.Clear does, and publishes the result. It returns the causes that it cleared.
func (m *Monitor) Clear(id health.DeviceID, cause string) ([]string, error) {
	m.mu.Lock()
	defer m.unlock()
	devices, causes, err := judge.Clear(m.currentConfig(), m.now.Devices, m.now.Source.Status == health.SourceUp, id, cause)
	if err != nil {
		return nil, err
	}
	m.now.Devices = devices
	m.logLater(func() {
		m.log.Warn("cleared by an operator", zap.String("device", string(id)), zap.Strings("causes", causes))
	})
	m.storeJudged()
	return causes, nil
}
