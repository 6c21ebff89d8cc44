package monitor

import (
	"context"
	"time"

	"github.com/gpu-node-agent/gpu-node-agent/health"
)

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

// followMPS decides again after each change of the MPS daemons: the death of one takes effect at once, and while the source is
// down or stalled.
func (m *Monitor) followMPS(ctx context.Context) {
	for {
		state, changed := m.mps.Watch()
		if state != nil {
			m.applyMPS()
		}
		select {
		case <-ctx.Done():
			return
		case <-changed:
		}
	}
}

func (m *Monitor) applyMPS() {
	m.mu.Lock()
	defer m.unlock()
	if !m.now.Polled() {
		return // the first reading decides
	}
	m.view(time.Now())
	m.store()
}
