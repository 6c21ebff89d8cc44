package kube

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"reflect"
	"strings"
	"sync"
	"time"

	"go.uber.org/zap"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/health/backoff"
	"github.com/gpu-node-agent/gpu-node-agent/health/wait"
)

// NodeState is what the API server must have of the node. Labels, Feature and Taints are independent. A nil one is not configured or not
// known yet, and the API server keeps what it has. An empty one is removed. A NodeState is not modified once stored.
type NodeState struct {
	Labels  map[string]string // of the node
	Feature map[string]string // of the node's NodeFeature, an object of Node Feature Discovery

	RemoveCondition bool // the condition is no longer reported, but may exist

	StartupTaint *corev1.Taint  // to remove once OffersAll; nil for none
	OffersAll    bool           // every device is offered to pods
	Taints       []corev1.Taint // to set; the agent's others are removed, except Undecided
	Undecided    []corev1.Taint // configured, but it is unknown whether the node must have them: they stay as they are
}

// NodeOptions configure a NodeWriter. All fields are required.
type NodeOptions struct {
	Desired    *health.Latest[NodeState]
	Written    *health.Latest[NodeState] // the newest of Desired that the API server has in full; the writer stores the same pointer
	Kubeconfig func() string
	Node       string // the node's name in Kubernetes
	Namespace  string // of the NodeFeature; "" if it is unknown
	Log        *zap.Logger
}

// NodeStatus counts what the writer did since the process started.
type NodeStatus struct {
	Enabled    bool   // there is something to write, or to remove
	Writes     uint64 // of labels and taints
	Errors     uint64 // failed requests, except refused removals of what is left
	LabelsErr  string // why the node's labels are not as desired; empty if they are
	FeatureErr string // why the NodeFeature is not
	TaintsErr  string // why the taints are not

	ConditionErr string // why the condition may still exist, although it is no longer reported

	// What earlier agents may have written and this one has no right to remove.
	LabelsLeft, FeatureLeft, TaintsLeft, ConditionLeft bool

	AbsentStartupTaint corev1.Taint // the startup taint that the newest check removed, or did not find; zero before such a check
}

// Leftovers names what earlier agents may have left: labels, nodefeature, taints, condition.
func (s NodeStatus) Leftovers() (kinds []string) {
	for _, part := range []struct {
		kind string
		left bool
	}{{"labels", s.LabelsLeft}, {"nodefeature", s.FeatureLeft}, {"taints", s.TaintsLeft}, {"condition", s.ConditionLeft}} {
		if part.left {
			kinds = append(kinds, part.kind)
		}
	}
	return kinds
}

// NodeWriter writes the labels and taints of the node, and removes the condition when it is no longer reported.
//
//	NodeState ─► Latest ─┬─► node_labels.go ──► PATCH nodes, server-side apply
//	                     ├─► node_feature.go ─► POST, PUT, DELETE nodefeatures
//	                     ├─► node_taints.go ──► PATCH nodes, with the resource version that was read
//	                     └─► conditionPart ───► PATCH nodes/status
//
// Each part is read before it is written, again soon after, and then every few minutes, so that edits of others are corrected. There is no
// watch: it would be a connection for each node, and for labels that nobody edits.
type NodeWriter struct {
	NodeOptions
	open func(kubeconfig string) (*client, error)

	// These belong to Run.
	current currentClient
	parts   []*nodePart

	mu     sync.Mutex // guards status
	status NodeStatus
}

// NewNodeWriter returns a writer. It makes no request while nothing is desired.
func NewNodeWriter(o NodeOptions) *NodeWriter {
	w := &NodeWriter{NodeOptions: o, open: connect}
	const nodeRights = "a node named %, and a cluster role with get and patch on nodes"
	w.parts = []*nodePart{
		w.newPart(&w.status.LabelsErr, &w.status.LabelsLeft, "the node's labels", nodeRights, (&labelsWriter{NodeWriter: w}).part()),
		w.newPart(&w.status.FeatureErr, &w.status.FeatureLeft, "the NodeFeature",
			"the API nfd.k8s-sigs.io/v1alpha1 of Node Feature Discovery, a cluster role with get on nodes, and a role with get, create, "+
				"update and delete on nodefeatures", (&featureWriter{NodeWriter: w}).part()),
		w.newPart(&w.status.TaintsErr, &w.status.TaintsLeft, "the node's taints", nodeRights, (&taintsWriter{NodeWriter: w}).part()),
		w.newPart(&w.status.ConditionErr, &w.status.ConditionLeft, "the node's condition", "a cluster role with patch on nodes/status",
			w.conditionPart()),
	}
	return w
}

// Status returns the writer's counts. It may be called from any goroutine.
func (w *NodeWriter) Status() NodeStatus {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.status
}

func (w *NodeWriter) updateStatus(f func(*NodeStatus)) {
	w.mu.Lock()
	defer w.mu.Unlock()
	f(&w.status)
}

// countWrite counts a write.
func (w *NodeWriter) countWrite() { w.updateStatus(func(s *NodeStatus) { s.Writes++ }) }

// removeTimeout limits the last attempt to remove labels, after the process was told to stop. All components together have a few seconds.
const removeTimeout = 2 * time.Second

// Run writes until ctx ends. What the API server has then stays, except for what is to be removed: that is tried once more.
func (w *NodeWriter) Run(ctx context.Context) error {
	for ctx.Err() == nil {
		desired, changed := w.Desired.Watch()
		next := never
		if desired != nil {
			next = w.step(ctx, desired, false)
		}
		var due <-chan time.Time
		if next >= 0 {
			due = time.After(next)
		}
		select {
		case <-ctx.Done():
		case <-due:
		case <-changed:
			wait.Sleep(ctx, settleDelay)
		}
	}
	last, cancel := context.WithTimeout(context.WithoutCancel(ctx), removeTimeout)
	defer cancel()
	if desired := w.Desired.Load(); desired != nil {
		w.step(last, desired, true)
	}
	return nil
}

// step writes what is due, and returns after which time something is due again, negative for never. The last step only removes.
func (w *NodeWriter) step(ctx context.Context, desired *NodeState, last bool) (next time.Duration) {
	next, enabled, complete := never, desired.StartupTaint != nil, true
	for _, p := range w.parts {
		want := p.of(desired)
		enabled = enabled || !want.stays()
		if last && !want.removes {
			continue
		}
		d, done := p.step(ctx, desired, want, last)
		complete = complete && done
		if d >= 0 && (next < 0 || d < next) {
			next = d
		}
	}
	w.updateStatus(func(s *NodeStatus) { s.Enabled = enabled })
	if complete && !last && w.Written.Load() != desired {
		w.Written.Store(desired)
	}
	return next
}

// client returns a client for the current kubeconfig file.
func (w *NodeWriter) client() (*client, error) {
	if err := w.current.open(w.Kubeconfig(), w.open); err != nil {
		return nil, err
	}
	return w.current.api, nil
}

// desiredPart is a part of a NodeState.
type desiredPart struct {
	value   any  // for comparison; nil: what the API server has stays
	removes bool // nothing is to be left of the part
}

func (d desiredPart) stays() bool { return d.value == nil }

// partWriter writes a part.
type partWriter struct {
	of func(*NodeState) desiredPart
	// write reads what the API server has and changes what differs. changed is false if the desired part was written before: then the call
	// checks what others have done to it. warning describes what was left out.
	write func(ctx context.Context, api *client, s *NodeState, changed bool) (warning string, err error)
	// interval returns the time between two checks of a part that has been desired since a time; nil for checkInterval.
	interval func(s *NodeState, since time.Time) time.Duration
}

// nodePart is a part that is retried by itself, so that a missing right or API delays no other part.
type nodePart struct {
	partWriter
	writer *NodeWriter
	err    *string // NodeStatus.LabelsErr or another; guarded by the writer's mutex, as isLeft
	isLeft *bool   // NodeStatus.LabelsLeft or another
	rights string
	errs   *ErrorLog
	left   *ErrorLog // while isLeft

	desired  any       // the newest desired part
	since    time.Time // of desired
	written  any       // the desired part that the API server has; nil if there is none
	earliest time.Time // the next request
	checkAt  time.Time // when written is checked; zero for never
	lateEnd  time.Time // until then the API server may commit a request that failed
	retry    backoff.Backoff
	warning  string // of the last write
}

const (
	// minInterval is the least time between two writes of a part. A GPU that flaps must not keep the API server busy.
	minInterval = 5 * time.Second

	// minCheckInterval is the time until what was written is checked first.
	minCheckInterval = 30 * time.Second

	// slowRetry is the pause after an error that only a change of the cluster can end, such as a missing API.
	slowRetry = 5 * time.Minute

	// lateWindow is how long after an error without an answer the API server may still commit the request. It gives up a request after
	// --request-timeout, 1 minute by default.
	lateWindow = 2 * time.Minute
)

// permanentError is an error that only a change of the cluster can end.
type permanentError struct{ error }

func (e permanentError) Unwrap() error { return e.error }

func (w *NodeWriter) newPart(err *string, isLeft *bool, what, rights string, p partWriter) *nodePart {
	rights = strings.ReplaceAll(rights, "%", w.Node)
	return &nodePart{
		partWriter: p, writer: w, err: err, isLeft: isLeft, rights: rights, retry: newBackoff(),
		errs: NewErrorLog(w.Log, "cannot write "+what, "wrote "+what+" again", rights),
		left: NewErrorLog(w.Log, "earlier agents may have left "+what+", and this one has no right to remove them", "nothing is left of "+what,
			CleanupCommand),
	}
}

// step writes the part if it is due. It returns when it is due again, negative for never, and whether the API server has it.
func (p *nodePart) step(ctx context.Context, s *NodeState, want desiredPart, last bool) (next time.Duration, done bool) {
	if *p.isLeft && !want.removes {
		p.setLeft(false)
		p.left.Forget()          // nobody has looked whether something is left
		p.earliest = time.Time{} // what is configured now does not wait for slowRetry
	}
	if want.stays() {
		p.desired, p.written, p.warning = nil, nil, ""
		p.retry.Reset()
		p.setError("")
		return never, true
	}
	if !reflect.DeepEqual(want.value, p.desired) {
		p.desired, p.since = want.value, time.Now()
	}
	changed := !reflect.DeepEqual(want.value, p.written)
	if !changed && p.checkAt.IsZero() {
		return never, true
	}
	due := p.checkAt
	if changed || due.Before(p.earliest) {
		due = p.earliest
	}
	if d := time.Until(due); d > 0 && !last {
		return d, !changed && !want.removes // what was removed may come back while it is still checked
	}
	api, err := p.writer.client()
	var warning string
	if err == nil {
		warning, err = p.write(ctx, api, s, changed)
	}
	now := time.Now()
	switch {
	case err == nil:
		p.written = want.value
		p.retry.Reset()
		p.earliest, p.checkAt = now.Add(minInterval), now.Add(jitter(p.nextCheck(s)))
		p.errs.Recovered()
		p.left.Recovered()
		p.setLeft(false)
		p.setError(warning)
		p.logWarning(warning)
		if want.removes {
			if p.checkAt = p.lateEnd; !now.Before(p.lateEnd) {
				p.checkAt = time.Time{} // others do not add what is the agent's
				return never, true
			}
		}
		return p.checkAt.Sub(now), !want.removes
	case ctx.Err() != nil:
		return 0, false
	}
	if !refused(err) {
		p.lateEnd = now.Add(lateWindow)
	}
	pause := p.retry.Next()
	left := want.removes && (apierrors.IsForbidden(err) || errors.Is(err, errNoAccount))
	if _, permanent := errors.AsType[permanentError](err); permanent || left {
		pause = jitter(slowRetry)
	}
	p.earliest = now.Add(pause)
	p.written = nil // what the API server has is unknown
	p.setLeft(left)
	if left {
		p.left.Report(err)
		p.setError(fmt.Sprintf("earlier agents may have left some, and this one has no right to remove them: %s; this removes them: %s",
			p.describe(err), CleanupCommand))
		return p.earliest.Sub(now), false
	}
	p.errs.Report(err)
	p.writer.updateStatus(func(s *NodeStatus) { s.Errors++ })
	p.setError(p.describe(err))
	return p.earliest.Sub(now), false
}

// refused reports whether the API server has answered that it did not do what was asked.
func refused(err error) bool {
	status, ok := errors.AsType[*apierrors.StatusError](err)
	return ok && status.ErrStatus.Code >= 400 && status.ErrStatus.Code < 500
}

func (p *nodePart) nextCheck(s *NodeState) time.Duration {
	if p.interval == nil {
		return checkInterval(p.since)
	}
	return p.interval(s, p.since)
}

// checkInterval returns the time between two checks of what has been desired since a time. It grows, because others who remove something do
// so soon: an agent that ends beside this one, or Node Feature Discovery after a change of the output.
func checkInterval(since time.Time) time.Duration {
	return min(max(minCheckInterval, time.Since(since)), heartbeatInterval)
}

// describe returns an error with the rights that the agent needs, if it lacks some.
func (p *nodePart) describe(err error) string {
	text := err.Error()
	if apierrors.IsForbidden(err) || apierrors.IsUnauthorized(err) {
		text += "; the agent requires " + p.rights
	}
	return text
}

// setLeft records whether the part may be left by earlier agents.
func (p *nodePart) setLeft(left bool) {
	p.writer.updateStatus(func(*NodeStatus) { *p.isLeft = left })
}

func (p *nodePart) setError(text string) {
	p.writer.updateStatus(func(*NodeStatus) { *p.err = text })
}

// logWarning logs what was left out, when it changes.
func (p *nodePart) logWarning(text string) {
	switch text {
	case p.warning:
		return
	case "":
		p.writer.Log.Info("nothing is left out any more", zap.String("was", p.warning))
	default:
		p.writer.Log.Warn("left out what others set", zap.String("reason", text))
	}
	p.warning = text
}

// jitter varies a time by a tenth, so that the nodes of a cluster do not ask at once.
func jitter(d time.Duration) time.Duration {
	tenth := d / 10
	return d - tenth + rand.N(2*tenth+1) //nolint:gosec // not a secret
}

// namespaceFile has the namespace of the pod's service account.
const namespaceFile = "/var/run/secrets/kubernetes.io/serviceaccount/namespace"

// PodNamespace returns the namespace of the agent's pod: POD_NAMESPACE, else the service account's. It is "" outside of a pod.
func PodNamespace() string {
	text, _ := os.ReadFile(namespaceFile) // "" on failure
	return cmp.Or(os.Getenv("POD_NAMESPACE"), strings.TrimSpace(string(text)))
}
