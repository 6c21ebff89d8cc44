package apiserver

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/clientcmd"

	"github.com/gpu-node-agent/gpu-node-agent/e2e/internal/node"
	"github.com/gpu-node-agent/gpu-node-agent/e2e/internal/pki"
	"github.com/gpu-node-agent/gpu-node-agent/e2e/internal/process"
)

// Users of the API server, identified by their certificates.
const (
	admin        = "admin"
	agent        = "gpu-node-agent" // has the documented cluster role
	unprivileged = "nobody"         // has no rights
)

// cluster is an etcd and a kube-apiserver.
type cluster struct {
	dir       string
	pki       *pki.Authority
	etcd      *process.Process
	apiServer *process.Process      // nil while stopped
	client    *kubernetes.Clientset // of the admin
}

// The ports are fixed, because the API server restarts on its own port.
func etcdURL() string { return "http://" + node.Host() + ":12379" }

const apiServerPort = "16443"

func newCluster(dir string) (*cluster, error) {
	c := &cluster{dir: dir}
	var err error
	if c.pki, err = pki.New(dir, "https://"+node.Host()+":"+apiServerPort, node.Host(), "127.0.0.1"); err != nil {
		return nil, err
	}
	policy := "apiVersion: audit.k8s.io/v1\nkind: Policy\nomitStages: [RequestReceived]\nrules:\n- {level: None, userGroups: [" + pki.Masters +
		"]}\n- {level: Metadata}\n"
	err = errors.Join(os.WriteFile(c.file("audit.yaml"), []byte(policy), 0o600),
		c.pki.User(admin, admin, pki.Masters), c.pki.User(agent, agent), c.pki.User(unprivileged, unprivileged))
	if err != nil {
		return nil, err
	}
	config, err := clientcmd.BuildConfigFromFlags("", c.pki.Kubeconfig(admin))
	if err != nil {
		return nil, err
	}
	config.QPS, config.Burst, config.Timeout = 100, 100, 10*time.Second
	if c.client, err = kubernetes.NewForConfig(config); err != nil {
		return nil, err
	}
	// etcd has no peers, so any port will do.
	c.etcd, err = process.StartRole(etcdRole, c.file("etcd.log"), "--data-dir="+c.file("etcd"), "--listen-client-urls="+etcdURL(),
		"--advertise-client-urls="+etcdURL(), "--listen-peer-urls=http://127.0.0.1:0", "--unsafe-no-fsync")
	if err != nil {
		return nil, err
	}
	if err := c.startAPIServer(); err != nil {
		c.stop()
		return nil, err
	}
	return c, nil
}

func (c *cluster) file(name string) string { return filepath.Join(c.dir, name) }

// startAPIServer starts the API server on its fixed port and waits until it is ready.
func (c *cluster) startAPIServer() error {
	p, err := process.StartRole(apiServerRole, c.file("kube-apiserver.log"), append(c.pki.ServerFlags(),
		"--etcd-servers="+etcdURL(), "--bind-address="+node.Host(), "--secure-port="+apiServerPort,
		"--advertise-address=127.0.0.1", "--endpoint-reconciler-type=none", "--service-cluster-ip-range=10.96.0.0/16",
		"--authorization-mode=RBAC",
		"--disable-admission-plugins=ServiceAccount", // no controller creates service accounts
		"--audit-policy-file="+c.file("audit.yaml"), "--audit-log-path="+c.file("audit.log"), "--audit-log-mode=blocking-strict",
		"--shutdown-delay-duration=0s")...)
	if err != nil {
		return err
	}
	c.apiServer = p
	_, err = process.Await(context.Background(), node.Timeout, func(ctx context.Context) error {
		_, err := c.client.RESTClient().Get().AbsPath("/readyz").DoRaw(ctx)
		return err
	}, p, c.etcd)
	return err
}

func (c *cluster) stopAPIServer() {
	if c.apiServer != nil {
		c.apiServer.Kill()
		c.apiServer = nil
	}
}

// freeze stops the API server's process with SIGSTOP, or continues it. The end of the test continues it too.
func (c *cluster) freeze(t *testing.T, on bool) {
	t.Helper()
	signal := syscall.SIGCONT
	if on {
		signal = syscall.SIGSTOP
		t.Cleanup(func() { _ = c.apiServer.Signal(syscall.SIGCONT) })
	}
	if err := c.apiServer.Signal(signal); err != nil {
		t.Fatal(err)
	}
}

func (c *cluster) stop() {
	c.stopAPIServer()
	c.etcd.Kill()
}

// request is a request in the audit log.
type request struct {
	Verb string `json:"verb"`
	User struct {
		Username string `json:"username"`
	} `json:"user"`
	ObjectRef struct {
		Resource    string `json:"resource"`
		Subresource string `json:"subresource"`
		Namespace   string `json:"namespace"`
		Name        string `json:"name"`
	} `json:"objectRef"`
	ResponseStatus struct {
		Code int `json:"code"`
	} `json:"responseStatus"`
}

// requests returns the requests of a user, such as "patch nodes/status n1 200".
func (c *cluster) requests(user string) ([]string, error) {
	text, err := os.ReadFile(c.file("audit.log"))
	if err != nil {
		return nil, err
	}
	var all []string
	whole := text[:bytes.LastIndexByte(text, '\n')+1] // the API server may be writing the last line
	for line := range bytes.Lines(whole) {
		var r request
		if err := json.Unmarshal(line, &r); err != nil {
			return nil, err
		}
		if r.User.Username != user {
			continue
		}
		what := strings.TrimSuffix(r.ObjectRef.Resource+"/"+r.ObjectRef.Subresource, "/")
		all = append(all, fmt.Sprintf("%s %s %s %d", r.Verb, what, r.ObjectRef.Name, r.ResponseStatus.Code))
	}
	return all, nil
}
