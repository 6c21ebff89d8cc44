package kube

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"time"

	"go.uber.org/zap"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
)

// taintsAnnotation lists the taints that the agent has set, as a JSON list of KEY:EFFECT. A later process removes the ones that are no
// longer configured.
const taintsAnnotation = component + "/taints"

const (
	// startupTaintWindow is how long after every device was offered the startup taint is checked each minCheckInterval. Karpenter, and
	// a node that registers, may set it again in that time.
	startupTaintWindow = 10 * time.Minute

	// maxTaintConflicts is how often the taints are read and written again at once, because somebody else wrote the node in between. The
	// kubelet writes only its status, which is an update of the node as well.
	maxTaintConflicts = 5
)

// taintsWriter writes taints of the node. The API server takes a node's taints only as a whole. So each write changes the list that was
// read before, on the condition that the node has not changed since.
type taintsWriter struct{ *NodeWriter }

// desiredTaints is the part of a NodeState that concerns taints.
type desiredTaints struct {
	removeStartup  *corev1.Taint // the startup taint; nil if it must not be removed yet
	touch          bool          // set and undecided are known
	set, undecided []corev1.Taint
}

func (w *taintsWriter) part() partWriter {
	return partWriter{
		of: func(s *NodeState) desiredPart {
			d := desiredTaints{touch: s.Taints != nil, set: s.Taints, undecided: s.Undecided}
			if s.OffersAll {
				d.removeStartup = s.StartupTaint
			}
			if !d.touch && d.removeStartup == nil {
				return desiredPart{}
			}
			return desiredPart{d, d.removeStartup == nil && len(d.set)+len(d.undecided) == 0}
		},
		write:    w.write,
		interval: w.interval,
	}
}

func (w *taintsWriter) interval(s *NodeState, since time.Time) time.Duration {
	if s.StartupTaint != nil && s.OffersAll && time.Since(since) < startupTaintWindow {
		return minCheckInterval
	}
	return checkInterval(since)
}

func (w *taintsWriter) write(ctx context.Context, api *client, s *NodeState, _ bool) (warning string, err error) {
	version := fromCache
	if w.part().of(s).removes { // there is no later check, and a cache that lacks the newest write would hide what is to be removed
		version = ""
	}
	next, err := api.writeTaints(ctx, w.Node, version, s)
	if err != nil {
		return "", err
	}
	w.noteStartupTaintAbsent(s)
	if next.changed {
		w.countWrite()
		w.Log.Info("node taints", zap.Strings("set", next.added), zap.Strings("removed", next.removed))
	}
	return next.warning, nil
}

// noteStartupTaintAbsent records that the node does not have the startup taint.
func (w *taintsWriter) noteStartupTaintAbsent(s *NodeState) {
	if s.OffersAll && s.StartupTaint != nil {
		w.updateStatus(func(status *NodeStatus) { status.AbsentStartupTaint = *s.StartupTaint })
	}
}

// taintedNode is the part of a Node that concerns its taints. They are kept as the API server wrote them, because a later release of
// Kubernetes may add fields.
type taintedNode struct {
	Metadata metav1.ObjectMeta `json:"metadata"`
	Spec     struct {
		Taints []json.RawMessage `json:"taints"`
	} `json:"spec"`
}

// nextTaints are the taints that a node must have, and what a write of them changes.
type nextTaints struct {
	changed        bool
	taints         []json.RawMessage
	ours           []string // KEY:EFFECT of the taints that the agent has set
	added, removed []string
	warning        string
}

// mergeTaints returns the taints of a node with the agent's as a state has them. The taints of others keep their values and positions.
func mergeTaints(node *taintedNode, s *NodeState, now time.Time) (next nextTaints) {
	before := recordedTaints(node.Metadata.Annotations)
	desired := make(map[string]corev1.Taint)
	for _, t := range s.Taints {
		desired[TaintID(t)] = t
	}
	stays := func(id string) bool { return s.Taints == nil || slices.ContainsFunc(s.Undecided, hasTaintID(id)) }
	var foreign []string
	for _, raw := range node.Spec.Taints {
		var t corev1.Taint
		_ = json.Unmarshal(raw, &t) // a taint that cannot be read stays: it has no key
		id := TaintID(t)
		want, isDesired := desired[id]
		delete(desired, id)
		switch isOurs := slices.Contains(before, id); {
		case s.OffersAll && s.StartupTaint != nil && id == TaintID(*s.StartupTaint):
			next.removed = append(next.removed, id)
			continue
		case isOurs && !isDesired && !stays(id):
			next.removed = append(next.removed, id)
			continue
		case isOurs && isDesired && t.Value != want.Value:
			raw = encodeTaint(want, now)
			next.added = append(next.added, id)
			next.ours = append(next.ours, id)
		case isOurs:
			next.ours = append(next.ours, id)
		case isDesired && t.Value != want.Value:
			foreign = append(foreign, fmt.Sprintf("%s has the value %q, expected %q", id, t.Value, want.Value))
		}
		next.taints = append(next.taints, raw)
	}
	for _, t := range s.Taints {
		id := TaintID(t)
		if _, missing := desired[id]; missing {
			next.taints = append(next.taints, encodeTaint(t, now))
			next.added = append(next.added, id)
			next.ours = append(next.ours, id)
		}
	}
	if len(foreign) > 0 {
		next.warning = "somebody else set taints that the agent is to set: " + strings.Join(foreign, "; ")
	}
	slices.Sort(next.ours)
	next.changed = len(next.added)+len(next.removed) > 0 || !slices.Equal(next.ours, before)
	return next
}

// recordedTaints returns KEY:EFFECT of the taints that agents have set, by a node's annotations. A record that is not valid JSON counts as
// empty.
func recordedTaints(annotations map[string]string) (ids []string) {
	_ = json.Unmarshal([]byte(annotations[taintsAnnotation]), &ids)
	return ids
}

// TaintID returns KEY:EFFECT. A node has one taint of each.
func TaintID(t corev1.Taint) string { return t.Key + ":" + string(t.Effect) }

func hasTaintID(id string) func(corev1.Taint) bool {
	return func(t corev1.Taint) bool { return TaintID(t) == id }
}

// encodeTaint returns a taint as the API has it. Pods with tolerationSeconds are evicted some time after timeAdded.
func encodeTaint(t corev1.Taint, now time.Time) json.RawMessage {
	if t.Effect == corev1.TaintEffectNoExecute {
		t.TimeAdded = &metav1.Time{Time: now}
	}
	raw, _ := json.Marshal(t) // a Taint always has a JSON form
	return raw
}

// taintedNode reads a node at a resource version or a later one.
func (c *client) taintedNode(ctx context.Context, node, version string) (*taintedNode, error) {
	r := c.rest.Get().Resource("nodes").Name(node).SetHeader("Accept", "application/json")
	if version != "" {
		r.Param("resourceVersion", version)
	}
	text, err := r.MaxRetries(0).DoRaw(ctx)
	if err != nil {
		return nil, err
	}
	n := new(taintedNode)
	return n, json.Unmarshal(text, n)
}

// writeTaints gives a node the agent's taints as a state has them, and returns the result. It reads the node at a resource version or a
// later one.
func (c *client) writeTaints(ctx context.Context, name, version string, s *NodeState) (nextTaints, error) {
	for attempt := 0; ; attempt++ {
		node, err := c.taintedNode(ctx, name, version)
		if err != nil {
			return nextTaints{}, err
		}
		next := mergeTaints(node, s, time.Now())
		if !next.changed {
			return next, nil
		}
		err = c.patchTaints(ctx, node, next)
		if apierrors.IsConflict(err) && attempt < maxTaintConflicts {
			version = "" // what is newest
			continue
		}
		return next, err
	}
}

// patchTaints writes the taints, and the record of the agent's, if the node has not changed since it was read.
func (c *client) patchTaints(ctx context.Context, node *taintedNode, next nextTaints) error {
	var annotation any // nil removes it
	if len(next.ours) > 0 {
		text, err := json.Marshal(next.ours)
		if err != nil {
			return err
		}
		annotation = string(text)
	}
	meta := map[string]any{
		"resourceVersion": node.Metadata.ResourceVersion, "uid": node.Metadata.UID,
		"annotations": map[string]any{taintsAnnotation: annotation},
	}
	return write(ctx, c.rest.Patch(types.MergePatchType).Resource("nodes").Name(node.Metadata.Name),
		map[string]any{"metadata": meta, "spec": map[string]any{"taints": next.taints}})
}
