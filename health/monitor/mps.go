package monitor

import "github.com/gpu-node-agent/gpu-node-agent/health"

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
