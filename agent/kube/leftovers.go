package kube

import (
	"context"
	"encoding/json"
	"maps"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"
)

// CleanupCommand removes what agents have left on nodes and have no right to remove.
const CleanupCommand = "gpu-node-agent cleanup --context NAME --apply"

// CleanedAnnotation of an agent's pod is the time at which its node had only what the agent's configuration has: cleanup found it so, or
// removed the rest.
const CleanedAnnotation = component + "/cleaned"

// ServesLabel selects the agents' pods.
const ServesLabel = component + "/serves=node"

// NodeTraces is what agents have written to a node.
type NodeTraces struct {
	Node      string
	Taints    []string // KEY:EFFECT, as recorded in the agents' annotation
	Labels    []string // the keys that belong to the agents' field manager
	Condition bool
}

// TracesOf returns the traces on a node.
func TracesOf(n *corev1.Node) NodeTraces {
	t := NodeTraces{Node: n.Name, Taints: recordedTaints(n.Annotations)}
	t.Condition = slices.ContainsFunc(n.Status.Conditions, func(c corev1.NodeCondition) bool { return c.Type == conditionType })
	for _, m := range n.ManagedFields {
		if m.Manager != component || m.Operation != metav1.ManagedFieldsOperationApply || m.FieldsV1 == nil {
			continue
		}
		var fields struct {
			Metadata struct {
				Labels map[string]json.RawMessage `json:"f:labels"`
			} `json:"f:metadata"`
		}
		if err := json.NewDecoder(m.FieldsV1.GetRawReader()).Decode(&fields); err != nil {
			continue // impossible: the API server writes it
		}
		for _, field := range slices.Sorted(maps.Keys(fields.Metadata.Labels)) {
			if key, ok := strings.CutPrefix(field, "f:"); ok {
				t.Labels = append(t.Labels, key)
			}
		}
	}
	return t
}

// Cleaner removes what agents have written to nodes, by the agents' own requests. What no longer exists counts as removed. Cleaner makes
// each request once, except when somebody else wrote the node in between.
type Cleaner struct{ api *client }

// NewCleaner returns a cleaner. It makes no request.
func NewCleaner(c *rest.Config) (*Cleaner, error) {
	api, err := newClient(rest.CopyConfig(c))
	if err != nil {
		return nil, err
	}
	return &Cleaner{api}, nil
}

// RemoveTaints removes the taints that the node's annotation records, except the ones in keep, each as KEY:EFFECT.
func (c *Cleaner) RemoveTaints(ctx context.Context, node string, keep []string) error {
	s := NodeState{Taints: []corev1.Taint{}}
	for _, id := range keep {
		key, effect, _ := strings.Cut(id, ":")
		s.Undecided = append(s.Undecided, corev1.Taint{Key: key, Effect: corev1.TaintEffect(effect)})
	}
	_, err := c.api.writeTaints(ctx, node, "", &s)
	return unlessGone(err)
}

// RemoveLabels removes the labels that belong to the agents' field manager.
func (c *Cleaner) RemoveLabels(ctx context.Context, node string) error {
	m, err := c.api.nodeMetadata(ctx, node)
	if err == nil {
		err = c.api.applyLabels(ctx, m, map[string]string{})
	}
	return unlessGone(err)
}

// RemoveCondition removes the condition GPUHealthy.
func (c *Cleaner) RemoveCondition(ctx context.Context, node string) error {
	return unlessGone(c.api.deleteCondition(ctx, node))
}

// RemoveFeature deletes a node's NodeFeature of the agents in a namespace.
func (c *Cleaner) RemoveFeature(ctx context.Context, namespace, node string) error {
	_, err := c.api.deleteFeature(ctx, namespace, node)
	return err
}

// listLimit is the number of objects per page of a list.
const listLimit = 500

// Features returns the namespaces of the agents' NodeFeatures by node. An empty namespace stands for all of them.
func (c *Cleaner) Features(ctx context.Context, namespace string) (map[string][]string, error) {
	path := []string{"/apis", featureAPI, "nodefeatures"}
	if namespace != "" {
		path = []string{"/apis", featureAPI, "namespaces", namespace, "nodefeatures"}
	}
	found := make(map[string][]string)
	for next := ""; ; {
		var page metav1.PartialObjectMetadataList
		r := c.api.rest.Get().AbsPath(path...).Param("limit", strconv.Itoa(listLimit)).Param("continue", next)
		r.SetHeader("Accept", "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1,application/json")
		err := read(ctx, r, &page)
		if apierrors.IsNotFound(err) { // there is no such API
			return nil, nil
		}
		if err != nil {
			return nil, err
		}
		for i := range page.Items {
			m := &page.Items[i]
			if node := m.Labels[featureNodeLabel]; node != "" && m.Name == featureName(node) {
				found[node] = append(found[node], m.Namespace)
			}
		}
		if next = page.Continue; next == "" {
			return found, nil
		}
	}
}

// MarkCleaned sets CleanedAnnotation of a pod. It writes the pod's status: the right to that cannot change what the pod runs.
func (c *Cleaner) MarkCleaned(ctx context.Context, namespace, pod string, uid types.UID, at time.Time) error {
	meta := map[string]any{"uid": uid, "annotations": map[string]string{CleanedAnnotation: at.UTC().Format(time.RFC3339Nano)}}
	return unlessGone(write(ctx, c.api.rest.Patch(types.MergePatchType).Namespace(namespace).Resource("pods").Name(pod).SubResource("status"),
		map[string]any{"metadata": meta}))
}

func unlessGone(err error) error {
	if apierrors.IsNotFound(err) {
		return nil
	}
	return err
}

// annotationsFile has the annotations of the agent's pod, which the kubelet keeps up to date.
const annotationsFile = "/etc/gpu-node-agent-pod/annotations"

// CleanedAt returns CleanedAnnotation of the agent's pod; "" if it has none, or is not known.
func CleanedAt() string {
	text, _ := os.ReadFile(annotationsFile) // "" on failure
	return cleanedAt(string(text))
}

func cleanedAt(annotations string) string {
	for line := range strings.Lines(annotations) {
		if quoted, ok := strings.CutPrefix(strings.TrimSpace(line), CleanedAnnotation+"="); ok {
			value, _ := strconv.Unquote(quoted)
			return value
		}
	}
	return ""
}
