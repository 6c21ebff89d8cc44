//go:build cluster

package cluster

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"time"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"

	"github.com/gpu-node-agent/gpu-node-agent/e2e/internal/pki"
	"github.com/gpu-node-agent/gpu-node-agent/e2e/internal/process"
)

// Users of the API server, identified by their certificates.
const (
	admin       = "admin"
	kubeletUser = "kubelet"
	managerUser = "manager"
	schedUser   = "scheduler"
)

// patience is the longest wait for steps that take seconds, for a busy machine.
const patience = 2 * time.Minute

// theCluster is shared by all tests.
var theCluster *cluster

// cluster is a machine with a complete cluster.
type cluster struct {
	dir     string // bin/e2e-cluster
	pki     *pki.Authority
	config  *rest.Config
	client  *kubernetes.Clientset
	watcher *kubernetes.Clientset // for watches, which last until their context ends
	dynamic dynamic.Interface
	api     *process.Process
	kubelet *process.Process
}

func newCluster(dir string) (*cluster, error) {
	c := &cluster{dir: dir}
	var err error
	if c.pki, err = pki.New(c.file("state", "pki"), "https://"+serviceIP+":443",
		serviceIP, nodeIP, "127.0.0.1", nodeName, "localhost", "kubernetes.default.svc"); err != nil {
		return nil, err
	}
	if err := errors.Join(
		c.pki.User(admin, admin, pki.Masters), c.pki.User("to-kubelet", "kube-apiserver", pki.Masters),
		c.pki.User(kubeletUser, "system:node:"+nodeName, "system:nodes"),
		c.pki.User(managerUser, "system:kube-controller-manager"), c.pki.User(schedUser, "system:kube-scheduler"),
	); err != nil {
		return nil, err
	}
	if c.config, err = clientcmd.BuildConfigFromFlags("", c.pki.Kubeconfig(admin)); err != nil {
		return nil, err
	}
	c.config.QPS, c.config.Burst = 100, 100
	if c.watcher, err = kubernetes.NewForConfig(c.config); err != nil {
		return nil, err
	}
	c.config.Timeout = 30 * time.Second // it would end a watch, too
	if c.client, err = kubernetes.NewForConfig(c.config); err != nil {
		return nil, err
	}
	if c.dynamic, err = dynamic.NewForConfig(c.config); err != nil {
		return nil, err
	}
	if err := errors.Join(makeMachine(c.file("state"), c.file("logs")), nodeFiles(c)); err != nil {
		return nil, err
	}
	begin := time.Now()
	if err := c.start(); err != nil {
		return nil, err
	}
	fmt.Printf("the cluster is up after %.0fs\n", time.Since(begin).Seconds())
	return c, nil
}

func (c *cluster) file(elem ...string) string {
	return filepath.Join(append([]string{c.dir}, elem...)...)
}

// start starts all components and waits until the node is ready.
func (c *cluster) start() error {
	if _, err := c.play(etcdRole, "--data-dir="+c.file("state", "etcd"), "--listen-client-urls="+etcdURL,
		"--advertise-client-urls="+etcdURL, "--listen-peer-urls=http://127.0.0.1:0", "--unsafe-no-fsync"); err != nil {
		return err
	}
	if err := c.startAPIServer(); err != nil {
		return err
	}
	if _, err := c.play(controllerRole, "--kubeconfig="+c.pki.Kubeconfig(managerUser), "--root-ca-file="+c.pki.File("ca.crt"),
		"--service-account-private-key-file="+c.pki.File("server.key"), "--use-service-account-credentials=true",
		"--leader-elect=false", "--bind-address=127.0.0.1", "--authentication-skip-lookup", "--kube-api-qps=200", "--kube-api-burst=200",
		// Tests stop the kubelet or create nodes without one. After a minute these would get taints and other conditions.
		"--node-monitor-grace-period=1h", "--node-startup-grace-period=1h"); err != nil {
		return err
	}
	if _, err := c.play(schedulerRole, "--kubeconfig="+c.pki.Kubeconfig(schedUser),
		"--leader-elect=false", "--bind-address=127.0.0.1", "--authentication-skip-lookup"); err != nil {
		return err
	}
	runtime, err := c.containerd()
	if err != nil {
		return err
	}
	for _, image := range []string{"pause", "workload", "agent-old", "agent-new"} {
		if err := c.wait(runtime, "containerd has the image "+image, func(ctx context.Context) error {
			out, err := exec.CommandContext(ctx, c.file("containerd", "ctr"), "-n", "k8s.io", "images", "import",
				c.file(image+".tar")).CombinedOutput()
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
				// Pods need the default service account.
				_, err := c.client.CoreV1().ServiceAccounts("default").Get(ctx, "default", metav1.GetOptions{})
				return err
			}
		}
		return errors.New("the node is not ready")
	})
}

const etcdURL = "http://127.0.0.1:2379"

// startAPIServer starts the API server and waits until it is ready.
func (c *cluster) startAPIServer() error {
	var err error
	c.api, err = c.play(apiServerRole, append(c.pki.ServerFlags(), "--etcd-servers="+etcdURL,
		"--bind-address=0.0.0.0", "--advertise-address="+nodeIP, "--secure-port=443",
		"--kubelet-client-certificate="+c.pki.File("to-kubelet.crt"), "--kubelet-client-key="+c.pki.File("to-kubelet.key"),
		"--kubelet-certificate-authority="+c.pki.File("ca.crt"), "--kubelet-preferred-address-types=InternalIP",
		"--service-cluster-ip-range=10.96.0.0/16",
		"--authorization-mode=Node,RBAC", "--enable-admission-plugins=NodeRestriction", "--allow-privileged=true")...)
	if err != nil {
		return err
	}
	return c.wait(c.api, "the API server is ready", func(ctx context.Context) error {
		_, err := c.client.RESTClient().Get().AbsPath("/readyz").DoRaw(ctx)
		return err
	})
}

func (c *cluster) startKubelet() (err error) {
	c.kubelet, err = c.play(kubeletRole, "--kubeconfig="+c.pki.Kubeconfig(kubeletUser), "--config="+c.file("state", "kubelet.yaml"),
		"--hostname-override="+nodeName, "--node-ip="+nodeIP, "-v=2")
	return err
}

// wait waits until holds returns nil. It fails if the process exits.
func (c *cluster) wait(on *process.Process, what string, holds func(context.Context) error) error {
	if _, err := process.Await(context.Background(), patience, holds, on); err != nil {
		return fmt.Errorf("%s: %w", what, err)
	}
	return nil
}

// play starts this program in another role.
func (c *cluster) play(role string, args ...string) (*process.Process, error) {
	return process.StartRole(role, c.file("logs", role+".log"), args...)
}

// containerd starts containerd, which searches its shim in PATH.
func (c *cluster) containerd() (*process.Process, error) {
	cmd := exec.Command(c.file("containerd", "containerd"), "-c", c.file("state", "containerd.toml"))
	cmd.Env = append(os.Environ(), "PATH="+c.file("containerd")+":"+os.Getenv("PATH"))
	return process.StartLogged(c.file("logs", "containerd.log"), cmd)
}

// program starts another program.
func (c *cluster) program(name string, args ...string) (*process.Process, error) {
	return process.StartLogged(c.file("logs", name+".log"), exec.Command(name, args...))
}
