package apiservertest

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"syscall"
	"testing"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/rest"
)

// New returns a server that has some nodes and runs until the test ends. Its clients use connections in memory, so it also works under
// synctest.
func New(t testing.TB, nodes ...string) *Server {
	s := &Server{
		changed: make(chan struct{}), version: 100, objects: make(map[key]object), denied: make(map[string]bool),
		listener: newListener(),
	}
	for _, name := range nodes {
		s.Put(&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name}})
	}
	s.http = &http.Server{Handler: s} //nolint:gosec // of a test
	var done sync.WaitGroup
	done.Go(func() {
		if err := s.http.Serve(s.listener); !errors.Is(err, http.ErrServerClosed) {
			t.Error(err)
		}
	})
	t.Cleanup(func() {
		_ = s.http.Close()
		s.listener.setRefused(true)
		done.Wait()
	})
	return s
}

// Client returns a client of the server.
func (s *Server) Client() (kubernetes.Interface, error) {
	return kubernetes.NewForConfig(&rest.Config{
		Host: "http://apiserver", UserAgent: "test", QPS: 5, Burst: 10, WarningHandler: rest.NoWarnings{},
		Transport: s.Transport(nil),
	})
}

// Kubeconfig makes the server listen on 127.0.0.1 too, and returns the path of a kubeconfig file for it.
func (s *Server) Kubeconfig(t testing.TB) string {
	t.Helper()
	l, err := new(net.ListenConfig).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	server := &http.Server{Handler: s} //nolint:gosec // of a test
	done := make(chan struct{})
	go func() { defer close(done); _ = server.Serve(&gate{l, s.listener}) }()
	t.Cleanup(func() { _ = server.Close(); <-done })
	path := filepath.Join(t.TempDir(), "kubeconfig")
	text := fmt.Sprintf("apiVersion: v1\nkind: Config\nclusters: [{name: c, cluster: {server: 'http://%s'}}]\ncontexts: [{name: c, context: "+
		"{cluster: c, user: u}}]\n"+
		"users: [{name: u, user: {}}]\ncurrent-context: c\n", l.Addr())
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

// Transport returns a transport of the server's clients. Before each request it calls before, in the client's goroutine, unless it is nil.
// If before returns an error of apimachinery's package errors, that is the answer. Any other error ends the request like an error of the
// connection.
func (s *Server) Transport(before func(*http.Request) error) http.RoundTripper {
	return &transport{http.Transport{DialContext: s.listener.dial, MaxIdleConnsPerHost: 10}, before}
}

type transport struct {
	http.Transport
	before func(*http.Request) error
}

func (t *transport) RoundTrip(r *http.Request) (*http.Response, error) {
	if t.before == nil {
		return t.Transport.RoundTrip(r)
	}
	err := t.before(r)
	if err == nil {
		return t.Transport.RoundTrip(r)
	}
	if r.Body != nil {
		_ = r.Body.Close()
	}
	if _, answer := errors.AsType[*apierrors.StatusError](err); !answer {
		return nil, err
	}
	w := httptest.NewRecorder()
	w.Header().Set("Content-Type", "application/json")
	refuse(w, err)
	response := w.Result()
	response.Request = r
	return response, nil
}

// do changes the server.
func (s *Server) do(f func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	f()
	s.notify()
}

// Put creates or replaces an object, without validation.
func (s *Server) Put(o object) { s.PutBy("test", o) }

// PutBy is Put as a client with a field manager.
func (s *Server) PutBy(manager string, o object) {
	o = stored(o)
	s.do(func() {
		next, err := s.managed(s.objects[keyOf(o)], o, manager, "")
		if err != nil {
			panic(err)
		}
		s.put(next)
	})
}

// stored returns a copy of an object as the API server keeps it: with its kind, and times in seconds.
func stored(o object) object {
	gvk := resourceTypes()["nodefeatures"]
	if kinds, _, err := scheme.Scheme.ObjectKinds(o); err == nil {
		gvk = kinds[0]
	}
	text, err := json.Marshal(o)
	if err != nil {
		panic(err)
	}
	c, err := newObject(gvk)
	if err == nil {
		err = json.Unmarshal(text, c)
	}
	if err != nil {
		panic(err)
	}
	c.GetObjectKind().SetGroupVersionKind(gvk)
	return c
}

// Delete deletes an object, such as resourceslices; namespace is empty for objects without one.
func (s *Server) Delete(resource, namespace, name string) {
	s.do(func() { s.remove(key{resource, namespace, name}) })
}

// WipeSlices deletes the ResourceSlices of a node, as the kubelet does when it starts.
func (s *Server) WipeSlices(node string) {
	for _, slice := range s.Slices() {
		if slice.Spec.NodeName != nil && *slice.Spec.NodeName == node {
			s.Delete("resourceslices", "", slice.Name)
		}
	}
}

// Slices returns the ResourceSlices, by name.
func (s *Server) Slices() []resourceapi.ResourceSlice {
	s.mu.Lock()
	defer s.mu.Unlock()
	var all []resourceapi.ResourceSlice
	for _, k := range keys(s.objects) {
		if slice, ok := s.objects[k].(*resourceapi.ResourceSlice); ok {
			all = append(all, *slice.DeepCopy())
		}
	}
	return all
}

// Claims returns the ResourceClaims, by namespace and name.
func (s *Server) Claims() []resourceapi.ResourceClaim {
	s.mu.Lock()
	defer s.mu.Unlock()
	var all []resourceapi.ResourceClaim
	for _, k := range keys(s.objects) {
		if claim, ok := s.objects[k].(*resourceapi.ResourceClaim); ok {
			all = append(all, *claim.DeepCopy())
		}
	}
	return all
}

// Requests returns the requests that were answered, oldest first.
func (s *Server) Requests() []Request {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.requests)
}

// Lack sets the feature gates that are off.
func (s *Server) Lack(gates ...string) { s.do(func() { s.lacks = gates }) }

// Deny refuses requests by "verb resource", such as "list resourceslices". It replaces what was denied.
func (s *Server) Deny(requests ...string) {
	s.do(func() {
		clear(s.denied)
		for _, r := range requests {
			s.denied[r] = true
		}
	})
}

// SetAbsent makes the server lack API groups, such as resource.k8s.io. It replaces the groups that were absent.
func (s *Server) SetAbsent(groups ...string) { s.do(func() { s.absent = groups }) }

// SetStale keeps the cache, from which reads with resource version 0 are answered, as it is, or lets it follow again.
func (s *Server) SetStale(stale bool) {
	s.do(func() {
		if s.cache = nil; stale {
			s.cache = maps.Clone(s.objects)
		}
	})
}

// Watches returns the number of open watches.
func (s *Server) Watches() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.watches
}

// Answer sets a function that may refuse requests, such as with an error of apimachinery's package errors; nil for none.
func (s *Server) Answer(f func(Request) error) { s.do(func() { s.answer = f }) }

// Mutate sets a function that changes slices before they are stored, as a mutating webhook does; nil for none.
func (s *Server) Mutate(f func(*resourceapi.ResourceSlice)) { s.do(func() { s.mutate = f }) }

// Freeze makes the server accept connections and answer nothing, or go on.
func (s *Server) Freeze(frozen bool) {
	if frozen {
		s.Hang(func(Request) bool { return true })
	} else {
		s.Hang(nil)
	}
}

// Hang makes the server answer no request that f selects; nil for none. f must not call the server.
func (s *Server) Hang(f func(Request) bool) { s.do(func() { s.hangs = f }) }

// Compact expires all versions: a client that has an old one must list again.
func (s *Server) Compact() {
	s.do(func() {
		s.version++
		s.compacted, s.history = s.version, nil
	})
}

// SetRefused closes all connections and refuses new ones, or accepts connections again. Connections to Kubeconfig's address are closed
// instead of refused.
func (s *Server) SetRefused(refused bool) { s.listener.setRefused(refused) }

// listener is a net.Listener in memory.
type listener struct {
	accept chan net.Conn

	mu      sync.Mutex // guards all below
	refused bool
	conns   map[net.Conn]bool
	closed  chan struct{}
}

func newListener() *listener {
	return &listener{accept: make(chan net.Conn), conns: make(map[net.Conn]bool), closed: make(chan struct{})}
}

func (l *listener) dial(ctx context.Context, _, _ string) (net.Conn, error) {
	client, server := net.Pipe()
	if l.add(client) {
		select {
		case l.accept <- server:
			return client, nil
		case <-l.closed:
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
	return nil, &net.OpError{Op: "dial", Net: "tcp", Err: os.NewSyscallError("connect", syscall.ECONNREFUSED)}
}

func (l *listener) setRefused(refused bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.refused = refused
	if refused {
		for c := range l.conns {
			_ = c.Close()
		}
		clear(l.conns)
	}
}

// gate is a listener that closes connections while the server refuses them.
type gate struct {
	net.Listener
	l *listener
}

func (g *gate) Accept() (net.Conn, error) {
	for {
		c, err := g.Listener.Accept()
		if err != nil || g.l.add(c) {
			return c, err
		}
		_ = c.Close()
	}
}

// add adds a connection, unless connections are refused.
func (l *listener) add(c net.Conn) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if !l.refused {
		l.conns[c] = true
	}
	return !l.refused
}

func (l *listener) Accept() (net.Conn, error) {
	select {
	case c := <-l.accept:
		return c, nil
	case <-l.closed:
		return nil, net.ErrClosed
	}
}

func (l *listener) Close() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	select {
	case <-l.closed:
	default:
		close(l.closed)
	}
	return nil
}

func (l *listener) Addr() net.Addr { return &net.UnixAddr{Name: "apiserver", Net: "unix"} }
