package kube

import (
	"cmp"
	"context"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
	"go.uber.org/zap/zaptest/observer"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/health/judge"
	"github.com/gpu-node-agent/gpu-node-agent/internal/apiservertest"
	"github.com/gpu-node-agent/gpu-node-agent/internal/healthtest"
)

// apiServer is the stand-in API server with the node node1. Its requests are counted, and a test can make them fail.
type apiServer struct {
	*apiservertest.Server
	transport http.RoundTripper

	mu       sync.Mutex                // guards everything below
	fail     func(*http.Request) error // fails a request, or changes the server before it
	requests []string                  // such as "PATCH nodes"
}

func newAPI(t *testing.T) *apiServer {
	a := &apiServer{Server: apiservertest.New(t)}
	a.transport = a.Transport(a.before)
	a.createNode()
	return a
}

// open opens a client.
func (a *apiServer) open(string) (*client, error) {
	return newClient(&rest.Config{Transport: a.transport})
}

func (a *apiServer) before(r *http.Request) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.requests = append(a.requests, r.Method+" "+resourceOf(r))
	core, reads := strings.HasPrefix(r.URL.Path, "/api/"), r.Method == "GET" || r.ContentLength == int64(len("{}"))
	if core && !reads && !strings.Contains(r.Header.Get("Accept"), ";as=PartialObjectMetadata;") {
		return fmt.Errorf("%s %s asks for the whole object", r.Method, r.URL)
	}
	if a.fail != nil {
		return a.fail(r)
	}
	return nil
}

// resourceOf returns the resource of a request, such as nodes.
func resourceOf(r *http.Request) string {
	path := strings.Split(r.URL.Path, "/")
	path = path[slices.IndexFunc(path, func(s string) bool { return strings.HasPrefix(s, "v1") })+1:]
	if path[0] == "namespaces" {
		path = path[2:]
	}
	return path[0]
}

// lose has the server handle a request, and loses the answer.
func (a *apiServer) lose(r *http.Request) error {
	again := r.Clone(r.Context())
	body, err := r.GetBody()
	if err != nil {
		return err
	}
	again.Body = body
	response, err := a.Transport(nil).RoundTrip(again)
	if err != nil {
		return err
	}
	_ = response.Body.Close()
	return errRefused
}

// took returns the requests since the last call.
func (a *apiServer) took() string {
	a.mu.Lock()
	defer a.mu.Unlock()
	all := strings.Join(a.requests, ", ")
	a.requests = nil
	return all
}

// did returns how many requests such as "patch nodes/status" the server has answered.
func (a *apiServer) did(request string) (n int) {
	for _, r := range a.Requests() {
		if r.Verb+" "+r.Resource == request {
			n++
		}
	}
	return n
}

// writes returns the number of writes of the condition.
func (a *apiServer) writes() int { return a.did("patch nodes/status") }

func (a *apiServer) failWith(err error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.fail = nil; err != nil {
		a.fail = func(*http.Request) error { return err }
	}
}

// createNode replaces the node.
func (a *apiServer) createNode() {
	a.Delete("nodes", "", "node1")
	a.Put(&corev1.Node{
		ObjectMeta: metav1.ObjectMeta{Name: "node1", Labels: map[string]string{corev1.LabelHostname: "node1"}},
		Status:     corev1.NodeStatus{Conditions: []corev1.NodeCondition{kubeletCondition()}},
	})
}

// node returns the node, nil if it is deleted.
func (a *apiServer) node() *corev1.Node {
	n, _ := a.Get("nodes", "", "node1").(*corev1.Node)
	return n
}

// change changes the node, without field managers.
func (a *apiServer) change(f func(*corev1.Node)) {
	n := a.node()
	f(n)
	a.Put(n)
}

// setLabel sets a label as another client does that does not use server-side apply. An empty value removes it.
func (a *apiServer) setLabel(manager, key, value string) {
	n := a.node()
	if n.Labels[key] = value; value == "" {
		delete(n.Labels, key)
	}
	a.PutBy(manager, n)
}

func (a *apiServer) setTaints(taints ...corev1.Taint) {
	a.change(func(n *corev1.Node) { n.Spec.Taints = taints })
}

// setConditions sets the node's conditions besides the kubelet's.
func (a *apiServer) setConditions(conditions ...corev1.NodeCondition) {
	a.change(func(n *corev1.Node) { n.Status.Conditions = append(conditions, kubeletCondition()) })
}

// conditions returns the node's conditions besides the kubelet's.
func (a *apiServer) conditions(t *testing.T) []corev1.NodeCondition {
	t.Helper()
	all := a.node().Status.Conditions
	i := slices.Index(all, kubeletCondition())
	if i < 0 {
		t.Fatalf("the kubelet's condition is lost: %+v", all)
	}
	return slices.Delete(all, i, i+1)
}

func kubeletCondition() corev1.NodeCondition {
	return corev1.NodeCondition{Type: corev1.NodeReady, Status: corev1.ConditionTrue}
}

// feature returns the node's NodeFeature, nil if there is none.
func (a *apiServer) feature() *apiservertest.NodeFeature {
	f, _ := a.Get("nodefeatures", "gpu", "gpu-node-agent-node1").(*apiservertest.NodeFeature)
	return f
}

func (a *apiServer) clearEvents() {
	for _, e := range a.Events() {
		a.Delete("events", e.Namespace, e.Name)
	}
}

// apiError returns an error response of the API server.
func apiError(code int, reason metav1.StatusReason, causes ...metav1.CauseType) error {
	s := metav1.Status{
		Status: metav1.StatusFailure, Code: int32(code), Reason: reason, Message: "refused: " + string(reason),
		Details: &metav1.StatusDetails{},
	}
	if code == http.StatusServiceUnavailable {
		s.Details.RetryAfterSeconds = 1
	}
	for _, c := range causes {
		s.Details.Causes = append(s.Details.Causes, metav1.StatusCause{Type: c})
	}
	return &apierrors.StatusError{ErrStatus: s}
}

// rig runs a reporter with a fake API server under synctest.
type rig struct {
	*apiServer
	config    health.Latest[judge.Config]
	snapshots health.Latest[health.Snapshot]
	holders   map[health.DeviceID][]Pod
	lost      atomic.Pointer[[]string] // Options.Unschedulable; nil if unknown
	idle      atomic.Pointer[IdlePods]
	logged    *observer.ObservedLogs
	reporter  *Reporter
	stop      func()
}

func newRig(api *apiServer, saved ...health.DeviceState) *rig {
	core, logged := observer.New(zapcore.InfoLevel)
	g := &rig{apiServer: api, logged: logged, holders: make(map[health.DeviceID][]Pod)}
	g.enable(true)
	g.lost.Store(&[]string{})
	g.idle.Store(new(IdlePods))
	g.reporter = New(Options{
		Config: &g.config, Snapshots: &g.snapshots, Node: "node1", Saved: saved, Log: zap.New(core),
		Holders: func(id health.DeviceID) []Pod { return g.holders[id] },
		Idle:    func() IdlePods { return *g.idle.Load() },
		Unschedulable: func() ([]string, bool) {
			lost := g.lost.Load()
			return *cmp.Or(lost, &[]string{}), lost != nil
		},
	})
	g.reporter.open = api.open
	return g
}

// withRig runs a test with a reporter that has written the condition of two healthy GPUs.
func withRig(t *testing.T, test func(*rig)) {
	synctest.Test(t, func(t *testing.T) {
		g := newRig(newAPI(t))
		g.start(t)
		g.setDevices(gpu(0, nil), gpu(1, nil))
		g.advance(2 * time.Second)
		test(g)
	})
}

func (g *rig) start(t *testing.T) {
	done := make(chan error)
	ctx, cancel := context.WithCancel(t.Context())
	go func() { done <- g.reporter.Run(ctx) }()
	g.stop = sync.OnceFunc(func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
	t.Cleanup(g.stop)
}

func (g *rig) enable(on bool) {
	c := judge.DefaultConfig()
	c.Kubernetes.Enabled = on
	g.config.Store(&c)
}

func (g *rig) setDevices(devices ...health.DeviceState) { g.snapshots.Store(snapshotOf(devices...)) }

// advance lets time pass and waits until the reporter is idle. Between two calls the test may read and change the server.
func (g *rig) advance(d time.Duration) {
	g.fence()
	<-time.After(d)
	synctest.Wait()
}

// fence orders the test's changes before the server's next request.
func (g *rig) fence() {
	g.mu.Lock()
	defer g.mu.Unlock()
}

// condition returns the node's condition.
func (g *rig) condition(t *testing.T) corev1.NodeCondition {
	t.Helper()
	all := g.conditions(t)
	if len(all) != 1 || all[0].Type != conditionType {
		t.Fatalf("the node has the conditions %+v, want one", all)
	}
	return all[0]
}

func (g *rig) wantCondition(t *testing.T, status corev1.ConditionStatus, reason string, writes int) {
	t.Helper()
	if c := g.condition(t); c.Status != status || c.Reason != reason || g.writes() != writes {
		t.Errorf("after %d writes: %+v, want %s %s after %d", g.writes(), c, status, reason, writes)
	}
}

// wantEvents checks the events, each as "object reason ×count", sorted.
func (g *rig) wantEvents(t *testing.T, want ...string) {
	t.Helper()
	var list []string
	for _, e := range g.Events() {
		o := e.InvolvedObject
		list = append(list, fmt.Sprintf("%s/%s %s ×%d", strings.ToLower(o.Kind), o.Name, e.Reason, e.Count))
	}
	slices.Sort(list)
	if !slices.Equal(list, want) {
		t.Errorf("events %q, want %q", list, want)
	}
}

// snapshotOf returns a snapshot of a source that is up.
func snapshotOf(devices ...health.DeviceState) *health.Snapshot {
	return &health.Snapshot{At: time.Now(), Source: health.Source{Kind: "sim", Status: health.SourceUp}, Devices: devices}
}

func gpu(index int, xids map[int]uint64, findings ...health.Finding) health.DeviceState {
	d := health.DeviceState{
		Device: health.Device{ID: health.DeviceID(fmt.Sprintf("GPU-%d", index)), Index: index},
		XIDs:   healthtest.Counted(xids, health.XID{}),
	}
	return withFindings(d, findings...)
}

func mig(of, gi int, xids map[int]uint64, findings ...health.Finding) health.DeviceState {
	parent := health.DeviceID(fmt.Sprintf("GPU-%d", of))
	d := health.DeviceState{Device: health.Device{
		ID: health.DeviceID(fmt.Sprintf("MIG-%d-%d", of, gi)), Parent: parent, Kind: health.KindMIG, Index: of, GI: gi, MIGIndex: gi - 1,
	}, XIDs: healthtest.Counted(xids, health.XID{})}
	return withFindings(d, findings...)
}

func withFindings(d health.DeviceState, findings ...health.Finding) health.DeviceState {
	d.Verdict = health.Verdict{State: health.Healthy, Findings: findings}
	for _, f := range findings {
		d.Verdict.State = max(d.Verdict.State, f.State)
	}
	return d
}

func finding(cause string, s health.State) health.Finding {
	return health.Finding{Cause: cause, State: s, Reason: "it is " + cause, Action: health.ActionResetGPU}
}

func inheritedFrom(parent string, f health.Finding) health.Finding {
	f.From = health.DeviceID(parent)
	return f
}
