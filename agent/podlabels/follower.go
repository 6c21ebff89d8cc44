// Package podlabels follows the labels and UIDs of this node's pods, so that a scrape can add what metrics.podLabels and
// metrics.podUID select without a request to the API server.
//
// It lists and watches the pods bound to this node, and only their metadata. While the API server is unreachable, the
// last known labels stay.
package podlabels

import (
	"context"
	"sync"
	"time"

	"github.com/go-logr/logr"
	"go.uber.org/zap"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/cache"
	"k8s.io/klog/v2"

	"github.com/gpu-node-agent/gpu-node-agent/agent/kube"
	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/health/wait"
	"github.com/gpu-node-agent/gpu-node-agent/metrics"
)

// Config selects what to follow. It is immutable.
type Config struct {
	Labels     metrics.PodLabels // if it selects nothing, the follower makes no requests
	Kubeconfig string            // "": the pod's service account
}

// Options configure a Follower. All fields are required.
type Options struct {
	Config *health.Latest[Config]
	Node   string // the node's name in Kubernetes
	Log    *zap.Logger
}

// Status is the state of the connection to the API server.
type Status struct {
	Enabled bool
	Up      bool   // the last request succeeded
	Err     string // of the last request; empty after success
	Pods    int    // the number of pods followed
}

// selection holds the UID and the selected labels of a pod.
type selection struct {
	pod     cache.ObjectName
	uid     string
	labels  []metrics.Label
	omitted []string // keys of the labels over the limit of a pattern
}

// Follower follows the pods' labels.
type Follower struct {
	Options
	open func(kubeconfig string) (*rest.Config, error)

	mu             sync.Mutex // guards all below
	pods           cache.Store
	status         Status
	omissionLogged bool // for this configuration
}

// New returns a follower. It does nothing while no label is configured.
func New(o Options) *Follower {
	return &Follower{Options: o, open: kube.RESTConfig, pods: newStore(metrics.PodLabels{})}
}

// Labels returns the selected labels of a pod, with its UID if that is selected, and nil for an unknown pod. The caller
// must not modify the result.
func (f *Follower) Labels(namespace, name string) []metrics.Label {
	object, ok, _ := f.store().GetByKey(cache.NewObjectName(namespace, name).String())
	if !ok {
		return nil
	}
	p := object.(selection)
	if len(p.omitted) > 0 { // logged here, because labels matter only for pods that hold a device
		f.logOmission(p.pod.String(), p.omitted)
	}
	return p.labels
}

// PodByUID returns the name of a pod; ok is false for an unknown pod, and for each while no label is selected.
func (f *Follower) PodByUID(uid string) (namespace, name string, ok bool) {
	for _, object := range f.store().List() {
		if s := object.(selection); s.uid == uid {
			return s.pod.Namespace, s.pod.Name, true
		}
	}
	return "", "", false
}

// logOmission logs the first pod of a configuration with too many labels.
func (f *Follower) logOmission(name string, omitted []string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if !f.omissionLogged {
		f.omissionLogged = true
		f.Log.Warn("too many labels of a pod match a pattern; further pods are not logged",
			zap.String("pod", name), zap.Strings("omitted", omitted), zap.String("key", "metrics.podLabels"))
	}
}

// Status returns the follower's status. It may be called from any goroutine.
func (f *Follower) Status() Status {
	f.mu.Lock()
	defer f.mu.Unlock()
	s := f.status
	s.Pods = len(f.pods.ListKeys())
	return s
}

func (f *Follower) store() cache.Store {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.pods
}

// retryInterval is how often a kubeconfig or service account that cannot be used is read again.
const retryInterval = 10 * time.Second

// Run follows the configuration and the pods until ctx ends.
func (f *Follower) Run(ctx context.Context) error {
	for ctx.Err() == nil {
		c, same, cancel := health.WatchPart(ctx, f.Config, func(c *Config) *Config { return c })
		var labels metrics.PodLabels
		if c != nil {
			labels = c.Labels
		}
		f.mu.Lock()
		f.status, f.omissionLogged = Status{Enabled: labels.Any()}, false
		f.pods = newStore(labels) // labels of the old configuration disappear even if the API server is unreachable
		f.mu.Unlock()
		if !labels.Any() {
			<-same.Done()
		} else {
			f.follow(same, *c)
		}
		cancel()
	}
	return nil
}

// follow follows the pods until ctx ends.
func (f *Follower) follow(ctx context.Context, c Config) {
	conn := newConnection(f, c)
	client, err := conn.open(c.Kubeconfig)
	for ; err != nil; client, err = conn.open(c.Kubeconfig) {
		conn.failed(err)
		if !wait.Sleep(ctx, retryInterval) {
			return
		}
	}
	silent := logr.Discard() // connection logs errors, each once
	cache.NewReflectorWithOptions(listWatch(ctx, client, f.Node, conn), &metav1.PartialObjectMetadata{}, f.store(), cache.ReflectorOptions{
		Name: "pods", TypeDescription: "pods", Logger: &silent,
	}).RunWithContext(klog.NewContext(ctx, silent))
}

// newStore returns a store that keeps a selection of each pod, by namespace/name.
func newStore(labels metrics.PodLabels) cache.Store {
	picker := metrics.NewPodPicker(labels)
	return cache.NewStore(cache.MetaNamespaceKeyFunc, cache.WithTransformer(func(object any) (any, error) {
		pod, err := meta.Accessor(object)
		if err != nil {
			return nil, err
		}
		labels, omitted := picker.Of(string(pod.GetUID()), pod.GetLabels())
		return selection{cache.MetaObjectToName(pod), string(pod.GetUID()), labels, omitted}, nil
	}))
}
