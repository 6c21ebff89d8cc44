package reclaim

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"

	appsv1 "k8s.io/api/apps/v1"
	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
)

// readObjects reads one namespace after the other. It makes no request about another namespace.
func (a *api) readObjects(ctx context.Context, p Policy) (Objects, []string) {
	all := Objects{Namespaces: make(map[string]map[string]string), Owners: make(map[Ref]*Owner)}
	var errs []string
	for _, namespace := range p.Namespaces {
		pods, owners := len(all.Pods), make(map[Ref]*Owner)
		annotations, err := a.readNamespace(ctx, namespace, &all.Pods, owners)
		if err != nil {
			// Without some of its pods, an owner would look idle.
			all.Pods = all.Pods[:pods]
			errs = append(errs, fmt.Sprintf("%s: cannot read the namespace: %v", namespace, err))
			continue
		}
		all.Namespaces[namespace] = annotations
		maps.Copy(all.Owners, owners)
	}
	return all, errs
}

// readNamespace adds the pods and the owners of a namespace, and returns its annotations.
func (a *api) readNamespace(ctx context.Context, namespace string, pods *[]corev1.Pod, owners map[Ref]*Owner) (map[string]string, error) {
	o, err := a.get(ctx, Ref{Kind: kindNamespace, Name: namespace})
	if err != nil {
		return nil, err
	}
	annotations := o.(*corev1.Namespace).Annotations
	// Owners are read after their pods: one that got pods in between counts more than these.
	running := metav1.ListOptions{FieldSelector: "status.phase!=Succeeded,status.phase!=Failed"}
	err = a.list(ctx, kindPod, namespace, running, func(o runtime.Object) error {
		*pods = append(*pods, trimPod(o.(*corev1.Pod)))
		return nil
	})
	for _, kind := range []string{kindReplicaSet, kindDeployment, kindStatefulSet, kindJob, kindCronJob} {
		if err != nil {
			return nil, err
		}
		err = a.list(ctx, kind, namespace, metav1.ListOptions{}, func(o runtime.Object) error {
			if owner := ownerOf(o); o.(metav1.Object).GetDeletionTimestamp() == nil {
				owners[owner.Ref] = owner
			}
			return nil
		})
	}
	return annotations, err
}

// trimPod returns what a plan needs of a pod, which is a small part of it.
func trimPod(p *corev1.Pod) corev1.Pod {
	t := corev1.Pod{TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: kindPod}, ObjectMeta: p.ObjectMeta}
	t.ManagedFields = nil
	delete(t.Annotations, corev1.LastAppliedConfigAnnotation)
	t.Spec = corev1.PodSpec{
		NodeName: p.Spec.NodeName, PriorityClassName: p.Spec.PriorityClassName, Priority: p.Spec.Priority, ResourceClaims: p.Spec.ResourceClaims,
	}
	for _, c := range p.Spec.InitContainers {
		t.Spec.InitContainers = append(t.Spec.InitContainers, corev1.Container{
			Name: c.Name, Resources: c.Resources,
			RestartPolicy: c.RestartPolicy,
		})
	}
	for _, c := range p.Spec.Containers {
		t.Spec.Containers = append(t.Spec.Containers, corev1.Container{Name: c.Name, Resources: c.Resources})
	}
	t.Status = corev1.PodStatus{Phase: p.Status.Phase, Conditions: p.Status.Conditions, StartTime: p.Status.StartTime}
	return t
}

// ownerOf returns what a plan needs of an owner.
func ownerOf(object runtime.Object) (o *Owner) {
	field := "replicas"
	var fields []metav1.ManagedFieldsEntry
	scalable := func(kind string, m metav1.ObjectMeta, replicas *int32) {
		o = &Owner{
			Ref: Ref{m.Namespace, kind, m.Name}, UID: m.UID, ResourceVersion: m.ResourceVersion, Generation: m.Generation,
			Labels: m.Labels, Annotations: m.Annotations, Controller: metav1.GetControllerOf(&m), Replicas: 1, // the API's default
		}
		if fields = m.ManagedFields; replicas != nil {
			o.Replicas = *replicas
		}
	}
	switch x := object.(type) {
	case *appsv1.Deployment:
		scalable(kindDeployment, x.ObjectMeta, x.Spec.Replicas)
		o.Pods = x.Status.Replicas
	case *appsv1.ReplicaSet:
		scalable(kindReplicaSet, x.ObjectMeta, x.Spec.Replicas)
		o.Pods = x.Status.Replicas
	case *appsv1.StatefulSet:
		scalable(kindStatefulSet, x.ObjectMeta, x.Spec.Replicas)
		o.Pods = x.Status.Replicas
		retention := x.Spec.PersistentVolumeClaimRetentionPolicy
		o.DeletesVolumes = retention != nil && retention.WhenScaled == appsv1.DeletePersistentVolumeClaimRetentionPolicyType
	case *batchv1.Job:
		field = "suspend"
		scalable(kindJob, x.ObjectMeta, nil)
		o.Pods, o.Suspended = x.Status.Active, x.Spec.Suspend != nil && *x.Spec.Suspend
	case *batchv1.CronJob:
		scalable(kindCronJob, x.ObjectMeta, nil)
	default:
		panic(fmt.Sprintf("unexpected owner %T", object))
	}
	o.ChangedBy = managerOf(fields, field)
	delete(o.Annotations, corev1.LastAppliedConfigAnnotation)
	return o
}

// managerOf returns the manager that last set a field of an object's spec, "" if unknown; if several set the same value, it is another one
// than this command. The API server has none for replicas that the subresource scale changed to 0, or from a value that had none.
func managerOf(entries []metav1.ManagedFieldsEntry, field string) string {
	manager := ""
	for _, e := range entries {
		var set struct {
			Spec map[string]json.RawMessage `json:"f:spec"`
		}
		if e.FieldsV1 == nil || json.NewDecoder(e.FieldsV1.GetRawReader()).Decode(&set) != nil || set.Spec["f:"+field] == nil {
			continue
		}
		if manager == "" || manager == fieldManager {
			manager = e.Manager
		}
	}
	return manager
}
