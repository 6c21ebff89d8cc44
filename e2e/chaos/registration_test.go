package chaos

import "time"

const (
	// settles is how long the agent waits before each registration, so that the kubelet does not lose it, and until
	// it looks.
	settles = 1500 * time.Millisecond

	// restful is for how long a registration must have stood for its end not to count as one of many.
	restful = 8 * time.Second

	// auditing is how long the agent may need to find out that the kubelet has dropped it behind an open stream.
	auditing = 20 * time.Second
)

// registration is what is known of the agent's registrations with the kubelet. Only while one may be under way may the
// kubelet's view take longer than anything else: after the kubelet or the agent was started, the socket directory was
// wiped, the kubelet has closed the stream or dropped the plugin, and if there is a resource that was not there before,
// as after a MIG re-partition. All else that changes goes over the stream that is open.
type registration struct {
	due    bool            // one may be under way, and was not seen to be done
	doneAt time.Time       // when the last one was seen to be
	served map[string]bool // the resources that the agent showed last

	kills int // of the stream in a row that came too soon for the agent not to become careful

	forgot   bool // the kubelet has dropped the plugin behind its open stream, and it is not known to be back
	forgotAt time.Time
	forgets  int // in a row: the audit becomes careful too
}

// disturbed: the agent registers after its settle time, whatever was before.
func (r *registration) disturbed() { r.due, r.kills = true, 0 }

// killed: the kubelet has closed the stream.
func (r *registration) killed() {
	if !r.due && time.Since(r.doneAt) > restful {
		r.kills = 0
	}
	r.due = true
	r.kills++
}

// forgotten: the kubelet has dropped the plugin, and does not say so.
func (r *registration) forgotten() {
	r.forgets++
	if time.Since(r.forgotAt) > time.Minute {
		r.forgets = 0
	}
	r.due, r.forgot, r.forgotAt = true, true, time.Now()
}

// restarted: another agent, which serves nothing yet.
func (r *registration) restarted() { *r = registration{due: true} }

// serves notes what the agent shows: what is new is registered.
func (r *registration) serves(want map[string]map[string]bool) {
	now := map[string]bool{}
	for name := range want {
		now[name] = true
		r.due = r.due || !r.served[name]
	}
	r.served = now
}

// done: the kubelet has everything.
func (r *registration) done() {
	if r.due {
		r.doneAt = time.Now()
	}
	r.due, r.forgot = false, false
}

// extra is how much longer than anything else the kubelet's view may take now.
func (r *registration) extra() time.Duration {
	if !r.due {
		return 0
	}
	out := settles
	if r.kills > 1 { // the first pause is no longer than the settle time; each is twice the one before
		out += min(30*time.Second, time.Second<<min(r.kills-1, 5)) - time.Second
	}
	if r.forgot {
		out = max(out, auditing<<min(r.forgets, 3))
	}
	return slow(out)
}
