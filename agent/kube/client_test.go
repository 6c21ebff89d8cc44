package kube

import (
	"context"
	"errors"
	"io/fs"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"
	"k8s.io/klog/v2"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/health/judge"
)

// writeKubeconfig writes a kubeconfig file with contexts, the first of which is current, and returns its path.
func writeKubeconfig(t *testing.T, server string, contexts ...string) string {
	t.Helper()
	clusters, names, current := "", "", ""
	for _, name := range contexts {
		clusters += "- {name: " + name + ", cluster: {server: '" + server + "/" + name + "'}}\n"
		names += "- {name: " + name + ", context: {cluster: " + name + "}}\n"
	}
	if len(contexts) > 0 {
		current = contexts[0]
	}
	path := filepath.Join(t.TempDir(), "kubeconfig")
	text := "apiVersion: v1\nkind: Config\ncurrent-context: '" + current + "'\nclusters:\n" + clusters + "contexts:\n" + names
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

// outsidePod makes the test run as outside of a pod and without a user's kubeconfig file.
func outsidePod(t *testing.T) {
	t.Helper()
	t.Setenv("KUBERNETES_SERVICE_HOST", "")
	t.Setenv("KUBECONFIG", filepath.Join(t.TempDir(), "none"))
}

func TestRESTConfig(t *testing.T) {
	outsidePod(t)
	c, err := RESTConfig(writeKubeconfig(t, "http://server", "a"))
	if err != nil || c.Host != "http://server/a" || c.UserAgent != "gpu-node-agent" || c.QPS <= 0 || c.QPS > 10 || c.Burst < int(c.QPS) ||
		c.Burst > 20 {
		t.Errorf("%+v, %v", c, err)
	}
	if _, err := RESTConfigOf("a.kubeconfig", ""); !errors.Is(err, errNoAccount) || !strings.HasPrefix(err.Error(), "a.kubeconfig: ") {
		t.Error(err)
	}
	if _, err := os.Stat("/var/run/secrets/kubernetes.io/serviceaccount/token"); err != nil { // as in a pod without an account
		t.Setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
		t.Setenv("KUBERNETES_SERVICE_PORT", "443")
		if _, err := RESTConfigOf("a.kubeconfig", ""); !errors.Is(err, errNoAccount) {
			t.Error(err)
		}
	}
	if _, err := RESTConfigOf("a.kubeconfig", "/none"); err == nil || !strings.HasPrefix(err.Error(), "a.kubeconfig: ") ||
		errors.Is(err, errNoAccount) {
		t.Error(err)
	}
}

// A token that cannot be read is a fault, and no missing account.
func TestAccountError(t *testing.T) {
	for _, c := range []struct {
		err  error
		none bool
	}{{rest.ErrNotInCluster, true}, {fs.ErrNotExist, true}, {fs.ErrPermission, false}} {
		if err := accountError("a.kubeconfig", c.err); errors.Is(err, errNoAccount) != c.none || errors.Is(err, c.err) == c.none {
			t.Errorf("%v: %v", c.err, err)
		}
	}
}

func TestOperatorRESTConfig(t *testing.T) {
	outsidePod(t)
	if _, err := OperatorRESTConfig("", ""); err == nil || !strings.Contains(err.Error(),
		"expected $KUBECONFIG, ~/.kube/config, --kubeconfig") {
		t.Error(err)
	}
	file := writeKubeconfig(t, "http://server", "a", "b")
	for _, c := range []struct{ env, file, context, host string }{
		{file, "", "", "http://server/a"},
		{file, "", "b", "http://server/b"},
		{"/none", file, "", "http://server/a"},
		{"/none", file, "b", "http://server/b"},
		{file, "", "c", ""},
		{file, "/none", "", ""},
	} {
		t.Setenv("KUBECONFIG", c.env)
		config, err := OperatorRESTConfig(c.file, c.context)
		switch {
		case c.host == "":
			if err == nil || !strings.HasPrefix(err.Error(), "access to the API server: ") {
				t.Errorf("%+v: %v", c, err)
			}
		case err != nil || config.Host != c.host || config.UserAgent != "gpu-node-agent" || config.QPS <= 0:
			t.Errorf("%+v: %+v, %v", c, config, err)
		}
	}
}

func TestReadRuntime(t *testing.T) {
	outsidePod(t)
	a := newAPI(t)
	a.change(func(n *corev1.Node) {
		n.Status.NodeInfo.ContainerRuntimeVersion, n.Status.NodeInfo.KubeletVersion = "containerd://2.1.4", "v1.37.0"
	})
	file := a.Kubeconfig(t)
	if r, err := ReadRuntime(t.Context(), file, "node1"); err != nil || r != (Runtime{"containerd://2.1.4", "v1.37.0"}) {
		t.Errorf("%+v, %v", r, err)
	}
	if r, err := ReadRuntime(t.Context(), file, "node2"); err == nil || r != (Runtime{}) {
		t.Errorf("%+v, %v", r, err)
	}
	if _, err := ReadRuntime(t.Context(), "", "node1"); !errors.Is(err, errNoAccount) {
		t.Error(err)
	}
}

// The file is the one that is configured when a client is opened.
func TestConnector(t *testing.T) {
	outsidePod(t)
	file := ""
	open := Connector(func() string { return file })
	if c, err := open(); c != nil || !errors.Is(err, errNoAccount) {
		t.Errorf("%v, %v", c, err)
	}
	file = newAPI(t).Kubeconfig(t)
	c, err := open()
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	for range 90 { // the claims of many pods that start do not wait for each other
		if n, err := c.CoreV1().Nodes().Get(ctx, "node1", metav1.GetOptions{}); err != nil || n.Name != "node1" {
			t.Fatalf("%+v, %v", n, err)
		}
	}
}

// Each component connects by the file that is configured.
func TestComponentsConnect(t *testing.T) {
	outsidePod(t)
	for node, component := range map[string]func(kubeconfig string) (run func(context.Context) error){
		"writer": func(kubeconfig string) func(context.Context) error {
			var desired, written health.Latest[NodeState]
			desired.Store(&NodeState{Labels: map[string]string{"a": "1"}})
			return NewNodeWriter(NodeOptions{
				Desired: &desired, Written: &written, Kubeconfig: func() string { return kubeconfig }, Node: "writer", Log: zap.NewNop(),
			}).Run
		},
		"follower": func(kubeconfig string) func(context.Context) error {
			var config health.Latest[RuntimeConfig]
			config.Store(&RuntimeConfig{Needed: true, Kubeconfig: kubeconfig})
			return NewRuntimeFollower(RuntimeOptions{
				Config: &config, Node: "follower", Answered: func(Runtime, error, bool) {},
				Log: zap.NewNop(),
			}).Run
		},
		"reporter": func(kubeconfig string) func(context.Context) error {
			config := judge.DefaultConfig()
			config.Kubernetes = judge.KubernetesConfig{Enabled: true, Kubeconfig: kubeconfig}
			var configs health.Latest[judge.Config]
			configs.Store(&config)
			var snapshots health.Latest[health.Snapshot]
			snapshots.Store(snapshotOf(gpu(0, nil)))
			return New(Options{
				Config: &configs, Snapshots: &snapshots, Node: "reporter", Log: zap.NewNop(),
				Holders: func(health.DeviceID) []Pod { return nil }, Unschedulable: func() ([]string, bool) { return nil, true },
			}).Run
		},
	} {
		t.Run(node, func(t *testing.T) {
			requests := make(chan string, 100)
			s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				requests <- r.UserAgent() + " " + r.Method + " " + r.URL.Path
				http.NotFound(w, r)
			}))
			defer s.Close()
			run := component(writeKubeconfig(t, s.URL, "a"))
			ctx, cancel := context.WithCancel(t.Context())
			done := make(chan error)
			go func() { done <- run(ctx) }()
			if got, want := <-requests, "gpu-node-agent GET /a/api/v1/nodes/"+node; got != want {
				t.Errorf("%q, want %q", got, want)
			}
			cancel()
			if err := <-done; err != nil {
				t.Error(err)
			}
		})
	}
}

func TestNodeName(t *testing.T) {
	host, err := os.Hostname()
	if err != nil {
		t.Skip(err)
	}
	for env, want := range map[string]string{"": host, "node7": "node7"} {
		t.Setenv("NODE_NAME", env)
		if got := NodeName(); got != want {
			t.Errorf("NODE_NAME=%s: %q, want %q", env, got, want)
		}
	}
	t.Setenv("POD_NAMESPACE", "gpu")
	if got := PodNamespace(); got != "gpu" {
		t.Errorf("namespace %q", got)
	}
}

func TestCaptureLog(t *testing.T) {
	core, logs := observer.New(zap.InfoLevel)
	CaptureLog(zap.New(core))
	t.Cleanup(klog.ClearLogger)
	klog.Background().Error(errors.New("no token"), "cannot read")
	if all := logs.FilterLevelExact(zap.WarnLevel).FilterMessageSnippet("no token").All(); len(all) != 1 ||
		!strings.HasPrefix(all[0].Message, "client-go: ") {
		t.Errorf("%v", logs.All())
	}
}
