package kube

import (
	"context"
	"time"

	"go.uber.org/zap"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpu-node-agent/gpu-node-agent/health/wait"
)

const (
	// heartbeatInterval is how often an unchanged condition is written. The kubelet does the same with its own.
	heartbeatInterval = 5 * time.Minute

	// lostInterval is the least time between the last write and a change of conditionState.lost alone. On a full node it
	// changes with every pod that starts or ends.
	lostInterval = time.Minute

	// settleDelay collects changes that follow each other into one write.
	settleDelay = time.Second
)

// conditionWriter writes the node's condition.
type conditionWriter struct {
	*Reporter
	api         *client
	current     corev1.NodeCondition // as the API server has it
	loaded      bool                 // current was read from the API server
	fingerprint string               // of current; "" if another process wrote it
	lost        string               // of current
}

// runConditionWriter writes until ctx ends. It writes the newest state only: older ones are skipped.
func (r *Reporter) runConditionWriter(ctx context.Context, api *client) {
	w := &conditionWriter{Reporter: r, api: api}
	errs := NewErrorLog(r.Log, "cannot write the node's condition", "wrote the node's condition again",
		"a node named "+r.Node+", and a cluster role with get on nodes and patch on nodes/status")
	retry := newBackoff()
	for ctx.Err() == nil {
		desired, changed := r.desired.Watch()
		if desired == nil {
			wait.For(ctx, changed)
			continue
		}
		if d := w.dueIn(desired); d > 0 {
			await(ctx, changed, d)
			continue
		}
		if desired.fingerprint != w.fingerprint && !wait.Sleep(ctx, settleDelay) {
			return
		}
		err := w.write(ctx)
		switch {
		case ctx.Err() != nil:
		case err != nil:
			errs.Report(err)
			r.updateStatus(func(s *Status) { s.Errors, s.ConditionErr = s.Errors+1, err.Error() })
			retry.Wait(ctx)
		default:
			errs.Recovered()
			retry.Reset()
			r.updateStatus(func(s *Status) { s.ConditionErr = "" })
		}
	}
}

// dueIn returns after which time a state must be written: at once over a heartbeat that is ahead, because the clock was.
func (w *conditionWriter) dueIn(desired *conditionState) time.Duration {
	age := time.Since(w.current.LastHeartbeatTime.Time)
	if !w.loaded || desired.fingerprint != w.fingerprint || age < 0 {
		return 0
	}
	interval := heartbeatInterval
	if desired.lost != w.lost {
		interval = lostInterval
	}
	return interval - age
}

// write writes the desired condition if it is due. It reads the condition once before: if another process wrote it, the
// time of its last transition stays.
func (w *conditionWriter) write(ctx context.Context) error {
	if !w.loaded {
		c, err := w.api.condition(ctx, w.Node)
		if err != nil {
			return err
		}
		w.current, w.loaded = c, true
		if d := w.desired.Load(); c.Status == d.status && c.Reason == d.reason && c.Message == d.message {
			w.fingerprint, w.lost = d.fingerprint, d.lost
		}
	}
	desired := w.desired.Load()
	if w.dueIn(desired) > 0 {
		return nil // it changed back during settleDelay
	}
	next := desired.condition(w.current, time.Now())
	if err := w.api.patchCondition(ctx, w.Node, next); err != nil {
		return err
	}
	w.updateStatus(func(s *Status) { s.Writes++ })
	if next.Status != w.current.Status {
		w.Log.Info("node condition", zap.String("type", conditionType), zap.String("status", string(next.Status)),
			zap.String("was", string(w.current.Status)), zap.String("reason", next.Reason))
	}
	w.current, w.fingerprint, w.lost = next, desired.fingerprint, desired.lost
	return nil
}

// condition returns the condition to write over the current one. Its transition time is when the status was reached,
// even if it is written later, and stays while the status does.
func (s conditionState) condition(current corev1.NodeCondition, now time.Time) corev1.NodeCondition {
	c := corev1.NodeCondition{
		Type: conditionType, Status: s.status, Reason: s.reason, Message: s.message,
		LastHeartbeatTime: metav1.NewTime(now), LastTransitionTime: metav1.NewTime(s.since),
	}
	if current.Status == s.status && !current.LastTransitionTime.IsZero() {
		c.LastTransitionTime = current.LastTransitionTime
	}
	return c
}

// conditionPart removes the condition after reporting was disabled.
func (w *NodeWriter) conditionPart() partWriter {
	return partWriter{
		of: func(s *NodeState) desiredPart {
			if !s.RemoveCondition {
				return desiredPart{}
			}
			return desiredPart{true, true}
		},
		write: func(ctx context.Context, api *client, _ *NodeState, _ bool) (warning string, err error) {
			return "", unlessGone(api.deleteCondition(ctx, w.Node))
		},
	}
}
