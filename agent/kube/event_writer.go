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
			await(ctx, r.queue.wake, in)
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

// write writes an event. It raises the count of the one that this process has written with the same key.
func (w *eventWriter) write(ctx context.Context, e event) error {
	var old *writtenEvent
	if o, ok := w.written[e.key]; ok && time.Since(o.at) < eventTTL {
		old = &o
	}
	now, err := w.writeEvent(ctx, w.api, e, old, w.reference)
	if err != nil || now == nil {
		return err
	}
	w.written[e.key] = *now
	maps.DeleteFunc(w.written, func(_ eventKey, o writtenEvent) bool { return now.at.Sub(o.at) > eventTTL })
	return nil
}

// writeEvent raises the count of old, or creates an event if the API server lacks old. old is nil if there was none before. reference
// returns the object of a new event, nil if there is nothing to write about. The result is the event at the API server.
func (r *Reporter) writeEvent(ctx context.Context, api *client, e event, old *writtenEvent,
	reference func(context.Context, object) (*corev1.ObjectReference, error),
) (*writtenEvent, error) {
	namespace := cmp.Or(e.key.object.namespace, metav1.NamespaceDefault)
	if old != nil {
		count := old.count + e.count
		err := api.patchEvent(ctx, namespace, old.name, map[string]any{
			"count": toInt32(count), "lastTimestamp": metav1.NewTime(e.last), "message": e.message,
		})
		if err == nil {
			return r.wroteEvent(old.name, count), nil
		}
		if !apierrors.IsNotFound(err) {
			return nil, err
		}
	}
	involved, err := reference(ctx, e.key.object)
	if involved == nil || err != nil {
		return nil, err
	}
	err = api.createEvent(ctx, corev1.Event{
		TypeMeta: metav1.TypeMeta{Kind: "Event", APIVersion: "v1"}, ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: e.name},
		InvolvedObject: *involved, Type: e.typ, Reason: e.key.reason, Message: e.message,
		Source: corev1.EventSource{Component: component, Host: r.Node}, FirstTimestamp: metav1.NewTime(e.first),
		LastTimestamp: metav1.NewTime(e.last),
		Count:         toInt32(max(e.count, 1)), ReportingController: component, ReportingInstance: r.Node,
	})
	if err != nil && !apierrors.IsAlreadyExists(err) { // an earlier attempt created it, and its response was lost
		return nil, err
	}
	return r.wroteEvent(e.name, e.count), nil
}

func (r *Reporter) wroteEvent(name string, count uint64) *writtenEvent {
	r.updateStatus(func(s *Status) { s.Events++ })
	return &writtenEvent{name, count, time.Now()}
}

// reference returns the reference to an event's object, nil if the object no longer exists. kubectl describe finds events by the UID of
// their object. For a node, the kubelet uses the node's name as UID; for a pod, it is the pod's UID.
func (w *eventWriter) reference(ctx context.Context, o object) (*corev1.ObjectReference, error) {
	if o.namespace == "" {
		return &corev1.ObjectReference{Kind: "Node", APIVersion: "v1", Name: o.name, UID: types.UID(o.name)}, nil
	}
	p, err := w.api.pod(ctx, o.namespace, o.name)
	switch {
	case apierrors.IsNotFound(err):
		return nil, nil
	case apierrors.IsForbidden(err):
		w.podErrs.Report(err)
		return podReference(o, ""), nil
	case err != nil:
		return nil, err
	case p.Spec.NodeName != w.Node:
		return nil, nil // another pod with the same name
	}
	return podReference(o, p.UID), nil
}

func podReference(o object, uid types.UID) *corev1.ObjectReference {
	return &corev1.ObjectReference{Kind: "Pod", APIVersion: "v1", Namespace: o.namespace, Name: o.name, UID: uid}
}

// eventName returns a unique name for an event.
func eventName(e event) string { return eventNameOf(e.key.object.name, rand.Uint64()) }

// eventNameOf returns the name of an event on an object.
func eventNameOf(object string, number uint64) string {
	const maxLength = 253 - 17 // the API's limit, less the suffix
	return fmt.Sprintf("%s.%x", strings.TrimRight(object[:min(len(object), maxLength)], ".-"), number)
}

func toInt32(n uint64) int32 { return int32(min(n, math.MaxInt32)) }
