package apiserver

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	authorizationv1 "k8s.io/api/authorization/v1"
	autoscalingv1 "k8s.io/api/autoscaling/v1"
	batchv1 "k8s.io/api/batch/v1"
	v1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"

	"github.com/gpu-node-agent/gpu-node-agent/e2e/internal/node"
	"github.com/gpu-node-agent/gpu-node-agent/e2e/internal/process"
)

// TestReclaimChart checks the chart's rights and policy for reclaim on an API server.
func TestReclaimChart(t *testing.T) {
	installChart(t, "cluster-values.yaml")
	client, err := kubernetes.NewForConfig(accountConfig(t, reclaimAccount, "n1"))
	if err != nil {
		t.Fatal(err)
	}
	t.Run("rights", func(t *testing.T) { checkReclaimRights(t, client) })
	t.Run("policy", func(t *testing.T) { checkReclaimPolicy(t, client) })
	t.Run("command", checkReclaimCommand)
}

// checkReclaimRights checks what the account can do in a namespace of the policy, in the release's, and in another one.
func checkReclaimRights(t *testing.T, client *kubernetes.Clientset) {
	resources := map[string][]string{
		"":      {"namespaces", "pods", "pods/eviction", "events", "secrets", "configmaps", "nodes"},
		"apps":  {"deployments", "deployments/scale", "replicasets", "replicasets/scale", "statefulsets", "statefulsets/scale", "daemonsets"},
		"batch": {"jobs", "cronjobs"},
	}
	want := map[string][]string{
		"research": {
			"namespaces get", "pods list,patch", "pods/eviction create", "events create", "deployments get,list,patch", "deployments/scale patch",
			"replicasets get,list,patch",
			"replicasets/scale patch", "statefulsets get,list,patch", "statefulsets/scale patch", "jobs list,patch", "cronjobs list",
		},
		"other": nil,
		"gpu":   {"pods list"},
	}
	for namespace, want := range want {
		var got []string
		for _, group := range []string{"", "apps", "batch"} {
			for _, resource := range resources[group] {
				if verbs := allowedVerbs(t, client, group, resource, namespace); len(verbs) > 0 {
					got = append(got, resource+" "+strings.Join(verbs, ","))
				}
			}
		}
		if !slices.Equal(got, want) {
			t.Errorf("in %s, the account can %q, want %q", namespace, got, want)
		}
	}
}

// allowedVerbs returns what an account may do with a resource in a namespace.
func allowedVerbs(t *testing.T, client *kubernetes.Clientset, group, resource, namespace string) (verbs []string) {
	t.Helper()
	for _, verb := range []string{"create", "delete", "deletecollection", "get", "list", "patch", "update", "watch"} {
		name, subresource, _ := strings.Cut(resource, "/")
		attributes := &authorizationv1.ResourceAttributes{
			Verb: verb, Group: group, Resource: name, Subresource: subresource,
			Namespace: namespace,
		}
		if resource == "namespaces" {
			attributes.Name = namespace
		}
		review := &authorizationv1.SelfSubjectAccessReview{Spec: authorizationv1.SelfSubjectAccessReviewSpec{ResourceAttributes: attributes}}
		result, err := client.AuthorizationV1().SelfSubjectAccessReviews().Create(t.Context(), review, metav1.CreateOptions{})
		if err != nil {
			t.Fatal(err)
		}
		if result.Status.Allowed {
			verbs = append(verbs, verb)
		}
	}
	return verbs
}

// checkReclaimPolicy checks which changes the account can make.
func checkReclaimPolicy(t *testing.T, client *kubernetes.Clientset) {
	const namespace = "research"
	admin := theCluster.client
	replicas, labels := int32(3), map[string]string{"app": "idle"}
	template := v1.PodTemplateSpec{ObjectMeta: metav1.ObjectMeta{Labels: labels}, Spec: node.Pod(namespace, "x", node.GPU, 0).Spec}
	selector, about := &metav1.LabelSelector{MatchLabels: labels},
		metav1.ObjectMeta{Name: "idle", Labels: labels, Annotations: map[string]string{"a": "b"}}
	_, err := admin.AppsV1().Deployments(namespace).Create(t.Context(),
		&appsv1.Deployment{ObjectMeta: about, Spec: appsv1.DeploymentSpec{Replicas: &replicas, Selector: selector, Template: template}},
		metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	_, err = admin.AppsV1().StatefulSets(namespace).Create(t.Context(),
		&appsv1.StatefulSet{ObjectMeta: about, Spec: appsv1.StatefulSetSpec{Replicas: &replicas, Selector: selector, Template: template}},
		metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	_, err = admin.AppsV1().ReplicaSets(namespace).Create(t.Context(),
		&appsv1.ReplicaSet{ObjectMeta: about, Spec: appsv1.ReplicaSetSpec{Replicas: &replicas, Selector: selector, Template: template}},
		metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	job := template
	job.Spec.RestartPolicy = v1.RestartPolicyNever
	if _, err = admin.BatchV1().Jobs(namespace).Create(t.Context(), &batchv1.Job{ObjectMeta: about, Spec: batchv1.JobSpec{Template: job}},
		metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	pod := node.Pod(namespace, "idle", node.GPU, 0)
	pod.Labels, pod.Annotations = labels, map[string]string{"a": "b"}
	if _, err = admin.CoreV1().Pods(namespace).Create(t.Context(), pod, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}

	patch := func(ctx context.Context, resource, body string) error {
		name, subresource, _ := strings.Cut(resource, "/")
		var err error
		request := client.AppsV1().RESTClient().Patch(types.MergePatchType)
		switch name {
		case "jobs":
			request = client.BatchV1().RESTClient().Patch(types.MergePatchType)
		case "pods":
			request = client.CoreV1().RESTClient().Patch(types.MergePatchType)
		}
		request = request.Namespace(namespace).Resource(name).Name("idle").Body([]byte(body))
		if subresource != "" {
			request = request.SubResource(subresource)
		}
		err = request.Do(ctx).Error()
		return err
	}
	const record, label, scale = `{"metadata": {"annotations": {"gpu-node-agent/reclaimed": "{}", "gpu-node-agent/reclaim-notice": "x"}}}`,
		`{"metadata": {"labels": {"a": "b"}}}`, `{"spec": {"replicas": %d}}`
	_, err = process.Await(t.Context(), node.Timeout,
		func(ctx context.Context) error { return refusedByPolicy(patch(ctx, "pods", label), "reclaim") })
	if err != nil {
		t.Fatal(err)
	}
	type change struct {
		resource, patch string
		admitted        bool
	}
	var changes []change
	for _, resource := range []string{"deployments", "replicasets", "statefulsets", "jobs", "pods"} {
		changes = append(
			changes, change{resource, record, true}, change{
				resource, `{"metadata": {"annotations": {"gpu-node-agent/reclaim-notice": null}}}`,
				true,
			}, change{resource, label, false},
			change{resource, `{"metadata": {"labels": null}}`, false}, change{resource, `{"metadata": {"annotations": {"b": "c"}}}`, false},
			change{resource, `{"metadata": {"annotations": {"a": null}}}`, false},
			change{resource, `{"metadata": {"finalizers": ["example.test/x"]}}`, false},
			change{resource, `{"metadata": {"ownerReferences": [{"apiVersion": "v1", "kind": "Pod", "name": "x", "uid": "x"}]}}`, false},
		)
		switch resource {
		case "pods":
			changes = append(changes, change{resource, `{"spec": {"activeDeadlineSeconds": 1}}`, false})
		case "jobs":
			changes = append(
				changes, change{resource, `{"spec": {"parallelism": 2}}`, false}, change{resource, `{"spec": {"activeDeadlineSeconds": 1}}`, false},
				change{resource, `{"spec": {"suspend": true}}`, true}, change{resource, `{"spec": {"suspend": false}}`, true},
			)
		default:
			changes = append(
				changes, change{resource, fmt.Sprintf(scale, 0), false},
				change{resource, `{"spec": {"template": {"spec": {"priority": 0, "serviceAccountName": "x"}}}}`, false},
				change{resource + "/scale", fmt.Sprintf(scale, 2), false}, change{resource + "/scale", fmt.Sprintf(scale, 4), false},
				change{resource + "/scale", fmt.Sprintf(scale, 0), true},
				change{resource + "/scale", fmt.Sprintf(scale, 3), true}, change{resource + "/scale", fmt.Sprintf(scale, 2), false},
			)
		}
	}
	for _, c := range changes {
		err := patch(t.Context(), c.resource, c.patch)
		if !c.admitted {
			err = refusedByPolicy(err, "reclaim")
		}
		if err != nil {
			t.Errorf("%s: %s: %v", c.resource, c.patch, err)
		}
	}
	_, err = client.AppsV1().Deployments(namespace).UpdateScale(t.Context(), "idle",
		&autoscalingv1.Scale{ObjectMeta: metav1.ObjectMeta{Name: "idle", Namespace: namespace}}, metav1.UpdateOptions{})
	if err := forbidden(err); err != nil {
		t.Error(err)
	}
	for component, admitted := range map[string]bool{"gpu-node-agent-reclaim": true, "gpu-node-agent": false, "kubelet": false, "": false} {
		_, err := client.CoreV1().Events(namespace).Create(t.Context(), &v1.Event{
			ObjectMeta:     metav1.ObjectMeta{Namespace: namespace, GenerateName: "test-"},
			InvolvedObject: v1.ObjectReference{Kind: "Pod", Name: "idle", Namespace: namespace},
			Reason:         "Test", Message: "test", Type: v1.EventTypeNormal, Source: v1.EventSource{Component: component},
			ReportingController: component,
		}, metav1.CreateOptions{})
		if !admitted {
			err = refusedByPolicy(err, "reclaim")
		}
		if err != nil {
			t.Errorf("an event of %q: %v", component, err)
		}
	}
	eviction := &policyv1.Eviction{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: "idle"}}
	if err := client.PolicyV1().Evictions(namespace).Evict(t.Context(), eviction); err != nil {
		t.Errorf("eviction: %v", err)
	}
}
