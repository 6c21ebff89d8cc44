// Package kube says in Kubernetes' own words what the health judge thinks: a condition of the node, and
// events on the node and on the pods that hold a device.
//
//	Snapshot ─► conditionOf ─► Latest ─► writer ─► PATCH nodes/status
//	        └─► happenings ──► queue ──► poster ─► POST, PATCH events
//
// What is said is pure: condition.go and happening.go. Nobody waits for the API server: while it is away
// the newest condition and a bounded number of events are kept.
//
// It and agent/podlabels alone import client-go, and take of it what is hard to get right: how to reach and trust
// the API server, tokens that change, and what an error means. The typed clients would bring every API
// group with them, which is more code than all of the agent; the three objects that are spoken of here are
// in client.go.
package kube

import (
	"context"
	"sync"
	"time"

	"github.com/go-logr/logr/funcr"
	"go.uber.org/zap"
	"k8s.io/klog/v2"

	"github.com/gpu-node-agent/gpu-node-agent/health"
)

// Pod names a pod.
type Pod struct{ Namespace, Name string }

// Options are what a Reporter needs to know. All but Remembered must be set.
type Options struct {
	Config    *health.Latest[health.Config]
	Snapshots *health.Latest[health.Snapshot]
	Node      string // the Kubernetes name of this node
	// Holders returns the pods that hold a device now. It is called for every event and must not wait.
	Holders func(health.DeviceID) []Pod
	// Remembered is what an earlier process knew: events tell what has changed since.
	Remembered []health.DeviceState
	Log        *zap.Logger
}

// Reporter keeps a node's condition and writes events.
type Reporter struct {
	Options
	open   func(kubeconfig string) (*client, error)
	wanted health.Latest[state]
	queue  *queue
	before []health.DeviceState // what events were told of last; Run's own

	mu     sync.Mutex // guards status
	status Status
}

// Status is what the reporter has done since the process started.
type Status struct {
	Enabled   bool
	Writes    uint64 // of the condition
	Events    uint64 // written, a repeated one each time that its count was raised
	Dropped   uint64 // events that were given up
	Errors    uint64 // refused or failed requests
	Condition string // why the condition could not be written last, in words; empty if it could
	Event     string // the same for the last event
}

// New returns a reporter, which does nothing while health.kubernetes.enabled is false.
func New(o Options) *Reporter {
	return &Reporter{Options: o, open: connect, queue: newQueue(), before: o.Remembered}
}

// Status may be called from any goroutine.
func (r *Reporter) Status() Status {
	r.mu.Lock()
	defer r.mu.Unlock()
	s := r.status
	s.Dropped += r.queue.lost()
	return s
}

func (r *Reporter) count(f func(*Status)) {
	r.mu.Lock()
	defer r.mu.Unlock()
	f(&r.status)
}

// Run reports until ctx ends. The condition then stays as it is: the next process goes on with it.
func (r *Reporter) Run(ctx context.Context) error {
	// client-go has no other way to say that it cannot read its token.
	klog.SetLogger(funcr.New(func(_, text string) { r.Log.Warn("client-go: " + text) }, funcr.Options{}))
	for ctx.Err() == nil {
		c, same, cancel := health.While(ctx, r.Config, func(c *health.Config) health.KubernetesConfig { return c.Kubernetes })
		r.count(func(s *Status) {
			*s = Status{Enabled: c.Enabled, Writes: s.Writes, Events: s.Events, Dropped: s.Dropped, Errors: s.Errors}
		})
		if !c.Enabled {
			<-same.Done()
			cancel()
			if s := r.Snapshots.Load(); s.Polled() { // what happened meanwhile is not told later
				r.before = s.Devices
			}
			continue
		}
		api := r.report(same, c.Kubeconfig)
		cancel()
		if api != nil && ctx.Err() == nil && !r.Config.Load().Kubernetes.Enabled {
			r.withdraw(ctx, api)
		}
	}
	return nil
}

// report follows the snapshots and tells the API server until ctx ends. It returns how to reach it, nil if
// that was never known.
func (r *Reporter) report(ctx context.Context, kubeconfig string) *client {
	var parts sync.WaitGroup
	defer parts.Wait()
	parts.Go(func() { r.follow(ctx) })

	trouble := newTrouble(r.Log, "the condition and events", "how to reach the API server")
	api, err := r.open(kubeconfig)
	for pause := (backoff{}); err != nil; api, err = r.open(kubeconfig) {
		trouble.say(err)
		r.count(func(s *Status) { s.Errors, s.Condition, s.Event = s.Errors+1, err.Error(), err.Error() })
		if !pause.wait(ctx) {
			return nil
		}
	}
	parts.Go(func() { r.runWriter(ctx, api) })
	parts.Go(func() { r.runPoster(ctx, api) })
	return api
}

// follow turns snapshots into what is to be said. It talks to nobody, so it misses nothing.
func (r *Reporter) follow(ctx context.Context) {
	for {
		s, changed := r.Snapshots.Watch()
		now := time.Now()
		if next, known := conditionOf(s); known {
			was := r.wanted.Load()
			if next.since = now; was != nil && was.status == next.status {
				next.since = was.since
			}
			if was == nil || *was != next {
				r.wanted.Store(&next)
			}
		}
		if s.Polled() {
			for _, h := range happenings(r.before, s.Devices, r.Node, r.Holders, now) {
				r.queue.add(h)
			}
			r.before = s.Devices
		}
		select {
		case <-ctx.Done():
			return
		case <-changed:
		}
	}
}
