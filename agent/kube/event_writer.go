package kube

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"time"

	"golang.org/x/time/rate"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
)

// The events of a node: a burst for the worst day, then two a minute. What has to wait is counted together.
const (
	eventBurst = 50
	eventEvery = 30 * time.Second
)

// maxPosted bounds the events whose count can still be raised.
const maxPosted = 512

// posted is an event that was written.
type posted struct {
	name  string
	count uint64
	at    time.Time
}

// poster writes events.
type poster struct {
	*Reporter
	api    *client
	posted map[happeningKey]posted
	noPods *trouble // reading pods
}

// runPoster writes the queue's events until ctx ends.
func (r *Reporter) runPoster(ctx context.Context, api *client) {
	p := &poster{r, api, make(map[happeningKey]posted), newTrouble(r.Log, "the UID of a pod in its events", "a cluster role with get on pods")}
	t := newTrouble(r.Log, "events", "a cluster role with create and patch on events")
	limit := rate.NewLimiter(rate.Every(eventEvery), eventBurst)
	var pause backoff
	for ctx.Err() == nil {
		h, in, ok := r.queue.take(time.Now(), p.notBefore)
		if !ok {
			wait(ctx, r.queue.wake, in)
			continue
		}
		if limit.Wait(ctx) != nil {
			r.queue.add(h) // for the next configuration
			return
		}
		h.name = cmp.Or(h.name, eventName(h))
		err := p.post(ctx, h)
		switch {
		case ctx.Err() != nil:
			r.queue.add(h) // for the next configuration
		case err == nil:
			t.over()
			pause = backoff{}
			r.count(func(s *Status) { s.Event = "" })
		case hopeless(err):
			t.say(err)
			r.count(func(s *Status) { s.Errors, s.Dropped, s.Event = s.Errors+1, s.Dropped+1, err.Error() })
		default:
			t.say(err)
			r.count(func(s *Status) { s.Errors, s.Event = s.Errors+1, err.Error() })
			r.queue.add(h)
			pause.wait(ctx)
		}
	}
}

func (p *poster) notBefore(k happeningKey) time.Time {
	if e, ok := p.posted[k]; ok {
		return e.at.Add(again)
	}
	return time.Time{}
}

// post writes an event: a new one, or a greater count of one that is there.
func (p *poster) post(ctx context.Context, h happening) error {
	namespace := cmp.Or(h.key.object.namespace, metav1.NamespaceDefault)
	old, ok := p.posted[h.key]
	if ok && time.Since(old.at) < eventLife {
		old.count += h.count
		err := p.api.patchEvent(ctx, namespace, old.name, eventPatch{count32(old.count), metav1.NewTime(h.last), h.message})
		if !apierrors.IsNotFound(err) {
			if err == nil {
				p.wrote(h.key, old)
			}
			return err
		}
	}
	about, err := p.reference(ctx, h.key.object)
	if about == nil || err != nil {
		return err
	}
	err = p.api.createEvent(ctx, event{
		Kind: "Event", APIVersion: "v1", Metadata: metav1.ObjectMeta{Namespace: namespace, Name: h.name},
		InvolvedObject: *about, Type: h.typ, Reason: h.key.reason, Message: h.message,
		Source: source{component, p.Node}, FirstTimestamp: metav1.NewTime(h.first), LastTimestamp: metav1.NewTime(h.last),
		Count: count32(h.count), ReportingComponent: component, ReportingInstance: p.Node,
	})
	if err == nil || apierrors.IsAlreadyExists(err) { // ours: the answer to the first attempt was lost
		p.wrote(h.key, posted{name: h.name, count: h.count})
		return nil
	}
	return err
}

func (p *poster) wrote(k happeningKey, e posted) {
	e.at = time.Now()
	p.posted[k] = e
	p.count(func(s *Status) { s.Events++ })
	maps.DeleteFunc(p.posted, func(_ happeningKey, o posted) bool { return e.at.Sub(o.at) > eventLife })
	if len(p.posted) > maxPosted {
		delete(p.posted, slices.MinFunc(slices.Collect(maps.Keys(p.posted)), func(a, b happeningKey) int {
			return p.posted[a].at.Compare(p.posted[b].at)
		}))
	}
}

// reference names what an event is about, nil if it is not there any more. kubectl describe finds a node's
// events by the UID that the kubelet uses, its name, and those of a pod by the pod's real UID.
func (p *poster) reference(ctx context.Context, o object) (*reference, error) {
	if o.namespace == "" {
		return &reference{Kind: "Node", APIVersion: "v1", Name: o.name, UID: types.UID(o.name)}, nil
	}
	about := &reference{Kind: "Pod", APIVersion: "v1", Namespace: o.namespace, Name: o.name}
	uid, node, err := p.api.pod(ctx, o.namespace, o.name)
	switch {
	case apierrors.IsNotFound(err):
		return nil, nil
	case apierrors.IsForbidden(err):
		p.noPods.say(err)
		return about, nil
	case err != nil:
		return nil, err
	case node != p.Node:
		return nil, nil // its name is another's by now
	}
	about.UID = uid
	return about, nil
}

// eventName makes a name that no other event has.
func eventName(h happening) string {
	const room = 253 - 17 // the API's limit, and what comes behind
	o := h.key.object.name
	return fmt.Sprintf("%s.%x", strings.TrimRight(o[:min(len(o), room)], ".-"), rand.Uint64())
}

func count32(n uint64) int32 { return int32(min(n, math.MaxInt32)) }
