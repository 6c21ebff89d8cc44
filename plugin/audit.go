package plugin

import (
	"slices"
	"time"

	"go.uber.org/zap"
)

// audit is what a link remembers of what the kubelet believes. A stream that is open proves nothing: the
// race of kubernetes#127803 can end with a kubelet that has dropped us and holds the stream.
type audit struct {
	asked     time.Time     // the question that was looked at last
	suspected time.Time     // when a mismatch was seen first, zero if there is none
	notBefore time.Time     // no other registration for a mismatch before
	pause     time.Duration // until notBefore, the next time
}

// check compares what the kubelet believes with what we say, and registers again if the two differ for
// good: in two answers some time apart, both to questions that were asked long enough after we last said
// something, and nothing said between them.
func (l *link) check() {
	b := l.pods.beliefs.Load()
	if l.phase != registered {
		l.audit.suspected = time.Time{}
		return
	}
	if b == nil || b.err != "" || b.asked.Equal(l.audit.asked) {
		return
	}
	l.audit.asked = b.asked
	said := l.srv.streams.count().lastTold
	if !l.audit.suspected.After(said) { // it was about another list
		l.audit.suspected = time.Time{}
	}
	if b.asked.Before(said.Add(l.settle)) || b.asked.Before(l.since.Add(l.settle)) {
		l.pods.ask(l.settle + l.hurry)
		return
	}
	r := l.srv.resource()
	want := r.healthyIDs()
	have := b.devices[l.srv.name]
	switch {
	case slices.Equal(want, have):
		l.audit.suspected, l.audit.notBefore, l.audit.pause = time.Time{}, time.Time{}, 0
	case l.audit.suspected.IsZero():
		l.audit.suspected = b.asked
		l.pods.ask(2 * l.hurry)
	case b.asked.Sub(l.audit.suspected) < 2*l.hurry:
		l.pods.ask(2 * l.hurry)
	case b.asked.After(l.audit.notBefore):
		l.lost(len(want), len(have), len(r.Devices))
	}
}

// lost registers again because the kubelet does not have what we told it. The streams end first: a
// kubelet that has dropped us keeps an old one until it ends, and its end would take the next
// registration with it.
func (l *link) lost(want, have, all int) {
	now := time.Now()
	l.log.Warn("the kubelet does not have what we told it, although its stream is open; registering again",
		zap.Int("healthy", want), zap.Int("kubelet", have), zap.Int("devices", all))
	l.mu.Lock()
	l.mismatches++
	l.mu.Unlock()
	l.srv.streams.drop()
	l.disturbed("the kubelet does not have what we told it")
	// If that does not help twice, something else is wrong, and each registration takes the devices away
	// from the kubelet for a moment.
	l.audit.suspected = time.Time{}
	l.audit.notBefore = now.Add(l.audit.pause)
	l.audit.pause = min(max(2*l.audit.pause, l.doubt), l.audits)
}

// healthyIDs returns the ids of the devices that the kubelet may hand out, sorted.
func (r Resource) healthyIDs() []string {
	ids := make([]string, 0, len(r.Devices))
	for _, d := range r.Devices {
		if d.Healthy() {
			ids = append(ids, d.ID)
		}
	}
	slices.Sort(ids)
	return ids
}
