package reclaim

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
	"go.uber.org/zap/zaptest/observer"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"

	"github.com/gpu-node-agent/gpu-node-agent/agent/terminal"
	"github.com/gpu-node-agent/gpu-node-agent/internal/apiservertest"
)

// fakeCluster has the objects of a world.
type fakeCluster struct {
	Objects
	errs    []string
	urls    map[string]string
	agents  error
	results map[string]error // of apply, by the object's name
	applied []string
	after   func() // of the first apply
}

func (c *fakeCluster) findAgents(context.Context) (map[string]string, error) { return c.urls, c.agents }

func (c *fakeCluster) readObjects(context.Context, Policy) (Objects, []string) {
	return c.Objects, c.errs
}

func (c *fakeCluster) apply(ctx context.Context, _ Policy, a Action, at time.Time) error {
	if ctx.Err() != nil {
		return ctx.Err()
	}
	if time.Since(at) > time.Minute {
		return errors.New("old time")
	}
	c.applied = append(c.applied, string(a.Kind)+" "+a.Name)
	if c.after != nil {
		c.after()
	}
	return c.results[a.Name]
}

// liveWorld has pods of n1 that are idle as of now, for the given hours.
func liveWorld(t *testing.T, idle map[string]float64) *fakeCluster {
	t.Helper()
	w := newTestWorld()
	w.Pods, w.Agents, w.Owners = nil, map[string]Agent{}, map[Ref]*Owner{}
	for name, h := range idle {
		w.addPod(name, nil, "n1", h)
	}
	skew := time.Since(now())
	for i := range w.Pods {
		p := &w.Pods[i]
		p.CreationTimestamp.Time = p.CreationTimestamp.Add(skew)
		p.Status.Conditions[0].LastTransitionTime.Time = p.Status.Conditions[0].LastTransitionTime.Add(skew)
	}
	n := w.Agents["n1"].Status
	n.Time, n.Source.Measured, n.Kubelet.Holders = time.Now(), time.Now(), time.Now()
	return &fakeCluster{Objects: w.Objects, urls: map[string]string{"n1": serveNode(t, n)}, results: make(map[string]error)}
}

func (c *fakeCluster) run(ctx context.Context, o options) (*Report, []observer.LoggedEntry, error) {
	core, logs := observer.New(zapcore.InfoLevel)
	o.connect = func(string, agentSelection) (cluster, error) { return c, nil }
	r, err := o.run(ctx, testPolicy(), zap.New(core))
	return r, logs.All(), err
}

func TestRunWithoutApplyChangesNothing(t *testing.T) {
	c := liveWorld(t, map[string]float64{"a": 3, "b": 0})
	r, logs, err := c.run(t.Context(), options{})
	if err != nil || len(r.Actions) != 1 || r.Actions[0].Name != "a" || r.Actions[0].Done || !r.DryRun || r.GPUs != 1 || len(r.Errors) > 0 {
		t.Errorf("%+v, %v", r, err)
	}
	if len(c.applied) > 0 || len(logs) > 0 {
		t.Errorf("applied %q, logs %v", c.applied, logs)
	}
}

// An error of one action does not stop the others. What was done although an error came later gives back GPUs.
func TestRunApplies(t *testing.T) {
	c := liveWorld(t, map[string]float64{"a": 3, "b": 2.5, "c": 4, "d": 0})
	c.results["c"] = errors.New("conflict")
	c.results["a"] = lateError{errors.New("no Event")}
	r, logs, err := c.run(t.Context(), options{apply: true})
	if err == nil || !strings.Contains(err.Error(), "1 of 3") {
		t.Errorf("%v", err)
	}
	if want := []string{"evict c", "evict a", "evict b"}; !slices.Equal(c.applied, want) {
		t.Errorf("applied %q, want %q", c.applied, want)
	}
	var done []bool
	var texts []string
	for _, a := range r.Actions {
		done, texts = append(done, a.Done), append(texts, a.Error)
	}
	if !slices.Equal(done, []bool{false, true, true}) || !slices.Equal(texts, []string{"conflict", "no Event", ""}) || r.DryRun ||
		r.GPUs != 2 || r.GPUHours != 5.5 {
		t.Errorf("%+v", r)
	}
	var levels []zapcore.Level
	for _, l := range logs {
		levels = append(levels, l.Level)
	}
	if !slices.Equal(levels, []zapcore.Level{zapcore.ErrorLevel, zapcore.WarnLevel, zapcore.InfoLevel, zapcore.InfoLevel}) {
		t.Errorf("logs %v", logs)
	}
	if m := logs[3].ContextMap(); m["gpus"] != 2.0 || m["gpuHours"] != 5.5 || m["actions"] != int64(3) || m["failed"] != int64(1) ||
		m["leftAlone"] != int64(1) {
		t.Errorf("summary %v", m)
	}
}

// An action that is refused is replaced, so that actions which are refused in every run do not take the place of others. An action that may
// have been done is not replaced. What a PodDisruptionBudget refuses, and what changed since it was read, is no failure of the run.
func TestRunReplacesRefusedActions(t *testing.T) {
	gone := apierrors.NewNotFound(schema.GroupResource{}, "a")
	refusal, denied, lost := apierrors.NewTooManyRequests("budget", 0),
		apierrors.NewForbidden(schema.GroupResource{}, "a", errors.New("denied")), errors.New("connection reset")
	for _, tt := range []struct {
		a, b, rest error
		applied    int
		fails      bool // the run
	}{
		{nil, nil, nil, 2, false},
		{refusal, nil, nil, 3, false},
		{errChanged, refusal, nil, 4, false},
		{gone, nil, nil, 3, false},
		{denied, refusal, nil, 4, true},
		{lost, nil, nil, 2, true},
		{refusal, lost, nil, 3, true},
		{refusal, refusal, refusal, 6, false},
		{refusal, refusal, lost, 4, true},
	} {
		c := liveWorld(t, map[string]float64{"a": 4.5, "b": 4, "c": 3.5, "d": 3, "e": 2.5, "f": 2.2})
		c.results = map[string]error{"a": tt.a, "b": tt.b, "c": tt.rest, "d": tt.rest, "e": tt.rest, "f": tt.rest}
		p := testPolicy()
		p.MaxPerRun = 2
		o := options{apply: true, connect: func(string, agentSelection) (cluster, error) { return c, nil }}
		r, err := o.run(t.Context(), p, zap.NewNop())
		if (err != nil) != tt.fails || !slices.Equal(c.applied[:2], []string{"evict a", "evict b"}) || len(c.applied) != tt.applied ||
			len(r.Actions)+len(r.Skipped) != 6 {
			t.Errorf("%+v: applied %q, left %v, %v", tt, c.applied, r.Skipped, err)
		}
	}
}

func TestRunBoundsRefusedActions(t *testing.T) {
	idle := make(map[string]float64)
	for i := range 2 * maxReplaced {
		idle[fmt.Sprint("p", i)] = 3
	}
	c := liveWorld(t, idle)
	for name := range idle {
		c.results[name] = apierrors.NewForbidden(schema.GroupResource{}, name, errors.New("denied"))
	}
	if _, _, err := c.run(t.Context(), options{apply: true}); err == nil || len(c.applied) != testPolicy().MaxPerRun+maxReplaced {
		t.Errorf("%d tries, %v", len(c.applied), err)
	}
}

func TestRunStopsBetweenActions(t *testing.T) {
	c := liveWorld(t, map[string]float64{"a": 3, "b": 2.5})
	ctx, cancel := context.WithCancel(t.Context())
	c.after = cancel
	r, _, err := c.run(ctx, options{apply: true})
	if err == nil || !slices.Equal(c.applied, []string{"evict a"}) || !r.Actions[0].Done || r.Actions[1].Done || r.Actions[1].Error == "" {
		t.Errorf("applied %q, %+v, %v", c.applied, r, err)
	}
}

// What a run has read is too old for an action after a while.
func TestRunEndsWithItsPlan(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := &fakeCluster{Objects: Objects{Namespaces: map[string]map[string]string{"ns": nil}, Owners: make(map[Ref]*Owner)}}
		for _, name := range []string{"a", "b", "c"} {
			o := &Owner{
				Ref: Ref{"ns", kindDeployment, name}, Generation: 5,
				Annotations: map[string]string{recordAnnotation: recordText(3, now(), 5)},
			}
			c.Owners[o.Ref] = o
		}
		c.after = func() { <-time.After(maxPlanAge * 2 / 3) }
		r, _, err := c.run(t.Context(), options{undo: true, apply: true})
		if err == nil || !slices.Equal(c.applied, []string{"restore a", "restore b"}) || !r.Actions[1].Done || r.Actions[2].Error == "" {
			t.Errorf("applied %q, %+v, %v", c.applied, r, err)
		}
	})
}

func TestRunUndo(t *testing.T) {
	c := liveWorld(t, nil)
	o := &Owner{
		Ref: Ref{"ns", kindDeployment, "web"}, Generation: 5,
		Annotations: map[string]string{recordAnnotation: recordText(3, now(), 5)},
	}
	c.Owners[o.Ref] = o
	c.agents = errors.New("not asked")
	r, _, err := c.run(t.Context(), options{undo: true, apply: true})
	if err != nil || !slices.Equal(c.applied, []string{"restore web"}) || !r.Actions[0].Done || len(r.Errors) > 0 {
		t.Errorf("applied %q, %+v, %v", c.applied, r, err)
	}
	if got := r.summary(); got != "restores 1 object with 1.5 GPUs" {
		t.Errorf("summary %q", got)
	}
}

// Pods without an agent's response are left alone. It is an error if no agent responds.
func TestRunWithoutAgents(t *testing.T) {
	for name, c := range map[string]struct {
		change func(*fakeCluster)
		fails  bool
		errs   int
	}{
		"none found":          {func(c *fakeCluster) { c.urls, c.agents = nil, errors.New("none") }, true, 1},
		"none on the node":    {func(c *fakeCluster) { c.urls = map[string]string{"n9": "http://127.0.0.1:1"} }, true, 0},
		"refused":             {func(c *fakeCluster) { c.urls["n1"] = "http://127.0.0.1:1" }, true, 1},
		"no pods":             {func(c *fakeCluster) { c.Pods, c.urls, c.agents = nil, nil, errors.New("none") }, false, 0},
		"namespace is lost":   {func(c *fakeCluster) { c.errs = []string{"team-b: forbidden"} }, false, 1},
		"no namespace at all": {func(c *fakeCluster) { c.Namespaces, c.errs = nil, []string{"ns: forbidden"} }, true, -1},
	} {
		w := liveWorld(t, map[string]float64{"a": 3})
		c.change(w)
		r, _, err := w.run(t.Context(), options{apply: true})
		if (err != nil) != c.fails || r == nil != (c.errs < 0) || r != nil && len(r.Errors) != c.errs || c.fails && len(w.applied) > 0 {
			t.Errorf("%s: %+v, %v, applied %q", name, r, err, w.applied)
		}
	}
}

func TestCommand(t *testing.T) {
	dir := t.TempDir()
	file := func(name, text string) string {
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	policy := file("policy.yaml", "namespaces: [ns]\nidle: {after: 2h}\nnotice: 0s\n")
	w := liveWorld(t, map[string]float64{"a": 3, "b": 0})
	server := apiservertest.New(t)
	server.Put(&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "ns"}})
	for _, p := range w.Pods {
		p.UID = types.UID(p.Name)
		server.Put(&p)
	}
	kubeconfig := server.Kubeconfig(t)
	call := func(args ...string) (string, string, error) {
		var out, errs bytes.Buffer
		c := Command()
		c.SilenceUsage, c.SilenceErrors = true, true
		c.SetArgs(args)
		c.SetOut(&out)
		c.SetErr(&errs)
		err := c.ExecuteContext(t.Context())
		return out.String(), errs.String(), err
	}
	out, log, err := call("--policy", policy, "--kubeconfig", kubeconfig, "--snapshot", w.urls["n1"], "-o", "json")
	var r Report
	if err != nil || log != "" || json.Unmarshal([]byte(out), &r) != nil || len(r.Actions) != 1 || r.Actions[0].String() != "Pod ns/a" ||
		r.Actions[0].GPUHours != 3 || !r.DryRun || len(r.Skipped) != 1 || r.Skipped[0].Reason != ReasonBusy {
		t.Errorf("%s%s%v", out, log, err)
	}
	out, _, err = call("--policy", policy, "--kubeconfig", kubeconfig, "--snapshot", w.urls["n1"])
	if err != nil || !strings.Contains(out, "Pod ns/a") || !strings.Contains(out, "Pod ns/b") {
		t.Errorf("%s%v", out, err)
	}
	out, _, err = call("--policy", policy, "--kubeconfig", kubeconfig, "--snapshot", "http://127.0.0.1:1", "-o", "json")
	if err == nil || json.Unmarshal([]byte(out), &r) != nil || len(r.Errors) != 1 {
		t.Errorf("%s%v", out, err)
	}
	for _, c := range []struct {
		args []string
		want string
	}{
		{nil, "--policy"},
		{[]string{"--policy", policy, "-o", "yaml"}, "--output"},
		{[]string{"--policy", policy, "--snapshot", "http://ada:secret@127.0.0.1:1"}, "--user"},
		{[]string{"--policy", policy, "--agent-scheme", "ftp"}, "--agent-scheme"},
		{[]string{"--policy", policy, "--agent-port", "70000"}, "--agent-port"},
		{[]string{"--policy", policy, "--user", "ada"}, "--user"},
		{[]string{"--policy", policy, "--cert-file", policy}, "--cert-file"},
		{[]string{"--policy", kubeconfig}, kubeconfig},
		{[]string{"--policy", policy, "--kubeconfig", dir + "/none"}, "--kubeconfig"},
	} {
		if out, _, err := call(c.args...); err == nil || !strings.Contains(err.Error(), c.want) || strings.Contains(err.Error(), "secret") ||
			out != "" {
			t.Errorf("%q: %v, want %q\n%s", c.args, err, c.want, out)
		}
	}
}

func TestReportTable(t *testing.T) {
	ref := func(name string) Ref { return Ref{"ns", kindDeployment, name} }
	r := newReport(now())
	r.DryRun = false
	r.Actions = []Action{
		{Ref: ref("failed"), Kind: ActionScale, GPUs: 4, GPUHours: 8, Error: "conflict"},
		{Ref: ref("late"), Kind: ActionScale, GPUs: 1, GPUHours: 8, Error: "no Event", Done: true},
		{Ref: ref("noticed"), Kind: ActionNotify, GPUs: 0.125, GPUHours: 1, Done: true},
		{Ref: ref("restored"), Kind: ActionRestore, Done: true},
	}
	r.Skipped = []Skipped{{Ref: ref("busy"), Reason: ReasonBusy, Text: "used"}}
	r.Errors = []string{"node n1: refused"}
	r.sum()
	if r.GPUs != 1.125 || r.GPUHours != 9 || r.Announced != 0.125 {
		t.Errorf("%+v", r)
	}
	text := r.Table(terminal.Output{})
	for _, part := range []string{
		"conflict", "no Event", "0.13", "gives back 1 GPU,", "announces 0.13 GPUs", "9 GPU-hours",
		"restores 1 object", "1 of 4 actions", "busy", "node n1: refused",
	} {
		if !strings.Contains(text, part) {
			t.Errorf("lacks %q:\n%s", part, text)
		}
	}
	if text := newReport(now()).Table(terminal.Output{}); text != "dry run: nothing to do\n" {
		t.Errorf("%q", text)
	}
}
