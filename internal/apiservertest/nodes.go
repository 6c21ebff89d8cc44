package apiservertest

import (
	"errors"
	"fmt"
	"maps"
	"net/http"
	"reflect"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/managedfields"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"k8s.io/client-go/applyconfigurations"
	"k8s.io/client-go/kubernetes/scheme"
)

// NodeFeature is what the server keeps of Node Feature Discovery's object. It refuses other fields.
type NodeFeature struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata"`
	Spec              NodeFeatureSpec `json:"spec"`
}

// NodeFeatureSpec holds the labels that a node is to have.
type NodeFeatureSpec struct {
	Labels map[string]string `json:"labels"`
}

// DeepCopyObject returns a copy.
func (f *NodeFeature) DeepCopyObject() runtime.Object {
	c := &NodeFeature{TypeMeta: f.TypeMeta}
	f.DeepCopyInto(&c.ObjectMeta)
	c.Spec.Labels = maps.Clone(f.Spec.Labels)
	return c
}

// noDefaults sets no defaults.
type noDefaults struct{}

func (noDefaults) Default(runtime.Object) {}

// fieldManager returns the API server's own records of who has set which field of a node. The server keeps them of nodes only.
func (s *Server) fieldManager(subresource string) (*managedfields.FieldManager, error) {
	if s.types == nil {
		s.types = applyconfigurations.NewTypeConverter(scheme.Scheme)
	}
	gvk := corev1.SchemeGroupVersion.WithKind("Node")
	return managedfields.NewDefaultFieldManager(s.types, scheme.Scheme, noDefaults{}, scheme.Scheme, gvk, gvk.GroupVersion(), subresource, nil)
}

// managed records what a manager has changed of a node, or has created if old is nil.
func (s *Server) managed(old, changed object, manager, subresource string) (object, error) {
	if _, ok := changed.(*corev1.Node); !ok {
		return changed, nil
	}
	fields, err := s.fieldManager(subresource)
	if err != nil {
		return nil, err
	}
	var before runtime.Object = &corev1.Node{TypeMeta: metav1.TypeMeta{Kind: "Node", APIVersion: "v1"}}
	if old != nil {
		before = old.DeepCopyObject()
	}
	return fields.UpdateNoErrors(before, changed, manager).(object), nil
}

// managerOf returns the field manager of a request.
func managerOf(r *http.Request) string {
	if m := r.URL.Query().Get("fieldManager"); m != "" {
		return m
	}
	agent, _, _ := strings.Cut(r.UserAgent(), "/")
	return agent
}

// apply is server-side apply to a node. The API server would create a node without a UID that is gone; this one refuses an apply without a
// UID even if the node exists, so that no test depends on when the node goes. The caller holds mu.
func (s *Server) apply(r *http.Request, q *Request, old object, body []byte) (any, error) {
	group := schema.GroupResource{Resource: q.Resource}
	if q.Resource != "nodes" {
		return nil, unsupported(q)
	}
	query := r.URL.Query()
	manager := query.Get("fieldManager")
	if manager == "" {
		return nil, apierrors.NewInvalid(schema.GroupKind{Group: "meta.k8s.io", Kind: "PatchOptions"}, "", field.ErrorList{
			field.Required(field.NewPath("fieldManager"), "is required for apply patch"),
		})
	}
	sent := new(unstructured.Unstructured)
	if err := sent.UnmarshalJSON(body); err != nil {
		return nil, apierrors.NewBadRequest(err.Error())
	}
	switch {
	case sent.GetUID() == "" || sent.GetName() != q.Name:
		return nil, apierrors.NewBadRequest("expected the name and the UID of the node")
	case old == nil:
		return nil, apierrors.NewConflict(group, q.Name, fmt.Errorf("uid mismatch: the provided object specified uid %s, and no existing "+
			"object was found", sent.GetUID()))
	case sent.GetUID() != old.GetUID():
		return nil, apierrors.NewConflict(group, q.Name, fmt.Errorf("uid mismatch: the provided object specified uid %s, and the existing "+
			"object has uid %s", sent.GetUID(), old.GetUID()))
	}
	fields, err := s.fieldManager("")
	if err != nil {
		return nil, err
	}
	result, err := fields.Apply(old.DeepCopyObject(), sent, manager, query.Get("force") == "true")
	if err != nil {
		if _, isStatus := errors.AsType[*apierrors.StatusError](err); !isStatus {
			err = apierrors.NewBadRequest(err.Error())
		}
		return nil, err
	}
	return s.store(result.(object), q.DryRun)
}

// unsupported is the answer to a patch of an unknown kind.
func unsupported(q *Request) error {
	return apierrors.NewGenericServerResponse(http.StatusUnsupportedMediaType, "patch", schema.GroupResource{}, q.Name, "", 0, false)
}

// store validates and stores an object that a client has changed. A dry run does not store it.
func (s *Server) store(o object, dryRun bool) (any, error) {
	var errs field.ErrorList
	switch o := o.(type) {
	case *corev1.Node:
		errs = validateNode(o)
	case *corev1.Event:
		errs = validateEvent(o)
	}
	if len(errs) > 0 {
		return nil, apierrors.NewInvalid(o.GetObjectKind().GroupVersionKind().GroupKind(), o.GetName(), errs)
	}
	if dryRun {
		return o, nil
	}
	return s.put(o), nil
}

// validateNode returns what the API server refuses of a node's labels and taints.
func validateNode(n *corev1.Node) (errs field.ErrorList) {
	path := field.NewPath("metadata", "labels")
	for key, value := range n.Labels {
		for _, m := range slices.Concat(validation.IsQualifiedName(key), validation.IsValidLabelValue(value)) {
			errs = append(errs, field.Invalid(path.Key(key), value, m))
		}
	}
	effects := []corev1.TaintEffect{corev1.TaintEffectNoSchedule, corev1.TaintEffectPreferNoSchedule, corev1.TaintEffectNoExecute}
	seen := make(map[string]bool)
	for i, t := range n.Spec.Taints {
		at := field.NewPath("spec", "taints").Index(i)
		for _, m := range slices.Concat(validation.IsQualifiedName(t.Key), validation.IsValidLabelValue(t.Value)) {
			errs = append(errs, field.Invalid(at, t.ToString(), m))
		}
		if !slices.Contains(effects, t.Effect) {
			errs = append(errs, field.NotSupported(at.Child("effect"), t.Effect, effects))
		}
		if id := t.Key + ":" + string(t.Effect); seen[id] {
			errs = append(errs, field.Duplicate(at, id))
		} else {
			seen[id] = true
		}
	}
	return errs
}

// validateEvent returns what the API server refuses of an event of core/v1.
func validateEvent(e *corev1.Event) (errs field.ErrorList) {
	for _, m := range validation.IsDNS1123Subdomain(e.Name) {
		errs = append(errs, field.Invalid(field.NewPath("metadata", "name"), e.Name, m))
	}
	namespace := e.InvolvedObject.Namespace
	if namespace == "" {
		namespace = metav1.NamespaceDefault
	}
	if e.Namespace != namespace {
		errs = append(errs, field.Invalid(field.NewPath("involvedObject", "namespace"), e.InvolvedObject.Namespace,
			"does not match event.namespace"))
	}
	return errs
}

// keep copies the field Spec or Status from another object of the same type.
func keep(name string, o, from object) {
	if f := reflect.ValueOf(o).Elem().FieldByName(name); f.IsValid() {
		f.Set(reflect.ValueOf(from.DeepCopyObject()).Elem().FieldByName(name))
	}
}

// sameButTimes reports whether two objects differ in nothing, or only in when field managers have written: the API server stores neither.
func sameButTimes(a, b object) bool {
	clean := func(o object) object {
		if len(o.GetManagedFields()) == 0 {
			return o
		}
		o = o.DeepCopyObject().(object)
		managers := slices.Clone(o.GetManagedFields())
		for i := range managers {
			managers[i].Time = nil
		}
		o.SetManagedFields(managers)
		return o
	}
	return reflect.DeepEqual(clean(a), clean(b))
}
