package podlabels

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"reflect"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"

	"github.com/gpu-node-agent/gpu-node-agent/agent/internal/agenttest"
	"github.com/gpu-node-agent/gpu-node-agent/agent/kube"
	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/internal/apiservertest"
	"github.com/gpu-node-agent/gpu-node-agent/metrics"
)

// rig runs a follower with a stand-in API server.
type rig struct {
	*Follower
	*apiservertest.Server
	t       *testing.T
	created int // pods
	config  health.Latest[Config]
	logged  *observer.ObservedLogs
	stop    func()
}

func newRig(t *testing.T, keys ...string) *rig {
	t.Helper()
	core, logged := observer.New(zap.InfoLevel)
	g := &rig{Server: apiservertest.New(t), t: t, logged: logged}
	g.configure(metrics.Config{PodLabels: keys})
	g.Follower = New(Options{Config: &g.config, Node: "node-1", Log: zap.New(core)})
	kubeconfig := g.Kubeconfig(t)
	g.open = func(string) (*rest.Config, error) {
		c, err := kube.RESTConfig(kubeconfig)
		if err == nil {
			c.Wrap(func(next http.RoundTripper) http.RoundTripper { return metadataOnly{next, t} })
		}
		return c, err
	}
	return g
}

// metadataOnly checks that each request asks for the metadata of the node's pods.
type metadataOnly struct {
	next http.RoundTripper
	t    *testing.T
}

func (m metadataOnly) RoundTrip(r *http.Request) (*http.Response, error) {
	if r.Method != http.MethodGet || r.URL.Path != "/api/v1/pods" || r.URL.Query().Get("fieldSelector") != "spec.nodeName=node-1" ||
		!strings.Contains(r.Header.Get("Accept"), "as=PartialObjectMetadata") || !strings.HasPrefix(r.UserAgent(), "gpu-node-agent") {
		m.t.Errorf("unexpected request %s %s, Accept %s", r.Method, r.URL, r.Header.Get("Accept"))
	}
	return m.next.RoundTrip(r)
}

// put creates or changes a pod, or deletes it if labels is nil. New pods get the UIDs uid-1, uid-2 and so on.
func (g *rig) put(namespace, name string, labels map[string]string) {
	if labels == nil {
		g.Delete("pods", namespace, name)
		return
	}
	if g.Get("pods", namespace, name) == nil {
		g.created++
	}
	g.Put(&corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name, UID: types.UID(fmt.Sprint("uid-", g.created)), Labels: labels},
		Spec:       corev1.PodSpec{NodeName: "node-1"},
	})
}

// count returns how many lists, and how many requests in all, the server has answered.
func (g *rig) count() (lists, requests int) {
	for _, r := range g.Requests() {
		if requests++; r.Verb == "list" {
			lists++
		}
	}
	return lists, requests
}

func (g *rig) start() *rig {
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- g.Run(ctx) }()
	g.stop = sync.OnceFunc(func() {
		cancel()
		select {
		case err := <-done:
			if err != nil {
				g.t.Error(err)
			}
		case <-time.After(15 * time.Second): // half of listTimeout
			g.t.Error("Run did not return")
		}
	})
	g.t.Cleanup(g.stop)
	return g
}

func (g *rig) configure(c metrics.Config) { g.config.Store(&Config{Labels: c.SelectedPodLabels()}) }

// awaitLabels waits until a pod has labels, as "name=value".
func (g *rig) awaitLabels(namespace, name string, want ...string) {
	g.t.Helper()
	agenttest.Eventually(g.t, "labels", func() error {
		var have []string
		for _, l := range g.Labels(namespace, name) {
			have = append(have, l.Name+"="+l.Value)
		}
		if !reflect.DeepEqual(have, want) {
			return fmt.Errorf("%s/%s has %q, want %q", namespace, name, have, want)
		}
		return nil
	})
}

// awaitWatches waits until n watches are open.
func (g *rig) awaitWatches(n int) {
	g.t.Helper()
	agenttest.Eventually(g.t, "watches", func() error {
		if open := g.Watches(); open != n {
			return fmt.Errorf("%d watches, want %d", open, n)
		}
		return nil
	})
}

func (g *rig) awaitUp(want bool) {
	g.t.Helper()
	agenttest.Eventually(g.t, "status", func() error {
		if s := g.Status(); s.Up != want || want != (s.Err == "") {
			return fmt.Errorf("status %+v, want up %v", s, want)
		}
		return nil
	})
}

// warnings returns the number of warnings logged.
func (g *rig) warnings() int { return g.logged.FilterLevelExact(zap.WarnLevel).Len() }

func TestFollow(t *testing.T) {
	t.Parallel()
	g := newRig(t, "team", "app.kubernetes.io/name", "3d")
	g.put("a", "one", map[string]string{"app.kubernetes.io/name": "Größe \"1\"", "team": "x", "pod-template-hash": "1"})
	g.put("b", "one", map[string]string{"other": "y", "3d": ""})
	g.start()
	g.awaitLabels("a", "one", "team=x", `app_kubernetes_io_name=Größe "1"`)
	g.awaitUp(true)
	g.awaitLabels("b", "one") // a label without a value counts as absent
	g.awaitLabels("c", "one")
	if s := g.Status(); !s.Enabled || s.Pods != 2 {
		t.Errorf("status %+v", s)
	}
	if namespace, name, ok := g.PodByUID("uid-2"); namespace != "b" || name != "one" || !ok {
		t.Errorf("pod by its UID: %s/%s, %v", namespace, name, ok)
	}
	if namespace, name, ok := g.PodByUID(""); ok {
		t.Errorf("pod without a UID: %s/%s", namespace, name)
	}
	g.awaitWatches(1) // a change before it opens causes another list
	g.put("c", "one", map[string]string{"team": "z"})
	g.awaitLabels("c", "one", "team=z")
	g.put("a", "one", map[string]string{"team": "w"})
	g.awaitLabels("a", "one", "team=w")
	g.put("a", "one", nil)
	g.awaitLabels("a", "one")
	g.put("a", "one", map[string]string{"team": "again"}) // another pod of the same name
	g.awaitLabels("a", "one", "team=again")
	if lists, _ := g.count(); lists != 1 {
		t.Errorf("%d lists, want 1", lists)
	}
}

// During an outage the last known labels stay. Afterwards the follower catches up.
func TestOutage(t *testing.T) {
	t.Parallel()
	g := newRig(t, "team")
	g.put("a", "stays", map[string]string{"team": "x"})
	g.put("a", "goes", map[string]string{"team": "x"})
	g.start()
	g.awaitLabels("a", "goes", "team=x")
	g.SetRefused(true)
	g.awaitUp(false)
	g.awaitLabels("a", "stays", "team=x")
	g.awaitLabels("a", "goes", "team=x")
	g.put("a", "goes", nil)
	g.put("a", "comes", map[string]string{"team": "y"})
	g.SetRefused(false)
	g.awaitLabels("a", "comes", "team=y")
	g.awaitLabels("a", "goes")
	g.awaitLabels("a", "stays", "team=x")
	g.awaitUp(true)
	if n := g.warnings(); n != 1 || g.logged.Len() != 2 {
		t.Errorf("%d warnings in %d entries, want the outage and the recovery: %v", n, g.logged.Len(), g.logged.All())
	}
}

// After 410 Gone the follower lists again.
func TestExpired(t *testing.T) {
	t.Parallel()
	g := newRig(t, "team")
	g.put("a", "one", map[string]string{"team": "x"})
	g.start()
	g.awaitLabels("a", "one", "team=x")
	g.awaitWatches(1)
	g.Compact()
	agenttest.Eventually(g.t, "second list", func() error {
		if lists, _ := g.count(); lists < 2 {
			return fmt.Errorf("%d lists", lists)
		}
		return nil
	})
	g.put("a", "one", map[string]string{"team": "y"})
	g.awaitLabels("a", "one", "team=y")
	if g.logged.Len() != 0 {
		t.Errorf("unexpected log: %v", g.logged.All())
	}
}

func TestForbidden(t *testing.T) {
	t.Parallel()
	g := newRig(t, "team")
	g.put("a", "one", map[string]string{"team": "x"})
	g.Deny("list pods")
	g.start()
	agenttest.Eventually(g.t, "retry", func() error {
		if _, requests := g.count(); requests < 2 {
			return fmt.Errorf("%d requests", requests)
		}
		return nil
	})
	if s := g.Status(); s.Up || !strings.Contains(s.Err, "pods is forbidden") {
		t.Errorf("status %+v", s)
	}
	if n := g.warnings(); n != 1 {
		t.Errorf("%d warnings: %v", n, g.logged.All())
	}
	g.Deny()
	g.awaitLabels("a", "one", "team=x")
}

// Without configured labels the follower closes its watch and makes no requests.
func TestConfigurationChange(t *testing.T) {
	t.Parallel()
	g := newRig(t)
	g.put("a", "one", map[string]string{"team": "x", "app": "y"})
	g.start()
	g.configure(metrics.Config{PodLabels: []string{"team"}})
	g.awaitLabels("a", "one", "team=x")
	g.configure(metrics.Config{PodLabels: []string{"app", "team"}})
	g.awaitLabels("a", "one", "app=y", "team=x")
	g.configure(metrics.Config{})
	g.awaitLabels("a", "one")
	g.awaitWatches(0)
	if s := g.Status(); s != (Status{}) {
		t.Errorf("status %+v", s)
	}
	if _, requests := g.count(); requests > 4 { // two configurations, each a list and a watch
		t.Errorf("%d requests", requests)
	}
}

func TestDisabledOpensNoConnection(t *testing.T) {
	t.Parallel()
	g := newRig(t)
	opened := make(chan struct{}, 1)
	g.open = func(string) (*rest.Config, error) {
		opened <- struct{}{}
		return nil, errors.New("no")
	}
	before := g.store()
	g.start()
	agenttest.Eventually(t, "the configuration is followed", func() error {
		if g.store() == before {
			return errors.New("not yet")
		}
		return nil
	})
	if labels := g.Labels("a", "one"); labels != nil {
		t.Errorf("labels %v", labels)
	}
	g.stop()
	if len(opened) > 0 {
		t.Error("opened a connection")
	}
}

// Neither Labels nor the end of Run waits for a server that does not answer.
func TestUnresponsiveServer(t *testing.T) {
	t.Parallel()
	for _, verb := range []string{"list", "watch"} {
		t.Run(verb, func(t *testing.T) {
			g := newRig(t, "team")
			g.put("a", "one", map[string]string{"team": "x"})
			held := make(chan struct{})
			once := sync.OnceFunc(func() { close(held) })
			g.Hang(func(r apiservertest.Request) bool {
				if r.Verb == verb {
					once()
				}
				return r.Verb == verb
			})
			g.start()
			<-held
			g.Labels("a", "one")
			g.stop()
		})
	}
}

func TestInvalidKubeconfig(t *testing.T) {
	t.Parallel()
	g := newRig(t, "team")
	g.open = func(string) (*rest.Config, error) {
		return nil, errors.New("health.kubernetes.kubeconfig: no such file")
	}
	g.start()
	g.awaitUp(false)
	if s := g.Status(); !strings.Contains(s.Err, "health.kubernetes.kubeconfig") {
		t.Errorf("status %+v", s)
	}
	g.stop()
}

// Each of two pods that had the same name has its own UID. metrics.podUID needs no selected label.
func TestUID(t *testing.T) {
	t.Parallel()
	g := newRig(t)
	g.configure(metrics.Config{PodUID: true})
	g.put("a", "one", map[string]string{"team": "x"})
	g.start()
	g.awaitLabels("a", "one", "pod_uid=uid-1")
	g.awaitLabels("a", "two")
	if s := g.Status(); !s.Enabled || s.Pods != 1 {
		t.Errorf("status %+v", s)
	}
	g.awaitWatches(1)
	g.put("a", "two", map[string]string{})
	g.awaitLabels("a", "two", "pod_uid=uid-2")
	g.put("a", "one", map[string]string{"team": "y"}) // the same pod
	g.put("a", "two", nil)
	g.awaitLabels("a", "two")
	g.awaitLabels("a", "one", "pod_uid=uid-1")
	g.put("a", "two", map[string]string{"team": "z"})
	g.awaitLabels("a", "two", "pod_uid=uid-3")
	g.SetRefused(true)
	g.awaitUp(false)
	g.awaitLabels("a", "two", "pod_uid=uid-3")
	agenttest.Eventually(t, "one entry with the key", func() error { // it is logged after the status is set
		if n := g.logged.FilterField(zap.String("key", "metrics.podUID")).Len(); n != 1 {
			return fmt.Errorf("%d entries: %v", n, g.logged.All())
		}
		return nil
	})
	g.SetRefused(false)
	g.configure(metrics.Config{PodUID: true, PodLabels: []string{"team"}})
	g.awaitLabels("a", "two", "team=z", "pod_uid=uid-3")
	g.configure(metrics.Config{})
	g.awaitLabels("a", "two")
	g.awaitWatches(0)
}

// Labels that match a pattern follow the pod. Omitted labels are logged for the first pod that Labels is called for.
func TestPatterns(t *testing.T) {
	t.Parallel()
	g := newRig(t, `/^app\.kubernetes\.io//`, "/^team$/")
	g.put("a", "one", map[string]string{"app.kubernetes.io/name": "llm", "team": "x", "other": "y"})
	g.start()
	g.awaitLabels("a", "one", "app_kubernetes_io_name=llm", "team=x")
	g.awaitWatches(1)
	g.put("a", "one", map[string]string{"app.kubernetes.io/part-of": "chat"})
	g.awaitLabels("a", "one", "app_kubernetes_io_part_of=chat")

	many := make(map[string]string)
	for i := range 12 {
		many["x"+string(rune('a'+i))] = "1"
	}
	g.configure(metrics.Config{PodLabels: []string{"/.*/"}})
	g.put("a", "many", many)
	g.put("b", "many", many)
	g.put("a", "one", map[string]string{"other": "y", "team": "z"})
	g.awaitLabels("a", "one", "other=y", "team=z") // with the new configuration
	if g.warnings() != 0 {
		t.Errorf("logged for pods that Labels was not called for: %v", g.logged.All())
	}
	for range 3 {
		g.awaitLabels("a", "many", "xa=1", "xb=1", "xc=1", "xd=1", "xe=1", "xf=1", "xg=1", "xh=1", "xi=1", "xj=1")
		if labels := g.Labels("b", "many"); len(labels) != 10 {
			t.Errorf("%d labels", len(labels))
		}
	}
	if g.warnings() != 1 {
		t.Fatalf("want one warning: %v", g.logged.All())
	}
	if c := g.logged.All()[0].ContextMap(); c["pod"] != "a/many" || !reflect.DeepEqual(c["omitted"], []any{"xk", "xl"}) {
		t.Errorf("log fields %v", c)
	}
	g.configure(metrics.Config{PodLabels: []string{"/^x/"}}) // logs again
	g.awaitLabels("a", "one")
	g.awaitLabels("a", "many", "xa=1", "xb=1", "xc=1", "xd=1", "xe=1", "xf=1", "xg=1", "xh=1", "xi=1", "xj=1")
	if g.warnings() != 2 {
		t.Errorf("want two warnings: %v", g.logged.All())
	}
}
