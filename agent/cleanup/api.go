package cleanup

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/pager"
	"k8s.io/component-helpers/scheduling/corev1/nodeaffinity"

	"github.com/gpu-node-agent/gpu-node-agent/agent/config"
	"github.com/gpu-node-agent/gpu-node-agent/agent/kube"
	"github.com/gpu-node-agent/gpu-node-agent/agent/node"
)

const (
	requestTimeout = 10 * time.Second // of one request
	requestRate    = 50               // requests per second
	requestBurst   = 100
)

// The part of an agent's pod template that has the configuration.
const (
	configVolume = "config"
	configFile   = "config.yaml"
)

// api is the API server.
type api struct {
	*kube.Cleaner
	client    kubernetes.Interface
	namespace string // of the ConfigMaps and NodeFeatures that may be read; "" for all
}

// connect returns the API server of a context of a kubeconfig file. It makes no request.
func connect(kubeconfig, contextName, namespace string) (cluster, error) {
	c, err := kube.OperatorRESTConfig(kubeconfig, contextName)
	if err != nil {
		return nil, err
	}
	c.QPS, c.Burst, c.Timeout = requestRate, requestBurst, requestTimeout
	cleaner, err := kube.NewCleaner(c)
	if err != nil {
		return nil, err
	}
	client, err := kubernetes.NewForConfig(c)
	if err != nil {
		return nil, err
	}
	return &api{cleaner, client, namespace}, nil
}

// each calls f for each object of a list, of which it keeps a page in memory.
func each(ctx context.Context, list pager.ListPageFunc, selector string, f func(runtime.Object)) error {
	p := pager.New(list)
	p.PageBufferSize = 0
	return p.EachListItem(ctx, metav1.ListOptions{LabelSelector: selector}, func(o runtime.Object) error {
		f(o)
		return nil
	})
}

// jobCreated returns when a Job of the namespace was created.
func (a *api) jobCreated(ctx context.Context, name string) (time.Time, error) {
	j, err := a.client.BatchV1().Jobs(a.namespace).Get(ctx, name, metav1.GetOptions{})
	if err != nil {
		return time.Time{}, fmt.Errorf("hook's Job: %w", err)
	}
	return j.CreationTimestamp.Time, nil
}

// readTraces returns what agents have written, of each node.
func (a *api) readTraces(ctx context.Context) (found []traces, err error) {
	list := func(ctx context.Context, o metav1.ListOptions) (runtime.Object, error) {
		return a.client.CoreV1().Nodes().List(ctx, o)
	}
	err = each(ctx, list, "", func(o runtime.Object) { found = append(found, tracesOf(o.(*corev1.Node))) })
	if err != nil {
		return nil, fmt.Errorf("nodes: %w", err)
	}
	return found, nil
}

// readNode returns what agents have written of a node, without its NodeFeatures. It returns nothing of a deleted node.
func (a *api) readNode(ctx context.Context, name string) (traces, error) {
	n, err := a.client.CoreV1().Nodes().Get(ctx, name, metav1.GetOptions{})
	if apierrors.IsNotFound(err) {
		return traces{NodeTraces: kube.NodeTraces{Node: name}}, nil
	}
	if err != nil {
		return traces{}, err
	}
	return tracesOf(n), nil
}

func tracesOf(n *corev1.Node) traces {
	return traces{NodeTraces: kube.TracesOf(n), nodeLabels: n.Labels}
}

// readFeatures returns the namespaces of the NodeFeatures by node.
func (a *api) readFeatures(ctx context.Context) (map[string][]string, error) {
	found, err := a.Features(ctx, a.namespace)
	if err != nil {
		return nil, fmt.Errorf("NodeFeatures: %w", err)
	}
	return found, nil
}

// readAgents returns the agents of the cluster with their configurations.
func (a *api) readAgents(ctx context.Context) (all agents, err error) {
	all = agents{daemonSets: make(map[types.UID]daemonSet), pods: make(map[string][]agentPod)}
	configs := &configReader{api: a, read: make(map[string]configuration)}
	apps := a.client.AppsV1()
	var errs []error
	seen := make(map[types.UID]bool) // whose controller has seen the newest spec
	label, value, _ := strings.Cut(kube.ServesLabel, "=")
	list := func(ctx context.Context, o metav1.ListOptions) (runtime.Object, error) {
		return apps.DaemonSets("").List(ctx, o)
	}
	err = each(ctx, list, "", func(o runtime.Object) {
		d := o.(*appsv1.DaemonSet)
		if d.Spec.Template.Labels[label] != value {
			return
		}
		c, err := configs.of(ctx, d.Namespace, d.Spec.Template.Spec)
		errs = append(errs, err)
		affinity := nodeaffinity.GetRequiredNodeAffinity(&corev1.Pod{Spec: d.Spec.Template.Spec})
		all.daemonSets[d.UID] = daemonSet{name: d.Namespace + "/" + d.Name, config: c, affinity: affinity}
		seen[d.UID] = d.Status.ObservedGeneration >= d.Generation && d.DeletionTimestamp == nil
	})
	if err = errors.Join(append(errs, err)...); err != nil {
		return agents{}, fmt.Errorf("agents' DaemonSets: %w", err)
	}
	// After the DaemonSets: a controller creates a revision before it reports the spec as seen.
	newest := make(map[types.UID]int64)
	list = func(ctx context.Context, o metav1.ListOptions) (runtime.Object, error) {
		return apps.ControllerRevisions("").List(ctx, o)
	}
	err = each(ctx, list, kube.ServesLabel, func(o runtime.Object) {
		r := o.(*appsv1.ControllerRevision)
		owner := metav1.GetControllerOf(r)
		if owner == nil || !seen[owner.UID] || r.Revision < newest[owner.UID] {
			return
		}
		d := all.daemonSets[owner.UID]
		d.revision, newest[owner.UID] = r.Labels[appsv1.DefaultDaemonSetUniqueLabelKey], r.Revision
		all.daemonSets[owner.UID] = d
	})
	if err != nil {
		return agents{}, fmt.Errorf("agents' ControllerRevisions: %w", err)
	}
	list = func(ctx context.Context, o metav1.ListOptions) (runtime.Object, error) {
		return a.client.CoreV1().Pods("").List(ctx, o)
	}
	err = each(ctx, list, kube.ServesLabel, func(o runtime.Object) {
		p := o.(*corev1.Pod)
		if p.Spec.NodeName == "" || p.Status.Phase == corev1.PodSucceeded || p.Status.Phase == corev1.PodFailed {
			return // it writes nothing
		}
		c, err := configs.of(ctx, p.Namespace, p.Spec)
		errs = append(errs, err)
		pod := agentPod{
			namespace: p.Namespace, name: p.Name, uid: p.UID, revision: p.Labels[appsv1.DefaultDaemonSetUniqueLabelKey],
			ending: p.DeletionTimestamp != nil, started: started(p), config: c,
		}
		if owner := metav1.GetControllerOf(p); owner != nil {
			pod.controller = owner.UID
		}
		all.pods[p.Spec.NodeName] = append(all.pods[p.Spec.NodeName], pod)
	})
	if err = errors.Join(append(errs, err)...); err != nil {
		return agents{}, fmt.Errorf("agents' pods: %w", err)
	}
	return all, nil
}

// started reports whether each container of a pod has started at least once. The kubelet has then written the configuration's volume.
func started(p *corev1.Pod) bool {
	return len(p.Status.ContainerStatuses) == len(p.Spec.Containers) &&
		!slices.ContainsFunc(p.Status.ContainerStatuses, func(c corev1.ContainerStatus) bool {
			return c.State.Running == nil && c.State.Terminated == nil && c.LastTerminationState.Terminated == nil
		})
}

// configReader reads each ConfigMap once.
type configReader struct {
	api  *api
	read map[string]configuration // by NAMESPACE/NAME
}

// of returns the configuration of an agent's pods. It returns an error if a later attempt may succeed. Otherwise configuration.unknown is
// why the configuration cannot be read.
func (r *configReader) of(ctx context.Context, namespace string, pod corev1.PodSpec) (configuration, error) {
	if key := overrides(pod); key != "" {
		return configuration{unknown: key + " overrides its file"}, nil
	}
	i := slices.IndexFunc(pod.Volumes, func(v corev1.Volume) bool { return v.Name == configVolume && v.ConfigMap != nil })
	if i < 0 {
		return configuration{unknown: "no volume " + configVolume + " of a ConfigMap"}, nil
	}
	name := pod.Volumes[i].ConfigMap.Name
	key := namespace + "/" + name
	c, ok := r.read[key]
	if ok {
		return c, nil
	}
	switch m, err := r.api.configMap(ctx, namespace, name); {
	case apierrors.IsNotFound(err), apierrors.IsForbidden(err), errors.Is(err, errOtherNamespace):
		c = configuration{unknown: fmt.Sprintf("ConfigMap %s: %v", key, err)}
	case err != nil:
		r.read[key] = configuration{} // one attempt and one error are enough
		return configuration{}, fmt.Errorf("ConfigMap %s: %w", key, err)
	default:
		c = parseConfig(m.Data[configFile])
		if _, exists := m.Data[configFile]; !exists {
			c = configuration{unknown: fmt.Sprintf("ConfigMap %s: no %s", key, configFile)}
		}
	}
	r.read[key] = c
	return c, nil
}

var errOtherNamespace = errors.New("not in the namespace of --namespace")

func (a *api) configMap(ctx context.Context, namespace, name string) (*corev1.ConfigMap, error) {
	if a.namespace != "" && a.namespace != namespace {
		return nil, errOtherNamespace
	}
	return a.client.CoreV1().ConfigMaps(namespace).Get(ctx, name, metav1.GetOptions{})
}

// partKeys returns the keys by which an agent writes to the API server what may be left.
func partKeys() []string {
	return []string{"node.labels.output", "node.taints", "health.kubernetes.enabled"}
}

// overrides returns what may set a part of the configuration beside the file, "" for nothing.
func overrides(pod corev1.PodSpec) string {
	for _, c := range pod.Containers {
		if len(c.EnvFrom) > 0 {
			return "envFrom of container " + c.Name
		}
		for _, e := range c.Env {
			if config.IsVariable(e.Name, partKeys()...) {
				return "variable " + e.Name
			}
		}
		for _, arg := range append(c.Command, c.Args...) {
			if flag, _, _ := strings.Cut(arg, "="); slices.Contains(partKeys(), strings.TrimPrefix(flag, "--")) {
				return "argument " + arg
			}
		}
	}
	return ""
}

// parseConfig returns what a configuration file has of the node.
func parseConfig(text string) configuration {
	c, err := config.Parse([]byte(text))
	if err != nil { // the agent keeps its last good configuration, whatever that is
		return configuration{unknown: "invalid: " + err.Error()}
	}
	parts := configuration{
		labels: c.Node.Labels.Output == node.LabelsAPI, feature: c.Node.Labels.Output == node.LabelsNodeFeature,
		condition: c.Health.Kubernetes.Enabled,
	}
	for _, t := range c.Node.Taints {
		parts.taints = append(parts.taints, kube.TaintID(t.Taint()))
	}
	return parts
}

// remove removes what an item has.
func (a *api) remove(ctx context.Context, i Item) error {
	var errs []error
	add := func(what string, err error) {
		if err != nil {
			errs = append(errs, fmt.Errorf("%s: %w", what, err))
		}
	}
	if len(i.Taints) > 0 {
		add("taints", a.RemoveTaints(ctx, i.Node, i.keep))
	}
	if len(i.Labels) > 0 {
		add("labels", a.RemoveLabels(ctx, i.Node))
	}
	for _, namespace := range i.Features {
		add("NodeFeature", a.RemoveFeature(ctx, namespace, i.Node))
	}
	if i.Condition {
		add("condition", a.RemoveCondition(ctx, i.Node))
	}
	return errors.Join(errs...)
}

// mark records in an agent's pod that its node was cleaned.
func (a *api) mark(ctx context.Context, p agentPod, at time.Time) error {
	return a.MarkCleaned(ctx, p.namespace, p.name, p.uid, at)
}
