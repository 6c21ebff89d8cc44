// Package podlabels follows the labels of this node's pods, so that a scrape can show those that
// metrics.podLabels names without asking anybody.
//
// It lists and watches the pods that are bound to this node, and no others, and of those their metadata only.
// Nobody waits for the API server: while it is away, what it said last is shown.
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

// Config is what is followed. It is not modified.
type Config struct {
	Labels     []metrics.PodLabel // none: nothing is followed, and the API server not asked
	Kubeconfig string             // "": the pod's service account
}

// Options are what a Follower needs to know. All must be set.
type Options struct {
	Config *health.Latest[Config]
	Node   string // the Kubernetes name of this node
	Log    *zap.Logger
}

// Status is how it goes.
type Status struct {
	Enabled bool
	Up      bool   // what is shown is what the API server says
	Err     string // why it is not, in words; empty while there is nothing to say
	Pods    int    // that are followed
}

type pod struct{ namespace, name string }

// Follower follows the pods' labels.
type Follower struct {
	Options
	open  func(kubeconfig string) (*rest.Config, error)
	known health.Latest[map[pod][]metrics.Label]

	mu     sync.Mutex // guards status
	status Status
}

// New returns a follower, which does nothing while no label is configured.
func New(o Options) *Follower { return &Follower{Options: o, open: kube.Reach} }

// Labels returns those of a pod's labels that are to be shown and that it has, in the order of the configuration,
// none if the pod is not known. The caller does not modify them.
func (f *Follower) Labels(namespace, name string) []metrics.Label {
	known := f.known.Load()
	if known == nil {
		return nil
	}
	return (*known)[pod{namespace, name}]
}

// Status may be called from any goroutine.
func (f *Follower) Status() Status {
	f.mu.Lock()
	s := f.status
	f.mu.Unlock()
	if known := f.known.Load(); known != nil {
		s.Pods = len(*known)
	}
	return s
}

// retryAfter is how long to wait for what tells how to reach the API server: a file of the node.
const retryAfter = 10 * time.Second

// Run follows the configuration and the pods until ctx ends.
func (f *Follower) Run(ctx context.Context) error {
	for ctx.Err() == nil {
		c, same, cancel := health.While(ctx, f.Config, func(c *Config) *Config { return c })
		f.mu.Lock()
		f.status = Status{Enabled: c != nil && len(c.Labels) > 0}
		f.mu.Unlock()
		f.known.Store(nil) // what is not configured any more is not shown, even if nobody answers
		if c == nil || len(c.Labels) == 0 {
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
	t := &trouble{Follower: f, said: make(map[metav1.StatusReason]bool)}
	client, err := t.connect(c.Kubeconfig)
	for ; err != nil; client, err = t.connect(c.Kubeconfig) {
		t.say(err)
		select {
		case <-ctx.Done():
			return
		case <-time.After(retryAfter):
		}
	}
	silent := logr.Discard() // what goes wrong is said by trouble, once
	cache.NewReflectorWithOptions(podsOf(ctx, client, f.Node, t), &metav1.PartialObjectMetadata{}, &store{f, c.Labels}, cache.ReflectorOptions{
		Name: "pods", TypeDescription: "pods", Logger: &silent,
	}).RunWithContext(klog.NewContext(ctx, silent))
}

// store takes the pods from the reflector, and keeps of each what is to be shown.
type store struct {
	*Follower
	labels []metrics.PodLabel
}

// shown returns a pod and its labels.
func (s *store) shown(object any) (pod, []metrics.Label, bool) {
	if gone, ok := object.(cache.DeletedFinalStateUnknown); ok {
		object = gone.Obj
	}
	m, ok := object.(*metav1.PartialObjectMetadata)
	if !ok {
		return pod{}, nil, false
	}
	labels := make([]metrics.Label, 0, len(s.labels))
	for _, l := range s.labels {
		if value, has := m.Labels[l.Key]; has {
			labels = append(labels, metrics.Label{Name: l.Name, Value: value})
		}
	}
	return pod{m.Namespace, m.Name}, labels, true
}

// change stores a copy with a change: there are as many pods on a node as fit, which is few.
func (s *store) change(f func(map[pod][]metrics.Label)) error {
	next := make(map[pod][]metrics.Label)
	if known := s.known.Load(); known != nil {
		next = maps.Clone(*known)
	}
	f(next)
	s.known.Store(&next)
	return nil
}

func (s *store) Add(object any) error { return s.Update(object) }

func (s *store) Update(object any) error {
	name, labels, ok := s.shown(object)
	if !ok {
		return nil
	}
	return s.change(func(known map[pod][]metrics.Label) { known[name] = labels })
}

func (s *store) Delete(object any) error {
	name, _, ok := s.shown(object)
	if !ok {
		return nil
	}
	return s.change(func(known map[pod][]metrics.Label) { delete(known, name) })
}

func (s *store) Replace(objects []any, _ string) error {
	return s.change(func(known map[pod][]metrics.Label) {
		clear(known)
		for _, o := range objects {
			if name, labels, ok := s.shown(o); ok {
				known[name] = labels
			}
		}
	})
}

func (s *store) Resync() error { return nil }
