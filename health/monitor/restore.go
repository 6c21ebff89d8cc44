package monitor

import (
	"time"

	"go.uber.org/zap"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/health/statefile"
)

// Restore gives the monitor what an earlier process knew. If a detach is in force, it stays so: the devices are shown and withheld,
// and no session is opened until Attach or the end of its time. It must come before Run.
func (m *Monitor) Restore(r statefile.Restored) {
	m.mu.Lock()
	defer m.unlock()
	m.recalled = r
	m.now.Devices, m.fresh, m.history = r.Devices, !r.Missed, r.History
	m.now.Source.DriverLoad = r.DriverLoad
	d := r.Detachment
	if !d.InForce() {
		m.attaching = d.Over // the process before this one may have ended before it could ask the host engine
		return
	}
	now := time.Now()
	m.now.Source.Kind, m.now.Source.Inventory, m.now.At = r.Source, r.Inventory, r.Polled
	w := &word{away: true, until: d.Until}
	w.expiry = time.AfterFunc(d.Until.Sub(now), func() { m.takeBack(w, "the time is up") })
	m.unasked = d.Unasked
	m.logLater(func() { m.log.Warn("the driver stays let go of, as before the start", zap.Time("until", d.Until)) })
	m.withhold(&release{since: d.Since, until: d.Until, term: d.For}, now)
	detach(&m.now.Source, d.Until, d.Since)
	m.store()
	m.say(w)
}

// exchange replaces the devices of one source by what is remembered of another, which has nothing to do with it. To show the
// devices of the one, and let them be given out, until the other is up would be to make them up. m.now is still the one's.
func (m *Monitor) exchange(src Source) {
	m.mu.Lock()
	defer m.unlock()
	now := time.Now()
	m.recalled = m.recalled.Exchange(&m.now, m.history, src.SourceID, now)
	m.logChangesLater(m.now.Devices, nil)
	m.now.Devices, m.now.At, m.now.Source.Versions = m.recalled.Devices, time.Time{}, health.Versions{}
	m.history, m.driver, m.now.Source.DriverLoad = m.recalled.History, "", m.recalled.DriverLoad
}

// detachment is what a later process must know of the release. m.mu is held.
func (m *Monitor) detachment() health.Detachment {
	switch r := m.release; {
	case r != nil && !r.over:
		return health.Detachment{Since: r.since, Until: r.until, For: r.term, Asking: r.asking, Unasked: m.unasked}
	case r != nil || m.attaching:
		return health.Detachment{Over: true}
	}
	return health.Detachment{}
}
