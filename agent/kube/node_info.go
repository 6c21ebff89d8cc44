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

// refusalSettles is how long the API server must refuse until that counts as its answer. One that starts refuses what it will allow when it has read
// the roles.
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
	// Answered is called with the runtime, or with why the Node cannot be read; away means that the API server did not answer, or has only just
	// started. After the first runtime, it is not called with an error: the last answer holds.
	Answered func(r Runtime, err error, away bool)
	Log      *zap.Logger
}

// RuntimeFollower asks the API server for the container runtime of the node, at once and then every few minutes.
type RuntimeFollower struct {
	RuntimeOptions
	open func(kubeconfig string) (*client, error)
}

// NewRuntimeFollower returns a follower. It makes no request while none is needed.
func NewRuntimeFollower(o RuntimeOptions) *RuntimeFollower { return &RuntimeFollower{o, connect} }

// Run asks until ctx ends.
func (f *RuntimeFollower) Run(ctx context.Context) error {
	var current currentClient
	var pauses backoff
	var known bool
	var refusing time.Time // since when; zero while it does not
	errs := NewErrorLog(f.Log, "cannot read the version of the container runtime", "read the version of the container runtime again",
		"a node named "+f.Node+", and a cluster role with get on nodes")
	for ctx.Err() == nil {
		cfg, changed := f.Config.Watch()
		pause := time.Duration(-1)
		if cfg != nil && cfg.Needed {
			err := current.open(cfg.Kubeconfig, f.open)
			configured := err == nil
			var r Runtime
			if configured {
				r, err = current.api.runtime(ctx, f.Node)
			}
			switch {
			case ctx.Err() != nil: // the error is that
			case err == nil:
				known, pauses, pause = true, backoff{}, jitter(runtimeInterval)
				errs.Recovered()
				f.Answered(r, nil, false)
			default:
				errs.Report(err)
				if !refused(err) || apierrors.IsTooManyRequests(err) {
					refusing = time.Time{}
				} else if refusing.IsZero() {
					refusing = time.Now()
				}
				away := configured && (refusing.IsZero() || time.Since(refusing) < refusalSettles)
				if !known {
					f.Answered(Runtime{}, err, away)
				}
				switch pause = pauses.next(); {
				case !away && pause == maxBackoff: // only a change of the cluster ends it
					pause = slowRetry
				case away && !known:
					pause = min(pause, awayRetry)
				}
				pause = jitter(pause)
			}
		}
		wait(ctx, changed, pause)
	}
	return nil
}
