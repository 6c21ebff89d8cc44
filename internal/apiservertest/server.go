// Package apiservertest is the stand-in for the API server: nodes, events, NodeFeatures, ResourceSlices, ResourceClaims, pods and their
// owners over HTTP, with watches, pages, patches, server-side apply, validation, feature gates and faults. Unlike client-go's fake
// clientset it refuses what the API server refuses. Where it differs, it is stricter: it refuses unknown fields, which the API server
// drops.
package apiservertest

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/http"
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
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/managedfields"
	"k8s.io/apimachinery/pkg/util/validation/field"
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
	cache     map[key]object // the objects that reads from the cache find; nil: as in objects
	history   []event        // by version
	lacks     []string
	denied    map[string]bool // "verb resource"
	absent    []string        // API groups
	hangs     func(Request) bool
	watches   int // that are open
	types     managedfields.TypeConverter
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
	old     object // nil if the object is new
	object  object
}

// seen returns the event as a watch with selectors sees it: to the watch, an object that does not match does not exist. kind is "" if the
// watch sees nothing.
func (e event) seen(match func(object) bool) (kind string, o object) {
	was, is := e.old != nil && match(e.old), e.kind != "DELETED" && match(e.object)
	switch {
	case was && is:
		return "MODIFIED", e.object
	case is:
		return "ADDED", e.object
	case was:
		o = e.old.DeepCopyObject().(object)
		o.SetResourceVersion(fmt.Sprint(e.version))
		return "DELETED", o
	}
	return "", nil
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
	request, k := parse(r)
	if !s.thawed(r, request) {
		return
	}
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
	result = partial(r, result)
	request.Code = http.StatusOK
	if err != nil {
		request.Code = int(statusOf(err).Code)
	} else if request.Verb == "create" {
		request.Code = http.StatusCreated
	}
	s.requests = append(s.requests, request)
	s.notify()
	s.mu.Unlock()
	if err != nil {
		refuse(w, err)
		return
	}
	w.WriteHeader(request.Code)
	_ = json.NewEncoder(w).Encode(result) // the client may be gone
}

// errNoAPI is the answer for an API group that the server does not serve.
var errNoAPI = apierrors.NewGenericServerResponse(http.StatusNotFound, "", schema.GroupResource{}, "", "404 page not found", 0, true)

// refuse answers with an error.
func refuse(w http.ResponseWriter, err error) {
	if errors.Is(err, errNoAPI) {
		http.Error(w, "404 page not found", http.StatusNotFound)
		return
	}
	status := statusOf(err)
	if d := status.Details; d != nil && d.RetryAfterSeconds > 0 {
		w.Header().Set("Retry-After", strconv.Itoa(int(d.RetryAfterSeconds)))
	}
	w.WriteHeader(int(status.Code))
	_ = json.NewEncoder(w).Encode(status) // the client may be gone
}

// partial returns an answer as its client asks for it: as a whole, or only the metadata of its objects.
func partial(r *http.Request, answer any) any {
	if !strings.Contains(r.Header.Get("Accept"), ";as=PartialObjectMetadata") {
		return answer
	}
	metadata := func(o object) object {
		m := meta.AsPartialObjectMetadata(o)
		m.SetGroupVersionKind(metav1.SchemeGroupVersion.WithKind("PartialObjectMetadata"))
		return m
	}
	switch a := answer.(type) {
	case object:
		return metadata(a)
	case list:
		items := make([]object, len(a.Items))
		for i, o := range a.Items {
			items[i] = metadata(o)
		}
		return list{metav1.TypeMeta{Kind: "PartialObjectMetadataList", APIVersion: "meta.k8s.io/v1"}, a.Metadata, items}
	}
	return answer
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
		"nodefeatures":   {Group: "nfd.k8s-sigs.io", Version: "v1alpha1", Kind: "NodeFeature"},
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
	if !ok || !strings.HasPrefix(r.URL.Path, prefix) || slices.Contains(s.absent, gvk.Group) {
		return errNoAPI
	}
	if s.denied[q.Verb+" "+q.Resource] {
		//nolint:staticcheck // the API server's text
		return apierrors.NewForbidden(group, q.Name, fmt.Errorf("User %q cannot %s resource %q in API group %q at the cluster scope", "agent",
			q.Verb, q.Resource, gvk.Group))
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
	old := s.readable(r)[k]
	if q.Verb == "patch" && r.Header.Get("Content-Type") == string(types.ApplyPatchType) {
		return s.apply(r, q, old, body)
	}
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
		return s.delete(group, k, old, body)
	case "create", "update":
		return s.write(r, q, k, old, body)
	}
	return nil, apierrors.NewMethodNotSupported(group, q.Verb)
}

// delete deletes an object. The caller holds mu.
func (s *Server) delete(group schema.GroupResource, k key, old object, body []byte) (any, error) {
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
}

// write creates or replaces an object. The caller holds mu.
func (s *Server) write(r *http.Request, q *Request, k key, old object, body []byte) (any, error) {
	gvk := resourceTypes()[k.resource]
	group := schema.GroupResource{Group: gvk.Group, Resource: q.Resource}
	o, err := newObject(gvk)
	if err != nil {
		return nil, err
	}
	if err := decode(body, o); err != nil {
		return nil, apierrors.NewBadRequest(err.Error())
	}
	if o.GetNamespace() == "" {
		o.SetNamespace(k.namespace)
	}
	if o.GetNamespace() != k.namespace || old != nil && o.GetName() != k.name {
		return nil, apierrors.NewBadRequest("the name or the namespace of the provided object does not match the one sent on the URL")
	}
	if q.Verb == "create" && o.GetName() == "" && o.GetGenerateName() != "" {
		o.SetName(o.GetGenerateName() + strconv.FormatInt(s.version+10000, 36))
	}
	q.Name = o.GetName()
	if q.Verb == "create" && s.objects[key{k.resource, k.namespace, q.Name}] != nil {
		return nil, apierrors.NewAlreadyExists(group, q.Name)
	}
	if _, custom := o.(*NodeFeature); custom && old != nil && o.GetResourceVersion() == "" {
		return nil, apierrors.NewInvalid(gvk.GroupKind(), q.Name, field.ErrorList{
			field.Invalid(field.NewPath("metadata", "resourceVersion"), 0, "must be specified for an update"),
		})
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
	if old != nil {
		keep("Status", o, old)
	}
	if o, err = s.managed(old, o, managerOf(r), ""); err != nil {
		return nil, err
	}
	return s.store(o, q.DryRun)
}

// newObject returns an empty object of a kind.
func newObject(gvk schema.GroupVersionKind) (object, error) {
	if gvk.Kind == "NodeFeature" {
		return &NodeFeature{TypeMeta: metav1.TypeMeta{Kind: gvk.Kind, APIVersion: gvk.GroupVersion().String()}}, nil
	}
	o, err := scheme.Scheme.New(gvk)
	if err != nil {
		return nil, err
	}
	return o.(object), nil
}

// decode decodes JSON without unknown fields, or protobuf. An empty body changes nothing.
func decode(body []byte, into runtime.Object) error {
	if len(body) == 0 {
		return nil
	}
	if _, custom := into.(*NodeFeature); custom {
		decoder := json.NewDecoder(bytes.NewReader(body))
		decoder.DisallowUnknownFields()
		return decoder.Decode(into)
	}
	_, _, err := serializer.NewCodecFactory(scheme.Scheme, serializer.EnableStrict).UniversalDeserializer().Decode(body, nil, into)
	return err
}

// readable returns the objects that a request finds: the cache's, if the request may be answered from the cache.
func (s *Server) readable(r *http.Request) map[key]object {
	if s.cache != nil && r.Method == http.MethodGet && r.URL.Query().Get("resourceVersion") == "0" {
		return s.cache
	}
	return s.objects
}

// list is the answer to a request for several objects.
type list struct {
	metav1.TypeMeta
	Metadata map[string]any `json:"metadata"`
	Items    []object       `json:"items"`
}

// list returns the objects of a kind in a namespace, or in all for "". A page continues after the number of objects in its token.
func (s *Server) list(r *http.Request, gvk schema.GroupVersionKind, namespace string) (any, error) {
	match, err := selector(r)
	if err != nil {
		return nil, err
	}
	items := []object{}
	objects := s.readable(r)
	for _, k := range keys(objects) {
		if o := objects[k]; kindOf(o) == gvk.Kind && (namespace == "" || k.namespace == namespace) && match(o) {
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
	return list{metav1.TypeMeta{Kind: gvk.Kind + "List", APIVersion: gvk.GroupVersion().String()}, metadata, items}, nil
}

func kindOf(o object) string { return o.GetObjectKind().GroupVersionKind().Kind }

func keys(objects map[key]object) []key {
	return slices.SortedFunc(maps.Keys(objects), func(a, b key) int {
		return strings.Compare(a.resource+"/"+a.namespace+"/"+a.name, b.resource+"/"+b.namespace+"/"+b.name)
	})
}

// selector returns the field and label selectors of a request. It refuses a selector of another field, as the API server does.
func selector(r *http.Request) (func(object) bool, error) {
	f, err := fields.ParseSelector(r.URL.Query().Get("fieldSelector"))
	l, err2 := labels.Parse(r.URL.Query().Get("labelSelector"))
	if err := errors.Join(err, err2); err != nil {
		return nil, apierrors.NewBadRequest(err.Error())
	}
	request, _ := parse(r)
	selectable := append([]string{"metadata.name", "metadata.namespace"}, map[string][]string{
		"resourceslices": {"spec.driver", "spec.nodeName"}, "pods": {"spec.nodeName", "status.phase"},
	}[request.Resource]...)
	for _, requirement := range f.Requirements() {
		if !slices.Contains(selectable, requirement.Field) {
			return nil, apierrors.NewBadRequest("field label not supported: " + requirement.Field)
		}
	}
	return func(o object) bool {
		set := fields.Set{"metadata.name": o.GetName(), "metadata.namespace": o.GetNamespace()}
		if slice, ok := o.(*resourceapi.ResourceSlice); ok {
			set["spec.driver"] = slice.Spec.Driver
			if slice.Spec.NodeName != nil {
				set["spec.nodeName"] = *slice.Spec.NodeName
			}
		}
		if pod, ok := o.(*corev1.Pod); ok {
			set["spec.nodeName"], set["status.phase"] = pod.Spec.NodeName, string(pod.Status.Phase)
		}
		return f.Matches(set) && l.Matches(labels.Set(o.GetLabels()))
	}, nil
}

// put stores an object. The caller holds mu.
func (s *Server) put(o object) object {
	k := keyOf(o)
	kind := "ADDED"
	old := s.objects[k]
	if old != nil {
		kind = "MODIFIED"
		o.SetUID(old.GetUID())
		o.SetCreationTimestamp(old.GetCreationTimestamp())
		o.SetResourceVersion(old.GetResourceVersion())
		if sameButTimes(o, old) { // the API server writes no equal object
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
	s.history = append(s.history, event{s.version, kind, k, old, o})
	return o
}

// remove deletes an object. The caller holds mu.
func (s *Server) remove(k key) {
	if old := s.objects[k]; old != nil {
		delete(s.objects, k)
		s.version++
		s.history = append(s.history, event{s.version, "DELETED", k, old, nil})
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

// openWatch opens a watch from a version. With sendInitialEvents, first are the objects of that version.
func (s *Server) openWatch(r *http.Request, q Request) (from int64, first []event, initial bool, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	query := r.URL.Query()
	initial = query.Get("sendInitialEvents") == "true"
	from = s.version
	if v, convErr := strconv.ParseInt(query.Get("resourceVersion"), 10, 64); convErr == nil && v > 0 && !initial {
		from = v
	}
	if err = s.admit(r, q); err == nil && from < s.compacted {
		err = apierrors.NewResourceExpired("too old resource version")
	}
	q.Code = http.StatusOK
	if err != nil {
		q.Code = int(statusOf(err).Code)
	} else {
		s.watches++
	}
	s.requests = append(s.requests, q)
	s.notify()
	for _, k := range keys(s.objects) {
		if initial && k.resource == q.Resource {
			first = append(first, event{kind: "ADDED", key: k, object: s.objects[k]})
		}
	}
	return from, first, initial, err
}

// watch sends the changes since the version of the request, until the connection ends.
func (s *Server) watch(w http.ResponseWriter, r *http.Request, q Request) {
	match, err := selector(r)
	if err != nil {
		refuse(w, err)
		return
	}
	from, first, initial, err := s.openWatch(r, q)
	if err != nil {
		refuse(w, err)
		return
	}
	defer s.do(func() { s.watches-- })
	send := func(kind string, o any) bool {
		err := json.NewEncoder(w).Encode(map[string]any{"type": kind, "object": partial(r, o)})
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
	for s.thawed(r, q) {
		s.mu.Lock()
		compacted, changed := from < s.compacted, s.changed
		pending := slices.Clone(s.history)
		s.mu.Unlock()
		if compacted {
			send("ERROR", statusOf(apierrors.NewResourceExpired("too old resource version")))
			return
		}
		for _, e := range pending {
			if e.version <= from || e.key.resource != q.Resource {
				continue
			}
			if kind, o := e.seen(match); kind != "" && !send(kind, o) {
				return
			}
		}
		from = max(from, versionOf(pending))
		select {
		case <-r.Context().Done():
			return
		case <-changed:
		}
	}
}

// versionOf returns the version of the last event.
func versionOf(events []event) int64 {
	if len(events) == 0 {
		return 0
	}
	return events[len(events)-1].version
}

// thawed waits while the server does not answer a request; it returns false if the connection ends first.
func (s *Server) thawed(r *http.Request, q Request) bool {
	for {
		s.mu.Lock()
		frozen, changed := s.hangs != nil && s.hangs(q), s.changed
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
