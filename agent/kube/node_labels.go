package kube

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
)

// labelsWriter writes labels of the node by server-side apply. The API server records which labels are the agent's. It removes a label that
// the agent no longer applies, and refuses one that another field manager owns with another value.
type labelsWriter struct {
	*NodeWriter
	applied   map[string]string // the labels of the last apply; nil before the first
	uid       types.UID         // of the node then
	conflicts map[string]string // the field managers of the labels that the last apply left out
}

func (w *labelsWriter) part() partWriter {
	return partWriter{
		of: func(s *NodeState) desiredPart {
			if s.Labels == nil {
				return desiredPart{}
			}
			return desiredPart{s.Labels, len(s.Labels) == 0}
		},
		write: w.write,
	}
}

// write applies the labels, unless the node has them already since an apply by this process.
func (w *labelsWriter) write(ctx context.Context, api *client, s *NodeState, changed bool) (warning string, err error) {
	node, err := api.nodeMetadata(ctx, w.Node)
	if err != nil {
		return "", err
	}
	if !changed && len(w.conflicts) == 0 && node.UID == w.uid && containsAll(node.Labels, s.Labels) {
		return "", nil
	}
	if !changed || node.UID != w.uid {
		w.conflicts = nil // try these labels again
	}
	applied := maps.Clone(s.Labels)
	maps.DeleteFunc(applied, func(key, _ string) bool { _, taken := w.conflicts[key]; return taken })
	for attempt := 0; ; attempt++ {
		err = api.applyLabels(ctx, node, applied)
		found := conflictsOf(err)
		if len(found) == 0 || attempt == len(s.Labels) {
			break
		}
		if w.conflicts == nil {
			w.conflicts = make(map[string]string)
		}
		for key, manager := range found {
			w.conflicts[key] = manager
			delete(applied, key)
		}
	}
	if err != nil {
		return "", err
	}
	if !maps.Equal(applied, w.applied) || !containsAll(node.Labels, applied) {
		w.countWrite()
	}
	w.applied, w.uid = applied, node.UID
	maps.DeleteFunc(w.conflicts, func(key, _ string) bool { _, desired := s.Labels[key]; return !desired })
	return describeConflicts(w.conflicts), nil
}

// containsAll reports whether labels has all of want.
func containsAll(labels, want map[string]string) bool {
	for key, value := range want {
		if has, ok := labels[key]; !ok || has != value {
			return false
		}
	}
	return true
}

// conflictsOf returns the field managers that own labels which an apply could not set, by label. It is empty if the error is another one.
func conflictsOf(err error) map[string]string {
	status, ok := errors.AsType[*apierrors.StatusError](err)
	if !ok || status.ErrStatus.Details == nil {
		return nil
	}
	found := make(map[string]string)
	for _, c := range status.ErrStatus.Details.Causes {
		key, isLabel := strings.CutPrefix(c.Field, ".metadata.labels.")
		if c.Type != metav1.CauseTypeFieldManagerConflict || !isLabel {
			continue
		}
		_, manager, _ := strings.Cut(c.Message, "conflict with ")
		if quoted, err := strconv.QuotedPrefix(manager); err == nil {
			manager, _ = strconv.Unquote(quoted)
		}
		found[key] = manager
	}
	return found
}

// maxConflicts limits the labels that a text lists for each field manager.
const maxConflicts = 5

// describeConflicts returns a text such as: field manager "kubectl-label" has nvidia.com/gpu.count.
func describeConflicts(conflicts map[string]string) string {
	byManager := make(map[string][]string)
	for key, manager := range conflicts {
		byManager[manager] = append(byManager[manager], key)
	}
	var texts []string
	for _, manager := range slices.Sorted(maps.Keys(byManager)) {
		keys := byManager[manager]
		slices.Sort(keys)
		more := ""
		if n := len(keys) - maxConflicts; n > 0 {
			keys, more = keys[:maxConflicts], fmt.Sprintf(" and %d more", n)
		}
		texts = append(texts, fmt.Sprintf("field manager %q set %s%s to other values; the agent sets them when they are removed", manager,
			strings.Join(keys, ", "), more))
	}
	return strings.Join(texts, "; ")
}

// fromCache is the resource version with which the API server may answer a read from its cache. A write that follows has a precondition.
const fromCache = "0"

// nodeMetadata returns the metadata of a node.
func (c *client) nodeMetadata(ctx context.Context, node string) (*metav1.PartialObjectMetadata, error) {
	r := c.rest.Get().Resource("nodes").Name(node).Param("resourceVersion", fromCache)
	r.SetHeader("Accept", metadataOnly)
	m := new(metav1.PartialObjectMetadata)
	return m, read(ctx, r, m)
}

// applyLabels makes the labels the agent's, and removes its others. The UID keeps the API server from creating a node that was deleted.
func (c *client) applyLabels(ctx context.Context, node *metav1.PartialObjectMetadata, labels map[string]string) error {
	r := c.rest.Patch(types.ApplyPatchType).Resource("nodes").Name(node.Name).Param("fieldManager", component).Param("force", "false")
	return write(ctx, r, map[string]any{
		"apiVersion": "v1", "kind": "Node",
		"metadata": map[string]any{"name": node.Name, "uid": node.UID, "labels": labels},
	})
}
