package monitor

import (
	"context"
	"slices"
	"time"

	"go.uber.org/zap"

	"github.com/gpu-node-agent/gpu-node-agent/health"
)

// followConfig decides again after each change of the configuration: a cordon takes effect while the source is down or
// stalled.
func (m *Monitor) followConfig(ctx context.Context) {
	for {
		config, changed := m.config.Watch()
		var entriesChanged <-chan struct{}
		if m.bindings.entries != nil {
			_, entriesChanged = m.bindings.entries.Watch()
		}
		if config != nil {
			m.applyConfig()
		}
		select {
		case <-ctx.Done():
			return
		case <-changed:
		case <-entriesChanged:
		}
	}
}

func (m *Monitor) applyConfig() {
	m.mu.Lock()
	defer m.unlock()
	if !m.now.Polled() {
		return // the first reading decides
	}
	m.bind(m.now.Devices)
	m.view(time.Now())
	m.logUnmatchedCordons()
	m.store()
}

// view derives the verdicts anew without a new reading. m.mu is held.
func (m *Monitor) view(now time.Time) {
	if !m.now.Polled() {
		return // no device was published
	}
	devices := health.View(m.currentConfig(), m.now.Devices, m.viewContext(), now)
	m.logChangesLater(m.now.Devices, devices)
	m.now.Devices = devices
}

// currentConfig returns the configuration with the bindings, the zero Config before the first one is stored. m.mu is held.
func (m *Monitor) currentConfig() health.Config {
	if c := m.config.Load(); c != nil {
		return c.WithBindings(m.now.Bindings)
	}
	return health.Config{}
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
