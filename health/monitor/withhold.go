package monitor

import (
	"errors"
	"slices"
	"time"

	"github.com/gpu-node-agent/gpu-node-agent/health"
)

// Withholding is that all devices are Unhealthy ahead of a Detach, while it is found out whether pods hold them. The driver is
// still used.
type Withholding struct {
	m       *Monitor
	release *release // nil if they were withheld before, by a detach
	before  []health.DeviceState
}

// Withhold makes all devices Unhealthy, so that no pod gets one from now on, and returns what gives them back. Detach
// for the same time goes on from there.
func (m *Monitor) Withhold(d time.Duration) (*Withholding, error) {
	m.mu.Lock()
	defer m.unlock()
	if m.word.Load().away {
		return &Withholding{m: m}, nil
	}
	if m.release != nil && m.release.asking {
		return nil, errors.New("another detach has not been decided yet; try again")
	}
	if err := m.canDetach(); err != nil {
		return nil, err
	}
	now, src := time.Now(), m.source.Load()
	m.unasked = src != nil && src.Attach != nil
	w := &Withholding{m, &release{since: now, until: now.Add(d), term: d, asking: true, before: m.release}, m.now.Devices}
	m.withhold(w.release, now)
	m.store()
	return w, nil
}

// GiveBack ends the withholding, unless a detach has gone on from there. The devices are as they were, and as if nothing had
// been, but for what was measured meanwhile.
func (w *Withholding) GiveBack() {
	m := w.m
	m.mu.Lock()
	defer m.unlock()
	if w.release == nil || m.release != w.release {
		return
	}
	was := make(map[health.DeviceID]health.Verdict, len(w.before))
	for _, d := range w.before {
		was[d.Device.ID] = d.Verdict
	}
	m.now.Devices = slices.Clone(m.now.Devices)
	for i := range m.now.Devices { // who was not withheld before is not withheld by an earlier release now
		v := &m.now.Devices[i].Verdict
		if old := was[m.now.Devices[i].Device.ID]; !old.Has(health.CauseReleased) {
			v.Findings = slices.DeleteFunc(slices.Clone(v.Findings), func(f health.Finding) bool { return f.Cause == health.CauseReleased && f.From == "" })
		}
	}
	m.withhold(w.release.before, time.Now())
	for i := range m.now.Devices {
		v := &m.now.Devices[i].Verdict
		if old := was[m.now.Devices[i].Device.ID]; old.State == v.State && !old.Since.IsZero() {
			v.Since = old.Since
		}
	}
	m.store()
}

// canDetach returns why the session that is open cannot let go. m.mu is held.
func (m *Monitor) canDetach() error {
	if m.live == nil {
		return nil
	}
	return m.live.CanDetach()
}
