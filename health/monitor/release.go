package monitor

import (
	"errors"
	"slices"
	"time"

	"github.com/gpu-node-agent/gpu-node-agent/health"
)

// release is that the driver is let go of at an operator's word. It is made before the driver goes, so that the kubelet
// gives out no GPU that is about to be reset, and ends when each device was seen since. It is not modified.
type release struct {
	since time.Time     // when the devices were withheld
	until time.Time     // when the driver is taken back by itself
	term  time.Duration // how long that was from the last detach
	over  bool          // it is to be taken back now

	asking bool     // nobody has said yet that the driver is to go: see Withhold
	before *release // asking: what was in force before
}

// detachment is what decides over the devices: zero if the release is nil.
func (r *release) detachment() health.Detachment {
	switch {
	case r == nil:
		return health.Detachment{}
	case r.over:
		return health.Detachment{Over: true}
	}
	return health.Detachment{Since: r.since, Until: r.until, For: r.term}
}

var errNotBack = errors.New("the driver was let go of, and is not back: it shows no GPU")

// notBack returns an error if a reading shows that the driver is still away after it was let go of: then no GPU is
// missing, and an engine in this process would never look for the driver again.
func (m *Monitor) notBack(r *health.Reading) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	there := func(s health.Sample) bool { return s.Presence != health.Detached }
	switch {
	case m.release == nil || !m.release.over || m.fresh || len(unseen(m.now.Devices)) == 0:
		return nil
	case len(r.Devices) > 0 && (len(r.Samples) == 0 || slices.ContainsFunc(r.Samples, there)):
		return nil
	}
	return errNotBack
}

// unseen returns the devices that are kept from pods for a release.
func unseen(devices []health.DeviceState) (all []string) {
	for _, d := range devices {
		if d.Verdict.Has(health.CauseReleased) {
			all = append(all, string(d.Device.ID))
		}
	}
	return all
}

// seen ends the release when no device is withheld for it any more. m.mu is held.
func (m *Monitor) seen(devices []health.DeviceState) {
	if m.release != nil && m.release.over && len(unseen(devices)) == 0 {
		m.release = nil
	}
	if m.release == nil && m.word.Load().heard { // before that it is the session of before the word
		m.attaching = false
	}
}

// withhold puts a release in force, or ends it if it is nil. m.mu is held.
func (m *Monitor) withhold(r *release, now time.Time) {
	m.release = r
	var c health.Config
	if now := m.config.Load(); now != nil {
		c = *now
	}
	if m.now.Polled() { // otherwise nobody was told of any device
		m.decideAgain(c, now)
	}
}
