//go:build cluster

package cluster

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"time"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
)

// patience is the longest wait for what should take a few seconds, on a machine that is busy.
const patience = 2 * time.Minute

// theCluster is what all tests share.
var theCluster *cluster

// cluster is a machine that is a whole cluster.
type cluster struct {
	dir     string // bin/e2e-cluster
	pki     *pki
	config  *rest.Config
	client  *kubernetes.Clientset
	dynamic dynamic.Interface
	kubelet *process
}

func newCluster(dir string) (*cluster, error) {
	c := &cluster{dir: dir}
	var err error
	if c.pki, err = newPKI(c.file("state", "pki")); err != nil {
		return nil, err
	}
	if c.config, err = clientcmd.BuildConfigFromFlags("", c.pki.kubeconfig(admin)); err != nil {
		return nil, err
	}
	c.config.QPS, c.config.Burst, c.config.Timeout = 100, 100, 30*time.Second
	if c.client, err = kubernetes.NewForConfig(c.config); err != nil {
		return nil, err
	}
	if c.dynamic, err = dynamic.NewForConfig(c.config); err != nil {
		return nil, err
	}
	if err := errors.Join(makeMachine(c.file("state"), c.file("logs")), nodeFiles(c)); err != nil {
		return nil, err
	}
	began := time.Now()
	if err := c.start(); err != nil {
		return nil, err
	}
	fmt.Printf("the cluster is up after %.0fs\n", time.Since(began).Seconds())
	return c, nil
}

func (c *cluster) file(elem ...string) string {
	return filepath.Join(append([]string{c.dir}, elem...)...)
}

// start starts all parts, and waits until the node is ready.
func (c *cluster) start() error {
	const etcd = "http://127.0.0.1:2379"
	if _, err := c.run(etcdRole, etcdRole, "--data-dir="+c.file("state", "etcd"), "--listen-client-urls="+etcd,
		"--advertise-client-urls="+etcd, "--listen-peer-urls=http://127.0.0.1:0", "--unsafe-no-fsync"); err != nil {
		return err
	}
	api, err := c.run(apiServerRole, apiServerRole, "--etcd-servers="+etcd,
		"--bind-address=0.0.0.0", "--advertise-address="+nodeIP, "--secure-port=443",
		"--client-ca-file="+c.pki.file("ca.crt"), "--tls-cert-file="+c.pki.file("server.crt"), "--tls-private-key-file="+c.pki.file("server.key"),
		"--kubelet-client-certificate="+c.pki.file("to-kubelet.crt"), "--kubelet-client-key="+c.pki.file("to-kubelet.key"),
		"--kubelet-certificate-authority="+c.pki.file("ca.crt"), "--kubelet-preferred-address-types=InternalIP",
		"--service-account-key-file="+c.pki.file("server.key"), "--service-account-signing-key-file="+c.pki.file("server.key"),
		"--service-account-issuer=https://kubernetes.default.svc", "--service-cluster-ip-range=10.96.0.0/16",
		"--authorization-mode=Node,RBAC", "--enable-admission-plugins=NodeRestriction", "--allow-privileged=true")
	if err != nil {
		return err
	}
	if err := c.wait(api, "the API server is ready", func(ctx context.Context) error {
		_, err := c.client.RESTClient().Get().AbsPath("/readyz").DoRaw(ctx)
		return err
	}); err != nil {
		return err
	}
	if _, err := c.run(controllerRole, controllerRole, "--kubeconfig="+c.pki.kubeconfig(managerUser), "--root-ca-file="+c.pki.file("ca.crt"),
		"--service-account-private-key-file="+c.pki.file("server.key"), "--use-service-account-credentials=true",
		"--leader-elect=false", "--bind-address=127.0.0.1", "--authentication-skip-lookup"); err != nil {
		return err
	}
	if _, err := c.run(schedulerRole, schedulerRole, "--kubeconfig="+c.pki.kubeconfig(schedUser),
		"--leader-elect=false", "--bind-address=127.0.0.1", "--authentication-skip-lookup"); err != nil {
		return err
	}
	runtime, err := c.program("containerd", "containerd", "-c", c.file("state", "containerd.toml"))
	if err != nil {
		return err
	}
	for _, image := range []string{"pause", "workload", "agent-old", "agent-new"} {
		if err := c.wait(runtime, "containerd has the image "+image, func(ctx context.Context) error {
			out, err := exec.CommandContext(ctx, "ctr", "-n", "k8s.io", "images", "import", c.file(image+".tar")).CombinedOutput()
			if err != nil {
				err = fmt.Errorf("%w: %s", err, out)
			}
			return err
		}); err != nil {
			return err
		}
	}
	if err := c.startKubelet(); err != nil {
		return err
	}
	return c.wait(c.kubelet, "the node is ready", func(ctx context.Context) error {
		node, err := c.client.CoreV1().Nodes().Get(ctx, nodeName, metav1.GetOptions{})
		if err != nil {
			return err
		}
		for _, condition := range node.Status.Conditions {
			if condition.Type == v1.NodeReady && condition.Status == v1.ConditionTrue {
				// Pods need it too.
				_, err := c.client.CoreV1().ServiceAccounts("default").Get(ctx, "default", metav1.GetOptions{})
				return err
			}
		}
		return errors.New("the node is not ready")
	})
}

func (c *cluster) startKubelet() (err error) {
	c.kubelet, err = c.run(kubeletRole, kubeletRole, "--kubeconfig="+c.pki.kubeconfig(kubeletUser), "--config="+c.file("state", "kubelet.yaml"),
		"--hostname-override="+nodeName, "--node-ip="+nodeIP, "-v=2")
	return err
}

// wait waits until something holds, or a part has ended.
func (c *cluster) wait(on *process, what string, holds func(context.Context) error) error {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	for {
		err := holds(ctx)
		if err == nil {
			return nil
		}
		select {
		case <-on.exited:
			return fmt.Errorf("%s: not before it has ended; see %s", what, on.log)
		case <-ctx.Done():
			return fmt.Errorf("%s: not within %v: %w; see %s", what, patience, err, on.log)
		case <-time.After(200 * time.Millisecond):
		}
	}
}

// process is a part of the cluster.
type process struct {
	cmd    *exec.Cmd
	log    string
	exited chan struct{}
}

// run starts this program in another role.
func (c *cluster) run(name, as string, args ...string) (*process, error) {
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	return c.startProcess(name, append(os.Environ(), role+"="+as), self, args...)
}

// program starts another program.
func (c *cluster) program(name, command string, args ...string) (*process, error) {
	return c.startProcess(name, os.Environ(), command, args...)
}

func (c *cluster) startProcess(name string, env []string, command string, args ...string) (*process, error) {
	log := c.file("logs", name+".log")
	out, err := os.OpenFile(log, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return nil, err
	}
	defer out.Close()
	cmd := exec.Command(command, args...)
	cmd.Env, cmd.Stdout, cmd.Stderr = env, out, out
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
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

// stop ends a part as its service manager would.
func (p *process) stop() {
	_ = p.cmd.Process.Signal(syscall.SIGTERM) // an error: it has ended already
	select {
	case <-p.exited:
	case <-time.After(20 * time.Second):
		_ = p.cmd.Process.Kill()
		<-p.exited
	}
}
