package plugin

import (
	"slices"
	"time"

	"go.uber.org/zap"

	"github.com/gpu-node-agent/gpu-node-agent/health/backoff"
)

// audit compares the kubelet's allocatable IDs with the list that the plugin sent. An open stream proves nothing: the
// race of kubernetes#127803 can leave a kubelet that dropped the plugin and holds the stream.
type audit struct {
	lastAt      time.Time // of the last answer compared
	suspectedAt time.Time // of the first answer with a mismatch; zero if there is none
	nextAt      time.Time // earliest next registration for a mismatch; zero if there was none since the lists agreed
	retry       backoff.Backoff
}

// auditDevices registers again if the kubelet's devices differ persistently: in two answers, some time apart, both to
// queries made long enough after the last message, and without a message between them.
func (r *registrar) auditDevices() {
	a, quick := &r.audit, r.timing.pods.QuickRefresh
	answer := r.pods.Allocatable.Load()
	if r.phase != registered {
		a.suspectedAt = time.Time{}
		return
	}
	if answer == nil || answer.Err != "" || answer.At.Equal(a.lastAt) {
		return
	}
	a.lastAt = answer.At
	sent := r.srv.streams.counts().lastSent
	if !a.suspectedAt.After(sent) { // the mismatch concerned an older list
		a.suspectedAt = time.Time{}
	}
	if answer.At.Before(sent.Add(r.settle)) || answer.At.Before(r.phaseSince.Add(r.settle)) {
		r.pods.QueryWithin(r.settle + quick)
		return
	}
	resource := r.srv.resource()
	want, have := resource.healthyIDs(), answer.IDs[r.srv.name]
	switch {
	case slices.Equal(want, have):
		a.suspectedAt, a.nextAt = time.Time{}, time.Time{}
		a.retry.Reset()
		r.setAudited(answer.At)
	case a.suspectedAt.IsZero():
		r.setAudited(time.Time{})
		a.suspectedAt = answer.At
		r.pods.QueryWithin(2 * quick)
	case answer.At.Sub(a.suspectedAt) < 2*quick:
		r.pods.QueryWithin(2 * quick)
	case answer.At.After(a.nextAt):
		r.registerAfterMismatch(len(want), len(have), resource.units())
	}
}

// registerAfterMismatch ends the streams before it schedules a registration: a kubelet that dropped the plugin keeps an
// old stream, whose end would remove the next registration.
func (r *registrar) registerAfterMismatch(want, have, devices int) {
	r.log.Warn(msgMismatch,
		zap.Int("healthy", want), zap.Int("kubelet", have), zap.Int("devices", devices))
	r.mu.Lock()
	r.mismatches++
	r.mu.Unlock()
	r.endStreams()
	r.scheduleRegistration("the kubelet has another list")
	// Each registration takes the devices from the kubelet for a moment. If two do not help, the cause is another one.
	again := !r.audit.nextAt.IsZero()
	r.audit.suspectedAt, r.audit.nextAt = time.Time{}, time.Now()
	if again {
		r.audit.nextAt = r.audit.nextAt.Add(r.audit.retry.Next())
	}
}

func (r *registrar) setAudited(at time.Time) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.auditedAt = at
}
