package monitor

import (
	"context"
	"slices"
	"time"

	"go.uber.org/zap"

	"github.com/gpu-node-agent/gpu-node-agent/health"
)

// followConfig decides anew when the configuration has changed: a cordon does not wait for a source that is away
// or hangs.
func (m *Monitor) followConfig(ctx context.Context) {
	for {
		config, changed := m.config.Watch()
		if config != nil {
			m.decide(*config)
		}
		select {
		case <-ctx.Done():
			return
		case <-changed:
		}
	}
}

func (m *Monitor) decide(c health.Config) {
	m.mu.Lock()
	defer m.unlock()
	if !m.now.Polled() {
		return // the first reading decides
	}
	m.decideAgain(c, time.Now())
	m.sayIdle(c.UnmatchedCordons(m.now.Devices))
	m.store()
}

// decideAgain makes the decisions anew while nothing was measured anew. m.mu is held.
func (m *Monitor) decideAgain(c health.Config, now time.Time) {
	before := m.now.Devices
	m.now.Devices = health.Decide(c, before, before, m.held, m.release.detachment(), now)
	m.logChangesLater(before, m.now.Devices)
}

// sayIdle logs which words of health.cordon mean no device, if they are others than before. m.mu is held.
func (m *Monitor) sayIdle(words []string) {
	if len(words) > 0 && !slices.Equal(words, m.idle) {
		m.logLater(func() {
			m.log.Warn("no device of this node has this name", zap.String("key", "health.cordon"), zap.Strings("entries", words))
		})
	}
	m.idle = words
}
