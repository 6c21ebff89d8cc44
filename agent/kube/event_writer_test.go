package kube

import (
	"net/http"
	"reflect"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/health/judge"
	"github.com/gpu-node-agent/gpu-node-agent/internal/healthtest"
)

func TestEventReferences(t *testing.T) {
	withRig(t, func(g *rig) {
		pod := func(name, node string) {
			g.Put(&corev1.Pod{
				ObjectMeta: metav1.ObjectMeta{Namespace: "team", Name: name, UID: "uid-of-train"}, Spec: corev1.PodSpec{NodeName: node},
			})
		}
		pod("train", "node1")
		pod("moved", "node2")
		g.holders["GPU-0"] = []Pod{{"team", "train"}, {"team", "gone"}, {"team", "moved"}}
		began := time.Now()
		g.setDevices(gpu(0, nil, finding("lost", health.Unhealthy)), gpu(1, nil))
		g.advance(time.Second)
		g.wantEvents(t, "node/node1 GPUUnhealthy ×1", "pod/train GPUUnhealthy ×1")
		for _, e := range g.Events() {
			want, ns := "uid-of-train", "team"
			if e.InvolvedObject.Kind == "Node" {
				want, ns = "node1", "default"
			}
			if string(e.InvolvedObject.UID) != want || e.Namespace != ns || !strings.HasPrefix(e.Name, e.InvolvedObject.Name+".") {
				t.Errorf("%+v", e)
			}
			wantWarning(t, &e, eventUnhealthy, began)
		}
	})
}

// wantWarning checks what kubectl and routers of events show of a warning that was written once.
func wantWarning(t *testing.T, e *corev1.Event, reason string, at time.Time) {
	t.Helper()
	want := corev1.Event{
		TypeMeta: metav1.TypeMeta{Kind: "Event", APIVersion: "v1"},
		ObjectMeta: metav1.ObjectMeta{
			Namespace: e.Namespace, Name: e.Name, UID: e.UID, ResourceVersion: e.ResourceVersion, CreationTimestamp: e.CreationTimestamp,
		},
		InvolvedObject: e.InvolvedObject, Reason: reason, Message: e.Message,
		Source:         corev1.EventSource{Component: "gpu-node-agent", Host: "node1"},
		FirstTimestamp: e.FirstTimestamp, LastTimestamp: e.LastTimestamp, Count: 1, Type: "Warning",
		ReportingController: "gpu-node-agent", ReportingInstance: "node1",
	}
	o := e.InvolvedObject
	if !reflect.DeepEqual(*e, want) || e.Message == "" || o.APIVersion != "v1" || o.Name == "" ||
		(o.Kind == "Pod") != (o.Namespace == e.Namespace) {
		t.Errorf("got  %+v\nwant %+v", *e, want)
	}
	if e.FirstTimestamp.Sub(at).Abs() > time.Second || e.LastTimestamp.Sub(at).Abs() > time.Second {
		t.Errorf("from %v to %v, want %v", e.FirstTimestamp, e.LastTimestamp, at)
	}
}

func TestEventReferenceWithoutPodAccess(t *testing.T) {
	withRig(t, func(g *rig) {
		g.fail = func(r *http.Request) error {
			if strings.Contains(r.URL.Path, "/pods/") {
				return apiError(403, "Forbidden")
			}
			return nil
		}
		g.holders["GPU-0"] = []Pod{{"team", "train"}}
		g.setDevices(gpu(0, nil, finding("lost", health.Unhealthy)), gpu(1, nil))
		g.advance(time.Second)
		g.wantEvents(t, "node/node1 GPUUnhealthy ×1", "pod/train GPUUnhealthy ×1")
	})
}

// An XID that is reported very often has the largest count that the API has.
func TestEventCountIsLimited(t *testing.T) {
	withRig(t, func(g *rig) {
		g.setDevices(gpu(0, map[int]uint64{31: 1 << 40}), gpu(1, nil))
		g.advance(repeatInterval)
		g.wantEvents(t, "node/node1 XID ×2147483647")
		g.setDevices(gpu(0, map[int]uint64{31: 1 << 50}), gpu(1, nil))
		g.advance(repeatInterval)
		g.wantEvents(t, "node/node1 XID ×2147483647")
	})
}

// A detail of an XID that an earlier process has reported is an event of its own, of one XID.
func TestEventOfLateDetailAfterRestart(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		reported := gpu(0, map[int]uint64{31: 2})
		g := newRig(newAPI(t), reported)
		g.start(t)
		reported.XIDs = healthtest.WithDetail(reported.XIDs, 31, health.XIDDetail{Process: "python3", PID: 7194})
		g.setDevices(reported)
		g.advance(time.Minute)
		g.wantEvents(t, "node/node1 XID ×1")
	})
}

// A pod that cannot be read now is read again, and its event has its UID then.
func TestEventReferenceAfterError(t *testing.T) {
	withRig(t, func(g *rig) {
		g.Put(&corev1.Pod{
			ObjectMeta: metav1.ObjectMeta{Namespace: "team", Name: "train", UID: "uid-of-train"},
			Spec:       corev1.PodSpec{NodeName: "node1"},
		})
		g.fail = func(r *http.Request) error {
			if strings.Contains(r.URL.Path, "/pods/") {
				return apiError(500, metav1.StatusReasonInternalError)
			}
			return nil
		}
		g.holders["GPU-0"] = []Pod{{"team", "train"}}
		g.setDevices(gpu(0, nil, finding("lost", health.Unhealthy)), gpu(1, nil))
		g.advance(time.Minute)
		g.wantEvents(t, "node/node1 GPUUnhealthy ×1")
		if s := g.reporter.Status(); s.EventErr == "" || s.Errors == 0 || s.Dropped != 0 {
			t.Errorf("%+v", s)
		}
		g.failWith(nil)
		g.advance(maxBackoff)
		g.wantEvents(t, "node/node1 GPUUnhealthy ×1", "pod/train GPUUnhealthy ×1")
		for _, e := range g.Events() {
			if e.InvolvedObject.Kind == "Pod" && e.InvolvedObject.UID != "uid-of-train" {
				t.Errorf("%+v", e)
			}
		}
		if s := g.reporter.Status(); s.EventErr != "" || s.Events != 2 {
			t.Errorf("%+v", s)
		}
	})
}

func TestEventRepetitionsRaiseCount(t *testing.T) {
	withRig(t, func(g *rig) {
		for i := range 600 { // ten minutes
			g.setDevices(gpu(0, map[int]uint64{31: uint64(10 * (i + 1))}), gpu(1, nil))
			g.advance(time.Second)
		}
		g.advance(repeatInterval)
		g.wantEvents(t, "node/node1 XID ×6000")
		for _, e := range g.Events() {
			if lasted := e.LastTimestamp.Sub(e.FirstTimestamp.Time); lasted < 590*time.Second || lasted > 600*time.Second {
				t.Errorf("from %v to %v, want ten minutes", e.FirstTimestamp, e.LastTimestamp)
			}
		}
		if g.did("create events") != 1 || g.did("patch events") > 11 {
			t.Errorf("%d and %d requests", g.did("create events"), g.did("patch events"))
		}
	})
}

// manyXIDs returns n XIDs, each seen once.
func manyXIDs(n int) map[int]uint64 {
	xids := make(map[int]uint64)
	for code := range n {
		xids[code+1] = 1
	}
	return xids
}

func TestEventRateLimit(t *testing.T) {
	withRig(t, func(g *rig) {
		xids := manyXIDs(170)
		g.setDevices(gpu(0, xids), gpu(1, nil))
		g.advance(20 * time.Second)
		if g.did("create events") != eventBurst {
			t.Errorf("%d events at once, want %d", g.did("create events"), eventBurst)
		}
		g.advance(10 * eventInterval)
		if g.did("create events") != eventBurst+10 {
			t.Errorf("%d events, want %d", g.did("create events"), eventBurst+10)
		}
		// The limit does not delay the condition.
		g.setDevices(gpu(0, xids, finding("lost", health.Unhealthy)), gpu(1, nil))
		g.advance(settleDelay)
		g.wantCondition(t, corev1.ConditionFalse, "Lost", 3) // the first, a heartbeat and the change
	})
}

// A reload while an event waits for the rate limit does not drop the event.
func TestReloadKeepsEvents(t *testing.T) {
	withRig(t, func(g *rig) {
		xids := manyXIDs(eventBurst + 3)
		g.setDevices(gpu(0, xids), gpu(1, nil))
		g.advance(20 * time.Second)
		if g.did("create events") != eventBurst {
			t.Fatalf("%d events, want %d before the limit", g.did("create events"), eventBurst)
		}
		c := judge.DefaultConfig()
		c.Kubernetes = judge.KubernetesConfig{Enabled: true, Kubeconfig: "/another"}
		g.config.Store(&c)
		g.advance(20 * time.Second)
		if len(g.Events()) != eventBurst+3 {
			t.Errorf("%d events, want %d", len(g.Events()), eventBurst+3)
		}
		if s := g.reporter.Status(); s.Dropped != 0 {
			t.Errorf("%+v", s)
		}
	})
}

// A reload while an event is being written does not drop the event.
func TestReloadKeepsEventInFlight(t *testing.T) {
	withRig(t, func(g *rig) {
		g.fail = func(r *http.Request) error {
			if r.Method != http.MethodPost {
				return nil
			}
			g.mu.Unlock()
			defer g.mu.Lock()
			<-r.Context().Done()
			return r.Context().Err()
		}
		g.setDevices(gpu(0, map[int]uint64{31: 1}), gpu(1, nil))
		g.advance(time.Second)
		g.failWith(nil)
		c := judge.DefaultConfig()
		c.Kubernetes = judge.KubernetesConfig{Enabled: true, Kubeconfig: "/another"}
		g.config.Store(&c)
		g.advance(time.Second)
		g.wantEvents(t, "node/node1 XID ×1")
		if s := g.reporter.Status(); s.Errors != 0 || s.Dropped != 0 {
			t.Errorf("%+v", s)
		}
	})
}

func TestOutageDropsOldestEvents(t *testing.T) {
	withRig(t, func(g *rig) {
		g.failWith(errRefused)
		xids := manyXIDs(maxQueued + 50)
		g.setDevices(gpu(0, xids), gpu(1, nil))
		g.advance(time.Minute)
		if n := g.reporter.Status().Dropped; n < 50 || n > 52 {
			t.Errorf("%d dropped, want about 50", n)
		}
		g.advance(eventTTL)
		g.failWith(nil)
		g.advance(2 * time.Minute)
		g.wantEvents(t) // all were older than eventTTL
		g.setDevices(gpu(0, xids, finding("lost", health.Unhealthy)), gpu(1, nil))
		g.advance(time.Second)
		g.wantEvents(t, "node/node1 GPUUnhealthy ×1")
	})
}

func TestPermanentErrorDropsEvent(t *testing.T) {
	for _, err := range []error{
		apiError(403, "Forbidden", "NamespaceTerminating"), apiError(422, "Invalid"), apiError(404, "NotFound"), apiError(400, "BadRequest"),
		apiError(413, "RequestEntityTooLarge"),
	} {
		withRig(t, func(g *rig) {
			for namespace, name := range map[string]string{"ending": "one", "team": "two"} {
				g.Put(&corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name}, Spec: corev1.PodSpec{NodeName: "node1"}})
			}
			g.fail = func(r *http.Request) error {
				if r.Method == http.MethodPost && strings.Contains(r.URL.Path, "/ending/") {
					return err
				}
				return nil
			}
			g.holders["GPU-0"] = []Pod{{"ending", "one"}, {"team", "two"}}
			g.setDevices(gpu(0, nil, finding("lost", health.Unhealthy)), gpu(1, nil))
			g.advance(time.Second)
			g.wantEvents(t, "node/node1 GPUUnhealthy ×1", "pod/two GPUUnhealthy ×1")
			if s := g.reporter.Status(); s.Dropped != 1 || s.Errors != 1 || s.Events != 2 {
				t.Errorf("%v: %+v", err, s)
			}
		})
	}
}

func TestLostResponseCreatesOneEvent(t *testing.T) {
	withRig(t, func(g *rig) {
		tries := 0
		g.fail = func(r *http.Request) error {
			if r.Method != http.MethodPost {
				return nil
			}
			if tries++; tries == 1 {
				return g.lose(r)
			}
			return nil
		}
		g.setDevices(gpu(0, nil, finding("lost", health.Unhealthy)), gpu(1, nil))
		g.advance(time.Minute)
		if tries != 2 || len(g.Events()) != 1 {
			t.Errorf("%d attempts, %d events", tries, len(g.Events()))
		}
	})
}

// The API server deletes an event after an hour, so a later repetition is a new one.
func TestEventAfterAnHourIsNew(t *testing.T) {
	withRig(t, func(g *rig) {
		g.setDevices(gpu(0, map[int]uint64{31: 1}), gpu(1, nil))
		g.advance(eventTTL + repeatInterval)
		g.setDevices(gpu(0, map[int]uint64{31: 3}), gpu(1, nil))
		g.advance(repeatInterval)
		g.wantEvents(t, "node/node1 XID ×1", "node/node1 XID ×2")
		if g.did("patch events") != 0 {
			t.Errorf("%d patches of an event that may be gone", g.did("patch events"))
		}
	})
}

func TestDeletedEventIsCreatedAgain(t *testing.T) {
	withRig(t, func(g *rig) {
		g.setDevices(gpu(0, map[int]uint64{31: 1}), gpu(1, nil))
		g.advance(repeatInterval)
		g.clearEvents()
		g.setDevices(gpu(0, map[int]uint64{31: 3}), gpu(1, nil))
		g.advance(repeatInterval)
		g.wantEvents(t, "node/node1 XID ×2")
	})
}

func TestEventNameLength(t *testing.T) {
	long := strings.Repeat("a", 235) + ".b-" + strings.Repeat("c", 15)
	for o, kept := range map[string]string{
		"node1": "node1.", long: long[:235] + ".",
		strings.Repeat("a", 253): strings.Repeat("a", 236) + ".",
	} {
		n := eventName(event{key: eventKey{object: object{name: o}}})
		if len(n) > 253 || !strings.HasPrefix(n, kept) || strings.Contains(n, "..") || strings.Contains(n, "-.") {
			t.Errorf("%d bytes: %s", len(n), n)
		}
	}
}

func TestEventQueueMerges(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		q := newEventQueue()
		now := time.Now()
		q.add(event{message: "new", count: 2, first: now.Add(time.Minute), last: now.Add(time.Minute)})
		q.add(event{message: "old", count: 3, first: now, last: now, name: "x.1"}) // back in the queue after a failed attempt
		e, _, ok := q.take(now, func(eventKey) time.Time { return time.Time{} })
		if !ok || e.name != "x.1" || e.count != 5 || e.message != "new" || !e.first.Equal(now) || !e.last.Equal(now.Add(time.Minute)) {
			t.Errorf("%+v", e)
		}
		if _, in, ok := q.take(now, nil); ok || in >= 0 {
			t.Error("one event was taken twice")
		}
	})
}

// An event from before the start of the process is written once, however many processes report it, and not after an hour. It waits until
// reports are enabled.
func TestEventFromBeforeStart(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		api, at := newAPI(t), time.Now()
		process := func() *rig {
			g := newRig(api)
			at = at.In(time.FixedZone("", 3600*len(api.Events()))) // as on a host whose time zone was changed
			g.reporter.Report(NodeEvent{Reason: "GPUStateLost", Message: "lost", At: at})
			g.enable(false)
			g.start(t)
			g.advance(time.Minute)
			return g
		}
		g := process()
		g.wantEvents(t)
		g.enable(true)
		g.advance(time.Minute)
		g.wantEvents(t, "node/node1 GPUStateLost ×1")
		for _, e := range g.Events() {
			if e.Type != corev1.EventTypeWarning || e.Message != "lost" || !e.FirstTimestamp.Time.Equal(at) {
				t.Errorf("%+v", e)
			}
		}
		g.stop()

		g = process()
		g.enable(true)
		g.advance(time.Minute)
		g.wantEvents(t, "node/node1 GPUStateLost ×1")
		if s := g.reporter.Status(); s.Errors > 0 || s.Dropped > 0 {
			t.Errorf("%+v", s)
		}
		g.reporter.Report(NodeEvent{Reason: "Another", Message: strings.Repeat("long", maxMessage), At: at})
		g.advance(time.Minute)
		g.wantEvents(t, "node/node1 Another ×1", "node/node1 GPUStateLost ×1")
		for _, e := range g.Events() {
			if len(e.Message) > maxMessage {
				t.Errorf("a message of %d bytes", len(e.Message))
			}
		}
		g.stop()

		g.advance(eventTTL)
		g.clearEvents() // the API server has forgotten it
		g = process()
		g.enable(true)
		g.advance(time.Minute)
		g.wantEvents(t)
		g.stop()
	})
}
