package kube

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime/schema"
)

// taintsOf parses taints, each as KEY[=VALUE]:EFFECT. It is not nil.
func taintsOf(texts ...string) []corev1.Taint {
	taints := []corev1.Taint{}
	for _, text := range texts {
		id, effect, _ := strings.Cut(text, ":")
		key, value, _ := strings.Cut(id, "=")
		taints = append(taints, corev1.Taint{Key: key, Value: value, Effect: corev1.TaintEffect(effect)})
	}
	return taints
}

func TestMergeTaints(t *testing.T) {
	const (
		theirs, drain = "dedicated=ml:NoSchedule", "drain:NoExecute"
		ours, second  = "gpu/unhealthy:NoSchedule", "gpu/unhealthy:NoExecute"
		startup       = "gpu/not-ready:NoSchedule"
	)
	desired := func(texts ...string) NodeState { return NodeState{Taints: taintsOf(texts...)} }
	ready := func(s NodeState) NodeState {
		s.StartupTaint, s.OffersAll = &taintsOf(startup)[0], true
		return s
	}
	undecided := func(s NodeState, texts ...string) NodeState {
		s.Undecided = taintsOf(texts...)
		return s
	}
	for name, c := range map[string]struct {
		node     []string // taints
		before   string   // annotation
		state    NodeState
		want     []string
		wantOurs string
		same     bool // nothing is written
		warning  string
	}{
		"nothing": {node: []string{theirs}, state: desired(), want: []string{theirs}, same: true},
		"set beside others": {
			node: []string{theirs, drain}, state: desired(ours), want: []string{theirs, drain, ours},
			wantOurs: `["gpu/unhealthy:NoSchedule"]`,
		},
		"set two": {
			state: desired(ours, second), want: []string{ours, second},
			wantOurs: `["gpu/unhealthy:NoExecute","gpu/unhealthy:NoSchedule"]`,
		},
		"set already": {
			node: []string{ours, theirs}, before: `["gpu/unhealthy:NoSchedule"]`, state: desired(ours),
			want: []string{ours, theirs}, wantOurs: `["gpu/unhealthy:NoSchedule"]`, same: true,
		},
		"one of two effects": {
			node: []string{ours, second}, before: `["gpu/unhealthy:NoExecute","gpu/unhealthy:NoSchedule"]`,
			state: desired(second), want: []string{second}, wantOurs: `["gpu/unhealthy:NoExecute"]`,
		},
		"removed from between": {
			node: []string{theirs, ours, drain}, before: `["gpu/unhealthy:NoSchedule"]`, state: desired(),
			want: []string{theirs, drain},
		},
		"removed by others": {
			node: []string{theirs}, before: `["gpu/unhealthy:NoSchedule"]`, state: desired(ours),
			want: []string{theirs, ours}, wantOurs: `["gpu/unhealthy:NoSchedule"]`,
		},
		"no longer configured": {
			node: []string{"old:NoSchedule", ours}, before: `["gpu/unhealthy:NoSchedule","old:NoSchedule"]`,
			state: desired(ours), want: []string{ours}, wantOurs: `["gpu/unhealthy:NoSchedule"]`,
		},
		"value changed": {
			node: []string{"gpu/unhealthy=a:NoSchedule"}, before: `["gpu/unhealthy:NoSchedule"]`,
			state: desired("gpu/unhealthy=b:NoSchedule"), want: []string{"gpu/unhealthy=b:NoSchedule"}, wantOurs: `["gpu/unhealthy:NoSchedule"]`,
		},
		"of somebody else":             {node: []string{ours}, state: desired(ours), want: []string{ours}, same: true},
		"of somebody else, not wanted": {node: []string{ours}, state: desired(), want: []string{ours}, same: true},
		"of somebody else, other": {
			node: []string{"gpu/unhealthy=x:NoSchedule"}, state: desired(ours),
			want: []string{"gpu/unhealthy=x:NoSchedule"}, same: true, warning: `gpu/unhealthy:NoSchedule has the value "x"`,
		},
		"undecided stays": {
			node: []string{ours, second}, before: `["gpu/unhealthy:NoExecute","gpu/unhealthy:NoSchedule"]`,
			state: undecided(desired(), ours), want: []string{ours}, wantOurs: `["gpu/unhealthy:NoSchedule"]`,
		},
		"undecided is not set": {node: []string{theirs}, state: undecided(desired(), ours), want: []string{theirs}, same: true},
		"startup taint":        {node: []string{startup, theirs}, state: ready(NodeState{}), want: []string{theirs}},
		"startup taint, value": {node: []string{"gpu/not-ready=true:NoSchedule", theirs}, state: ready(NodeState{}), want: []string{theirs}},
		"startup taint, effect": {
			node: []string{"gpu/not-ready:NoExecute"}, state: ready(NodeState{}), want: []string{"gpu/not-ready:NoExecute"},
			same: true,
		},
		"no startup taint": {node: []string{theirs}, state: ready(NodeState{}), want: []string{theirs}, same: true},
		"startup taint, taints stay": {
			node: []string{startup, ours}, before: `["gpu/unhealthy:NoSchedule"]`, state: ready(NodeState{}),
			want: []string{ours}, wantOurs: `["gpu/unhealthy:NoSchedule"]`,
		},
		"startup and unhealthy": {
			node: []string{startup}, state: ready(desired(ours)), want: []string{ours},
			wantOurs: `["gpu/unhealthy:NoSchedule"]`,
		},
		"broken annotation": {
			node: []string{theirs}, before: `{`, state: desired(ours), want: []string{theirs, ours},
			wantOurs: `["gpu/unhealthy:NoSchedule"]`,
		},
		"annotation only": {node: []string{theirs}, before: `["gpu/unhealthy:NoSchedule"]`, state: desired(), want: []string{theirs}},
	} {
		t.Run(name, func(t *testing.T) {
			node := new(taintedNode)
			for _, taint := range taintsOf(c.node...) {
				raw, _ := json.Marshal(map[string]any{"key": taint.Key, "value": taint.Value, "effect": taint.Effect, "newField": 1})
				node.Spec.Taints = append(node.Spec.Taints, raw)
			}
			if c.before != "" {
				node.Metadata.Annotations = map[string]string{taintsAnnotation: c.before}
			}
			before := fmt.Sprintf("%s", node.Spec.Taints)
			next := mergeTaints(node, &c.state, time.Now())
			var have []string
			for _, raw := range next.taints {
				var taint corev1.Taint
				if err := json.Unmarshal(raw, &taint); err != nil {
					t.Fatal(err)
				}
				have = append(have, taint.ToString())
				kept := strings.Contains(before, string(raw))
				if kept != strings.Contains(string(raw), "newField") {
					t.Errorf("%s lost a field", raw)
				}
				if (taint.Effect == corev1.TaintEffectNoExecute && !kept) != (taint.TimeAdded != nil) {
					t.Errorf("time of %s", raw)
				}
			}
			wantOurs := []string(nil)
			if c.wantOurs != "" {
				_ = json.Unmarshal([]byte(c.wantOurs), &wantOurs)
			}
			if !slices.Equal(have, c.want) || !slices.Equal(next.ours, wantOurs) || next.changed == c.same ||
				!strings.Contains(next.warning, c.warning) || (c.warning == "") != (next.warning == "") {
				t.Errorf("%q, ours %q, changed %v, warning %q", have, next.ours, next.changed, next.warning)
			}
		})
	}
}

func TestNodeTaints(t *testing.T) {
	withNode(t, func(g *nodeRig) {
		g.setTaints(taintsOf("dedicated=ml:NoSchedule", "gpu/not-ready:NoSchedule")...)
		startup := &taintsOf("gpu/not-ready:NoSchedule")[0]
		g.set(NodeState{StartupTaint: startup})
		g.wantRequests("") // there is nothing to do before the node is ready
		if s := g.writer.Status(); !s.Enabled {
			t.Errorf("%+v", s)
		}
		g.set(NodeState{StartupTaint: startup, Taints: taintsOf("gpu/unhealthy:NoExecute")})
		g.wantTaints("dedicated=ml:NoSchedule", "gpu/not-ready:NoSchedule", "gpu/unhealthy:NoExecute")
		if added := g.node().Spec.Taints[2].TimeAdded; added == nil || time.Since(added.Time) > time.Minute {
			t.Errorf("added at %v", added)
		}
		g.wantRequests("GET nodes, PATCH nodes")
		s := g.set(NodeState{StartupTaint: startup, OffersAll: true, Taints: taintsOf()})
		g.wantTaints("dedicated=ml:NoSchedule")
		g.wantWritten(s, true)
		if len(g.node().Annotations) != 0 {
			t.Errorf("annotations %v", g.node().Annotations)
		}
		g.wantRequests("GET nodes, PATCH nodes")
		if n := g.logged.FilterMessage("node taints").Len(); n != 2 {
			t.Errorf("%d changes logged", n)
		}
	})
}

// Somebody adds the startup taint again: soon after the start the agent removes it soon, later at the next check.
func TestStartupTaintComesBack(t *testing.T) {
	withNode(t, func(g *nodeRig) {
		s := g.set(NodeState{StartupTaint: &taintsOf("gpu/not-ready:NoSchedule")[0], OffersAll: true})
		g.setTaints(*s.StartupTaint)
		g.firstCheck()
		g.wantTaints()
		if got := g.writer.Status().AbsentStartupTaint; got != *s.StartupTaint {
			g.t.Errorf("removed %v", got)
		}
		g.advance(startupTaintWindow - 2*time.Minute)
		g.setTaints(*s.StartupTaint)
		g.firstCheck()
		g.wantTaints()
		g.advance(time.Hour)
		g.took()
		g.setTaints(*s.StartupTaint)
		g.heartbeat()
		g.wantTaints()
		if requests := g.took(); strings.Count(requests, "PATCH") != 1 {
			t.Errorf("requests %q", requests)
		}
	})
}

// A later process removes the taints that are no longer configured, and no others.
func TestNodeTaintsAfterRestart(t *testing.T) {
	withNode(t, func(g *nodeRig) {
		g.setTaints(taintsOf("a:NoSchedule")...)
		g.set(NodeState{Taints: taintsOf("a:NoSchedule", "b:NoSchedule", "c:NoSchedule")})
		g.stop()
		second := newNodeRig(g.t, g.apiServer)
		second.start()
		second.set(NodeState{Taints: taintsOf("c:NoSchedule")})
		second.wantTaints("a:NoSchedule", "c:NoSchedule")
		s := second.set(NodeState{Taints: taintsOf()})
		second.wantTaints("a:NoSchedule")
		second.wantWritten(s, true)
	})
}

// What others do to the taints of the agent is corrected; a node that is created again gets them again.
func TestNodeTaintsForeignEdits(t *testing.T) {
	withNode(t, func(g *nodeRig) {
		g.set(NodeState{Taints: taintsOf("gpu/unhealthy=x:NoSchedule")})
		g.setTaints(taintsOf("theirs:NoSchedule")...)
		g.heartbeat()
		g.wantTaints("theirs:NoSchedule", "gpu/unhealthy=x:NoSchedule")
		g.setTaints(taintsOf("gpu/unhealthy=y:NoSchedule", "theirs:NoSchedule")...)
		g.heartbeat()
		g.wantTaints("gpu/unhealthy=x:NoSchedule", "theirs:NoSchedule")
		g.createNode()
		g.heartbeat()
		g.wantTaints("gpu/unhealthy=x:NoSchedule")
	})
}

// Others write the node between the agent's read and its write, and the cache is behind. Nothing is lost.
func TestNodeTaintsConflicts(t *testing.T) {
	withNode(t, func(g *nodeRig) {
		g.SetStale(true)
		g.setTaints(taintsOf("theirs:NoSchedule")...)
		patches := 0
		g.fail = func(r *http.Request) error {
			if r.Method == "PATCH" {
				if patches++; patches <= 3 {
					g.setTaints(append(g.node().Spec.Taints, taintsOf(fmt.Sprintf("theirs-%d:NoSchedule", patches))...)...)
				}
			}
			return nil
		}
		g.set(NodeState{Taints: taintsOf("gpu/unhealthy:NoSchedule")})
		g.wantTaints("theirs:NoSchedule", "theirs-1:NoSchedule", "theirs-2:NoSchedule", "theirs-3:NoSchedule", "gpu/unhealthy:NoSchedule")
		g.wantWarnings(0)
	})
}

// A taint is removed also if the cache does not have it yet.
func TestNodeTaintsRemovalWithStaleCache(t *testing.T) {
	withNode(t, func(g *nodeRig) {
		g.SetStale(true)
		g.set(NodeState{Taints: taintsOf("gpu/unhealthy:NoSchedule")})
		g.wantTaints("gpu/unhealthy:NoSchedule")
		s := g.set(NodeState{Taints: taintsOf()})
		g.wantTaints()
		g.wantWritten(s, true)
	})
}

// The API server may commit a taint after the request has timed out and the taint is no longer desired.
func TestNodeTaintsCommittedLate(t *testing.T) {
	withNode(t, func(g *nodeRig) {
		g.fail = func(r *http.Request) error {
			if r.Method == "PATCH" {
				return context.DeadlineExceeded
			}
			return nil
		}
		g.set(NodeState{Taints: taintsOf("gpu/unhealthy:NoSchedule")})
		g.failWith(nil)
		g.set(NodeState{Taints: taintsOf()})
		g.wantTaints()
		s := g.set(NodeState{Taints: taintsOf(), Labels: map[string]string{"a": "1"}})
		g.wantWritten(s, false)
		g.advance(time.Minute)
		g.mu.Lock()
		g.setTaints(taintsOf("gpu/unhealthy:NoSchedule")...)
		g.change(func(n *corev1.Node) {
			n.Annotations = map[string]string{taintsAnnotation: `["gpu/unhealthy:NoSchedule"]`}
		})
		g.mu.Unlock()
		g.advance(lateWindow)
		g.wantTaints()
		g.wantWritten(s, true)
		g.set(NodeState{Taints: taintsOf()})
		g.took()
		g.heartbeat()
		g.wantRequests("")
	})
}

// A node that changes at every attempt is tried again later.
func TestNodeTaintsEndlessConflicts(t *testing.T) {
	withNode(t, func(g *nodeRig) {
		g.fail = func(r *http.Request) error {
			if r.Method == "PATCH" {
				return apierrors.NewConflict(schema.GroupResource{Resource: "nodes"}, "node1", errors.New("the object has been modified"))
			}
			return nil
		}
		s := g.set(NodeState{Taints: taintsOf("gpu/unhealthy:NoSchedule")})
		g.took()
		g.advance(10 * time.Minute)
		if n := strings.Count(g.took(), "PATCH"); n > 20*(maxTaintConflicts+1) {
			t.Errorf("%d tries in ten minutes", n)
		}
		g.wantStatus(taintsErr, "modified")
		g.wantWritten(s, false)
		g.failWith(nil)
		g.advance(2 * maxBackoff)
		g.wantTaints("gpu/unhealthy:NoSchedule")
		if want := map[string]string{taintsAnnotation: `["gpu/unhealthy:NoSchedule"]`}; !maps.Equal(g.node().Annotations, want) {
			t.Errorf("annotations %v", g.node().Annotations)
		}
	})
}
