package reclaim

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/clientcmd"

	"github.com/gpu-node-agent/gpu-node-agent/internal/apiservertest"
)

const testNotice = "2026-11-23T01:00:00Z"

var testAt = time.Date(2026, 11, 23, 2, 0, 0, 123456000, time.UTC)

// wire is what a run's requests go through.
type wire struct {
	http.RoundTripper
	before func(*http.Request)                       // nil for none
	after  func(*http.Request, *http.Response) error // an error loses the response
}

func (w *wire) RoundTrip(r *http.Request) (*http.Response, error) {
	if w.before != nil {
		w.before(r)
	}
	answer, err := w.RoundTripper.RoundTrip(r)
	if err == nil && w.after != nil {
		if err = w.after(r, answer); err != nil {
			_ = answer.Body.Close()
			return nil, err
		}
	}
	return answer, err
}

// connectTo returns the api of a run, and what its requests go through.
func connectTo(t *testing.T, kubeconfig string) (*api, *wire) {
	t.Helper()
	c, err := clientcmd.BuildConfigFromFlags("", kubeconfig)
	if err != nil {
		t.Fatal(err)
	}
	w := new(wire)
	c.QPS = -1
	c.Wrap(func(rt http.RoundTripper) http.RoundTripper { w.RoundTripper = rt; return w })
	client, err := kubernetes.NewForConfig(c)
	if err != nil {
		t.Fatal(err)
	}
	return newAPI(client, agentSelection{Namespace: "gpu", Selector: "app=agent", Scheme: "http"}), w
}

// apiRig is an API server with one owner of each kind in namespace a, all with 3 replicas and a notice.
type apiRig struct {
	*apiservertest.Server
	t          *testing.T
	kubeconfig string
}

func newAPIRig(t *testing.T) *apiRig {
	t.Helper()
	s := apiservertest.New(t)
	m := func(name string) metav1.ObjectMeta {
		return metav1.ObjectMeta{Namespace: "a", Name: name, Annotations: map[string]string{"keep": "this", noticeAnnotation: testNotice}}
	}
	s.Put(&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "a", Annotations: map[string]string{"team": "red"}}})
	s.Put(&appsv1.Deployment{ObjectMeta: m("deployment"), Spec: appsv1.DeploymentSpec{Replicas: new(int32(3))}})
	s.Put(&appsv1.ReplicaSet{ObjectMeta: m("replicaset"), Spec: appsv1.ReplicaSetSpec{Replicas: new(int32(3))}})
	s.Put(&appsv1.StatefulSet{ObjectMeta: m("statefulset"), Spec: appsv1.StatefulSetSpec{Replicas: new(int32(3))}})
	s.Put(&batchv1.Job{ObjectMeta: m("job"), Spec: batchv1.JobSpec{Suspend: new(false)}})
	s.Put(&batchv1.CronJob{ObjectMeta: m("cronjob")})
	pod := &corev1.Pod{ObjectMeta: m("pod"), Status: corev1.PodStatus{Phase: corev1.PodRunning}}
	pod.Labels = map[string]string{"app": "bare"}
	s.Put(pod)
	return &apiRig{s, t, s.Kubeconfig(t)}
}

func (g *apiRig) connect() (*api, *wire) { return connectTo(g.t, g.kubeconfig) }

// read reads an owner as a run does.
func (g *apiRig) read(a *api, kind string) *Owner {
	g.t.Helper()
	all, errs := a.readObjects(g.t.Context(), Policy{Namespaces: []string{"a"}})
	o := all.Owners[Ref{"a", kind, strings.ToLower(kind)}]
	if len(errs) > 0 || o == nil {
		g.t.Fatalf("no %s: %q", kind, errs)
	}
	return o
}

// owner returns an owner as the API server has it.
func (g *apiRig) owner(kind string) *Owner {
	g.t.Helper()
	resource := map[string]string{kindJob: "jobs"}[kind]
	return ownerOf(g.Get(cmp.Or(resource, strings.ToLower(kind)+"s"), "a", strings.ToLower(kind)).(runtime.Object))
}

// update changes an object at the API server, as somebody else does.
func update[T interface {
	metav1.Object
	runtime.Object
}](g *apiRig, resource string, f func(T)) {
	o := g.Get(resource, "a", strings.TrimSuffix(resource, "s")).(T)
	f(o)
	o.SetGeneration(o.GetGeneration() + 1)
	g.Put(o)
}

func (g *apiRig) apply(a *api, kind ActionKind, o *Owner) error {
	return a.apply(g.t.Context(), Policy{}, Action{Kind: kind, Ref: o.Ref, Replicas: 3, GPUs: 2.5, owner: o}, testAt)
}

// writes returns the requests that change something.
func (g *apiRig) writes() (all []string) {
	for _, r := range g.Requests() {
		if r.Verb != "get" && r.Verb != "list" {
			all = append(all, r.String())
		}
	}
	return all
}

// checkRecorded checks that nothing is lost: an owner without replicas has the record of its replicas.
func (g *apiRig) checkRecorded(kind string) {
	g.t.Helper()
	o := g.owner(kind)
	var r Record
	text, recorded := o.Annotations[recordAnnotation]
	if recorded {
		r = recordIn(g.t, text)
	}
	switch stopped := o.Replicas == 0 || o.Suspended; {
	case stopped && r.Replicas != max(1, map[bool]int32{kind != kindJob: 3}[true]):
		g.t.Errorf("the %s has no replicas and the record %q", kind, text)
	case stopped && r.Generation > o.Generation:
		g.t.Errorf("the %s has generation %d and looks as if it was not changed: %q", kind, o.Generation, text)
	case !stopped && recorded && r.Generation <= o.Generation:
		g.t.Errorf("the %s has generation %d and looks as if it was changed: %q", kind, o.Generation, text)
	}
}

// checkEvents checks the reasons of all Events, and that each concerns an owner.
func (g *apiRig) checkEvents(o *Owner, want ...string) {
	g.t.Helper()
	var reasons []string
	for _, e := range g.Events() {
		reasons = append(reasons, e.Reason)
		if i := e.InvolvedObject; i.Kind != o.Kind || i.UID != o.UID || i.APIVersion != kindGroups[o.Kind]+"/v1" || i.Namespace != "a" ||
			e.Source.Component != fieldManager {
			g.t.Errorf("unexpected event %+v", e)
		}
	}
	if !slices.Equal(reasons, want) {
		g.t.Errorf("events %q, want %q", reasons, want)
	}
}

func TestApplyScalesAndRestores(t *testing.T) {
	for _, kind := range []string{kindDeployment, kindReplicaSet, kindStatefulSet, kindJob} {
		t.Run(kind, func(t *testing.T) {
			g := newAPIRig(t)
			a, _ := g.connect()
			do, undo := ActionScale, ActionRestore
			if kind == kindJob {
				do, undo = ActionSuspend, ActionResume
			}
			before := g.read(a, kind)
			if err := g.apply(a, do, before); err != nil {
				t.Fatal(err)
			}
			o := g.read(a, kind)
			if o.Replicas != 0 && !o.Suspended || o.Annotations[noticeAnnotation] != "" || o.Annotations["keep"] != "this" {
				t.Errorf("unexpected owner %+v", o)
			}
			want := Record{Replicas: before.Replicas, GPUs: 2.5, At: testAt, Generation: o.Generation}
			if r := recordIn(t, o.Annotations[recordAnnotation]); r != want {
				t.Errorf("record %v, want %v", r, want)
			}
			if err := g.apply(a, undo, o); err != nil {
				t.Fatal(err)
			}
			o = g.read(a, kind)
			if _, recorded := o.Annotations[recordAnnotation]; o.Replicas != before.Replicas || o.Suspended || recorded ||
				o.Annotations["keep"] != "this" {
				t.Errorf("unexpected owner %+v after undo", o)
			}
			g.checkEvents(o, eventReclaimed, eventRestored)
		})
	}
}

func TestApplyNotifies(t *testing.T) {
	g := newAPIRig(t)
	a, _ := g.connect()
	pod := g.Get("pods", "a", "pod").(*corev1.Pod)
	actions := []Action{
		{Kind: ActionNotify, Ref: Ref{"a", kindPod, "pod"}, pod: pod},
		{Kind: ActionNotify, Ref: Ref{"a", kindJob, "job"}, owner: g.read(a, kindJob)},
	}
	for _, act := range actions {
		if err := a.apply(t.Context(), Policy{OptOut: "example.com/keep"}, act, testAt); err != nil {
			t.Fatal(err)
		}
		// The notice of another run came in between.
		if err := a.apply(t.Context(), Policy{}, act, testAt.Add(time.Second)); !errors.Is(err, errChanged) {
			t.Errorf("%s: %v", act.Kind, err)
		}
	}
	for _, o := range []metav1.Object{g.Get("pods", "a", "pod"), g.Get("jobs", "a", "job")} {
		if at := o.GetAnnotations()[noticeAnnotation]; at != "2026-11-23T02:00:00Z" {
			t.Errorf("%s: notice %q", o.GetName(), at)
		}
	}
	for _, e := range g.Events() {
		if e.Reason != eventNotice || e.Type != corev1.EventTypeWarning || !strings.Contains(e.Message, "example.com/keep") {
			t.Errorf("unexpected event %+v", e)
		}
	}
	if len(g.Events()) != 2 {
		t.Errorf("%d events", len(g.Events()))
	}
}

// killAfter lets no write pass after a number of writes; lost keeps the response of the last one from the run.
func (w *wire) killAfter(writes int, lost bool) {
	done := 0
	w.before = func(r *http.Request) {
		if r.Method == http.MethodGet {
			return
		}
		if done++; done > writes {
			r.URL.Host = "127.0.0.1:1"
		}
	}
	w.after = func(r *http.Request, _ *http.Response) error {
		if lost && r.Method != http.MethodGet && done == writes {
			return errors.New("killed")
		}
		return nil
	}
}

// A run that is killed after any write, before or after it has the response, leaves a state from which the next run goes on.
func TestApplyKilled(t *testing.T) {
	for _, kind := range []string{kindDeployment, kindStatefulSet, kindJob} {
		for writes := range 4 {
			for _, lost := range []bool{false, true} {
				t.Run(fmt.Sprint(kind, writes, lost), func(t *testing.T) {
					g := newAPIRig(t)
					a, w := g.connect()
					act := map[bool]ActionKind{true: ActionSuspend, false: ActionScale}[kind == kindJob]
					before := g.read(a, kind)
					w.killAfter(writes, lost)
					_ = g.apply(a, act, before)
					g.checkRecorded(kind)

					a, _ = g.connect()
					if o := g.read(a, kind); o.Replicas != 0 && !o.Suspended {
						if err := g.apply(a, act, o); err != nil {
							t.Fatal(err)
						}
					}
					if o := g.owner(kind); o.Replicas != 0 && !o.Suspended {
						t.Errorf("not changed: %+v", o)
					}
					g.checkRecorded(kind)
				})
			}
		}
	}
}

func TestApplyRefused(t *testing.T) {
	refuse := func(g *apiRig, request string, err error) {
		g.Answer(func(r apiservertest.Request) error {
			if r.Verb+" "+r.Resource == request {
				return err
			}
			return nil
		})
	}
	resource := schema.GroupResource{Group: "apps", Resource: "deployments/scale"}
	for name, tt := range map[string]struct {
		do       func(*apiRig, *wire)
		want     func(error) bool
		recorded bool // a record is left
		late     bool // the change was made
	}{
		"forbidden to scale": {
			do:   func(g *apiRig, _ *wire) { g.Deny("patch deployments/scale") },
			want: apierrors.IsForbidden,
		},
		"forbidden to write": {
			do:   func(g *apiRig, _ *wire) { g.Deny("patch deployments") },
			want: apierrors.IsForbidden,
		},
		"forbidden events": {
			do:       func(g *apiRig, _ *wire) { g.Deny("create events") },
			want:     apierrors.IsForbidden,
			recorded: true, late: true,
		},
		"refused by a webhook": {
			do: func(g *apiRig, _ *wire) {
				refuse(g, "patch deployments/scale", apierrors.NewForbidden(resource, "deployment", errors.New("admission webhook denied the request")))
			},
			want: apierrors.IsForbidden,
		},
		"server's error": {
			do: func(g *apiRig, _ *wire) {
				refuse(g, "patch deployments/scale", apierrors.NewInternalError(errors.New("etcd")))
			},
			want:     apierrors.IsInternalError,
			recorded: true,
		},
		"server's timeout": {
			do: func(g *apiRig, _ *wire) {
				refuse(g, "patch deployments/scale", apierrors.NewTimeoutError("request did not complete", 1))
			},
			want:     apierrors.IsTimeout,
			recorded: true,
		},
		"changed since it was read": {
			do: func(g *apiRig, _ *wire) {
				update(g, "deployments", func(d *appsv1.Deployment) { d.Spec.Replicas = new(int32(5)) })
			},
			want: func(err error) bool { return errors.Is(err, errChanged) },
		},
		"replicas changed after the record": {
			do: func(g *apiRig, w *wire) {
				afterRecord(w, func() {
					update(g, "deployments", func(d *appsv1.Deployment) { d.Spec.Replicas = new(int32(5)) })
				})
			},
			want: func(err error) bool { return errors.Is(err, errChanged) },
		},
		"removed after the record": {
			do:   func(g *apiRig, w *wire) { afterRecord(w, func() { g.Delete("deployments", "a", "deployment") }) },
			want: apierrors.IsNotFound,
		},
		"recreated after the record": {
			do: func(g *apiRig, w *wire) {
				afterRecord(w, func() {
					d := g.Get("deployments", "a", "deployment").(*appsv1.Deployment)
					g.Delete("deployments", "a", "deployment")
					d.UID, d.Annotations = "other", nil
					g.Put(d)
				})
			},
			want: func(err error) bool { return errors.Is(err, errChanged) },
		},
		"status written after the record": {
			do: func(g *apiRig, w *wire) {
				afterRecord(w, func() {
					d := g.Get("deployments", "a", "deployment").(*appsv1.Deployment)
					d.Status.ObservedGeneration = d.Generation
					g.Put(d)
				})
			},
			want:     func(err error) bool { return err == nil },
			recorded: true,
		},
	} {
		t.Run(name, func(t *testing.T) {
			g := newAPIRig(t)
			a, w := g.connect()
			o := g.read(a, kindDeployment)
			tt.do(g, w)
			err := g.apply(a, ActionScale, o)
			if _, late := errors.AsType[lateError](err); !tt.want(err) || late != tt.late {
				t.Errorf("unexpected error (late: %v): %v", late, err)
			}
			if g.Get("deployments", "a", "deployment") == nil {
				return
			}
			now := g.owner(kindDeployment)
			if _, recorded := now.Annotations[recordAnnotation]; recorded != tt.recorded {
				t.Errorf("record left: %v; %q", recorded, g.writes())
			}
			if now.UID == o.UID && !tt.recorded && now.Annotations[noticeAnnotation] != testNotice {
				t.Errorf("notice %q", now.Annotations[noticeAnnotation])
			}
			g.checkRecorded(kindDeployment)
			if wantEvents := map[bool]int{err == nil: 1}[true]; len(g.Events()) != wantEvents {
				t.Errorf("%d events after %v", len(g.Events()), err)
			}
		})
	}
}

// afterRecord calls f after the record was written.
func afterRecord(w *wire, f func()) {
	var once sync.Once
	w.after = func(r *http.Request, _ *http.Response) error {
		if r.Method == http.MethodPatch {
			once.Do(f)
		}
		return nil
	}
}

func TestApplyEvicts(t *testing.T) {
	evict := func(g *apiRig, pod *corev1.Pod) error {
		a, _ := g.connect()
		return a.apply(t.Context(), Policy{}, Action{Kind: ActionEvict, Ref: Ref{"a", kindPod, "pod"}, pod: pod}, testAt)
	}
	t.Run("budget", func(t *testing.T) {
		g := newAPIRig(t)
		pod := g.Get("pods", "a", "pod").(*corev1.Pod)
		budget := &policyv1.PodDisruptionBudget{ObjectMeta: metav1.ObjectMeta{Namespace: "a", Name: "one"}}
		budget.Spec.Selector = &metav1.LabelSelector{MatchLabels: map[string]string{"app": "bare"}}
		g.Put(budget)
		if err := evict(g, pod); !apierrors.IsTooManyRequests(err) || !strings.Contains(err.Error(), "budget one") {
			t.Errorf("unexpected error: %v", err)
		}
		if writes := g.writes(); !slices.Equal(writes, []string{"create pods/eviction 429"}) {
			t.Errorf("writes %q", writes) // a Retry-After is not followed
		}
		budget.Status.DisruptionsAllowed = 1
		g.Put(budget)
		if err := evict(g, pod); err != nil || g.Get("pods", "a", "pod") != nil {
			t.Errorf("not evicted: %v", err)
		}
		if e := g.Events(); len(e) != 1 || e[0].Reason != eventReclaimed || e[0].InvolvedObject.UID != pod.UID {
			t.Errorf("events %+v", e)
		}
	})
	t.Run("opted out since", func(t *testing.T) {
		g := newAPIRig(t)
		pod := g.Get("pods", "a", "pod").(*corev1.Pod)
		changed := pod.DeepCopy()
		changed.Annotations = map[string]string{DefaultPolicy().OptOut: ""}
		g.Put(changed)
		if err := evict(g, pod); !errors.Is(err, errChanged) || g.Get("pods", "a", "pod") == nil {
			t.Errorf("unexpected error: %v", err)
		}
	})
	t.Run("another pod of this name", func(t *testing.T) {
		g := newAPIRig(t)
		pod := g.Get("pods", "a", "pod").(*corev1.Pod)
		pod.UID = "earlier"
		if err := evict(g, pod); !errors.Is(err, errChanged) || g.Get("pods", "a", "pod") == nil {
			t.Errorf("unexpected error: %v", err)
		}
	})
}

func TestApplyStops(t *testing.T) {
	g := newAPIRig(t)
	a, w := g.connect()
	o := g.read(a, kindStatefulSet)
	ctx, stop := context.WithCancelCause(t.Context())
	afterRecord(w, func() { stop(errors.New("SIGTERM")) })
	act := Action{Kind: ActionScale, Ref: o.Ref, owner: o}
	if err := a.apply(ctx, Policy{}, act, testAt); err != nil || g.owner(kindStatefulSet).Replicas != 0 {
		t.Errorf("not finished: %v", err)
	}
	before := len(g.Requests())
	if err := a.apply(ctx, Policy{}, act, testAt); err == nil || len(g.Requests()) != before {
		t.Errorf("began an action: %v", err)
	}
}

// Two runs with the same plan: one acts.
func TestApplyTwice(t *testing.T) {
	for _, kind := range []string{kindDeployment, kindStatefulSet, kindJob} {
		t.Run(kind, func(t *testing.T) {
			g := newAPIRig(t)
			act := map[bool]ActionKind{true: ActionSuspend, false: ActionScale}[kind == kindJob]
			var together, runs sync.WaitGroup
			together.Add(2)
			var errs [2]error
			for i := range errs {
				a, _ := g.connect()
				o := g.read(a, kind)
				runs.Go(func() {
					together.Done()
					together.Wait()
					errs[i] = g.apply(a, act, o)
				})
			}
			runs.Wait()
			if done := slices.IndexFunc(errs[:], func(err error) bool { return err == nil }); done < 0 || !errors.Is(errs[1-done], errChanged) {
				t.Errorf("unexpected errors %v", errs)
			}
			if n := len(g.Events()); n != 1 {
				t.Errorf("%d events", n)
			}
			g.checkRecorded(kind)
		})
	}
}

// Somebody who changes an owner between the two writes of a run keeps it, and no record stays.
func TestApplyChangedBetweenWrites(t *testing.T) {
	for name, change := range map[string]func(*appsv1.StatefulSet){
		"opt-out": func(o *appsv1.StatefulSet) { o.Annotations[DefaultPolicy().OptOut] = "" },
		"spec":    func(o *appsv1.StatefulSet) { o.Generation++ },
	} {
		t.Run(name, func(t *testing.T) {
			g := newAPIRig(t)
			a, w := g.connect()
			o := g.read(a, kindStatefulSet)
			afterRecord(w, func() {
				set := g.Get("statefulsets", o.Namespace, o.Name).(*appsv1.StatefulSet)
				change(set)
				g.Put(set)
			})
			err := a.apply(t.Context(), DefaultPolicy(), Action{Kind: ActionScale, Ref: o.Ref, owner: o}, testAt)
			if !errors.Is(err, errChanged) {
				t.Errorf("unexpected error: %v", err)
			}
			if now := g.owner(kindStatefulSet); now.Replicas == 0 || now.Annotations[recordAnnotation] != "" || len(g.Events()) > 0 {
				t.Errorf("%+v, %d events", now, len(g.Events()))
			}
		})
	}
}

// A run that plans between the two writes of another one replaces its record. One of them scales, and the record stays.
func TestApplyBetweenWrites(t *testing.T) {
	for _, kind := range []string{kindDeployment, kindStatefulSet} {
		for _, secondFinishes := range []bool{true, false} {
			t.Run(fmt.Sprintf("%s, the second finishes first: %v", kind, secondFinishes), func(t *testing.T) {
				g := newAPIRig(t)
				first, firstWire := g.connect()
				second, secondWire := g.connect()
				o := g.read(first, kind)
				recorded, firstDone := make(chan struct{}), make(chan struct{})
				var runs sync.WaitGroup
				var secondErr error
				afterRecord(firstWire, func() {
					between := g.read(second, kind)
					if r := recordIn(t, between.Annotations[recordAnnotation]); r.Generation <= between.Generation {
						t.Errorf("looks as if it was changed: %v", r)
					}
					if !secondFinishes {
						afterRecord(secondWire, func() { close(recorded); <-firstDone })
					}
					runs.Go(func() {
						secondErr = second.apply(t.Context(), Policy{}, Action{Kind: ActionScale, Ref: between.Ref, owner: between}, testAt.Add(time.Second))
					})
					if secondFinishes {
						runs.Wait()
					} else {
						<-recorded
					}
				})
				firstErr := g.apply(first, ActionScale, o)
				close(firstDone)
				runs.Wait()
				if !errors.Is(firstErr, errChanged) || secondErr != nil {
					t.Errorf("errors of the first %v, of the second %v", firstErr, secondErr)
				}
				if g.owner(kind).Replicas != 0 || len(g.Events()) != 1 {
					t.Errorf("%+v, %d events", g.owner(kind), len(g.Events()))
				}
				g.checkRecorded(kind)
			})
		}
	}
}

func recordIn(t *testing.T, text string) (r Record) {
	t.Helper()
	if err := json.Unmarshal([]byte(text), &r); err != nil {
		t.Errorf("record %q: %v", text, err)
	}
	return r
}
