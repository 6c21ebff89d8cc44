package kube

import (
	"cmp"
	"context"
	"os"
	"time"

	"go.uber.org/zap"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/health/backoff"
)

// NodeName returns the Kubernetes node's name if the pod has it in NODE_NAME, else the host's.
func NodeName() string {
	host, _ := os.Hostname() // "" on failure
	return cmp.Or(os.Getenv("NODE_NAME"), host)
}

// Runtime is what the kubelet reports of a node's container runtime.
type Runtime struct {
	Version string // containerd://2.1.4
	Kubelet string // the version of the kubelet: v1.34.1
}

// ReadRuntime returns the container runtime of a node.
func ReadRuntime(ctx context.Context, kubeconfig, node string) (Runtime, error) {
	c, err := connect(kubeconfig)
	if err != nil {
		return Runtime{}, err
	}
	return c.runtime(ctx, node)
}

func (c *client) runtime(ctx context.Context, node string) (Runtime, error) {
	var n corev1.Node
	err := read(ctx, c.rest.Get().Resource("nodes").Name(node), &n)
	return Runtime{n.Status.NodeInfo.ContainerRuntimeVersion, n.Status.NodeInfo.KubeletVersion}, err
}

// runtimeInterval is the time between two questions for the container runtime: it can be upgraded under a running agent.
const runtimeInterval = 5 * time.Minute

// refusalSettles is how long the API server must refuse until that counts as its answer. While it starts, it also refuses what it allows
// once it has read the roles.
const refusalSettles = 30 * time.Second

// awayRetry is the longest pause while the API server has never answered: devices wait for that.
const awayRetry = 5 * time.Second

// RuntimeConfig is whether a RuntimeFollower asks, and whom.
type RuntimeConfig struct {
	Needed     bool
	Kubeconfig string
}

// RuntimeOptions configure a RuntimeFollower. All fields are required.
type RuntimeOptions struct {
	Config *health.Latest[RuntimeConfig]
	Node   string // the node's name in Kubernetes
	// Answered is called with the runtime, or with why the Node cannot be read; away means that the API server did not answer, or has only
	// just started. After the first runtime, it is not called with an error: the last answer holds.
	Answered func(r Runtime, err error, away bool)
	Log      *zap.Logger
}

// RuntimeFollower asks the API server for the container runtime of the node, at once and then every few minutes.
type RuntimeFollower struct {
	RuntimeOptions
	open func(kubeconfig string) (*client, error)
	errs *ErrorLog

	// These belong to Run.
	current  currentClient
	known    bool
	refusing time.Time // since when the API server refuses; zero while it does not
	retry    backoff.Backoff
}

// NewRuntimeFollower returns a follower. It makes no request while none is needed.
func NewRuntimeFollower(o RuntimeOptions) *RuntimeFollower {
	return &RuntimeFollower{
		RuntimeOptions: o, open: connect, retry: newBackoff(),
		errs: NewErrorLog(o.Log, "cannot read the version of the container runtime",
			"read the version of the container runtime again", "a node named "+o.Node+", and a cluster role with get on nodes"),
	}
}

// Run asks until ctx ends.
func (f *RuntimeFollower) Run(ctx context.Context) error {
	for ctx.Err() == nil {
		cfg, changed := f.Config.Watch()
		pause := never
		if cfg != nil && cfg.Needed {
			pause = f.ask(ctx, cfg.Kubeconfig)
		}
		await(ctx, changed, pause)
	}
	return nil
}

// ask asks once, and returns after which time to ask again.
func (f *RuntimeFollower) ask(ctx context.Context, kubeconfig string) (pause time.Duration) {
	var r Runtime
	err := f.current.open(kubeconfig, f.open)
	configured := err == nil
	if configured {
		r, err = f.current.api.runtime(ctx, f.Node)
	}
	switch {
	case ctx.Err() != nil:
		return 0
	case err == nil:
		f.known = true
		f.retry.Reset()
		f.errs.Recovered()
		f.Answered(r, nil, false)
		return jitter(runtimeInterval)
	case !refused(err) || apierrors.IsTooManyRequests(err):
		f.refusing = time.Time{}
	case f.refusing.IsZero():
		f.refusing = time.Now()
	}
	f.errs.Report(err)
	away := configured && (f.refusing.IsZero() || time.Since(f.refusing) < refusalSettles)
	if !f.known {
		f.Answered(Runtime{}, err, away)
	}
	switch {
	case !away: // only a change of the cluster ends it
		f.retry.Max = slowRetry
	case f.known:
		f.retry.Max = maxBackoff
	default:
		f.retry.Max = awayRetry
	}
	return f.retry.Next()
}
