package reclaim

import (
	"context"
	"fmt"
	"maps"
	"net"
	"slices"
	"strconv"
	"strings"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/rest"

	"github.com/gpu-node-agent/gpu-node-agent/agent/kube"
)

// fieldManager names the command in events, in managed fields and in the API server's audit log.
const fieldManager = "gpu-node-agent-reclaim"

const (
	requestTimeout = 15 * time.Second // of one request
	requestRate    = 50               // requests per second
	requestBurst   = 100
	pageSize       = 250 // objects per page of a list
)

// metricsPort is the name of the agents' container port.
const metricsPort = "metrics"

// api is the API server.
type api struct {
	agents    agentSelection
	resources map[string]resource // by kind
}

// resource is where the API server has the objects of a kind.
type resource struct {
	client  rest.Interface
	name    string // such as deployments
	newItem func() runtime.Object
	newList func() runtime.Object
}

// connect returns the API server of a kubeconfig file, or of the pod's service account if that is "". It makes no request.
func connect(kubeconfig string, agents agentSelection) (cluster, error) {
	c, err := kube.RESTConfigOf("--kubeconfig", kubeconfig)
	if err != nil {
		return nil, err
	}
	c.QPS, c.Burst, c.Timeout, c.UserAgent = requestRate, requestBurst, requestTimeout, fieldManager
	client, err := kubernetes.NewForConfig(c)
	if err != nil {
		return nil, err
	}
	return newAPI(client, agents), nil
}

func newAPI(c kubernetes.Interface, agents agentSelection) *api {
	core, apps, batch := c.CoreV1().RESTClient(), c.AppsV1().RESTClient(), c.BatchV1().RESTClient()
	return &api{agents, map[string]resource{
		kindPod:         {core, "pods", empty[corev1.Pod], empty[corev1.PodList]},
		kindDeployment:  {apps, "deployments", empty[appsv1.Deployment], empty[appsv1.DeploymentList]},
		kindReplicaSet:  {apps, "replicasets", empty[appsv1.ReplicaSet], empty[appsv1.ReplicaSetList]},
		kindStatefulSet: {apps, "statefulsets", empty[appsv1.StatefulSet], empty[appsv1.StatefulSetList]},
		kindJob:         {batch, "jobs", empty[batchv1.Job], empty[batchv1.JobList]},
		kindCronJob:     {batch, "cronjobs", empty[batchv1.CronJob], empty[batchv1.CronJobList]},
		kindNamespace:   {core, "namespaces", empty[corev1.Namespace], nil},
	}}
}

// empty returns an object of a type.
func empty[T any, P interface {
	*T
	runtime.Object
}]() runtime.Object {
	return P(new(T))
}

// get reads an object.
func (a *api) get(ctx context.Context, ref Ref) (runtime.Object, error) {
	r := a.resources[ref.Kind]
	o := r.newItem()
	return o, r.client.Get().NamespaceIfScoped(ref.Namespace, ref.Namespace != "").Resource(r.name).Name(ref.Name).Do(ctx).Into(o)
}

// list calls f for each object of a kind in a namespace. It keeps one page in memory.
func (a *api) list(ctx context.Context, kind, namespace string, o metav1.ListOptions, f func(runtime.Object) error) error {
	r := a.resources[kind]
	o.Limit = pageSize
	for {
		page := r.newList()
		if err := r.client.Get().Namespace(namespace).Resource(r.name).VersionedParams(&o, scheme.ParameterCodec).Do(ctx).Into(page); err != nil {
			return err
		}
		if err := meta.EachListItem(page, f); err != nil {
			return err
		}
		m, err := meta.ListAccessor(page)
		if err != nil || m.GetContinue() == "" {
			return err
		}
		o.Continue = m.GetContinue()
	}
}

// findAgents returns the URL of the agent on each node that has a Ready one. All must be in one namespace: otherwise, who can create a pod
// with the agents' labels anywhere could answer for every node, and would get the password.
func (a *api) findAgents(ctx context.Context) (map[string]string, error) {
	newest := make(map[string]*corev1.Pod) // by node
	pods, namespaces := 0, make(map[string]bool)
	err := a.list(ctx, kindPod, a.agents.Namespace, metav1.ListOptions{LabelSelector: a.agents.Selector}, func(o runtime.Object) error {
		pods++
		p := o.(*corev1.Pod)
		node := p.Spec.NodeName
		if ready(p) {
			namespaces[p.Namespace] = true
		}
		if old := newest[node]; ready(p) && p.DeletionTimestamp == nil && p.Status.PodIP != "" &&
			(old == nil || old.CreationTimestamp.Before(&p.CreationTimestamp)) {
			newest[node] = p.DeepCopy()
		}
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("agents' pods in namespace %s: %w", a.agents.Namespace, err)
	}
	if len(namespaces) > 1 {
		return nil, fmt.Errorf("agents' pods are in several namespaces: %s; set --agent-namespace",
			strings.Join(slices.Sorted(maps.Keys(namespaces)), ", "))
	}
	if len(newest) == 0 {
		return nil, fmt.Errorf("agents' pods in namespace %s: expected Ready pods with the labels %s, found none among %d pods",
			a.agents.Namespace, a.agents.Selector, pods)
	}
	urls := make(map[string]string, len(newest))
	for node, p := range newest {
		port := a.agents.Port
		if port == 0 {
			if port = portOf(p); port == 0 {
				return nil, fmt.Errorf("agent's pod %s/%s: expected a container port named %s, found none; set the port", p.Namespace, p.Name,
					metricsPort)
			}
		}
		urls[node] = a.agents.Scheme + "://" + net.JoinHostPort(p.Status.PodIP, strconv.Itoa(port))
	}
	return urls, nil
}

// portOf returns the agent's port, 0 if the pod has none.
func portOf(p *corev1.Pod) int {
	for _, c := range p.Spec.Containers {
		for _, port := range c.Ports {
			if port.Name == metricsPort {
				return int(port.ContainerPort)
			}
		}
	}
	return 0
}

// ready reports whether a pod is Ready.
func ready(p *corev1.Pod) bool {
	for _, c := range p.Status.Conditions {
		if c.Type == corev1.PodReady {
			return c.Status == corev1.ConditionTrue
		}
	}
	return false
}
