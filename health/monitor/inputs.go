package monitor

import (
	"context"
	"slices"

	"go.uber.org/zap"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/health/judge"
	"github.com/gpu-node-agent/gpu-node-agent/health/wait"
)

// followInputs publishes again after each change of the configuration, of its entries by index, or of the MPS daemons. So a cordon and the
// death of a daemon take effect while the source is down or stalled.
func (m *Monitor) followInputs(ctx context.Context) {
	wake := health.Wake(ctx, m.config, m.bindings.entries, m.mps)
	for {
		if m.config.Load() != nil {
			m.applyInputs()
		}
		if !wait.For(ctx, wake) {
			return
		}
	}
}

func (m *Monitor) applyInputs() {
	m.mu.Lock()
	defer m.unlock()
	if !m.now.Polled() {
		return // the first reading decides
	}
	m.bind()
	m.store()
}

// currentConfig returns the configuration with the bindings, the zero Config before the first one is stored. m.mu is held.
func (m *Monitor) currentConfig() judge.Config {
	if c := m.config.Load(); c != nil {
		return c.WithBindings(m.now.Bindings)
	}
	return judge.Config{}
}

// logUnmatchedCordons logs the entries of health.cordon that match no device, if they changed. m.mu is held.
func (m *Monitor) logUnmatchedCordons() {
	var refs []string
	for _, u := range m.currentConfig().UnmatchedCordons(m.now.Bindings, m.now.Devices) {
		if refs = u.Refs; !slices.Equal(refs, m.unmatchedCordons) {
			m.logLater(func() {
				m.log.Warn("entries match no device of this node", zap.String("key", u.Key), zap.Strings("entries", u.Refs))
			})
		}
	}
	m.unmatchedCordons = refs
}

// SetMPS sets where the monitor finds the state of the MPS daemons. Call it before Run. Without it, no device is served by MPS.
func (m *Monitor) SetMPS(state *health.Latest[health.MPSState]) { m.mps = state }

func (m *Monitor) mpsState() health.MPSState {
	if m.mps != nil {
		if s := m.mps.Load(); s != nil {
			return *s
		}
	}
	return health.MPSState{}
}

// Clear ends findings of a device as judge.Clear does, and publishes the result. It returns the causes that it cleared.
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
