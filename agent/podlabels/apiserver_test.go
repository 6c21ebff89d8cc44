package podlabels

import (
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"net/url"
	"strings"
	"sync"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/cache"
)

// apiServer is a fake API server with list and watch of pods.
type apiServer struct {
	*httptest.Server
	t *testing.T

	mu       sync.Mutex // guards all below
	version  int
	pods     map[cache.ObjectName]metav1.ObjectMeta
	watching map[chan metav1.WatchEvent]bool
	fail     func(http.ResponseWriter, *http.Request) bool // if it returns true, it has written the response
	created  int
	lists    int
	requests int
}

func newAPIServer(t *testing.T) *apiServer {
	a := &apiServer{t: t, version: 1, pods: make(map[cache.ObjectName]metav1.ObjectMeta), watching: make(map[chan metav1.WatchEvent]bool)}
	a.Server = httptest.NewServer(a)
	t.Cleanup(func() {
		a.CloseClientConnections()
		a.Close() // waits for every request, so a leaked one fails the test
	})
	return a
}

func (a *apiServer) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	a.mu.Lock()
	a.requests++
	fail := a.fail
	a.mu.Unlock()
	if fail != nil && fail(w, r) {
		return
	}
	q := r.URL.Query()
	if r.Method != http.MethodGet || r.URL.Path != "/api/v1/pods" || q.Get("fieldSelector") != "spec.nodeName=node-1" ||
		!strings.Contains(r.Header.Get("Accept"), "as=PartialObjectMetadata") || !strings.HasPrefix(r.UserAgent(), "gpu-node-agent") {
		a.t.Errorf("unexpected request %s %s, Accept %s", r.Method, r.URL, r.Header.Get("Accept"))
	}
	w.Header().Set("Content-Type", "application/json")
	if q.Get("watch") == "" {
		a.list(w)
	} else {
		a.watch(w, r, q)
	}
}

func (a *apiServer) list(w http.ResponseWriter) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.lists++
	l := metav1.PartialObjectMetadataList{
		TypeMeta: metav1.TypeMeta{APIVersion: "meta.k8s.io/v1", Kind: "PartialObjectMetadataList"},
		ListMeta: metav1.ListMeta{ResourceVersion: fmt.Sprint(a.version)},
	}
	for _, p := range a.pods {
		l.Items = append(l.Items, a.object(p))
	}
	if err := json.NewEncoder(w).Encode(l); err != nil {
		a.t.Error(err)
	}
}

func (a *apiServer) object(p metav1.ObjectMeta) metav1.PartialObjectMetadata {
	p.ResourceVersion = fmt.Sprint(a.version)
	return metav1.PartialObjectMetadata{TypeMeta: metav1.TypeMeta{APIVersion: "meta.k8s.io/v1", Kind: "PartialObjectMetadata"}, ObjectMeta: p}
}

func (a *apiServer) watch(w http.ResponseWriter, r *http.Request, q url.Values) {
	events := make(chan metav1.WatchEvent, 100)
	a.mu.Lock()
	if q.Get("resourceVersion") != fmt.Sprint(a.version) { // this server keeps no history
		events <- event(a.t, "ERROR", expired())
	}
	a.watching[events] = true
	a.mu.Unlock()
	defer func() {
		a.mu.Lock()
		defer a.mu.Unlock()
		delete(a.watching, events)
	}()
	flush := w.(http.Flusher).Flush
	flush()
	for {
		select {
		case <-r.Context().Done():
			return
		case e := <-events:
			if err := json.NewEncoder(w).Encode(e); err != nil {
				return
			}
			flush()
			if e.Type == "ERROR" {
				return
			}
		}
	}
}

func expired() metav1.Status {
	return metav1.Status{
		TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "Status"},
		Status:   metav1.StatusFailure, Code: http.StatusGone, Reason: metav1.StatusReasonExpired, Message: "too old resource version",
	}
}

func event(t *testing.T, kind string, object any) metav1.WatchEvent {
	t.Helper()
	text, err := json.Marshal(object)
	if err != nil {
		t.Fatal(err)
	}
	e := metav1.WatchEvent{Type: kind}
	e.Object.Raw = text
	return e
}

// put creates or changes a pod, or deletes it if labels is nil. New pods get the UIDs uid-1, uid-2 and so on.
func (a *apiServer) put(namespace, name string, labels map[string]string) {
	a.t.Helper()
	a.mu.Lock()
	defer a.mu.Unlock()
	a.version++
	id := cache.NewObjectName(namespace, name)
	kind := "ADDED"
	p, exists := a.pods[id]
	switch {
	case labels == nil:
		kind = "DELETED"
		delete(a.pods, id)
	case exists:
		kind = "MODIFIED"
	default:
		a.created++
		p = metav1.ObjectMeta{Namespace: namespace, Name: name, UID: types.UID(fmt.Sprint("uid-", a.created))}
	}
	if labels != nil {
		p.Labels = labels
		a.pods[id] = p
	}
	for events := range a.watching {
		events <- event(a.t, kind, a.object(p))
	}
}

// expireWatches ends every watch with 410 Gone.
func (a *apiServer) expireWatches() {
	a.mu.Lock()
	defer a.mu.Unlock()
	for events := range a.watching {
		events <- event(a.t, "ERROR", expired())
	}
}

// failWith makes a function answer all requests and ends the running ones. With nil the server answers again.
func (a *apiServer) failWith(f func(http.ResponseWriter, *http.Request) bool) {
	a.mu.Lock()
	a.fail = f
	a.mu.Unlock()
	if f != nil {
		a.CloseClientConnections()
	}
}

// dropConnection answers a request by closing its connection.
func dropConnection(w http.ResponseWriter, _ *http.Request) bool {
	if conn, _, err := w.(http.Hijacker).Hijack(); err == nil {
		_ = conn.Close()
	}
	return true
}

func (a *apiServer) count() (lists, requests int) {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.lists, a.requests
}
