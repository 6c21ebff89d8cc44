package kube

import (
	"context"
	"time"

	"go.uber.org/zap"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

const (
	// heartbeat is how often the condition is written though nothing has changed, as Kubernetes' own are.
	heartbeat = 5 * time.Minute

	// settle is how long a change is waited with, for what comes with it: one write for all.
	settle = time.Second
)

// writer keeps the node's condition.
type writer struct {
	*Reporter
	api    *client
	stands condition // what the API server has
	asked  bool      // stands is known
	gist   string    // of what stands; "" if it is not of this process
}

// runWriter writes until ctx ends. The newest state wins: what was not written in time is not written later.
func (r *Reporter) runWriter(ctx context.Context, api *client) {
	w := &writer{Reporter: r, api: api}
	t := newTrouble(r.Log, "the node's condition", "a node named "+r.Node+", and a cluster role with get on nodes and patch on nodes/status")
	var pause backoff
	for ctx.Err() == nil {
		want, changed := r.wanted.Watch()
		if want == nil {
			wait(ctx, changed, -1)
			continue
		}
		if d := w.due(want); d > 0 {
			wait(ctx, changed, d)
			continue
		}
		if want.gist != w.gist && !wait(ctx, nil, settle) {
			return
		}
		err := w.write(ctx)
		switch {
		case ctx.Err() != nil:
		case err != nil:
			t.say(err)
			r.count(func(s *Status) { s.Errors, s.Condition = s.Errors+1, err.Error() })
			pause.wait(ctx)
		default:
			t.over()
			pause = backoff{}
			r.count(func(s *Status) { s.Condition = "" })
		}
	}
}

// due returns in how long a state is to be written.
func (w *writer) due(want *state) time.Duration {
	if !w.asked || want.gist != w.gist {
		return 0
	}
	return heartbeat - time.Since(w.stands.LastHeartbeatTime.Time)
}

// write brings the API server what is wanted now, if it has something else. What stands there is asked for
// once: another process may have written it, and the time of its transition holds on.
func (w *writer) write(ctx context.Context) error {
	if !w.asked {
		c, err := w.api.condition(ctx, w.Node)
		if err != nil {
			return err
		}
		w.stands, w.asked = c, true
		if want := w.wanted.Load(); want.says(c) {
			w.gist = want.gist
		}
	}
	want := w.wanted.Load()
	if w.due(want) > 0 {
		return nil // it has changed back
	}
	next := want.follow(w.stands, time.Now())
	if err := w.api.patchCondition(ctx, w.Node, next); err != nil {
		return err
	}
	w.count(func(s *Status) { s.Writes++ })
	if next.Status != w.stands.Status {
		w.Log.Info("node condition", zap.String("type", next.Type), zap.String("status", next.Status),
			zap.String("was", w.stands.Status), zap.String("reason", next.Reason))
	}
	w.stands, w.gist = next, want.gist
	return nil
}

// says tells whether the condition already is what the state wants.
func (s state) says(c condition) bool {
	return c.Status == s.status && c.Reason == s.reason && c.Message == s.message
}

// follow returns the condition to write after the one that stands. The time of the transition is when the
// status was reached, however late it is written, and stays while the status does.
func (s state) follow(stands condition, now time.Time) condition {
	c := condition{
		Type: conditionType, Status: s.status, Reason: s.reason, Message: s.message,
		LastHeartbeatTime: metav1.NewTime(now), LastTransitionTime: metav1.NewTime(s.since),
	}
	if stands.Status == s.status && !stands.LastTransitionTime.IsZero() {
		c.LastTransitionTime = stands.LastTransitionTime
	}
	return c
}

// withdraw takes the condition away, since nobody keeps it any more. It is tried once: an API server that
// is away must not delay a new configuration.
func (r *Reporter) withdraw(ctx context.Context, api *client) {
	if err := api.patchCondition(ctx, r.Node, removal()); err != nil {
		r.Log.Warn("the node's condition cannot be removed and is old from now on", zap.String("condition", conditionType), zap.Error(err))
	}
	r.wanted.Store(nil)
}
