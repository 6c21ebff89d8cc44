package kube

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/http"
	"reflect"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
	"go.uber.org/zap/zaptest/observer"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/rest"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/internal/apiservertest"
)

// nodeRig runs a NodeWriter with a fake API server under synctest.
type nodeRig struct {
	*apiServer
	t                *testing.T
	desired, written health.Latest[NodeState]
	logged           *observer.ObservedLogs
	writer           *NodeWriter
	stop             func()
}

func withNode(t *testing.T, test func(*nodeRig)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		g := newNodeRig(t, newAPI(t))
		g.start()
		test(g)
	})
}

func newNodeRig(t *testing.T, s *apiServer) *nodeRig {
	core, logged := observer.New(zapcore.InfoLevel)
	g := &nodeRig{apiServer: s, t: t, logged: logged}
	g.writer = NewNodeWriter(NodeOptions{
		Desired: &g.desired, Written: &g.written, Kubeconfig: func() string { return "" }, Node: "node1", Namespace: "gpu", Log: zap.New(core),
	})
	g.writer.open = s.open
	return g
}

func (g *nodeRig) start() {
	done := make(chan error)
	ctx, cancel := context.WithCancel(g.t.Context())
	go func() { done <- g.writer.Run(ctx) }()
	g.stop = sync.OnceFunc(func() {
		cancel()
		if err := <-done; err != nil {
			g.t.Error(err)
		}
	})
	g.t.Cleanup(g.stop)
}

// set stores a state and waits until it can be written.
func (g *nodeRig) set(s NodeState) *NodeState {
	g.desired.Store(&s)
	g.advance(settleDelay + minInterval)
	return &s
}

// advance lets time pass and waits until the writer is idle. Between two calls the test may read and change the server.
func (g *nodeRig) advance(d time.Duration) {
	g.mu.Lock()
	g.mu.Unlock() //nolint:staticcheck // orders the test's changes before the next request
	<-time.After(d)
	synctest.Wait()
}

// heartbeat lets time pass until everything was checked.
func (g *nodeRig) heartbeat() { g.advance(heartbeatInterval + heartbeatInterval/10 + minInterval) }

// firstCheck lets time pass until what was written is checked once.
func (g *nodeRig) firstCheck() { g.advance(minCheckInterval + minCheckInterval/10) }

func (g *nodeRig) wantRequests(want string) {
	g.t.Helper()
	if got := g.took(); got != want {
		g.t.Errorf("requests %q, want %q", got, want)
	}
}

// wantLabels checks all labels of the node except the kubelet's.
func (g *nodeRig) wantLabels(want map[string]string) {
	g.t.Helper()
	labels := g.node().Labels
	if labels["kubernetes.io/hostname"] != "node1" {
		g.t.Errorf("the kubelet's label is lost: %v", labels)
	}
	if delete(labels, "kubernetes.io/hostname"); !maps.Equal(labels, want) {
		g.t.Errorf("labels %v, want %v", labels, want)
	}
}

func (g *nodeRig) wantWritten(s *NodeState, want bool) {
	g.t.Helper()
	if got := g.written.Load() == s; got != want {
		g.t.Errorf("written: %v, want %v; status %+v", got, want, g.writer.Status())
	}
}

// wantStatus checks that a text of the status has a part; an empty part means that the text must be empty.
func (g *nodeRig) wantStatus(of func(NodeStatus) string, part string) {
	g.t.Helper()
	if got := of(g.writer.Status()); part == "" && got != "" || !strings.Contains(got, part) {
		g.t.Errorf("status %q, want %q", got, part)
	}
}

func labelsErr(s NodeStatus) string  { return s.LabelsErr }
func featureErr(s NodeStatus) string { return s.FeatureErr }
func taintsErr(s NodeStatus) string  { return s.TaintsErr }

func conditionErr(s NodeStatus) string { return s.ConditionErr }

func (g *nodeRig) wantWarnings(want int) {
	g.t.Helper()
	if n := g.logged.FilterLevelExact(zapcore.WarnLevel).Len(); n != want {
		g.t.Errorf("%d warnings, want %d: %v", n, want, g.logged.All())
	}
}

func TestNodeWriterWithoutState(t *testing.T) {
	withNode(t, func(g *nodeRig) {
		g.advance(time.Hour)
		s := g.set(NodeState{})
		g.advance(time.Hour)
		g.wantRequests("")
		g.wantWritten(s, true)
		if s := g.writer.Status(); s != (NodeStatus{}) {
			t.Errorf("%+v", s)
		}
	})
}

func TestNodeLabels(t *testing.T) {
	withNode(t, func(g *nodeRig) {
		s := g.set(NodeState{Labels: map[string]string{"nvidia.com/gpu.count": "8", "nvidia.com/gpu.memory": "81559"}})
		g.wantLabels(s.Labels)
		g.wantWritten(s, true)
		g.wantRequests("GET nodes, PATCH nodes")
		g.firstCheck()
		g.wantRequests("GET nodes")
		equal := g.set(NodeState{Labels: maps.Clone(s.Labels), OffersAll: true})
		g.wantWritten(equal, true)
		g.wantRequests("")

		next := g.set(NodeState{Labels: map[string]string{"nvidia.com/gpu.count": "7"}})
		g.wantLabels(next.Labels)
		g.wantWritten(next, true)
		g.took()

		unknown := g.set(NodeState{})
		g.heartbeat()
		g.wantLabels(next.Labels)
		g.wantRequests("")
		g.wantWritten(unknown, true)

		for range 2 { // nobody has looked since: what is desired again is written at once
			g.setLabel("kubectl", "nvidia.com/gpu.count", "")
			again := g.set(*next)
			g.wantLabels(next.Labels)
			g.wantWritten(again, true)
			g.heartbeat() // the next check is minutes away
			g.set(NodeState{})
		}
		g.took()

		none := g.set(NodeState{Labels: map[string]string{}})
		g.wantLabels(map[string]string{})
		g.wantWritten(none, true)
		if s := g.writer.Status(); s != (NodeStatus{Enabled: true, Writes: 5}) {
			t.Errorf("%+v", s)
		}
		g.took()
		g.advance(time.Hour)
		g.wantRequests("")
	})
}

// Changes that follow each other are one write.
func TestNodeChangesAreOneWrite(t *testing.T) {
	withNode(t, func(g *nodeRig) {
		g.set(NodeState{Labels: map[string]string{"a": "0"}})
		g.took()
		for i := range 3 {
			g.desired.Store(&NodeState{Labels: map[string]string{"a": fmt.Sprint(i)}})
			g.advance(settleDelay / 5)
		}
		g.advance(minInterval)
		g.wantRequests("GET nodes, PATCH nodes")
		g.wantLabels(map[string]string{"a": "2"})
	})
}

// The checks of thousands of nodes are answered from the API server's cache.
func TestNodeChecksReadFromCache(t *testing.T) {
	withNode(t, func(g *nodeRig) {
		reads := 0
		g.fail = func(r *http.Request) error {
			if r.Method == "GET" {
				if reads++; r.URL.Query().Get("resourceVersion") != "0" {
					t.Errorf("reads %s from the storage", r.URL)
				}
			}
			return nil
		}
		g.set(NodeState{Labels: map[string]string{"a": "1"}, Taints: taintsOf("gpu/unhealthy:NoSchedule")})
		g.heartbeat()
		if reads < 4 {
			t.Errorf("%d reads", reads)
		}
	})
}

// A request is made once for each attempt: client-go would repeat one that the API server refuses for a second.
func TestNodeRequestsAreMadeOnce(t *testing.T) {
	one, none := map[string]string{"a": "1"}, map[string]string{}
	for request, s := range map[string]NodeState{
		"GET nodes": {Labels: one}, "PATCH nodes": {Labels: one}, "GET nodes ": {Taints: taintsOf("a:NoSchedule")},
		"GET nodefeatures": {Feature: one}, "POST nodefeatures": {Feature: one}, "DELETE nodefeatures": {Feature: none},
	} {
		withNode(t, func(g *nodeRig) {
			method, resource, _ := strings.Cut(strings.TrimSpace(request), " ")
			g.fail = func(r *http.Request) error {
				if r.Method == method && strings.Contains(r.URL.Path, "/"+resource) {
					return apiError(503, metav1.StatusReasonServiceUnavailable)
				}
				return nil
			}
			g.set(s)
			g.advance(5 * time.Minute)
			if n, errs := strings.Count(g.took(), method+" "+resource), g.writer.Status().Errors; errs == 0 || uint64(n) != errs {
				t.Errorf("%s: %d requests, %d errors", request, n, errs)
			}
		})
	}
}

// A process that starts removes what an earlier one applied and does not apply itself.
func TestNodeLabelsAfterRestart(t *testing.T) {
	for name, next := range map[string]map[string]string{"others": {"b": "2"}, "none": {}} {
		t.Run(name, func(t *testing.T) {
			withNode(t, func(g *nodeRig) {
				g.set(NodeState{Labels: map[string]string{"a": "1", "b": "2"}})
				g.stop()
				g.wantLabels(map[string]string{"a": "1", "b": "2"})
				second := newNodeRig(g.t, g.apiServer)
				second.start()
				s := second.set(NodeState{Labels: next})
				second.wantLabels(next)
				second.wantWritten(s, true)
			})
		})
	}
}

// An agent that ends after its successor has started removes its labels, which are the successor's too.
func TestNodeLabelsOfSuccessor(t *testing.T) {
	withNode(t, func(old *nodeRig) {
		s := NodeState{Labels: map[string]string{"a": "1"}, Feature: map[string]string{"a": "1"}}
		old.set(s)
		successor := newNodeRig(old.t, old.apiServer)
		successor.start()
		successor.set(s)
		old.desired.Store(&NodeState{Labels: map[string]string{}, Feature: map[string]string{}})
		old.stop()
		old.wantLabels(map[string]string{})
		successor.firstCheck()
		successor.wantLabels(s.Labels)
		if old.feature() == nil {
			old.t.Error("no NodeFeature")
		}
		successor.took()
		successor.advance(time.Hour)
		if n := strings.Count(successor.took(), "GET nodes"); n < 11 || n > 18 {
			old.t.Errorf("%d checks of the labels and the object in an hour", n)
		}
	})
}

// What others do to the labels is corrected, unless they set a value of their own.
func TestNodeLabelsForeignEdits(t *testing.T) {
	want := map[string]string{"a": "1", "b": "2"}
	withNode(t, func(g *nodeRig) {
		s := g.set(NodeState{Labels: want})
		g.setLabel("kubectl", "a", "")
		g.heartbeat()
		g.wantLabels(want)
		g.createNode()
		g.heartbeat()
		g.wantLabels(want)
		if n := g.writer.Status().Writes; n != 3 {
			t.Errorf("%d writes, want one for each edit", n)
		}
		g.setLabel("kubectl", "a", "theirs")
		g.heartbeat()
		g.wantLabels(map[string]string{"a": "theirs", "b": "2"})
		g.wantStatus(labelsErr, `"kubectl" set a`)
		g.setLabel("", "a", "")
		g.heartbeat()
		g.wantStatus(labelsErr, "")
		g.Delete("nodes", "", "node1")
		g.heartbeat()
		g.wantStatus(labelsErr, "not found")
		g.createNode()
		g.advance(2 * maxBackoff)
		g.wantLabels(want)
		g.wantStatus(labelsErr, "")
		g.wantWritten(s, true)
	})
}

// A label that another manager has set to another value is left out and reported, and the others are applied.
func TestNodeLabelsConflict(t *testing.T) {
	withNode(t, func(g *nodeRig) {
		g.setLabel("nfd-master", "a", "theirs")
		g.setLabel("kubectl-label", "b", "2") // the same value
		s := g.set(NodeState{Labels: map[string]string{"a": "1", "b": "2", "c": "3"}})
		g.wantLabels(map[string]string{"a": "theirs", "b": "2", "c": "3"})
		g.wantStatus(labelsErr, `"nfd-master" set a to`)
		g.wantWritten(s, true)
		g.wantRequests("GET nodes, PATCH nodes, PATCH nodes")
		next := g.set(NodeState{Labels: map[string]string{"a": "2", "b": "2", "c": "4"}})
		g.wantLabels(map[string]string{"a": "theirs", "b": "2", "c": "4"})
		g.wantRequests("GET nodes, PATCH nodes") // without a
		g.setLabel("kubectl-label", "c", "theirs")
		g.heartbeat()
		g.wantLabels(map[string]string{"a": "theirs", "b": "2", "c": "theirs"})
		g.wantStatus(labelsErr, `"kubectl-label" set c to other values; the agent sets them when they are removed; `+
			`field manager "nfd-master" set a to`)
		g.took()
		writes := g.writer.Status().Writes
		for range 12 {
			g.heartbeat()
		}
		if n := strings.Count(g.took(), "PATCH"); n > 2*14 {
			t.Errorf("%d tries in an hour", n)
		}
		if n := g.writer.Status().Writes; n != writes { // nothing has changed
			t.Errorf("%d writes, want %d", n, writes)
		}
		g.wantWarnings(2)
		g.setLabel("", "a", "")
		g.setLabel("", "c", "")
		g.heartbeat()
		g.wantLabels(next.Labels)
		g.wantStatus(labelsErr, "")
		if s := g.writer.Status(); s.Errors != 0 {
			t.Errorf("%+v", s)
		}
		// A label that the agent no longer has is not reported, and a removal leaves the labels of others.
		g.setLabel("nfd-master", "a", "theirs")
		g.heartbeat()
		g.wantStatus(labelsErr, "nfd-master")
		g.set(NodeState{Labels: map[string]string{"c": "3"}})
		g.wantStatus(labelsErr, "")
		g.set(NodeState{Labels: map[string]string{}})
		g.wantLabels(map[string]string{"a": "theirs", "b": "2"})
	})
}

// After an error it is unknown what the API server has: a write without a response may have been made. So the labels that were written
// before are written again at once when they are desired again.
func TestNodeLabelsAfterUnknownWrite(t *testing.T) {
	withNode(t, func(g *nodeRig) {
		first := NodeState{Labels: map[string]string{"a": "1"}}
		g.set(first)
		g.heartbeat() // the next check is minutes away
		g.mu.Lock()
		g.fail = func(r *http.Request) error {
			if r.Method == "GET" {
				return nil
			}
			return g.lose(r)
		}
		g.mu.Unlock()
		g.set(NodeState{Labels: map[string]string{"a": "2"}})
		g.wantLabels(map[string]string{"a": "2"})
		g.wantStatus(labelsErr, "refused")
		g.failWith(nil)
		again := g.set(first)
		g.advance(8 * minBackoff) // the pause may have grown to that
		g.wantLabels(first.Labels)
		g.wantWritten(again, true)
	})
}

// An outage of any kind costs few requests and one warning, and the newest state is written after it.
func TestNodeWriterOutage(t *testing.T) {
	hang := func(r *http.Request) error {
		<-r.Context().Done()
		return r.Context().Err()
	}
	for name, failure := range map[string]func(*http.Request) error{
		"refused": func(*http.Request) error { return errRefused },
		"forbidden": func(*http.Request) error {
			return apierrors.NewForbidden(schema.GroupResource{Resource: "nodes"}, "node1", errors.New("no rights"))
		},
		"throttled": func(*http.Request) error { return apiError(429, metav1.StatusReasonTooManyRequests) },
		"hangs":     nil,
	} {
		t.Run(name, func(t *testing.T) {
			withNode(t, func(g *nodeRig) {
				g.set(NodeState{Labels: map[string]string{"a": "0"}, Taints: []corev1.Taint{}})
				g.mu.Lock()
				if g.fail = failure; failure == nil {
					g.fail = func(r *http.Request) error {
						g.mu.Unlock()
						defer g.mu.Lock()
						return hang(r)
					}
				}
				g.mu.Unlock()
				g.took()
				var s *NodeState
				for i := range 20 {
					s = g.set(NodeState{Labels: map[string]string{"a": fmt.Sprint(i)}, Taints: []corev1.Taint{unhealthyTaint()}})
					g.advance(30 * time.Second)
				}
				if n := len(strings.Split(g.took(), ", ")); n < 16 || n > 2*(6+24) {
					t.Errorf("%d requests in twelve minutes", n)
				}
				g.wantWarnings(2) // labels and taints
				status := g.writer.Status()
				if status.LabelsErr == "" || status.TaintsErr == "" || status.Errors == 0 {
					t.Errorf("%+v", status)
				}
				if name == "forbidden" && !strings.Contains(status.LabelsErr, "get and patch on nodes") {
					t.Errorf("status %q names no rights", status.LabelsErr)
				}
				g.wantWritten(s, false)
				g.failWith(nil)
				g.advance(maxBackoff + 2*minInterval)
				g.advance(maxBackoff)
				g.wantLabels(s.Labels)
				g.wantTaints("gpu/unhealthy:NoSchedule")
				g.wantWritten(s, true)
				g.wantStatus(labelsErr, "")
				g.wantStatus(taintsErr, "")
				// The next outage is logged again, and starts with short pauses.
				g.failWith(errRefused)
				s = g.set(NodeState{Labels: map[string]string{"a": "after"}, Taints: taintsOf()})
				g.wantWarnings(4)
				g.failWith(nil)
				g.advance(9 * minBackoff)
				g.wantLabels(s.Labels)
				g.wantTaints()
			})
		})
	}
}

// What is configured again is written after a short pause, however long an outage had lasted before.
func TestNodeWriterConfiguredInOutage(t *testing.T) {
	withNode(t, func(g *nodeRig) {
		g.failWith(errRefused)
		g.set(NodeState{Labels: map[string]string{"a": "0"}})
		g.advance(10 * time.Minute)
		g.set(NodeState{})
		g.advance(maxBackoff) // the pause has ended
		s := g.set(NodeState{Labels: map[string]string{"a": "1"}})
		g.failWith(nil)
		g.advance(8 * minBackoff)
		g.wantLabels(s.Labels)
	})
}

// A GPU that flaps causes few writes, and the last state is written.
func TestNodeWriterFlapping(t *testing.T) {
	withNode(t, func(g *nodeRig) {
		for i := range 600 {
			g.desired.Store(&NodeState{Labels: map[string]string{"unhealthy": fmt.Sprint(i % 2)}})
			g.advance(time.Second)
		}
		g.advance(minInterval + settleDelay)
		g.wantLabels(map[string]string{"unhealthy": "1"})
		if n := strings.Count(g.took(), "PATCH"); n > 125 {
			t.Errorf("%d writes in ten minutes", n)
		}
	})
}

// Without kubeconfig and service account the status names the key.
func TestNodeWriterConnects(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := newNodeRig(t, newAPI(t))
		var configured atomic.Bool
		open := g.writer.open
		g.writer.open = func(kubeconfig string) (*client, error) {
			if !configured.Load() {
				return nil, errors.New("health.kubernetes.kubeconfig: missing")
			}
			return open(kubeconfig)
		}
		g.start()
		s := g.set(NodeState{Labels: map[string]string{"a": "1"}})
		g.wantStatus(labelsErr, "health.kubernetes.kubeconfig")
		configured.Store(true)
		g.advance(maxBackoff)
		g.wantLabels(s.Labels)
	})
}

// When the process stops, what is to be removed is removed, in a limited time; what is to be written is left to the next process.
func TestNodeWriterStop(t *testing.T) {
	for name, c := range map[string]struct {
		last  NodeState
		hangs bool
		want  map[string]string
	}{
		"kept":           {NodeState{Labels: map[string]string{"a": "1"}}, false, map[string]string{"a": "1"}},
		"changed":        {NodeState{Labels: map[string]string{"a": "2"}}, false, map[string]string{"a": "1"}},
		"removed":        {NodeState{Labels: map[string]string{}}, false, map[string]string{}},
		"cannot removed": {NodeState{Labels: map[string]string{}}, true, map[string]string{"a": "1"}},
	} {
		t.Run(name, func(t *testing.T) {
			withNode(t, func(g *nodeRig) {
				g.set(NodeState{Labels: map[string]string{"a": "1"}})
				if c.hangs {
					g.fail = func(r *http.Request) error {
						<-r.Context().Done()
						return r.Context().Err()
					}
				}
				g.desired.Store(&c.last)
				began := time.Now()
				g.stop()
				if took := time.Since(began); took > removeTimeout {
					t.Errorf("stopped after %v", took)
				}
				g.wantLabels(c.want)
			})
		})
	}
}

// A request that is in flight at the end does not count as done.
func TestNodeWriterStopsWhileRequestHangs(t *testing.T) {
	withNode(t, func(g *nodeRig) {
		g.mu.Lock()
		g.fail = func(r *http.Request) error {
			g.mu.Unlock()
			defer g.mu.Lock()
			<-r.Context().Done()
			return r.Context().Err()
		}
		g.mu.Unlock()
		s := NodeState{Labels: map[string]string{"a": "1"}}
		g.desired.Store(&s)
		g.advance(2 * settleDelay)
		began := time.Now()
		if g.stop(); time.Since(began) != 0 {
			t.Errorf("stopped after %v", time.Since(began))
		}
		g.wantWritten(&s, false)
		if status := g.writer.Status(); status.Errors != 0 {
			t.Errorf("%+v", status)
		}
	})
}

func TestNodeFeature(t *testing.T) {
	const name = "gpu-node-agent-node1"
	withNode(t, func(g *nodeRig) {
		s := g.set(NodeState{Feature: map[string]string{"a": "1", "b": "2"}})
		f := g.feature()
		var want apiservertest.NodeFeature
		want.TypeMeta = metav1.TypeMeta{APIVersion: "nfd.k8s-sigs.io/v1alpha1", Kind: "NodeFeature"}
		want.ObjectMeta = metav1.ObjectMeta{
			Name: name, Namespace: "gpu", Labels: map[string]string{"nfd.node.kubernetes.io/node-name": "node1"},
			OwnerReferences: []metav1.OwnerReference{{APIVersion: "v1", Kind: "Node", Name: "node1", UID: g.node().UID}},
		}
		want.Spec.Labels = s.Feature
		if f == nil {
			t.Fatal("no NodeFeature")
		}
		want.UID, want.ResourceVersion, want.CreationTimestamp = f.UID, f.ResourceVersion, f.CreationTimestamp
		if !reflect.DeepEqual(*f, want) {
			t.Fatalf("%+v", f)
		}
		g.wantWritten(s, true)
		g.wantRequests("GET nodefeatures, GET nodes, POST nodefeatures")
		g.firstCheck()
		g.wantRequests("GET nodefeatures")
		next := g.set(NodeState{Feature: map[string]string{"a": "2"}})
		if f := g.feature(); !maps.Equal(f.Spec.Labels, next.Feature) {
			t.Errorf("%+v", f)
		}
		f = g.feature()
		f.Spec.Labels = map[string]string{"theirs": "1"}
		g.Put(f)
		g.heartbeat()
		if f := g.feature(); !maps.Equal(f.Spec.Labels, next.Feature) {
			t.Errorf("%+v", f)
		}
		g.Delete("nodefeatures", "gpu", name)
		g.createNode()
		g.heartbeat()
		if f := g.feature(); f == nil || f.OwnerReferences[0].UID != g.node().UID {
			t.Errorf("%+v", f)
		}
		g.wantLabels(map[string]string{})
		none := g.set(NodeState{Feature: map[string]string{}, Labels: next.Feature}) // output api
		if f := g.feature(); f != nil {
			t.Errorf("left %v", f)
		}
		g.wantLabels(next.Feature)
		g.wantWritten(none, true)
	})
}

// Without Node Feature Discovery the status explains it, and the agent rarely tries again. Its removal then is done.
func TestNodeFeatureWithoutAPI(t *testing.T) {
	withNode(t, func(g *nodeRig) {
		g.SetAbsent("nfd.k8s-sigs.io")
		s := g.set(NodeState{Feature: map[string]string{"a": "1"}, Labels: map[string]string{}})
		g.wantStatus(featureErr, "install Node Feature Discovery")
		g.took()
		g.advance(time.Hour)
		if n := strings.Count(g.took(), "POST"); n < 9 || n > 14 {
			t.Errorf("%d tries in an hour", n)
		}
		g.wantWarnings(1)
		g.SetAbsent()
		g.heartbeat()
		g.wantStatus(featureErr, "")
		g.wantWritten(s, true)
		g.SetAbsent("nfd.k8s-sigs.io")
		writes := g.writer.Status().Writes
		none := g.set(NodeState{Feature: map[string]string{}})
		g.wantWritten(none, true)
		if n := g.writer.Status().Writes; n != writes {
			t.Errorf("%d writes, want %d: there was nothing to delete", n, writes)
		}
	})
}

// A writer without a namespace reports that, and makes no request.
func TestNodeFeatureWithoutNamespace(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := newNodeRig(t, newAPI(t))
		g.writer.Namespace = ""
		g.start()
		s := g.set(NodeState{Feature: map[string]string{"a": "1"}})
		g.advance(time.Hour)
		g.wantStatus(featureErr, "POD_NAMESPACE")
		g.wantRequests("")
		g.wantWritten(s, false)
		g.wantWarnings(1)
		if n := g.writer.Status().Errors; n < 11 || n > 15 {
			t.Errorf("%d tries in an hour", n)
		}
	})
}

// Each request for the NodeFeature can fail, and it is written as soon as none does.
func TestNodeFeatureErrors(t *testing.T) {
	for name, fails := range map[string]func(*http.Request) bool{
		"read":   func(r *http.Request) bool { return r.Method == "GET" && strings.Contains(r.URL.Path, "/nodefeatures/") },
		"node":   func(r *http.Request) bool { return strings.HasSuffix(r.URL.Path, "/nodes/node1") },
		"create": func(r *http.Request) bool { return r.Method == "POST" },
		"change": func(r *http.Request) bool { return r.Method == "PUT" },
		"delete": func(r *http.Request) bool { return r.Method == "DELETE" },
	} {
		t.Run(name, func(t *testing.T) {
			withNode(t, func(g *nodeRig) {
				next := &NodeState{Feature: map[string]string{"a": "2"}}
				switch name {
				case "change":
					g.set(NodeState{Feature: map[string]string{"a": "1"}})
				case "delete":
					g.set(NodeState{Feature: map[string]string{"a": "1"}})
					next = &NodeState{Feature: map[string]string{}}
				}
				writes := g.writer.Status().Writes
				g.fail = func(r *http.Request) error {
					if fails(r) {
						return apiError(500, metav1.StatusReasonInternalError)
					}
					return nil
				}
				next = g.set(*next)
				g.advance(time.Minute)
				g.wantWritten(next, false)
				if status := g.writer.Status(); status.FeatureErr == "" || status.Errors < 3 || status.Writes != writes {
					t.Errorf("%+v", status)
				}
				g.failWith(nil)
				g.advance(lateWindow + maxBackoff)
				g.wantStatus(featureErr, "")
				g.wantWritten(next, true)
				f := g.feature()
				if (f == nil) != (name == "delete") || f != nil && !maps.Equal(f.Spec.Labels, next.Feature) || g.writer.Status().Writes != writes+1 {
					t.Errorf("%+v; %+v", f, g.writer.Status())
				}
			})
		})
	}
}

// Somebody who removed the node's name from the object gets it back: Node Feature Discovery finds the node by it.
func TestNodeFeatureNodeName(t *testing.T) {
	withNode(t, func(g *nodeRig) {
		g.set(NodeState{Feature: map[string]string{"a": "1"}})
		f := g.feature()
		f.Labels = map[string]string{featureNodeLabel: "node2"}
		g.Put(f)
		g.heartbeat()
		if f := g.feature(); f.Labels[featureNodeLabel] != "node1" {
			t.Errorf("%+v", f)
		}
	})
}

// Only a conflict about a label leaves out a label.
func TestConflictsOfOtherErrors(t *testing.T) {
	cause := func(kind metav1.CauseType, field, message string) metav1.StatusCause {
		return metav1.StatusCause{Type: kind, Field: field, Message: message}
	}
	const conflict, byOther = metav1.CauseTypeFieldManagerConflict, `conflict with "other" using v1`
	err := apierrors.NewApplyConflict([]metav1.StatusCause{
		cause(conflict, ".metadata.labels.a", byOther), cause(conflict, ".metadata.labels.b/c.d", "conflict with other"),
		cause(conflict, ".spec.taints", byOther), cause(metav1.CauseTypeFieldValueInvalid, ".metadata.labels.x", byOther),
	}, "Apply failed")
	if got, want := conflictsOf(err), map[string]string{"a": "other", "b/c.d": "other"}; !maps.Equal(got, want) {
		t.Errorf("%v, want %v", got, want)
	}
	for _, err := range []error{nil, errRefused, &apierrors.StatusError{}} {
		if got := conflictsOf(err); len(got) > 0 {
			t.Errorf("%v: %v", err, got)
		}
	}
}

// The status lists some of many labels that another manager has set.
func TestNodeLabelsManyConflicts(t *testing.T) {
	for n, want := range map[int]string{5: `"nfd" set a0, a1, a2, a3, a4 to other`, 6: `"nfd" set a0, a1, a2, a3, a4 and 1 more to other`} {
		withNode(t, func(g *nodeRig) {
			labels := map[string]string{"mine": "1"}
			for i := range n {
				key := fmt.Sprint("a", i)
				g.setLabel("nfd", key, "theirs")
				labels[key] = "1"
			}
			s := g.set(NodeState{Labels: labels})
			g.wantStatus(labelsErr, want)
			g.wantWritten(s, true)
			if g.node().Labels["mine"] != "1" {
				t.Errorf("labels %v", g.node().Labels)
			}
		})
	}
}

// The condition is removed once, also after a time without the right to it.
func TestNodeWriterRemovesCondition(t *testing.T) {
	withNode(t, func(g *nodeRig) {
		reported := func() {
			g.setConditions(corev1.NodeCondition{Type: conditionType})
		}
		reported()
		g.failWith(apierrors.NewForbidden(schema.GroupResource{Resource: "nodes/status"}, "", errors.New("no rights")))
		s := g.set(NodeState{RemoveCondition: true})
		g.wantStatus(conditionErr, "patch on nodes/status")
		if status := g.writer.Status(); !slices.Equal(status.Leftovers(), []string{"condition"}) || status.Errors > 0 || !status.Enabled {
			t.Errorf("%+v", status)
		}
		g.wantWritten(s, false)
		g.failWith(nil)
		g.advance(slowRetry + slowRetry/10)
		if g.wantWritten(s, true); len(g.conditions(t)) > 0 {
			t.Errorf("conditions %v", g.conditions(t))
		}
		g.wantStatus(conditionErr, "")
		g.took()
		reported() // by another agent
		g.advance(time.Hour)
		g.wantRequests("")
		g.Delete("nodes", "", "node1")
		g.set(NodeState{})
		g.wantWritten(g.set(NodeState{RemoveCondition: true}), true) // with its node
	})
}

// A part without rights does not delay the others.
func TestNodePartsAreIndependent(t *testing.T) {
	withNode(t, func(g *nodeRig) {
		g.fail = func(r *http.Request) error {
			if strings.Contains(r.URL.Path, "nodefeatures") {
				return apierrors.NewForbidden(schema.GroupResource{Resource: "nodefeatures"}, "", errors.New("no rights"))
			}
			return nil
		}
		s := g.set(NodeState{Labels: map[string]string{"a": "1"}, Feature: map[string]string{}, Taints: []corev1.Taint{unhealthyTaint()}})
		g.wantLabels(s.Labels)
		g.wantTaints("gpu/unhealthy:NoSchedule")
		g.wantStatus(featureErr, "delete on nodefeatures")
		g.wantStatus(featureErr, CleanupCommand)
		if s := g.writer.Status(); !slices.Equal(s.Leftovers(), []string{"nodefeature"}) || s.Errors > 0 {
			t.Errorf("%+v", s)
		}
		g.wantWritten(s, false)
		g.took()
		g.advance(time.Hour)
		if n := strings.Count(g.took(), "DELETE"); n > 14 { // the chart grants the rights only while they are needed
			t.Errorf("%d tries in an hour", n)
		}
	})
}

func unhealthyTaint() corev1.Taint {
	return corev1.Taint{Key: "gpu/unhealthy", Effect: corev1.TaintEffectNoSchedule}
}

// wantTaints checks the node's taints in order, each as KEY[=VALUE]:EFFECT.
func (g *nodeRig) wantTaints(want ...string) {
	g.t.Helper()
	n := g.node()
	var have []string
	for _, t := range n.Spec.Taints {
		have = append(have, t.ToString())
	}
	if !slices.Equal(have, want) {
		g.t.Errorf("taints %q, want %q; annotations %v", have, want, n.Annotations)
	}
}

// roundTripper answers requests.
type roundTripper func(*http.Request) (*http.Response, error)

func (f roundTripper) RoundTrip(r *http.Request) (*http.Response, error) { return f(r) }

// An answer that cannot be decoded, such as a proxy's, is no state to write over.
func TestNodeWriterUndecodableAnswers(t *testing.T) {
	withNode(t, func(g *nodeRig) {
		g.writer.open = func(string) (*client, error) {
			return newClient(&rest.Config{Transport: roundTripper(func(r *http.Request) (*http.Response, error) {
				if r.Method != "GET" {
					t.Errorf("%s %s", r.Method, r.URL)
				}
				const text = `{"kind": "PartialObjectMetadata", "apiVersion": "meta.k8s.io/v1", "metadata": {"name": "node1"}, "spec": 5}`
				return &http.Response{
					StatusCode: http.StatusOK, Header: http.Header{"Content-Type": {"application/json"}}, Request: r,
					Body: io.NopCloser(strings.NewReader(text)),
				}, nil
			})})
		}
		s := g.set(NodeState{Feature: map[string]string{"a": "1"}, Taints: taintsOf("a:NoSchedule")})
		if status := g.writer.Status(); status.FeatureErr == "" || status.TaintsErr == "" {
			t.Errorf("%+v", status)
		}
		g.wantWritten(s, false)
	})
}
