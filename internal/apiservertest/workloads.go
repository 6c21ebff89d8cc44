package apiservertest

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"reflect"
	"strings"

	appsv1 "k8s.io/api/apps/v1"
	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/strategicpatch"
)

// Get returns an object, nil if there is none.
func (s *Server) Get(resource, namespace, name string) metav1.Object {
	s.mu.Lock()
	defer s.mu.Unlock()
	if o := s.objects[key{resource, namespace, name}]; o != nil {
		return o.DeepCopyObject().(object)
	}
	return nil
}

// Events returns the Events, by name.
func (s *Server) Events() []corev1.Event {
	s.mu.Lock()
	defer s.mu.Unlock()
	var all []corev1.Event
	for _, k := range keys(s.objects) {
		if e, ok := s.objects[k].(*corev1.Event); ok {
			all = append(all, *e.DeepCopy())
		}
	}
	return all
}

// replicasOf returns the replicas of a workload, nil for another object.
func replicasOf(o object) **int32 {
	switch o := o.(type) {
	case *appsv1.Deployment:
		return &o.Spec.Replicas
	case *appsv1.ReplicaSet:
		return &o.Spec.Replicas
	case *appsv1.StatefulSet:
		return &o.Spec.Replicas
	}
	return nil
}

// specOf returns the spec of an object with generations, nil for another object.
func specOf(o object) any {
	switch o := o.(type) {
	case *appsv1.Deployment:
		return o.Spec
	case *appsv1.ReplicaSet:
		return o.Spec
	case *appsv1.StatefulSet:
		return o.Spec
	case *batchv1.Job:
		return o.Spec
	}
	return nil
}

// patch changes an object, or its replicas by the subresource scale. The caller holds mu.
func (s *Server) patch(r *http.Request, q *Request, old object, body []byte) (any, error) {
	_, subresource, _ := strings.Cut(q.Resource, "/")
	scale := subresource == "scale"
	document, err := documentOf(old, scale)
	if err != nil {
		return nil, err
	}
	switch types.PatchType(r.Header.Get("Content-Type")) {
	case types.MergePatchType:
		var patch map[string]any
		if err := json.Unmarshal(body, &patch); err != nil {
			return nil, apierrors.NewBadRequest(err.Error())
		}
		merge(document, patch)
	case types.StrategicMergePatchType:
		if _, custom := old.(*NodeFeature); custom {
			return nil, unsupported(q)
		}
		var patch map[string]any
		if err := json.Unmarshal(body, &patch); err != nil {
			return nil, apierrors.NewBadRequest(err.Error())
		}
		if document, err = strategicpatch.StrategicMergeMapPatch(document, patch, old); err != nil {
			return nil, apierrors.NewBadRequest(err.Error())
		}
	case types.JSONPatchType:
		if err := applyOperations(document, body); err != nil {
			return nil, err
		}
	default:
		return nil, unsupported(q)
	}
	text, err := json.Marshal(document)
	if err != nil {
		return nil, err
	}
	o := reflect.New(reflect.TypeOf(old).Elem()).Interface().(object)
	if scale {
		o = old.DeepCopyObject().(object)
		err = patchScale(o, text)
	} else {
		decoder := json.NewDecoder(strings.NewReader(string(text)))
		decoder.DisallowUnknownFields()
		err = decoder.Decode(o)
	}
	if err != nil {
		return nil, apierrors.NewBadRequest(err.Error())
	}
	switch subresource {
	case "status":
		keep("Spec", o, old)
	case "":
		keep("Status", o, old)
	}
	group := schema.GroupResource{Group: old.GetObjectKind().GroupVersionKind().Group, Resource: q.Resource}
	if o.GetUID() != old.GetUID() {
		//nolint:staticcheck // the API server's text
		return nil, apierrors.NewConflict(group, q.Name, fmt.Errorf("Precondition failed: UID in precondition: %v, UID in object meta: %v",
			o.GetUID(), old.GetUID()))
	}
	if o.GetResourceVersion() != old.GetResourceVersion() {
		return nil, apierrors.NewConflict(group, q.Name,
			errors.New("the object has been modified; please apply your changes to the latest version and try again"))
	}
	// As the strategies of the API server: a change of a Deployment's annotations is a generation too.
	_, deployment := o.(*appsv1.Deployment)
	if !equality.Semantic.DeepEqual(specOf(o), specOf(old)) || deployment &&
		!equality.Semantic.DeepEqual(o.GetAnnotations(), old.GetAnnotations()) {
		o.SetGeneration(old.GetGeneration() + 1)
	}
	if o, err = s.managed(old, o, managerOf(r), subresource); err != nil {
		return nil, err
	}
	return s.store(o, q.DryRun)
}

// documentOf returns an object, or its subresource scale, as JSON.
func documentOf(o object, scale bool) (map[string]any, error) {
	var v any = o
	if scale {
		replicas := replicasOf(o)
		if replicas == nil {
			return nil, apierrors.NewNotFound(schema.GroupResource{Resource: "scale"}, o.GetName())
		}
		v = map[string]any{
			"metadata": map[string]any{
				"name": o.GetName(), "namespace": o.GetNamespace(), "uid": o.GetUID(),
				"resourceVersion": o.GetResourceVersion(),
			},
			"spec": map[string]any{"replicas": *replicas},
		}
	}
	text, err := json.Marshal(v)
	if err != nil {
		return nil, err
	}
	var document map[string]any
	return document, json.Unmarshal(text, &document)
}

// patchScale sets what a scale has of an object.
func patchScale(o object, scale []byte) error {
	var changed struct {
		Metadata metav1.ObjectMeta `json:"metadata"`
		Spec     struct {
			Replicas *int32 `json:"replicas"`
		} `json:"spec"`
	}
	err := json.Unmarshal(scale, &changed)
	o.SetUID(changed.Metadata.UID)
	o.SetResourceVersion(changed.Metadata.ResourceVersion)
	*replicasOf(o) = changed.Spec.Replicas
	return err
}

// merge applies a JSON merge patch (RFC 7386).
func merge(document, patch map[string]any) {
	for k, v := range patch {
		switch change, isMap := v.(map[string]any); {
		case v == nil:
			delete(document, k)
		case isMap:
			nested, ok := document[k].(map[string]any)
			if !ok {
				nested = make(map[string]any)
			}
			merge(nested, change)
			document[k] = nested
		default:
			document[k] = v
		}
	}
}

// applyOperations applies the operations test, add and remove of a JSON patch (RFC 6902) to members of objects.
func applyOperations(document map[string]any, body []byte) error {
	var operations []struct {
		Op, Path string
		Value    any
	}
	if err := json.Unmarshal(body, &operations); err != nil {
		return apierrors.NewBadRequest(err.Error())
	}
	for _, op := range operations {
		names := strings.Split(op.Path, "/")[1:]
		at := document
		for _, name := range names[:len(names)-1] {
			at, _ = at[name].(map[string]any)
		}
		last := strings.NewReplacer("~1", "/", "~0", "~").Replace(names[len(names)-1])
		value, exists := at[last]
		refuse := func(text string) error {
			return apierrors.NewGenericServerResponse(http.StatusUnprocessableEntity, "", schema.GroupResource{}, "", text, 0, false)
		}
		switch {
		case at == nil || !exists && op.Op != "add":
			return refuse("path is missing: " + op.Path)
		case op.Op == "test" && !reflect.DeepEqual(value, op.Value):
			return refuse("testing value failed: " + op.Path)
		case op.Op == "remove":
			delete(at, last)
		case op.Op == "add":
			at[last] = op.Value
		}
	}
	return nil
}

// evict deletes a pod if the budgets of its namespace allow it. The caller holds mu.
func (s *Server) evict(o object, body []byte) (any, error) {
	pod, ok := o.(*corev1.Pod)
	var e policyv1.Eviction
	if err := decode(body, &e); err != nil || !ok {
		return nil, apierrors.NewBadRequest(fmt.Sprintf("eviction of %T: %v", o, err))
	}
	if d := e.DeleteOptions; d != nil && d.Preconditions != nil && d.Preconditions.UID != nil && *d.Preconditions.UID != pod.UID {
		return nil, apierrors.NewConflict(schema.GroupResource{Resource: "pods"}, pod.Name,
			fmt.Errorf("the UID in the precondition (%s) does not match the UID in record (%s)", *d.Preconditions.UID, pod.UID))
	}
	if d := e.DeleteOptions; d != nil && d.Preconditions != nil && d.Preconditions.ResourceVersion != nil &&
		*d.Preconditions.ResourceVersion != pod.ResourceVersion {
		return nil, apierrors.NewConflict(schema.GroupResource{Resource: "pods"}, pod.Name,
			errors.New("the ResourceVersion in the precondition does not match that in record"))
	}
	for _, other := range s.objects {
		b, ok := other.(*policyv1.PodDisruptionBudget)
		if !ok || b.Namespace != pod.Namespace {
			continue
		}
		match, err := metav1.LabelSelectorAsSelector(b.Spec.Selector)
		if err != nil {
			return nil, err
		}
		if match.Matches(labels.Set(pod.Labels)) && b.Status.DisruptionsAllowed == 0 {
			err := apierrors.NewTooManyRequests("Cannot evict pod as it would violate the pod's disruption budget.", 10)
			err.ErrStatus.Details.Causes = []metav1.StatusCause{{
				Type:    policyv1.DisruptionBudgetCause,
				Message: "The disruption budget " + b.Name + " needs 1 healthy pods and has 1 currently",
			}}
			return nil, err
		}
	}
	s.remove(keyOf(pod))
	return metav1.Status{TypeMeta: metav1.TypeMeta{Kind: "Status", APIVersion: "v1"}, Status: metav1.StatusSuccess}, nil
}
