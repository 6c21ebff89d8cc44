package kube

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"math"
	"math/rand/v2"
	"strings"
	"time"

	"golang.org/x/time/rate"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
)

// A node may write a burst of events, then two a minute. The queue merges events that wait.
const (
	eventBurst    = 50
	eventInterval = 30 * time.Second
)

// writtenEvent is an event that the API server has.
type writtenEvent struct {
	name  string
	count uint64
	at    time.Time // of the last write
}

// eventWriter writes events.
type eventWriter struct {
	*Reporter
	api     *client
	written map[eventKey]writtenEvent // of the last eventTTL; the limits above keep them few
	podErrs *ErrorLog                 // of reading pods
}

// runEventWriter writes the queue's events until ctx ends.
func (r *Reporter) runEventWriter(ctx context.Context, api *client) {
	w := &eventWriter{r, api, make(map[eventKey]writtenEvent), NewErrorLog(r.Log, "cannot read a pod's UID for its events", "",
		"a cluster role with get on pods")}
	errs := NewErrorLog(r.Log, "cannot write events", "wrote events again", "a cluster role with create and patch on events")
	limit := rate.NewLimiter(rate.Every(eventInterval), eventBurst)
	retry := newBackoff()
	for ctx.Err() == nil {
		e, in, ok := r.queue.take(time.Now(), w.notBefore)
		if !ok {
			Wait(ctx, r.queue.wake, in)
			continue
		}
		if limit.Wait(ctx) != nil {
			r.queue.add(e) // for the next configuration
			return
		}
		e.name = cmp.Or(e.name, eventName(e))
		err := w.write(ctx, e)
		switch {
		case ctx.Err() != nil:
			r.queue.add(e) // for the next configuration
		case err == nil:
			errs.Recovered()
			retry.Reset()
			r.updateStatus(func(s *Status) { s.EventErr = "" })
		case permanent(err):
			errs.Report(err)
			r.updateStatus(func(s *Status) { s.Errors, s.Dropped, s.EventErr = s.Errors+1, s.Dropped+1, err.Error() })
		default:
			errs.Report(err)
			r.updateStatus(func(s *Status) { s.Errors, s.EventErr = s.Errors+1, err.Error() })
			r.queue.add(e)
			retry.Wait(ctx)
		}
	}
}

func (w *eventWriter) notBefore(k eventKey) time.Time {
	if e, ok := w.written[k]; ok {
		return e.at.Add(repeatInterval)
	}
	return time.Time{}
}

// write creates an event, or raises the count of one that the API server has.
func (w *eventWriter) write(ctx context.Context, e event) error {
	namespace := cmp.Or(e.key.object.namespace, metav1.NamespaceDefault)
	old, ok := w.written[e.key]
	if ok && time.Since(old.at) < eventTTL {
		old.count += e.count
		err := w.api.patchEvent(ctx, namespace, old.name, map[string]any{
			"count": toInt32(old.count), "lastTimestamp": metav1.NewTime(e.last), "message": e.message,
		})
		if !apierrors.IsNotFound(err) {
			if err == nil {
				w.record(e.key, old)
			}
			return err
		}
	}
	involved, err := w.reference(ctx, e.key.object)
	if involved == nil || err != nil {
		return err
	}
	err = w.api.createEvent(ctx, corev1.Event{
		TypeMeta: metav1.TypeMeta{Kind: "Event", APIVersion: "v1"}, ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: e.name},
		InvolvedObject: *involved, Type: e.typ, Reason: e.key.reason, Message: e.message,
		Source: corev1.EventSource{Component: component, Host: w.Node}, FirstTimestamp: metav1.NewTime(e.first),
		LastTimestamp: metav1.NewTime(e.last),
		Count:         toInt32(max(e.count, 1)), ReportingController: component, ReportingInstance: w.Node,
	})
	if err == nil || apierrors.IsAlreadyExists(err) { // an earlier attempt created it, and its response was lost
		w.record(e.key, writtenEvent{name: e.name, count: e.count})
		return nil
	}
	return err
}

func (w *eventWriter) record(k eventKey, e writtenEvent) {
	e.at = time.Now()
	w.written[k] = e
	w.updateStatus(func(s *Status) { s.Events++ })
	maps.DeleteFunc(w.written, func(_ eventKey, o writtenEvent) bool { return e.at.Sub(o.at) > eventTTL })
}

// reference returns the reference to an event's object, nil if the object no longer exists. kubectl describe finds the
// events of a node by the UID that the kubelet uses, which is the node's name, and those of a pod by the pod's UID.
func (w *eventWriter) reference(ctx context.Context, o object) (*corev1.ObjectReference, error) {
	if o.namespace == "" {
		return &corev1.ObjectReference{Kind: "Node", APIVersion: "v1", Name: o.name, UID: types.UID(o.name)}, nil
	}
	pod := &corev1.ObjectReference{Kind: "Pod", APIVersion: "v1", Namespace: o.namespace, Name: o.name}
	p, err := w.api.pod(ctx, o.namespace, o.name)
	switch {
	case apierrors.IsNotFound(err):
		return nil, nil
	case apierrors.IsForbidden(err):
		w.podErrs.Report(err)
		return pod, nil
	case err != nil:
		return nil, err
	case p.Spec.NodeName != w.Node:
		return nil, nil // another pod with the same name
	}
	pod.UID = p.UID
	return pod, nil
}

// eventName returns a unique name for an event.
func eventName(e event) string { return eventNameOf(e.key.object.name, rand.Uint64()) }

// eventNameOf returns the name of an event on an object.
func eventNameOf(object string, number uint64) string {
	const maxLength = 253 - 17 // the API's limit, less the suffix
	return fmt.Sprintf("%s.%x", strings.TrimRight(object[:min(len(object), maxLength)], ".-"), number)
}

func toInt32(n uint64) int32 { return int32(min(n, math.MaxInt32)) }
