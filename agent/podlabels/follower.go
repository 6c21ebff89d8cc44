// Package podlabels follows the labels and UIDs of this node's pods, so that a scrape can add what metrics.podLabels and
// metrics.podUID select without a request to the API server.
//
// It lists and watches the pods bound to this node, and only their metadata. While the API server is unreachable, the
// last known labels stay.
package podlabels

import (
	"context"
	"maps"
	"sync"
	"time"

	"github.com/go-logr/logr"
	"go.uber.org/zap"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/cache"
	"k8s.io/klog/v2"

	"github.com/gpu-node-agent/gpu-node-agent/agent/kube"
	"github.com/gpu-node-agent/gpu-node-agent/health"
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

type podName struct{ namespace, name string }

// selection holds the UID and the selected labels of a pod.
type selection struct {
	uid     string
	labels  []metrics.Label
	omitted []string // keys of the labels over the limit of a pattern
}

// Follower follows the pods' labels.
type Follower struct {
	Options
	open func(kubeconfig string) (*rest.Config, error)
	pods health.Latest[map[podName]selection]

	mu             sync.Mutex // guards all below
	status         Status
	omissionLogged bool // for this configuration
}

// New returns a follower. It does nothing while no label is configured.
func New(o Options) *Follower { return &Follower{Options: o, open: kube.RESTConfig} }

// Labels returns the selected labels of a pod, with its UID if that is selected, and nil for an unknown pod. The caller
// must not modify the result.
func (f *Follower) Labels(namespace, name string) []metrics.Label {
	pods := f.pods.Load()
	if pods == nil {
		return nil
	}
	p := (*pods)[podName{namespace, name}]
	if len(p.omitted) > 0 { // logged here, because labels matter only for pods that hold a device
		f.logOmission(namespace+"/"+name, p.omitted)
	}
	return p.labels
}

// PodByUID returns the name of a pod; ok is false for an unknown pod, and for each while no label is selected.
func (f *Follower) PodByUID(uid string) (namespace, name string, ok bool) {
	pods := f.pods.Load()
	if pods == nil {
		return "", "", false
	}
	for pod, s := range *pods {
		if s.uid == uid {
			return pod.namespace, pod.name, true
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
	s := f.status
	f.mu.Unlock()
	if pods := f.pods.Load(); pods != nil {
		s.Pods = len(*pods)
	}
	return s
}

// retryInterval is how often a kubeconfig or service account that cannot be used is read again.
const retryInterval = 10 * time.Second

// Run follows the configuration and the pods until ctx ends.
func (f *Follower) Run(ctx context.Context) error {
	for ctx.Err() == nil {
		c, same, cancel := health.WatchPart(ctx, f.Config, func(c *Config) *Config { return c })
		f.mu.Lock()
		f.status, f.omissionLogged = Status{Enabled: c != nil && c.Labels.Any()}, false
		f.mu.Unlock()
		f.pods.Store(nil) // labels of the old configuration disappear even if the API server is unreachable
		if c == nil || !c.Labels.Any() {
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
		select {
		case <-ctx.Done():
			return
		case <-time.After(retryInterval):
		}
	}
	silent := logr.Discard() // connection logs errors, each once
	cache.NewReflectorWithOptions(listWatch(ctx, client, f.Node, conn), &metav1.PartialObjectMetadata{}, &store{f, metrics.NewPodPicker(c.Labels)}, cache.ReflectorOptions{
		Name: "pods", TypeDescription: "pods", Logger: &silent,
	}).RunWithContext(klog.NewContext(ctx, silent))
}

// store is the reflector's store. It keeps the selected labels of each pod.
type store struct {
	*Follower
	picker *metrics.PodPicker
}

// update stores a copy in which a pod is changed. A node has few pods, so a copy per change is cheap.
func (s *store) update(object any, change func(map[podName]selection, *metav1.PartialObjectMetadata)) error {
	if pod, ok := object.(*metav1.PartialObjectMetadata); ok {
		next := make(map[podName]selection)
		if pods := s.pods.Load(); pods != nil {
			maps.Copy(next, *pods)
		}
		change(next, pod)
		s.pods.Store(&next)
	}
	return nil
}

// put adds or replaces a pod's selected labels.
func (s *store) put(pods map[podName]selection, pod *metav1.PartialObjectMetadata) {
	labels, omitted := s.picker.Of(string(pod.UID), pod.Labels)
	pods[podName{pod.Namespace, pod.Name}] = selection{string(pod.UID), labels, omitted}
}

func (s *store) Add(object any) error    { return s.update(object, s.put) }
func (s *store) Update(object any) error { return s.update(object, s.put) }

func (s *store) Delete(object any) error {
	return s.update(object, func(pods map[podName]selection, pod *metav1.PartialObjectMetadata) {
		delete(pods, podName{pod.Namespace, pod.Name})
	})
}

func (s *store) Replace(objects []any, _ string) error {
	next := make(map[podName]selection)
	for _, o := range objects {
		if pod, ok := o.(*metav1.PartialObjectMetadata); ok {
			s.put(next, pod)
		}
	}
	s.pods.Store(&next)
	return nil
}

func (s *store) Resync() error { return nil }
