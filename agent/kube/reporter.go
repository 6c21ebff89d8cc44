// Package kube reports GPU health to the Kubernetes API server: a condition of the node, and events on the node and on
// the pods that hold a device.
//
//	Snapshot ─► conditionOf ───► Latest ──► conditionWriter ─► PATCH nodes/status
//	        └─► eventsBetween ─► eventQueue ─► eventWriter ──► POST, PATCH events
//	idle times ─────────────────────────────► idleWriter ───►
//
// condition.go and event.go are pure. While the API server is unreachable, the reporter keeps the newest condition and a
// limited number of events; no other part of the agent waits.
//
// client-go does what is hard to get right: addresses and certificates, token rotation, error classes. Its EventBroadcaster
// is not used: it gives an event up after twelve attempts, and the queue keeps one for an hour.
package kube

import (
	"context"
	"strings"
	"sync"
	"time"

	"github.com/go-logr/logr/funcr"
	"go.uber.org/zap"
	"k8s.io/klog/v2"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/health/judge"
)

// CaptureLog sends client-go's log to log: only there it reports that it cannot read the service account's token. Call it before any client
// is opened: klog does not lock its logger.
func CaptureLog(log *zap.Logger) {
	klog.SetLogger(funcr.New(func(_, text string) { log.Warn("client-go: " + text) }, funcr.Options{}))
}

// Pod names a pod.
type Pod struct{ Namespace, Name string }

// Options configure a Reporter. All fields but Idle and Saved are required.
type Options struct {
	Config    *health.Latest[judge.Config]
	Snapshots *health.Latest[health.Snapshot]
	Node      string // the node's name in Kubernetes
	// Holders returns the pods that hold a device now. The reporter calls it for every event; it must not block.
	Holders func(health.DeviceID) []Pod
	// Unschedulable describes the free devices that no new pod can get now, one text for each resource. It must not block.
	Unschedulable func() (texts []string, known bool)
	// Idle returns the pods that do not use their devices, nil if no pod is reported. It must not block.
	Idle func() IdlePods
	// Saved holds the devices of the saved state. Events report what has changed since.
	Saved []health.DeviceState
	Log   *zap.Logger
}

// Reporter writes a node's condition and events.
type Reporter struct {
	Options
	open     func(kubeconfig string) (*client, error)
	desired  health.Latest[conditionState]
	queue    *eventQueue
	reported []health.DeviceState // the devices up to whose state events were queued; only Run uses it

	mu     sync.Mutex // guards status
	status Status
}

// Status counts what the reporter did since the process started.
type Status struct {
	Enabled      bool
	Writes       uint64 // of the condition
	Events       uint64 // written, including each update of an event's count
	Dropped      uint64 // events that were not written: too many, too old or refused
	Errors       uint64 // failed requests
	ConditionErr string // of the last write of the condition; empty after success
	EventErr     string // of the last write of an event; empty after success

	IdleEnabled bool   // idle pods are reported
	IdleErr     string // of the last event of an idle pod; empty after success
}

// On reports whether the condition and events, or idle pods, are reported.
func (s *Status) On() bool { return s.Enabled || s.IdleEnabled }

// New returns a reporter. While health.kubernetes.enabled is false, it reports idle pods only.
func New(o Options) *Reporter {
	return &Reporter{Options: o, open: connect, queue: newEventQueue(), reported: o.Saved}
}

// Report queues an event of the node, which may be from before the process started: it is written once, however many processes report it.
// It may be called from any goroutine and never waits.
func (r *Reporter) Report(e NodeEvent) {
	if time.Since(e.At) < eventTTL {
		r.queue.add(e.event(r.Node))
	}
}

// Status returns the reporter's counts. It may be called from any goroutine.
func (r *Reporter) Status() Status {
	r.mu.Lock()
	defer r.mu.Unlock()
	s := r.status
	s.Dropped += r.queue.droppedCount()
	return s
}

func (r *Reporter) updateStatus(f func(*Status)) {
	r.mu.Lock()
	defer r.mu.Unlock()
	f(&r.status)
}

// Run reports until ctx ends. The condition then stays on the node, and the next process continues it.
func (r *Reporter) Run(ctx context.Context) error {
	var parts sync.WaitGroup
	defer parts.Wait()
	parts.Go(func() { r.runIdleWriter(ctx) })
	for ctx.Err() == nil {
		c, same, cancel := health.WatchPart(ctx, r.Config, func(c *judge.Config) judge.KubernetesConfig { return c.Kubernetes })
		r.updateStatus(func(s *Status) { s.Enabled, s.ConditionErr, s.EventErr = c.Enabled, "", "" })
		if !c.Enabled {
			<-same.Done()
			cancel()
			if s := r.Snapshots.Load(); s.Polled() { // changes while disabled cause no events later
				r.reported = s.Devices
			}
			continue
		}
		r.report(same, c.Kubeconfig)
		cancel()
		if !r.Config.Load().Kubernetes.Enabled {
			r.desired.Store(nil) // NodeWriter removes the condition
		}
	}
	return nil
}

// report follows the snapshots and writes to the API server until ctx ends.
func (r *Reporter) report(ctx context.Context, kubeconfig string) {
	var parts sync.WaitGroup
	defer parts.Wait()
	parts.Go(func() { r.followSnapshots(ctx) })

	errs := NewErrorLog(r.Log, "cannot configure access to the API server", "", "a kubeconfig file or a service account")
	retry := newBackoff()
	api, err := r.open(kubeconfig)
	for ; err != nil; api, err = r.open(kubeconfig) {
		errs.Report(err)
		r.updateStatus(func(s *Status) { s.Errors, s.ConditionErr, s.EventErr = s.Errors+1, err.Error(), err.Error() })
		if !retry.Wait(ctx) {
			return
		}
	}
	parts.Go(func() { r.runConditionWriter(ctx, api) })
	parts.Go(func() { r.runEventWriter(ctx, api) })
}

// holdersDelay is how long the first condition waits for the holders. Otherwise each restart would remove the pods from the
// message and add them again.
const holdersDelay = 5 * time.Second

// followSnapshots derives the desired condition and the events. It makes no requests, so it sees every change.
func (r *Reporter) followSnapshots(ctx context.Context) {
	for started := time.Now(); ; {
		s, changed := r.Snapshots.Watch()
		now := time.Now()
		before := r.desired.Load()
		lost, known := r.Unschedulable()
		var retry <-chan time.Time
		switch next, ok := conditionOf(s); {
		case !ok:
		case !known && before == nil && now.Sub(started) < holdersDelay:
			retry = time.After(settleDelay)
		default:
			if len(lost) > 0 {
				next.addLost(strings.Join(lost, "; "))
			}
			if next.since = now; before != nil && before.status == next.status {
				next.since = before.since
			}
			if before == nil || *before != next {
				r.desired.Store(&next)
			}
		}
		if s.Polled() {
			for _, e := range eventsBetween(r.reported, s.Devices, r.Node, r.Holders, now) {
				r.queue.add(e)
			}
			r.reported = s.Devices
		}
		select {
		case <-ctx.Done():
			return
		case <-changed:
		case <-retry:
		}
	}
}
