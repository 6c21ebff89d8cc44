package podlabels

import (
	"reflect"
	"testing"

	"go.uber.org/zap"

	"github.com/gpu-node-agent/gpu-node-agent/metrics"
)

// A pod that has another one's name has its own UID. No label need be asked for.
func TestUID(t *testing.T) {
	g := newRig(t)
	g.configure(metrics.Config{PodUID: true})
	g.put("a", "one", map[string]string{"team": "x"})
	g.start()
	g.becomes("a", "one", "pod_uid=uid-1")
	g.becomes("a", "two")
	if s := g.Status(); !s.Enabled || s.Pods != 1 {
		t.Errorf("status %+v", s)
	}
	g.watches(1)
	g.put("a", "two", map[string]string{})
	g.becomes("a", "two", "pod_uid=uid-2")
	g.put("a", "one", map[string]string{"team": "y"}) // the same pod
	g.put("a", "two", nil)
	g.becomes("a", "two")
	g.becomes("a", "one", "pod_uid=uid-1")
	g.put("a", "two", map[string]string{"team": "z"})
	g.becomes("a", "two", "pod_uid=uid-3")
	g.failWith(away)
	g.upBecomes(false)
	g.becomes("a", "two", "pod_uid=uid-3")
	if n := g.said.FilterField(zap.String("key", "metrics.podUID")).Len(); n != 1 {
		t.Errorf("the key was said %d times: %v", n, g.said.All())
	}
	g.failWith(nil)
	g.configure(metrics.Config{PodUID: true, PodLabels: []string{"team"}})
	g.becomes("a", "two", "team=z", "pod_uid=uid-3")
	g.configure(metrics.Config{})
	g.becomes("a", "two")
	g.watches(0)
}

// Which labels are like a pattern follows the pod. That some are too many is said once, and only of a pod that is
// asked for.
func TestPatterns(t *testing.T) {
	g := newRig(t, "app.kubernetes.io/*", "/^team$/")
	g.put("a", "one", map[string]string{"app.kubernetes.io/name": "llm", "team": "x", "other": "y"})
	g.start()
	g.becomes("a", "one", "app_kubernetes_io_name=llm", "team=x")
	g.watches(1)
	g.put("a", "one", map[string]string{"app.kubernetes.io/part-of": "chat"})
	g.becomes("a", "one", "app_kubernetes_io_part_of=chat")

	many := make(map[string]string)
	for i := range 12 {
		many["x"+string(rune('a'+i))] = "1"
	}
	g.configure(metrics.Config{PodLabels: []string{"*"}})
	g.put("a", "many", many)
	g.put("b", "many", many)
	g.put("a", "one", map[string]string{"team": "z"})
	g.becomes("a", "one", "team=z")
	if n := g.saidCount("more labels"); n != 0 {
		t.Errorf("it is said of pods that nobody asks for: %v", g.said.All())
	}
	for range 3 {
		g.becomes("a", "many", "xa=1", "xb=1", "xc=1", "xd=1", "xe=1", "xf=1", "xg=1", "xh=1", "xi=1", "xj=1")
		if labels := g.Labels("b", "many"); len(labels) != 10 {
			t.Errorf("%d labels", len(labels))
		}
	}
	said := g.said.FilterMessageSnippet("more labels").All()
	if len(said) != 1 {
		t.Fatalf("it was said %d times: %v", len(said), said)
	}
	if c := said[0].ContextMap(); c["pod"] != "a/many" || !reflect.DeepEqual(c["without"], []any{"xk", "xl"}) {
		t.Errorf("it says %v", c)
	}
	g.configure(metrics.Config{PodLabels: []string{"x*"}}) // another configuration: it may be wrong, too
	g.becomes("a", "one")
	g.becomes("a", "many", "xa=1", "xb=1", "xc=1", "xd=1", "xe=1", "xf=1", "xg=1", "xh=1", "xi=1", "xj=1")
	if n := g.saidCount("more labels"); n != 2 {
		t.Errorf("it was said %d times", n)
	}
}
