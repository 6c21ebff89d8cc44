package monitor

import (
	"slices"
	"time"

	"go.uber.org/zap"

	"github.com/gpu-node-agent/gpu-node-agent/health"
)

// xidsMayBeLost is the cause in the log of a gap that ended.
const xidsMayBeLost = "the source was away or listed no GPU, and no event source was up"

// minXIDGap is the least gap that is logged: a change of the configuration restarts the event sources within milliseconds.
const minXIDGap = time.Second

// xidWatch records whether XIDs can be seen, and until when they could.
type xidWatch struct {
	away bool      // no session has given a reading with a GPU since one failed, or since a reading listed none of the known ones
	seen time.Time // when a gap began, at the earliest; zero if only the failure says it
}

// followXIDGap begins or ends a gap in the report of XIDs. m.mu is held.
func (m *Monitor) followXIDGap(now time.Time) {
	g := &m.now.Source.XIDGap
	up := slices.ContainsFunc(m.now.Source.Events, func(e health.EventSourceState) bool { return e.Status == health.EventsUp })
	switch gap := m.xids.away && !up; {
	case gap && !g.Lasts():
		g.Since, g.Until = m.xids.seen, time.Time{}
		if g.Since.IsZero() {
			g.Since = now
		}
	case !gap && g.Lasts():
		lasted := now.Sub(g.Since)
		g.Until, g.Total = now, g.Total+lasted
		if lasted >= minXIDGap {
			since := g.Since
			m.logLater(func() {
				m.log.Warn("XIDs may be lost", zap.String("cause", xidsMayBeLost), zap.Duration("lasted", lasted), zap.Time("since", since))
			})
		}
	}
}

// setAway records whether the session with the source has failed or lists no GPU. m.mu is held.
func (m *Monitor) setAway(away bool, now time.Time) {
	m.xids.away = away
	m.followXIDGap(now)
	if !away {
		m.xids.seen = now
	}
}
