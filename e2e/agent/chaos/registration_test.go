package chaos

import "time"

const (
	// settleDelay is how long the agent waits before each registration, so that the kubelet does not lose it, plus a poll.
	settleDelay = 1500 * time.Millisecond

	// stableFor is how long a registration must last for its end not to count as repeated.
	stableFor = 8 * time.Second

	// auditTimeout is how long the agent may need to detect that the kubelet dropped it behind an open stream.
	auditTimeout = 20 * time.Second
)

// registration is the expected state of the agent's registrations. Only a registration may delay the kubelet's view:
// after a start of the kubelet or the agent, a wipe of the socket directory, the end of a stream, a dropped plugin, and
// a new resource, as after a MIG repartition. All other changes use the open stream.
type registration struct {
	due         bool            // a registration may be in progress
	confirmedAt time.Time       // when the last one was confirmed
	served      map[string]bool // resources of the last snapshot

	kills int // consecutive ends of a stream, for which the agent backs off

	dropped   bool // the kubelet dropped the plugin behind its open stream
	droppedAt time.Time
	drops     int // consecutive drops: the audit backs off too
}

// expectRegistration expects a registration after the settle delay and resets the backoff.
func (r *registration) expectRegistration() { r.due, r.kills = true, 0 }

// streamClosed expects a registration after the kubelet closed the stream.
func (r *registration) streamClosed() {
	if !r.due && time.Since(r.confirmedAt) > stableFor {
		r.kills = 0
	}
	r.due = true
	r.kills++
}

// pluginDropped expects a registration after the kubelet silently dropped the plugin.
func (r *registration) pluginDropped() {
	r.drops++
	if time.Since(r.droppedAt) > time.Minute {
		r.drops = 0
	}
	r.due, r.dropped, r.droppedAt = true, true, time.Now()
}

// restarted expects the first registrations of a new agent.
func (r *registration) restarted() { *r = registration{due: true} }

// setResources records the agent's resources and expects a registration for a new one.
func (r *registration) setResources(want map[string]map[string]bool) {
	now := map[string]bool{}
	for name := range want {
		now[name] = true
		r.due = r.due || !r.served[name]
	}
	r.served = now
}

// confirmed records that the kubelet has every resource.
func (r *registration) confirmed() {
	if r.due {
		r.confirmedAt = time.Now()
	}
	r.due, r.dropped = false, false
}

// extraTime returns how much longer the kubelet's view may take now.
func (r *registration) extraTime() time.Duration {
	if !r.due {
		return 0
	}
	out := settleDelay
	if r.kills > 1 { // the first backoff is at most the settle delay; each doubles
		out += min(30*time.Second, time.Second<<min(r.kills-1, 5)) - time.Second
	}
	if r.dropped {
		out = max(out, auditTimeout<<min(r.drops, 3))
	}
	return scaled(out)
}
