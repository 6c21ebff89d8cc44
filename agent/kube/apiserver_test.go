package kube

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
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
	"sigs.k8s.io/yaml"

	"github.com/gpu-node-agent/gpu-node-agent/health"
)

// apiServer is a fake API server behind an http.RoundTripper, because synctest allows no network. It decodes requests
// strictly into Kubernetes' own types.
type apiServer struct {
	mu         sync.Mutex // guards everything below
	fail       func(*http.Request) error
	conditions []corev1.NodeCondition
	writes     []time.Time // of the condition
	posts      int
	patches    int
	reads      int // of events
	events     map[string]*corev1.Event
	pods       map[string]corev1.Pod // by namespace/name
	requests   int
}

// apiError returns an error response of the API server.
func apiError(code int, reason metav1.StatusReason, causes ...metav1.CauseType) error {
	s := metav1.Status{
		Status: metav1.StatusFailure, Code: int32(code), Reason: reason, Message: "refused: " + string(reason),
		Details: &metav1.StatusDetails{},
	}
	for _, c := range causes {
		s.Details.Causes = append(s.Details.Causes, metav1.StatusCause{Type: c})
	}
	return &apierrors.StatusError{ErrStatus: s}
}

func (a *apiServer) RoundTrip(r *http.Request) (*http.Response, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.requests++
	var body []byte
	if r.Body != nil {
		body, _ = io.ReadAll(r.Body)
	}
	var answer any
	var err error
	if a.fail != nil {
		err = a.fail(r)
	}
	if err == nil {
		answer, err = a.answer(r, body)
	}
	return respond(r, answer, err)
}

// respond returns an API server's response: an answer, an API error, or no response for another error.
func respond(r *http.Request, answer any, err error) (*http.Response, error) {
	code, header := http.StatusOK, http.Header{"Content-Type": {"application/json"}}
	if s, ok := errors.AsType[*apierrors.StatusError](err); ok {
		status := s.ErrStatus
		status.Kind, status.APIVersion = "Status", "v1"
		answer, code, err = status, int(status.Code), nil
		if code == http.StatusServiceUnavailable {
			header.Set("Retry-After", "1")
		}
	}
	if err != nil {
		return nil, err
	}
	text, err := json.Marshal(answer)
	return &http.Response{
		StatusCode: code, Header: header, Request: r,
		Body: io.NopCloser(strings.NewReader(string(text))),
	}, err
}

func (a *apiServer) answer(r *http.Request, body []byte) (any, error) {
	path := strings.Split(strings.TrimPrefix(r.URL.Path, "/api/v1/"), "/")
	switch {
	case r.Method == "PATCH" && string(body) == "{}" && path[2] == "events": // reads the event
		a.reads++
		if e := a.events[path[3]]; e != nil {
			return e, nil
		}
		return nil, apiError(404, metav1.StatusReasonNotFound)
	case r.Method != "GET" && !strings.Contains(r.Header.Get("Accept"), ";as=PartialObjectMetadata;"):
		return nil, fmt.Errorf("%s %s asks for the whole object", r.Method, r.URL)
	case r.Method == "GET" && path[0] == "nodes":
		return corev1.Node{Status: corev1.NodeStatus{Conditions: a.conditions}}, nil
	case r.Method == "PATCH" && path[0] == "nodes" && path[2] == "status" &&
		r.Header.Get("Content-Type") == "application/strategic-merge-patch+json":
		a.writes = append(a.writes, time.Now())
		if strings.Contains(string(body), `"$patch":"delete"`) {
			a.conditions = nil
			return nil, nil
		}
		var n corev1.Node
		err := yaml.UnmarshalStrict(body, &n)
		if a.conditions = n.Status.Conditions; err == nil && (len(a.conditions) != 1 || a.conditions[0].Type != conditionType) {
			err = fmt.Errorf("patch of other conditions: %s", body)
		}
		return n, err
	case r.Method == "GET" && path[2] == "pods":
		if pod, ok := a.pods[path[1]+"/"+path[3]]; ok {
			return pod, nil
		}
		return nil, apiError(404, metav1.StatusReasonNotFound)
	case r.Method == "POST" && path[2] == "events":
		a.posts++
		e := new(corev1.Event)
		if err := yaml.UnmarshalStrict(body, e); err != nil {
			return nil, err
		}
		if a.events[e.Name] != nil {
			return nil, apiError(409, metav1.StatusReasonAlreadyExists)
		}
		a.events[e.Name] = e
		return e, nil
	case r.Method == "PATCH" && path[2] == "events" && r.Header.Get("Content-Type") == "application/merge-patch+json":
		a.patches++
		e := a.events[path[3]]
		if e == nil {
			return nil, apiError(404, metav1.StatusReasonNotFound)
		}
		return e, yaml.UnmarshalStrict(body, e)
	default:
		return nil, fmt.Errorf("unexpected request %s %s", r.Method, r.URL)
	}
}

// rig runs a reporter with a fake API server under synctest.
type rig struct {
	*apiServer
	config    health.Latest[health.Config]
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
	g.reporter.open = func(string) (*client, error) { return newClient(&rest.Config{Transport: api}) }
	return g
}

func newAPI() *apiServer {
	return &apiServer{events: make(map[string]*corev1.Event), pods: make(map[string]corev1.Pod)}
}

// withRig runs a test with a reporter that has written the condition of two healthy GPUs.
func withRig(t *testing.T, test func(*rig)) {
	synctest.Test(t, func(t *testing.T) {
		g := newRig(newAPI())
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
	c := health.DefaultConfig()
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

func (g *rig) failWith(err error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.fail = nil
	if err != nil {
		g.fail = func(*http.Request) error { return err }
	}
}

// condition returns the node's condition.
func (g *rig) condition(t *testing.T) corev1.NodeCondition {
	t.Helper()
	g.mu.Lock()
	defer g.mu.Unlock()
	if len(g.conditions) != 1 {
		t.Fatalf("the node has %d conditions, want 1", len(g.conditions))
	}
	return g.conditions[0]
}

func (g *rig) wantCondition(t *testing.T, status corev1.ConditionStatus, reason string, writes int) {
	t.Helper()
	if c := g.condition(t); c.Status != status || c.Reason != reason || len(g.writes) != writes {
		t.Errorf("after %d writes: %+v, want %s %s after %d", len(g.writes), c, status, reason, writes)
	}
}

// wantEvents checks the events, each as "object reason ×count", sorted.
func (g *rig) wantEvents(t *testing.T, want ...string) {
	t.Helper()
	g.mu.Lock()
	defer g.mu.Unlock()
	var list []string
	for _, e := range g.events {
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
	d := health.DeviceState{Device: health.Device{ID: health.DeviceID(fmt.Sprintf("GPU-%d", index)), Index: index}, XIDCounts: xids}
	return withFindings(d, findings...)
}

func mig(of, gi int, xids map[int]uint64, findings ...health.Finding) health.DeviceState {
	parent := health.DeviceID(fmt.Sprintf("GPU-%d", of))
	d := health.DeviceState{Device: health.Device{
		ID: health.DeviceID(fmt.Sprintf("MIG-%d-%d", of, gi)), Parent: parent, Kind: health.KindMIG, Index: of, GI: gi, MIGIndex: gi - 1,
	}, XIDCounts: xids}
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
