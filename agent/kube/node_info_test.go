package kube

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpu-node-agent/gpu-node-agent/health"
)

// runtimeRig runs a RuntimeFollower with a fake API server under synctest.
type runtimeRig struct {
	*nodeRig // for its clock
	config   health.Latest[RuntimeConfig]
	logs     *observer.ObservedLogs
	mu       sync.Mutex // guards answers
	answers  []string
	opened   []string // kubeconfig files; belongs to the follower
}

func withRuntime(t *testing.T, test func(*runtimeRig)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		core, logs := observer.New(zap.InfoLevel)
		g := &runtimeRig{nodeRig: newNodeRig(t, newAPI(t)), logs: logs}
		g.runs("containerd://1.6.36")
		f := NewRuntimeFollower(RuntimeOptions{
			Config: &g.config, Node: "node1", Log: zap.New(core),
			Answered: func(r Runtime, err error, away bool) {
				g.mu.Lock()
				defer g.mu.Unlock()
				g.answers = append(g.answers, fmt.Sprintf("%s, kubelet %s, error %v, away %v", r.Version, r.Kubelet, err, away))
			},
		})
		f.open = func(kubeconfig string) (*client, error) {
			if g.opened = append(g.opened, kubeconfig); kubeconfig == "none" {
				return nil, errors.New("no service account")
			}
			return g.open(kubeconfig)
		}
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error)
		go func() { done <- f.Run(ctx) }()
		t.Cleanup(func() {
			cancel()
			if err := <-done; err != nil {
				t.Error(err)
			}
		})
		test(g)
	})
}

// runs changes the runtime of the node.
func (g *runtimeRig) runs(version string) {
	g.apiServer.mu.Lock()
	defer g.apiServer.mu.Unlock()
	g.change(func(n *corev1.Node) {
		n.Status.NodeInfo.ContainerRuntimeVersion, n.Status.NodeInfo.KubeletVersion = version, "v1.37.0"
	})
}

func (g *runtimeRig) want(answers ...string) {
	g.t.Helper()
	g.advance(0)
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.answers = slices.Compact(g.answers); !slices.Equal(g.answers, answers) {
		g.t.Errorf("answers %q, want %q", g.answers, answers)
	}
	g.answers = nil
}

const oldAnswer, newAnswer = "containerd://1.6.36, kubelet v1.37.0, error <nil>, away false",
	"containerd://2.1.4, kubelet v1.37.0, error <nil>, away false"

// The runtime is asked for only if it is needed, at once and then every five minutes, not by all nodes at once.
func TestRuntimeFollower(t *testing.T) {
	withRuntime(t, func(g *runtimeRig) {
		g.config.Store(&RuntimeConfig{})
		g.advance(time.Hour)
		g.want()
		if took := g.took(); took != "" {
			t.Errorf("requests %q", took)
		}
		g.config.Store(&RuntimeConfig{Needed: true})
		g.want(oldAnswer)
		g.runs("containerd://2.1.4")
		g.advance(runtimeInterval * 8 / 10)
		g.want()
		g.advance(runtimeInterval * 3 / 10)
		g.want(newAnswer)
		g.took()
		g.advance(10 * runtimeInterval)
		if n := strings.Count(g.took(), "GET nodes"); n < 9 || n > 11 {
			t.Errorf("%d requests in ten intervals", n)
		}
		g.mu.Lock()
		g.answers = nil
		g.mu.Unlock()
		g.config.Store(&RuntimeConfig{Needed: true, Kubeconfig: "other"})
		g.want(newAnswer)
		g.config.Store(&RuntimeConfig{})
		g.took()
		g.advance(time.Hour)
		if took := g.took(); took != "" || !slices.Equal(g.opened, []string{"", "other"}) {
			t.Errorf("requests %q, opened %q", took, g.opened)
		}
	})
}

// Before the first answer the API server is asked again soon; afterwards the last answer holds while it is away, or refuses.
func TestRuntimeFollowerOutage(t *testing.T) {
	for name, failure := range map[string]error{
		"no answer":  errors.New("connection refused"),
		"overloaded": apiError(http.StatusTooManyRequests, metav1.StatusReasonTooManyRequests),
		"starting":   apiError(http.StatusServiceUnavailable, metav1.StatusReasonServiceUnavailable),
	} {
		t.Run(name, func(t *testing.T) {
			withRuntime(t, func(g *runtimeRig) {
				g.failWith(failure)
				g.config.Store(&RuntimeConfig{Needed: true})
				g.advance(time.Hour)
				g.mu.Lock()
				if n := len(g.answers); n < 600 || !strings.HasSuffix(g.answers[n-1], "true") {
					t.Errorf("%d answers", n)
				}
				g.answers = nil
				g.mu.Unlock()
				g.failWith(nil)
				g.advance(awayRetry * 11 / 10)
				g.want(oldAnswer)
				g.failWith(failure)
				g.took()
				g.advance(time.Hour)
				g.want()
				if n := strings.Count(g.took(), "GET nodes"); n < 50 || n > 130 { // every minute, or twice
					t.Errorf("%d requests in an hour", n)
				}
				g.failWith(nil)
				g.runs("containerd://2.1.4")
				g.advance(2 * maxBackoff)
				g.want(newAnswer)
				if n := g.logs.FilterLevelExact(zap.WarnLevel).Len(); n != 2 {
					t.Errorf("%d warnings: %v", n, g.logs.All())
				}
				// The next outage starts with short pauses again.
				g.failWith(failure)
				g.config.Store(&RuntimeConfig{Needed: true})
				g.want()
				g.failWith(nil)
				g.runs("containerd://1.6.36")
				g.advance(minBackoff)
				g.want(oldAnswer)
			})
		})
	}
}

// A refusal is an answer. It is asked again: slowly, because it may last, after some quick tries, because an API server that starts refuses
// too.
func TestRuntimeFollowerRefused(t *testing.T) {
	withRuntime(t, func(g *runtimeRig) {
		g.failWith(apiError(http.StatusForbidden, metav1.StatusReasonForbidden))
		g.config.Store(&RuntimeConfig{Needed: true})
		g.want(", kubelet , error refused: Forbidden, away true")
		g.failWith(errors.New("connection refused"))
		g.advance(awayRetry * 11 / 10)
		g.want(", kubelet , error Get \"http://localhost/api/v1/nodes/node1?timeout=10s\": connection refused, away true")
		g.failWith(apiError(http.StatusForbidden, metav1.StatusReasonForbidden))
		g.advance(refusalSettles)
		g.want(", kubelet , error refused: Forbidden, away true")
		g.advance(2 * awayRetry)
		g.mu.Lock()
		g.answers = g.answers[len(g.answers)-1:]
		g.mu.Unlock()
		g.want(", kubelet , error refused: Forbidden, away false")
		g.advance(10 * time.Minute)
		g.took()
		g.advance(time.Hour)
		if n := strings.Count(g.took(), "GET nodes"); n < 11 || n > 25 {
			t.Errorf("%d requests in an hour", n)
		}
		g.mu.Lock()
		g.answers = nil
		g.mu.Unlock()
		g.failWith(nil)
		g.advance(slowRetry * 11 / 10)
		g.want(oldAnswer)
		g.failWith(apiError(http.StatusForbidden, metav1.StatusReasonForbidden))
		g.advance(time.Hour)
		g.want()

		g.config.Store(&RuntimeConfig{Needed: true, Kubeconfig: "none"})
		g.want()
	})
}

// Without a service account and a kubeconfig file there is nobody to ask.
func TestRuntimeFollowerWithoutAccount(t *testing.T) {
	withRuntime(t, func(g *runtimeRig) {
		g.config.Store(&RuntimeConfig{Needed: true, Kubeconfig: "none"})
		g.want(", kubelet , error no service account, away false")
		if took := g.took(); took != "" {
			t.Errorf("requests %q", took)
		}
	})
}
