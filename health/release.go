package health

import (
	"errors"
	"fmt"
	"slices"
	"time"
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

// withholds tells whether a device is kept from pods for it. The driver may be gone for long after it was to be taken
// back, and a device that nobody has seen since a reset is not given out.
func (r *release) withholds(d DeviceState, was Verdict) bool {
	switch {
	case r == nil || d.Device.Kind != KindGPU: // MIG devices inherit it
		return false
	case !r.over:
		return true
	}
	return was.has(CauseReleased) && d.Sample.Presence == PresenceUnknown
}

func (r *release) finding(now time.Time) Finding {
	f := Finding{
		Cause: CauseReleased, State: Unhealthy, Since: now, Last: now, Clears: ClearsItself,
		Reason: "the agent has let go of the driver on request",
		Action: fmt.Sprintf("when the GPU is ready, say gpu-node-agent attach; at %s the agent attaches by itself", r.until.UTC().Format(time.RFC3339)),
	}
	if r.over {
		f.Reason = "the agent takes the driver back, and has not seen the GPU since it let go"
		f.Action = "see what keeps the source from being up: gpu-node-agent status"
	}
	return f
}

var errNotBack = errors.New("the driver was let go of, and is not back: it shows no GPU")

// notBack returns an error if a reading shows that the driver is still away after it was let go of: then no GPU is
// missing, and an engine in this process would never look for the driver again.
func (m *Monitor) notBack(r *Reading) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	there := func(s Sample) bool { return s.Presence != Detached }
	switch {
	case m.release == nil || !m.release.over || m.fresh || len(unseen(m.now.Devices)) == 0:
		return nil
	case len(r.Devices) > 0 && (len(r.Samples) == 0 || slices.ContainsFunc(r.Samples, there)):
		return nil
	}
	return errNotBack
}

// unseen returns the devices that are kept from pods for a release.
func unseen(devices []DeviceState) (all []string) {
	for _, d := range devices {
		if d.Verdict.has(CauseReleased) {
			all = append(all, string(d.Device.ID))
		}
	}
	return all
}

// seen ends the release when no device is withheld for it any more. m.mu is held.
func (m *Monitor) seen(devices []DeviceState) {
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
	var c Config
	if now := m.config.Load(); now != nil {
		c = *now
	}
	if m.now.Polled() { // otherwise nobody was told of any device
		m.decideAgain(c, now)
	}
}

// beginAnew has nothing that was measured before count: not for how long a condition is gone, how often a fault was
// seen, or that a device is there. m.mu is held.
func (m *Monitor) beginAnew(now time.Time) {
	m.now.Devices = slices.Clone(m.now.Devices)
	for i := range m.now.Devices {
		m.now.Devices[i].Sample.Presence = PresenceUnknown
		v := &m.now.Devices[i].Verdict
		v.suspect, v.Findings = nil, slices.Clone(v.Findings)
		for j := range v.Findings {
			v.Findings[j].unseen(now)
		}
	}
}
