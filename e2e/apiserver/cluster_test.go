package apiserver

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/clientcmd"
)

// The users that the API server knows by their certificates.
const (
	admin   = "admin"
	agent   = "gpu-node-agent" // may do what README.md says
	nobody  = "nobody"         // may do nothing
	masters = "system:masters"
)

// patience is the longest wait for what should take a few seconds, on a machine that is busy.
const patience = 90 * time.Second

// cluster is an etcd and a kube-apiserver.
type cluster struct {
	dir       string
	pki       *pki
	etcd      *process
	apiServer *process // nil while it is stopped
	etcdPort  int
	port      int
	client    *kubernetes.Clientset // of the admin
}

func newCluster(dir string) (*cluster, error) {
	c := &cluster{dir: dir}
	var err error
	if c.pki, err = newPKI(dir, admin+"/"+masters, agent, nobody); err != nil {
		return nil, err
	}
	if c.etcdPort, err = freePort(); err != nil {
		return nil, err
	}
	if c.port, err = freePort(); err != nil {
		return nil, err
	}
	policy := "apiVersion: audit.k8s.io/v1\nkind: Policy\nomitStages: [RequestReceived]\nrules:\n- {level: Metadata, users: [" +
		agent + ", " + nobody + "]}\n- {level: None}\n"
	if err := os.WriteFile(c.file("audit.yaml"), []byte(policy), 0o600); err != nil {
		return nil, err
	}
	for _, user := range []string{admin, agent, nobody} {
		if err := os.WriteFile(c.kubeconfig(user), []byte(c.pki.kubeconfig(user, c.port)), 0o600); err != nil {
			return nil, err
		}
	}
	config, err := clientcmd.BuildConfigFromFlags("", c.kubeconfig(admin))
	if err != nil {
		return nil, err
	}
	config.QPS, config.Burst, config.Timeout = 100, 100, 10*time.Second
	if c.client, err = kubernetes.NewForConfig(config); err != nil {
		return nil, err
	}
	etcd := fmt.Sprintf("http://127.0.0.1:%d", c.etcdPort)
	// The port of the peers is not used: there are none.
	c.etcd, err = start(c.file("etcd.log"), etcdRole, "--data-dir="+c.file("etcd"), "--listen-client-urls="+etcd,
		"--advertise-client-urls="+etcd, "--listen-peer-urls=http://127.0.0.1:0", "--unsafe-no-fsync")
	if err != nil {
		return nil, err
	}
	if err := c.startAPIServer(); err != nil {
		c.stop()
		return nil, err
	}
	return c, nil
}

func (c *cluster) file(name string) string       { return filepath.Join(c.dir, name) }
func (c *cluster) kubeconfig(user string) string { return c.file(user + ".kubeconfig") }
func (c *cluster) problem(p *process, e error) error {
	text, _ := os.ReadFile(p.log) // nothing is as good as an error
	return fmt.Errorf("%s: %w\n%s", filepath.Base(p.log), e, text[max(0, len(text)-4000):])
}

// startAPIServer starts it where it was before, and waits until it is ready.
func (c *cluster) startAPIServer() error {
	p, err := start(c.file("kube-apiserver.log"), apiServerRole,
		fmt.Sprintf("--etcd-servers=http://127.0.0.1:%d", c.etcdPort), fmt.Sprintf("--secure-port=%d", c.port),
		"--bind-address=127.0.0.1", "--advertise-address=127.0.0.1", "--endpoint-reconciler-type=none",
		"--client-ca-file="+c.pki.file("ca.crt"), "--tls-cert-file="+c.pki.file("server.crt"), "--tls-private-key-file="+c.pki.file("server.key"),
		"--service-account-key-file="+c.pki.file("server.key"), "--service-account-signing-key-file="+c.pki.file("server.key"),
		"--service-account-issuer=https://kubernetes.default.svc", "--service-cluster-ip-range=10.96.0.0/16",
		"--authorization-mode=RBAC",
		"--disable-admission-plugins=ServiceAccount", // there is no controller that makes them
		"--audit-policy-file="+c.file("audit.yaml"), "--audit-log-path="+c.file("audit.log"), "--audit-log-mode=blocking-strict",
		"--shutdown-delay-duration=0s")
	if err != nil {
		return err
	}
	c.apiServer = p
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	for {
		_, err := c.client.RESTClient().Get().AbsPath("/readyz").DoRaw(ctx)
		if err == nil {
			return nil
		}
		select {
		case <-p.exited:
			return c.problem(p, errors.New("it has ended"))
		case <-ctx.Done():
			return c.problem(p, err)
		case <-time.After(100 * time.Millisecond):
		}
	}
}

func (c *cluster) stopAPIServer() {
	if c.apiServer != nil {
		c.apiServer.kill()
		c.apiServer = nil
	}
}

// freeze stops the API server's process where it is, or lets it go on; the end of the test does that too.
func (c *cluster) freeze(t *testing.T, on bool) {
	t.Helper()
	signal := syscall.SIGCONT
	if on {
		signal = syscall.SIGSTOP
		t.Cleanup(func() { _ = c.apiServer.cmd.Process.Signal(syscall.SIGCONT) })
	}
	if err := c.apiServer.cmd.Process.Signal(signal); err != nil {
		t.Fatal(err)
	}
}

func (c *cluster) stop() {
	c.stopAPIServer()
	c.etcd.kill()
}

// request is what the audit log tells of one.
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

// requests returns what a user has asked, as "patch nodes/status n1 200".
func (c *cluster) requests(user string) ([]string, error) {
	f, err := os.Open(c.file("audit.log"))
	if err != nil {
		return nil, err
	}
	defer f.Close()
	var all []string
	lines := bufio.NewScanner(f)
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		var r request
		if err := json.Unmarshal(lines.Bytes(), &r); err != nil {
			return nil, err
		}
		if r.User.Username != user {
			continue
		}
		what := strings.TrimSuffix(r.ObjectRef.Resource+"/"+r.ObjectRef.Subresource, "/")
		all = append(all, fmt.Sprintf("%s %s %s %d", r.Verb, what, r.ObjectRef.Name, r.ResponseStatus.Code))
	}
	return all, lines.Err()
}

// process is a part of Kubernetes.
type process struct {
	cmd    *exec.Cmd
	log    string
	exited chan struct{}
}

func start(log, as string, args ...string) (*process, error) {
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	out, err := os.OpenFile(log, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return nil, err
	}
	defer out.Close()
	cmd := exec.Command(self, args...)
	cmd.Env = append(os.Environ(), role+"="+as)
	cmd.Dir = filepath.Dir(log)
	cmd.Stdout, cmd.Stderr = out, out
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	p := &process{cmd, log, make(chan struct{})}
	go func() {
		_ = cmd.Wait() // how it ended is in its log
		close(p.exited)
	}()
	return p, nil
}

func (p *process) kill() {
	_ = p.cmd.Process.Kill() // an error: it has ended already
	<-p.exited
}

// freePort is one that nobody listened on a moment ago.
func freePort() (int, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return 0, err
	}
	defer l.Close()
	return l.Addr().(*net.TCPAddr).Port, nil
}
