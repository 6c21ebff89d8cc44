// Package apiservertest is a stand-in for the API server: Nodes, ResourceSlices, ResourceClaims, pods and their owners over HTTP, with
// watches, pages, patches, validation, feature gates and faults. Unlike client-go's fake clientset it refuses what the API server refuses.
package apiservertest

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/http"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes/scheme"
)

// The feature gates that Lack switches off.
const (
	TaintsGate = "DRADeviceTaints"
	SharesGate = "DRAConsumableCapacity"
)

// Server is a stand-in for an API server. The zero Server is not ready; use New. Its methods may be called from any goroutine.
type Server struct {
	listener *listener
	http     *http.Server

	mu        sync.Mutex // guards all below
	changed   chan struct{}
	version   int64
	compacted int64 // watches from an older version are expired
	objects   map[key]object
	history   []event // by version
	lacks     []string
	denied    map[string]bool // "verb resource"
	absent    bool
	frozen    bool
	answer    func(Request) error
	mutate    func(*resourceapi.ResourceSlice)
	requests  []Request
}

type key struct{ resource, namespace, name string }

// object is an object of the API.
type object interface {
	metav1.Object
	runtime.Object
}

type event struct {
	version int64
	kind    string // ADDED, MODIFIED, DELETED
	key     key
	object  object
}

// Request is a request that the server has answered.
type Request struct {
	Verb     string // get, list, watch, create, update, patch, delete
	Resource string // such as resourceslices, with a subresource such as deployments/scale
	Name     string // of the object
	DryRun   bool
	Code     int // of the answer
	Path     string
}

// String returns the request as "verb resource code", with the verb "dry-run" for a dry run.
func (r Request) String() string {
	if r.DryRun {
		r.Verb = "dry-run"
	}
	return fmt.Sprintf("%s %s %d", r.Verb, r.Resource, r.Code)
}

// ServeHTTP answers a request. Watches end when the connection does.
func (s *Server) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	w.Header().Set("Content-Type", "application/json")
	if !s.thawed(r) {
		return
	}
	request, k := parse(r)
	if request.Verb == "watch" {
		s.watch(w, r, request)
		return
	}
	body, err := io.ReadAll(r.Body)
	if err != nil {
		return
	}
	s.mu.Lock()
	result, err := s.handle(r, &request, k, body)
	code := http.StatusOK
	if err != nil {
		status := statusOf(err)
		result, code = status, int(status.Code)
		if d := status.Details; d != nil && d.RetryAfterSeconds > 0 {
			w.Header().Set("Retry-After", strconv.Itoa(int(d.RetryAfterSeconds)))
		}
	} else if request.Verb == "create" {
		code = http.StatusCreated
	}
	request.Code = code
	s.requests = append(s.requests, request)
	s.notify()
	s.mu.Unlock()
	w.WriteHeader(code)
	_ = json.NewEncoder(w).Encode(result) // the client may be gone
}

// parse returns a request, and the object that it names.
func parse(r *http.Request) (Request, key) {
	q := Request{Path: r.URL.Path, DryRun: r.URL.Query().Has("dryRun")}
	parts := strings.Split(strings.TrimPrefix(r.URL.Path, "/"), "/")
	if parts[0] == "apis" && len(parts) > 3 {
		parts = parts[1:] // the API group
	}
	parts = parts[min(2, len(parts)-1):]
	var k key
	if parts[0] == "namespaces" && len(parts) > 2 {
		k.namespace, parts = parts[1], parts[2:]
	}
	k.resource = parts[0]
	if len(parts) > 1 {
		k.name = parts[1]
	}
	q.Resource, q.Name = strings.Join(append([]string{k.resource}, parts[min(2, len(parts)):]...), "/"), k.name
	switch r.Method {
	case http.MethodGet:
		q.Verb = "list"
		if k.name != "" {
			q.Verb = "get"
		} else if watch := r.URL.Query().Get("watch"); watch == "true" || watch == "1" {
			q.Verb = "watch"
		}
	case http.MethodPost:
		q.Verb = "create"
	case http.MethodPut:
		q.Verb = "update"
	case http.MethodPatch:
		q.Verb = "patch"
	case http.MethodDelete:
		q.Verb = "delete"
	}
	return q, k
}

// statusOf returns the answer for an error.
func statusOf(err error) metav1.Status {
	status, ok := errors.AsType[*apierrors.StatusError](err)
	if !ok {
		status = apierrors.NewInternalError(err)
	}
	answer := status.ErrStatus
	answer.Kind, answer.APIVersion = "Status", "v1"
	return answer
}

// resourceTypes are the types of objects by resource.
func resourceTypes() map[string]schema.GroupVersionKind {
	return map[string]schema.GroupVersionKind{
		"nodes":          corev1.SchemeGroupVersion.WithKind("Node"),
		"resourceslices": resourceapi.SchemeGroupVersion.WithKind("ResourceSlice"),
		"resourceclaims": resourceapi.SchemeGroupVersion.WithKind("ResourceClaim"),

		"namespaces":           corev1.SchemeGroupVersion.WithKind("Namespace"),
		"pods":                 corev1.SchemeGroupVersion.WithKind("Pod"),
		"events":               corev1.SchemeGroupVersion.WithKind("Event"),
		"deployments":          appsv1.SchemeGroupVersion.WithKind("Deployment"),
		"replicasets":          appsv1.SchemeGroupVersion.WithKind("ReplicaSet"),
		"statefulsets":         appsv1.SchemeGroupVersion.WithKind("StatefulSet"),
		"jobs":                 batchv1.SchemeGroupVersion.WithKind("Job"),
		"cronjobs":             batchv1.SchemeGroupVersion.WithKind("CronJob"),
		"poddisruptionbudgets": policyv1.SchemeGroupVersion.WithKind("PodDisruptionBudget"),
	}
}

// admit returns why a request is refused before it is handled. The caller holds mu.
func (s *Server) admit(r *http.Request, q Request) error {
	resource, _, _ := strings.Cut(q.Resource, "/")
	gvk, ok := resourceTypes()[resource]
	group := schema.GroupResource{Group: gvk.Group, Resource: q.Resource}
	prefix := "/apis/" + gvk.GroupVersion().String() + "/"
	if gvk.Group == "" {
		prefix = "/api/v1/"
	}
	if !ok || !strings.HasPrefix(r.URL.Path, prefix) || s.absent && gvk.Group == resourceapi.GroupName {
		return &apierrors.StatusError{ErrStatus: metav1.Status{
			Status: metav1.StatusFailure, Code: http.StatusNotFound, Reason: metav1.StatusReasonNotFound,
			Message: "the server could not find the requested resource",
			Details: &metav1.StatusDetails{},
		}}
	}
	if s.denied[q.Verb+" "+q.Resource] {
		return apierrors.NewForbidden(group, q.Name, fmt.Errorf("User %q cannot %s resource %q in API group %q at the cluster scope", "agent",
			q.Verb, q.Resource, gvk.Group)) //nolint:staticcheck // the API server's text
	}
	if s.answer != nil {
		return s.answer(q)
	}
	return nil
}

// handle handles a request other than a watch. The caller holds mu.
func (s *Server) handle(r *http.Request, q *Request, k key, body []byte) (any, error) {
	if err := s.admit(r, *q); err != nil {
		return nil, err
	}
	gvk := resourceTypes()[k.resource]
	group := schema.GroupResource{Group: gvk.Group, Resource: q.Resource}
	old := s.objects[k]
	if old == nil && k.name != "" {
		return nil, apierrors.NewNotFound(group, k.name)
	}
	switch q.Verb + strings.TrimPrefix(q.Resource, k.resource) {
	case "get":
		return old, nil
	case "list":
		return s.list(r, gvk, k.namespace)
	case "patch", "patch/scale", "patch/status":
		return s.patch(r, q, old, body)
	case "create/eviction":
		return s.evict(old, body)
	case "delete":
		var o metav1.DeleteOptions
		if err := decode(body, &o); err != nil {
			return nil, err
		}
		if p := o.Preconditions; p != nil && (p.UID != nil && *p.UID != old.GetUID() ||
			p.ResourceVersion != nil && *p.ResourceVersion != old.GetResourceVersion()) {
			return nil, apierrors.NewConflict(group, k.name, errors.New("precondition failed"))
		}
		s.remove(k)
		return metav1.Status{TypeMeta: metav1.TypeMeta{Kind: "Status", APIVersion: "v1"}, Status: metav1.StatusSuccess}, nil
	case "create", "update":
		decoded, err := scheme.Scheme.New(gvk)
		if err != nil {
			return nil, err
		}
		if err := decode(body, decoded); err != nil {
			return nil, apierrors.NewBadRequest(err.Error())
		}
		o := decoded.(object)
		if q.Verb == "create" && o.GetName() == "" && o.GetGenerateName() != "" {
			o.SetName(o.GetGenerateName() + strconv.FormatInt(s.version+10000, 36))
		}
		q.Name = o.GetName()
		if q.Verb == "create" && s.objects[key{k.resource, k.namespace, q.Name}] != nil {
			return nil, apierrors.NewAlreadyExists(group, q.Name)
		}
		if old != nil && o.GetResourceVersion() != "" && o.GetResourceVersion() != old.GetResourceVersion() {
			return nil, apierrors.NewConflict(group, q.Name,
				errors.New("the object has been modified; please apply your changes to the latest version and try again"))
		}
		if slice, ok := o.(*resourceapi.ResourceSlice); ok {
			if s.mutate != nil {
				s.mutate(slice)
			}
			prepareSlice(slice, s.lacks, time.Now())
			before, _ := old.(*resourceapi.ResourceSlice)
			if errs := validateSlice(slice, before); len(errs) > 0 {
				return nil, apierrors.NewInvalid(gvk.GroupKind(), q.Name, errs)
			}
		}
		if q.DryRun {
			return o, nil
		}
		return s.put(o), nil
	}
	return nil, apierrors.NewMethodNotSupported(group, q.Verb)
}

// decode decodes JSON or protobuf. An empty body changes nothing.
func decode(body []byte, into runtime.Object) error {
	if len(body) == 0 {
		return nil
	}
	_, _, err := scheme.Codecs.UniversalDeserializer().Decode(body, nil, into)
	return err
}

// list returns the objects of a kind in a namespace, or in all for "". A page continues after the number of objects in its token.
func (s *Server) list(r *http.Request, gvk schema.GroupVersionKind, namespace string) (any, error) {
	match, err := selector(r)
	if err != nil {
		return nil, err
	}
	items := []object{}
	for _, k := range s.keys() {
		if o := s.objects[k]; kindOf(o) == gvk.Kind && (namespace == "" || k.namespace == namespace) && match(o) {
			items = append(items, o)
		}
	}
	metadata := map[string]any{"resourceVersion": fmt.Sprint(s.version)}
	from, _ := strconv.Atoi(r.URL.Query().Get("continue"))
	items = items[min(from, len(items)):]
	if limit, _ := strconv.Atoi(r.URL.Query().Get("limit")); limit > 0 && len(items) > limit {
		items = items[:limit]
		metadata["continue"] = strconv.Itoa(from + limit)
	}
	return map[string]any{"kind": gvk.Kind + "List", "apiVersion": gvk.GroupVersion().String(), "metadata": metadata, "items": items}, nil
}

func kindOf(o object) string { return o.GetObjectKind().GroupVersionKind().Kind }

func (s *Server) keys() []key {
	return slices.SortedFunc(maps.Keys(s.objects), func(a, b key) int {
		return strings.Compare(a.resource+"/"+a.namespace+"/"+a.name, b.resource+"/"+b.namespace+"/"+b.name)
	})
}

// selector returns the field and label selectors of a request.
func selector(r *http.Request) (func(object) bool, error) {
	f, err := fields.ParseSelector(r.URL.Query().Get("fieldSelector"))
	l, err2 := labels.Parse(r.URL.Query().Get("labelSelector"))
	if err := errors.Join(err, err2); err != nil {
		return nil, apierrors.NewBadRequest(err.Error())
	}
	return func(o object) bool {
		set := fields.Set{"metadata.name": o.GetName(), "metadata.namespace": o.GetNamespace()}
		if slice, ok := o.(*resourceapi.ResourceSlice); ok {
			set["spec.driver"], set["spec.pool.name"] = slice.Spec.Driver, slice.Spec.Pool.Name
			if slice.Spec.NodeName != nil {
				set["spec.nodeName"] = *slice.Spec.NodeName
			}
		}
		if pod, ok := o.(*corev1.Pod); ok {
			set["status.phase"] = string(pod.Status.Phase)
		}
		return f.Matches(set) && l.Matches(labels.Set(o.GetLabels()))
	}, nil
}

// put stores an object. The caller holds mu.
func (s *Server) put(o object) object {
	k := keyOf(o)
	kind := "ADDED"
	if old := s.objects[k]; old != nil {
		kind = "MODIFIED"
		o.SetUID(old.GetUID())
		o.SetCreationTimestamp(old.GetCreationTimestamp())
		o.SetResourceVersion(old.GetResourceVersion())
		if reflect.DeepEqual(o, old) { // the API server writes no equal object
			return old
		}
	} else if o.GetUID() == "" {
		o.SetUID(types.UID(fmt.Sprintf("uid-%d", s.version+1)))
		o.SetCreationTimestamp(metav1.Now().Rfc3339Copy())
	}
	if o.GetGeneration() == 0 && specOf(o) != nil {
		o.SetGeneration(1)
	}
	s.version++
	o.SetResourceVersion(fmt.Sprint(s.version))
	s.objects[k] = o
	s.history = append(s.history, event{s.version, kind, k, o})
	return o
}

// remove deletes an object. The caller holds mu.
func (s *Server) remove(k key) {
	if o := s.objects[k]; o != nil {
		delete(s.objects, k)
		s.version++
		o = o.DeepCopyObject().(object)
		o.SetResourceVersion(fmt.Sprint(s.version))
		s.history = append(s.history, event{s.version, "DELETED", k, o})
	}
}

func keyOf(o object) key {
	for resource, gvk := range resourceTypes() {
		if gvk.Kind == kindOf(o) {
			return key{resource, o.GetNamespace(), o.GetName()}
		}
	}
	panic(fmt.Sprintf("unexpected object %T", o))
}

// watch sends the changes since the version of the request, until the connection ends.
func (s *Server) watch(w http.ResponseWriter, r *http.Request, q Request) {
	match, err := selector(r)
	s.mu.Lock()
	if err == nil {
		err = s.admit(r, q)
	}
	query := r.URL.Query()
	from := s.version
	if v, convErr := strconv.ParseInt(query.Get("resourceVersion"), 10, 64); convErr == nil && v > 0 {
		from = v
	}
	initial := query.Get("sendInitialEvents") == "true"
	if err == nil && !initial && from < s.compacted {
		err = apierrors.NewResourceExpired("too old resource version")
	}
	q.Code = http.StatusOK
	if err != nil {
		q.Code = int(statusOf(err).Code)
	}
	s.requests = append(s.requests, q)
	var first []event
	if initial {
		for _, k := range s.keys() {
			if k.resource == q.Resource {
				first = append(first, event{kind: "ADDED", key: k, object: s.objects[k]})
			}
		}
		from = s.version
	}
	s.notify()
	s.mu.Unlock()
	if err != nil {
		w.WriteHeader(q.Code)
		_ = json.NewEncoder(w).Encode(statusOf(err))
		return
	}
	send := func(kind string, o any) bool {
		err := json.NewEncoder(w).Encode(map[string]any{"type": kind, "object": o})
		w.(http.Flusher).Flush()
		return err == nil && kind != "ERROR"
	}
	w.(http.Flusher).Flush()
	for _, e := range first {
		if match(e.object) && !send(e.kind, e.object) {
			return
		}
	}
	if initial {
		gvk := resourceTypes()[q.Resource]
		end := map[string]any{"kind": gvk.Kind, "apiVersion": gvk.GroupVersion().String(), "metadata": map[string]any{
			"resourceVersion": fmt.Sprint(from), "annotations": map[string]any{metav1.InitialEventsAnnotationKey: "true"},
		}}
		if !send("BOOKMARK", end) {
			return
		}
	}
	for s.thawed(r) {
		s.mu.Lock()
		compacted, changed := from < s.compacted, s.changed
		pending := slices.Clone(s.history)
		s.mu.Unlock()
		if compacted {
			send("ERROR", statusOf(apierrors.NewResourceExpired("too old resource version")))
			return
		}
		for _, e := range pending {
			if e.version > from && e.key.resource == q.Resource && match(e.object) && !send(e.kind, e.object) {
				return
			}
			from = max(from, e.version)
		}
		select {
		case <-r.Context().Done():
			return
		case <-changed:
		}
	}
}

// thawed waits while the server is frozen; it returns false if the connection ends first.
func (s *Server) thawed(r *http.Request) bool {
	for {
		s.mu.Lock()
		frozen, changed := s.frozen, s.changed
		s.mu.Unlock()
		if !frozen {
			return r.Context().Err() == nil
		}
		select {
		case <-r.Context().Done():
			return false
		case <-changed:
		}
	}
}

// notify wakes all that wait for a change. The caller holds mu.
func (s *Server) notify() {
	close(s.changed)
	s.changed = make(chan struct{})
}
