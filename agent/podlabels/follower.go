// Package podlabels follows the labels and UIDs of this node's pods, so that a scrape can show what
// metrics.podLabels and metrics.podUID ask for without asking anybody.
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
	Labels     metrics.PodLabels // none: nothing is followed, and the API server not asked
	Kubeconfig string            // "": the pod's service account
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

// picked is what there is to show of a pod.
type picked struct {
	labels []metrics.Label
	left   []string // keys of the labels that were too many
}

// Follower follows the pods' labels.
type Follower struct {
	Options
	open  func(kubeconfig string) (*rest.Config, error)
	known health.Latest[map[pod]picked]

	mu      sync.Mutex // guards all below
	status  Status
	tooMany bool // it was said, of this configuration, that a pod has too many labels
}

// New returns a follower, which does nothing while no label is configured.
func New(o Options) *Follower { return &Follower{Options: o, open: kube.Reach} }

// Labels returns those of a pod's labels that are to be shown and that it has, and its UID if that is to be shown,
// none if the pod is not known. The caller does not modify them.
func (f *Follower) Labels(namespace, name string) []metrics.Label {
	known := f.known.Load()
	if known == nil {
		return nil
	}
	p := (*known)[pod{namespace, name}]
	if len(p.left) > 0 { // only here: of the pods that hold no device, nobody misses a label
		f.sayTooMany(namespace+"/"+name, p.left)
	}
	return p.labels
}

// sayTooMany says once for each configuration that a pod's labels are not all shown.
func (f *Follower) sayTooMany(name string, left []string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if !f.tooMany {
		f.tooMany = true
		f.Log.Warn("more labels of a pod are like a pattern than can be shown; this is said of one pod only",
			zap.String("pod", name), zap.Strings("without", left), zap.String("key", "metrics.podLabels"))
	}
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
		f.status, f.tooMany = Status{Enabled: c != nil && c.Labels.Any()}, false
		f.mu.Unlock()
		f.known.Store(nil) // what is not configured any more is not shown, even if nobody answers
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
	t := &trouble{Follower: f, key: keyOf(c.Labels), said: make(map[metav1.StatusReason]bool)}
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
	cache.NewReflectorWithOptions(podsOf(ctx, client, f.Node, t), &metav1.PartialObjectMetadata{}, &store{f, metrics.NewPodPicker(c.Labels)}, cache.ReflectorOptions{
		Name: "pods", TypeDescription: "pods", Logger: &silent,
	}).RunWithContext(klog.NewContext(ctx, silent))
}

// keyOf is the key to name when it goes wrong.
func keyOf(l metrics.PodLabels) string {
	if len(l.Named) == 0 && len(l.Patterns) == 0 {
		return "metrics.podUID"
	}
	return "metrics.podLabels"
}

// store takes the pods from the reflector, and keeps of each what is to be shown.
type store struct {
	*Follower
	picker *metrics.PodPicker
}

// pick returns a pod and what there is to show of it.
func (s *store) pick(object any) (pod, picked, bool) {
	if gone, ok := object.(cache.DeletedFinalStateUnknown); ok {
		object = gone.Obj
	}
	m, ok := object.(*metav1.PartialObjectMetadata)
	if !ok {
		return pod{}, picked{}, false
	}
	labels, left := s.picker.Of(string(m.UID), m.Labels)
	return pod{m.Namespace, m.Name}, picked{labels, left}, true
}

// change stores a copy with a change: there are as many pods on a node as fit, which is few.
func (s *store) change(f func(map[pod]picked)) error {
	next := make(map[pod]picked)
	if known := s.known.Load(); known != nil {
		next = maps.Clone(*known)
	}
	f(next)
	s.known.Store(&next)
	return nil
}

func (s *store) Add(object any) error { return s.Update(object) }

func (s *store) Update(object any) error {
	name, p, ok := s.pick(object)
	if !ok {
		return nil
	}
	return s.change(func(known map[pod]picked) { known[name] = p })
}

func (s *store) Delete(object any) error {
	name, _, ok := s.pick(object)
	if !ok {
		return nil
	}
	return s.change(func(known map[pod]picked) { delete(known, name) })
}

func (s *store) Replace(objects []any, _ string) error {
	return s.change(func(known map[pod]picked) {
		clear(known)
		for _, o := range objects {
			if name, p, ok := s.pick(o); ok {
				known[name] = p
			}
		}
	})
}

func (s *store) Resync() error { return nil }
