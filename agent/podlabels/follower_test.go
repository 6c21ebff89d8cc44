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
	"k8s.io/client-go/rest"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/metrics"
)

// rig is a follower that runs, and its API server.
type rig struct {
	*Follower
	*apiServer
	config health.Latest[Config]
	said   *observer.ObservedLogs
	stop   func()
}

func newRig(t *testing.T, keys ...string) *rig {
	t.Helper()
	core, said := observer.New(zap.InfoLevel)
	g := &rig{apiServer: newAPIServer(t), said: said}
	g.configure(metrics.Config{PodLabels: keys})
	g.Follower = New(Options{Config: &g.config, Node: "node-1", Log: zap.New(core)})
	g.open = func(string) (*rest.Config, error) { return &rest.Config{Host: g.URL}, nil }
	return g
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
		case <-time.After(3 * time.Second):
			g.t.Error("it does not end")
		}
	})
	g.t.Cleanup(g.stop)
	return g
}

func (g *rig) configure(c metrics.Config) { g.config.Store(&Config{Labels: c.ShownPodLabels()}) }

// becomes waits until a pod has labels, as "name=value".
func (g *rig) becomes(namespace, name string, want ...string) {
	g.t.Helper()
	g.eventually(func() error {
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

func (g *rig) eventually(check func() error) {
	g.t.Helper()
	over := time.After(60 * time.Second)
	for {
		err := check()
		if err == nil {
			return
		}
		select {
		case <-over:
			g.t.Fatal(err)
		case <-time.After(10 * time.Millisecond):
		}
	}
}

// watches waits until so many watches are open.
func (g *rig) watches(n int) {
	g.t.Helper()
	g.eventually(func() error {
		g.apiServer.mu.Lock()
		defer g.apiServer.mu.Unlock()
		if len(g.watching) != n {
			return fmt.Errorf("%d watches, want %d", len(g.watching), n)
		}
		return nil
	})
}

func (g *rig) upBecomes(want bool) {
	g.t.Helper()
	g.eventually(func() error {
		if s := g.Status(); s.Up != want || want != (s.Err == "") {
			return fmt.Errorf("status %+v, want up %v", s, want)
		}
		return nil
	})
}

func (g *rig) saidCount(text string) int { return g.said.FilterMessageSnippet(text).Len() }

func TestFollow(t *testing.T) {
	g := newRig(t, "team", "app.kubernetes.io/name", "3d")
	g.put("a", "one", map[string]string{"app.kubernetes.io/name": "Größe \"1\"", "team": "x", "pod-template-hash": "1"})
	g.put("b", "one", map[string]string{"other": "y", "3d": ""})
	g.start()
	g.becomes("a", "one", "team=x", `app_kubernetes_io_name=Größe "1"`)
	g.upBecomes(true)
	g.becomes("b", "one") // a label without a value is none
	g.becomes("c", "one")
	if s := g.Status(); !s.Enabled || s.Pods != 2 {
		t.Errorf("status %+v", s)
	}
	g.watches(1) // what changes before it is open is listed anew
	g.put("c", "one", map[string]string{"team": "z"})
	g.becomes("c", "one", "team=z")
	g.put("a", "one", map[string]string{"team": "w"})
	g.becomes("a", "one", "team=w")
	g.put("a", "one", nil)
	g.becomes("a", "one")
	g.put("a", "one", map[string]string{"team": "again"}) // another pod of the same name
	g.becomes("a", "one", "team=again")
	if lists, _ := g.count(); lists != 1 {
		t.Errorf("it was listed %d times", lists)
	}
}

// While the API server is away, what it said last is shown; nothing is lost of what happens meanwhile.
func TestOutage(t *testing.T) {
	g := newRig(t, "team")
	g.put("a", "stays", map[string]string{"team": "x"})
	g.put("a", "goes", map[string]string{"team": "x"})
	g.start()
	g.becomes("a", "goes", "team=x")
	g.failWith(away)
	g.upBecomes(false)
	g.becomes("a", "stays", "team=x")
	g.becomes("a", "goes", "team=x")
	g.put("a", "goes", nil)
	g.put("a", "comes", map[string]string{"team": "y"})
	g.failWith(nil)
	g.becomes("a", "comes", "team=y")
	g.becomes("a", "goes")
	g.becomes("a", "stays", "team=x")
	g.upBecomes(true)
	if said, again := g.saidCount("cannot be read"), g.saidCount("can be read again"); said != 1 || again != 1 {
		t.Errorf("the outage was said %d times, its end %d times: %v", said, again, g.said.All())
	}
}

// A watch that has missed too much ends with 410 Gone: all is listed anew.
func TestExpired(t *testing.T) {
	g := newRig(t, "team")
	g.put("a", "one", map[string]string{"team": "x"})
	g.start()
	g.becomes("a", "one", "team=x")
	g.watches(1)
	g.tellExpired()
	g.eventually(func() error {
		if lists, _ := g.count(); lists < 2 {
			return fmt.Errorf("%d lists", lists)
		}
		return nil
	})
	g.put("a", "one", map[string]string{"team": "y"})
	g.becomes("a", "one", "team=y")
	if n := g.saidCount(""); n != 0 {
		t.Errorf("it is nothing to talk of: %v", g.said.All())
	}
}

func TestForbidden(t *testing.T) {
	g := newRig(t, "team")
	g.put("a", "one", map[string]string{"team": "x"})
	g.failWith(func(w http.ResponseWriter, _ *http.Request) bool {
		w.Header().Set("Content-Type", "application/json")
		w.WriteHeader(http.StatusForbidden)
		fmt.Fprint(w, `{"kind":"Status","apiVersion":"v1","status":"Failure","reason":"Forbidden","code":403,"message":"pods is forbidden: no rights"}`)
		return true
	})
	g.start()
	g.eventually(func() error {
		if _, asked := g.count(); asked < 3 {
			return fmt.Errorf("asked %d times", asked)
		}
		return nil
	})
	if s := g.Status(); s.Up || !strings.Contains(s.Err, "no rights") {
		t.Errorf("status %+v", s)
	}
	if n := g.saidCount("cannot be read"); n != 1 {
		t.Errorf("it was said %d times", n)
	}
	g.failWith(nil)
	g.becomes("a", "one", "team=x")
}

// It is off until a label is named, and then asks nobody.
func TestOff(t *testing.T) {
	g := newRig(t)
	g.put("a", "one", map[string]string{"team": "x", "app": "y"})
	g.start()
	g.configure(metrics.Config{PodLabels: []string{"team"}})
	g.becomes("a", "one", "team=x")
	g.configure(metrics.Config{PodLabels: []string{"app", "team"}})
	g.becomes("a", "one", "app=y", "team=x")
	g.configure(metrics.Config{})
	g.becomes("a", "one")
	g.watches(0)
	if s := g.Status(); s != (Status{}) {
		t.Errorf("status %+v", s)
	}
	if _, asked := g.count(); asked > 4 { // two configurations, each a list and a watch
		t.Errorf("it has asked %d times", asked)
	}
}

func TestOffAsksNobody(t *testing.T) {
	g := newRig(t)
	opened := make(chan struct{}, 1)
	g.open = func(string) (*rest.Config, error) {
		opened <- struct{}{}
		return nil, errors.New("no")
	}
	g.start()
	if labels := g.Labels("a", "one"); labels != nil {
		t.Errorf("labels %v", labels)
	}
	g.stop()
	if len(opened) > 0 {
		t.Error("it has looked for the API server")
	}
}

// Nothing waits for a server that takes requests and does not answer, not even the end.
func TestFrozen(t *testing.T) {
	for name, frozen := range map[string]string{"list": "", "watch": "true"} {
		t.Run(name, func(t *testing.T) {
			g := newRig(t, "team")
			g.put("a", "one", map[string]string{"team": "x"})
			held := make(chan struct{}, 10)
			g.failWith(func(_ http.ResponseWriter, r *http.Request) bool {
				if r.URL.Query().Get("watch") != frozen {
					return false
				}
				held <- struct{}{}
				<-r.Context().Done()
				return true
			})
			g.start()
			<-held
			g.Labels("a", "one")
			g.stop()
		})
	}
}

func TestNoWayToTheServer(t *testing.T) {
	g := newRig(t, "team")
	g.open = func(string) (*rest.Config, error) {
		return nil, errors.New("health.kubernetes.kubeconfig: no such file")
	}
	g.start()
	g.upBecomes(false)
	g.eventually(func() error {
		if s := g.Status(); !strings.Contains(s.Err, "health.kubernetes.kubeconfig") {
			return fmt.Errorf("status %+v", s)
		}
		return nil
	})
	g.stop()
}
