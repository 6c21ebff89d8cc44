package kube

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/duration"

	"github.com/gpu-node-agent/gpu-node-agent/health/wait"
)

// eventIdle is the reason of the event on a pod that holds devices and does not use them. It is a warning, because somebody has to do
// something, and because many routers of events forward only warnings.
const eventIdle = "GPUIdle"

// OptOutAnnotation keeps a pod from being reported as idle and, by default, from being reclaimed. Every value but "false" does.
const OptOutAnnotation = "gpu-node-agent/reclaim-opt-out"

// OptedOut reports whether an object with these annotations opts out.
func OptedOut(annotations map[string]string, annotation string) bool {
	value, exists := annotations[annotation]
	return exists && value != "false"
}

// IdlePods are the pods that hold devices and have not used all of them for some time.
type IdlePods struct {
	After        time.Duration // for which a device is not used; 0: no pod is reported
	Evidence     string        // what they lack, for texts: process, work
	ModelUnknown bool          // an idle device may have a loaded model: its processes are not measured
	Pods         []IdlePod
}

// IdlePod is a pod and its idle devices.
type IdlePod struct {
	Pod
	Held int          // number of devices that the pod holds
	Kind string       // of these: GPU, MIG device or device
	Idle []IdleDevice // of these; at least one
}

// IdleDevice is a device that a pod has not used for some time.
type IdleDevice struct {
	Name string // as in GPU 3
	For  time.Duration
}

const (
	// idleInterval is how often the idle pods are examined.
	idleInterval = 10 * time.Second

	// idleRepeat is the least time between two events on a pod.
	idleRepeat = time.Hour

	// idleRecheck is the time between two requests for a pod that is not reported now: it is not Ready or it ends.
	idleRecheck = 5 * time.Minute
)

// idleWriter writes the events of idle pods.
//
// The event of a pod has a fixed name, so that the time of the last one is at the API server. So neither a restart nor a second agent
// repeats it early.
type idleWriter struct {
	*Reporter
	current  currentClient
	examined map[Pod]examinedPod // of the idle pods only
}

// examinedPod is the result of the last requests for a pod.
type examinedPod struct {
	next   time.Time // before which the pod is not examined
	failed bool      // it could not be reported
}

// runIdleWriter follows the idle pods until ctx ends. It makes no request while there is none.
func (r *Reporter) runIdleWriter(ctx context.Context) {
	if r.Idle == nil {
		return
	}
	w := &idleWriter{Reporter: r, examined: make(map[Pod]examinedPod)}
	errs := NewErrorLog(r.Log, "cannot report idle pods", "reported idle pods again",
		"a cluster role with get on pods, and create and patch on events")
	retry := newBackoff()
	for wait.Sleep(ctx, idleInterval) {
		reached, err := w.examine(ctx)
		switch {
		case ctx.Err() != nil:
		case err != nil:
			errs.Report(err)
			r.updateStatus(func(s *Status) { s.Errors, s.IdleErr = s.Errors+1, err.Error() })
			if reached {
				retry.Reset() // each pod has its own time for the next attempt
			} else {
				retry.Wait(ctx)
			}
		case w.failing():
			retry.Reset()
		default:
			errs.Recovered()
			retry.Reset()
			r.updateStatus(func(s *Status) { s.IdleErr = "" })
		}
	}
}

// examine reports each idle pod that is due. An error of one does not keep the others from being reported, unless the API server is not
// reached.
func (w *idleWriter) examine(ctx context.Context) (reached bool, err error) {
	idle := w.Idle()
	w.updateStatus(func(s *Status) { s.IdleEnabled = idle.After != 0 })
	maps.DeleteFunc(w.examined, func(p Pod, _ examinedPod) bool {
		return !slices.ContainsFunc(idle.Pods, func(i IdlePod) bool { return i.Pod == p })
	})
	var errs []error
	for _, p := range idle.Pods {
		now := time.Now()
		// After the clock was set back, a pod is not left alone for longer than idleRepeat.
		if next := w.examined[p.Pod].next; now.Before(next) && next.Sub(now) <= idleRepeat {
			continue
		}
		if err := w.current.open(w.Config.Load().Kubernetes.Kubeconfig, w.open); err != nil {
			return false, err
		}
		next, err := w.report(ctx, p, idle)
		if err == nil {
			w.examined[p.Pod] = examinedPod{next: next}
			continue
		}
		errs = append(errs, fmt.Errorf("pod %s/%s: %w", p.Namespace, p.Name, err))
		if apierrors.ReasonForError(err) == metav1.StatusReasonUnknown || ctx.Err() != nil {
			return false, errors.Join(errs...)
		}
		w.examined[p.Pod] = examinedPod{now.Add(idleRecheck), true}
	}
	return true, errors.Join(errs...)
}

// failing reports whether the last attempt to report an idle pod failed.
func (w *idleWriter) failing() bool {
	for _, p := range w.examined {
		if p.failed {
			return true
		}
	}
	return false
}

// report writes the event of a pod, if it is to be reported now, and returns when to examine the pod again.
func (w *idleWriter) report(ctx context.Context, p IdlePod, idle IdlePods) (next time.Time, err error) {
	pod, err := w.current.api.pod(ctx, p.Namespace, p.Name)
	now := time.Now()
	switch {
	case apierrors.IsNotFound(err):
		return now.Add(idleRecheck), nil
	case err != nil:
		return time.Time{}, err
	case pod.Spec.NodeName != w.Node, pod.DeletionTimestamp != nil:
		return now.Add(idleRecheck), nil
	}
	if OptedOut(pod.Annotations, OptOutAnnotation) {
		return now.Add(idleRepeat), nil
	}
	ready, ok := readySince(pod)
	if !ok {
		return now.Add(idleRecheck), nil
	}
	message, in := idleMessage(p, idle, now.Sub(ready))
	if message == "" {
		return now.Add(in), nil
	}
	return w.write(ctx, p.Pod, pod.UID, message, now)
}

// readySince returns since when a pod is Ready; ok is false if it is not.
func readySince(pod corev1.Pod) (at time.Time, ok bool) {
	for _, c := range pod.Status.Conditions {
		if c.Type == corev1.PodReady && c.Status == corev1.ConditionTrue {
			return c.LastTransitionTime.Time, true
		}
	}
	return time.Time{}, false
}

// idleMessage returns the message about a pod that has been Ready for a time. Earlier idle time does not count: it may have loaded a model.
// If the pod has not been Ready for long enough, the message is empty, and in is the time until it has.
func idleMessage(p IdlePod, idle IdlePods, ready time.Duration) (message string, in time.Duration) {
	if ready < idle.After {
		return "", min(max(idle.After-ready, idleInterval), idleRepeat)
	}
	shortest := ready
	names := make([]string, len(p.Idle))
	for i, d := range p.Idle {
		names[i], shortest = d.Name, min(shortest, d.For)
	}
	what := "the " + p.Kind
	if p.Held > 1 {
		what = fmt.Sprintf("%d of %d %ss", len(p.Idle), p.Held, p.Kind)
	}
	suffix := ". End the pod or request less if it does not need them; with the annotation " + OptOutAnnotation + " it is not reported"
	if idle.ModelUnknown {
		suffix = "; whether a model is loaded is unknown" + suffix
	}
	message = fmt.Sprintf("no %s on %s of the pod for %s: %s", idle.Evidence, what, duration.HumanDuration(shortest),
		strings.Join(names, ", "))
	return truncate(message, maxMessage-len(suffix)) + suffix, 0
}

// write writes the event of a pod, unless the last one is too recent. It returns when the next one may be written.
func (w *idleWriter) write(ctx context.Context, p Pod, uid types.UID, message string, now time.Time) (next time.Time, err error) {
	e := warningOf(eventKey{object: object{p.Namespace, p.Name}, reason: eventIdle}, message, now, string(uid))
	last, err := w.current.api.event(ctx, p.Namespace, e.name)
	var old *writtenEvent
	switch {
	case apierrors.IsNotFound(err):
	case err != nil:
		return time.Time{}, err
	case now.Sub(last.LastTimestamp.Time).Abs() < idleRepeat:
		if next = last.LastTimestamp.Add(idleRepeat); next.After(now.Add(idleRepeat)) { // the clock was set back
			next = now.Add(idleRepeat)
		}
		return next, nil
	default:
		old = &writtenEvent{name: e.name, count: uint64(max(last.Count, 0))}
	}
	_, err = w.writeEvent(ctx, w.current.api, e, old, func(_ context.Context, o object) (*corev1.ObjectReference, error) {
		return podReference(o, uid), nil
	})
	return now.Add(idleRepeat), err
}
