package kube

import (
	"fmt"
	"net/http"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpu-node-agent/gpu-node-agent/health"
)

func TestEventsOfAPod(t *testing.T) {
	inRig(t, func(g *rig) {
		pod := func(name, node string) {
			g.pods["team/"+name] = corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: name, UID: "uid-of-train"}, Spec: corev1.PodSpec{NodeName: node}}
		}
		pod("train", "node1")
		pod("moved", "node2")
		g.holders["GPU-0"] = []Pod{{"team", "train"}, {"team", "gone"}, {"team", "moved"}}
		g.show(gpu(0, nil, finding("lost", health.Unhealthy)), gpu(1, nil))
		g.pass(time.Second)
		if got := g.all(); !slices.Equal(got, []string{"node/node1 GPUUnhealthy ×1", "pod/train GPUUnhealthy ×1"}) {
			t.Errorf("events %q", got)
		}
		for _, e := range g.events {
			want, ns := "uid-of-train", "team"
			if e.InvolvedObject.Kind == "Node" {
				want, ns = "node1", "default"
			}
			if string(e.InvolvedObject.UID) != want || e.Namespace != ns || e.Type != corev1.EventTypeWarning ||
				e.Source.Component != component || e.Source.Host != "node1" || !strings.HasPrefix(e.Name, e.InvolvedObject.Name+".") {
				t.Errorf("%+v", e)
			}
		}
	})
}

func TestPodsThatCannotBeRead(t *testing.T) {
	inRig(t, func(g *rig) {
		g.fail = func(r *http.Request) error {
			if strings.Contains(r.URL.Path, "/pods/") {
				return refuse(403, "Forbidden")
			}
			return nil
		}
		g.holders["GPU-0"] = []Pod{{"team", "train"}}
		g.show(gpu(0, nil, finding("lost", health.Unhealthy)), gpu(1, nil))
		g.pass(time.Second)
		if got := g.all(); !slices.Contains(got, "pod/train GPUUnhealthy ×1") {
			t.Errorf("events %q", got)
		}
	})
}

func TestAnXIDStormIsFewEvents(t *testing.T) {
	inRig(t, func(g *rig) {
		for i := range 600 { // ten minutes
			g.show(gpu(0, map[int]uint64{31: uint64(10 * (i + 1))}), gpu(1, nil))
			g.pass(time.Second)
		}
		g.pass(again)
		if got := g.all(); !slices.Equal(got, []string{"node/node1 XID ×6000"}) {
			t.Errorf("events %q", got)
		}
		if g.posts != 1 || g.patches > 11 {
			t.Errorf("%d and %d requests", g.posts, g.patches)
		}
	})
}

func TestEventsAreRateLimited(t *testing.T) {
	inRig(t, func(g *rig) {
		xids := make(map[int]uint64)
		for code := range 170 {
			xids[code+1] = 1
		}
		g.show(gpu(0, xids), gpu(1, nil))
		g.pass(20 * time.Second)
		if g.posts != eventBurst {
			t.Errorf("%d events at once, want %d", g.posts, eventBurst)
		}
		g.pass(10 * eventEvery)
		if g.posts != eventBurst+10 {
			t.Errorf("%d events, want %d", g.posts, eventBurst+10)
		}
		// The condition does not wait behind them.
		g.show(gpu(0, xids, finding("lost", health.Unhealthy)), gpu(1, nil))
		g.pass(settle)
		if c := g.condition(t); c.Reason != "Lost" {
			t.Errorf("%+v", c)
		}
	})
}

// A reload while an event waits for its turn does not cost the event.
func TestAReloadCostsNoEvent(t *testing.T) {
	inRig(t, func(g *rig) {
		xids := make(map[int]uint64)
		for code := range eventBurst + 3 {
			xids[code+1] = 1
		}
		g.show(gpu(0, xids), gpu(1, nil))
		g.pass(20 * time.Second)
		if g.posts != eventBurst {
			t.Fatalf("%d events, want %d and one that waits", g.posts, eventBurst)
		}
		c := health.DefaultConfig()
		c.Kubernetes = health.KubernetesConfig{Enabled: true, Kubeconfig: "/another"}
		g.config.Store(&c)
		g.pass(20 * time.Second)
		if got := g.all(); len(got) != eventBurst+3 {
			t.Errorf("%d events, want %d", len(got), eventBurst+3)
		}
		if s := g.reporter.Status(); s.Dropped != 0 {
			t.Errorf("%+v", s)
		}
	})
}

func TestAnOutageCostsTheOldestEvents(t *testing.T) {
	inRig(t, func(g *rig) {
		g.failWith(errRefused)
		xids := make(map[int]uint64)
		for code := range maxPending + 50 {
			xids[code+1] = 1
		}
		g.show(gpu(0, xids), gpu(1, nil))
		g.pass(time.Minute)
		if n := g.reporter.Status().Dropped; n < 50 || n > 52 {
			t.Errorf("%d dropped, want about 50", n)
		}
		g.pass(eventLife)
		g.failWith(nil)
		g.pass(2 * time.Minute)
		if got := g.all(); len(got) != 0 {
			t.Errorf("events of more than an hour ago: %q", got)
		}
		g.show(gpu(0, xids, finding("lost", health.Unhealthy)), gpu(1, nil))
		g.pass(time.Second)
		if got := g.all(); len(got) != 1 {
			t.Errorf("events %q", got)
		}
	})
}

func TestAnEventThatIsHopelessHoldsNobodyUp(t *testing.T) {
	for _, why := range []error{
		refuse(403, "Forbidden", "NamespaceTerminating"), refuse(422, "Invalid"), refuse(404, "NotFound"), refuse(400, "BadRequest"),
	} {
		inRig(t, func(g *rig) {
			g.pods["ending/one"] = corev1.Pod{Spec: corev1.PodSpec{NodeName: "node1"}}
			g.pods["team/two"] = g.pods["ending/one"]
			g.fail = func(r *http.Request) error {
				if r.Method == http.MethodPost && strings.Contains(r.URL.Path, "/ending/") {
					return why
				}
				return nil
			}
			g.holders["GPU-0"] = []Pod{{"ending", "one"}, {"team", "two"}}
			g.show(gpu(0, nil, finding("lost", health.Unhealthy)), gpu(1, nil))
			g.pass(time.Second)
			if got := g.all(); !slices.Equal(got, []string{"node/node1 GPUUnhealthy ×1", "pod/two GPUUnhealthy ×1"}) {
				t.Errorf("%v: events %q", why, got)
			}
			if s := g.reporter.Status(); s.Dropped != 1 {
				t.Errorf("%v: %+v", why, s)
			}
		})
	}
}

func TestAnAnswerThatIsLostMakesNoSecondEvent(t *testing.T) {
	inRig(t, func(g *rig) {
		tries := 0
		g.fail = func(r *http.Request) error {
			if r.Method != http.MethodPost {
				return nil
			}
			if tries++; tries == 1 { // it is written all the same
				name := fmt.Sprint("event-", tries)
				g.events[name] = &corev1.Event{}
				return errRefused
			}
			return refuse(409, metav1.StatusReasonAlreadyExists)
		}
		g.show(gpu(0, nil, finding("lost", health.Unhealthy)), gpu(1, nil))
		g.pass(time.Minute)
		if tries != 2 || len(g.events) != 1 {
			t.Errorf("%d attempts, %d events", tries, len(g.events))
		}
	})
}

func TestAnEventThatIsForgottenIsMadeAnew(t *testing.T) {
	inRig(t, func(g *rig) {
		g.show(gpu(0, map[int]uint64{31: 1}), gpu(1, nil))
		g.pass(again)
		clear(g.events)
		g.show(gpu(0, map[int]uint64{31: 3}), gpu(1, nil))
		g.pass(again)
		if got := g.all(); !slices.Equal(got, []string{"node/node1 XID ×2"}) {
			t.Errorf("events %q", got)
		}
	})
}

func TestEventNamesFit(t *testing.T) {
	long := strings.Repeat("a", 235) + ".b-" + strings.Repeat("c", 15)
	for _, o := range []string{"node1", long} {
		if n := eventName(happening{key: happeningKey{object: object{name: o}}}); len(n) > 253 || strings.Contains(n, "..") || strings.Contains(n, "-.") {
			t.Errorf("%d bytes: %s", len(n), n)
		}
	}
}

func TestQueueKeepsTheFirstNameAndAllCounts(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		q := newQueue()
		now := time.Now()
		q.add(happening{message: "new", count: 2, first: now.Add(time.Minute), last: now.Add(time.Minute)})
		q.add(happening{message: "old", count: 3, first: now, last: now, name: "x.1"}) // put back after an attempt
		h, _, ok := q.take(now, func(happeningKey) time.Time { return time.Time{} })
		if !ok || h.name != "x.1" || h.count != 5 || h.message != "new" || !h.first.Equal(now) || !h.last.Equal(now.Add(time.Minute)) {
			t.Errorf("%+v", h)
		}
		if _, in, ok := q.take(now, nil); ok || in >= 0 {
			t.Errorf("taken twice")
		}
	})
}
