package cleanup

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/zap"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/component-helpers/scheduling/corev1/nodeaffinity"

	"github.com/gpu-node-agent/gpu-node-agent/agent/kube"
	"github.com/gpu-node-agent/gpu-node-agent/agent/terminal"
)

// fakeCluster is an API server with the agents that at returns for the time since its start.
type fakeCluster struct {
	at      func(time.Duration) agents
	started time.Time
	job     time.Duration // its age then
	fail    func(call, node string) error
	hangs   func() bool // requests end with their context only

	mu     sync.Mutex
	traces map[string]traces
	calls  []string // except reads of agents
	marked []string // pods
}

func (f *fakeCluster) call(name, node string) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.calls = append(f.calls, strings.TrimSpace(name+" "+node))
	if f.fail != nil {
		return f.fail(name, node)
	}
	return nil
}

func (f *fakeCluster) jobCreated(_ context.Context, name string) (time.Time, error) {
	if name != "job" {
		panic(name)
	}
	if f.fail != nil {
		if err := f.fail("job", ""); err != nil {
			return time.Time{}, err
		}
	}
	return f.started.Add(-f.job), nil
}

func (f *fakeCluster) readTraces(context.Context) ([]traces, error) {
	err := f.call("list", "")
	return slices.Collect(maps.Values(f.traces)), err
}

func (f *fakeCluster) readNode(_ context.Context, name string) (traces, error) {
	err := f.call("read", name)
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.traces[name], err
}

func (f *fakeCluster) readFeatures(context.Context) (map[string][]string, error) {
	return nil, f.call("features", "")
}

func (f *fakeCluster) readAgents(ctx context.Context) (agents, error) {
	if f.hangs != nil {
		if synctest.Wait(); f.hangs() || ctx.Err() != nil { // after the timer of a time that is over
			<-ctx.Done()
			return agents{}, ctx.Err()
		}
	}
	if f.fail != nil {
		if err := f.fail("agents", ""); err != nil {
			return agents{}, err
		}
	}
	return f.at(time.Since(f.started)), nil
}

func (f *fakeCluster) remove(_ context.Context, i Item) error {
	err := f.call("remove", i.Node)
	if err == nil {
		f.mu.Lock()
		defer f.mu.Unlock()
		f.traces[i.Node] = traces{NodeTraces: kube.NodeTraces{Node: i.Node, Taints: i.keep}}
	}
	return err
}

func (f *fakeCluster) mark(_ context.Context, p agentPod, at time.Time) error {
	err := f.call("mark", p.name)
	if err == nil && !at.IsZero() {
		f.mu.Lock()
		defer f.mu.Unlock()
		f.marked = append(f.marked, p.name)
	}
	return err
}

// tainted returns nodes with a taint each.
func tainted(names ...string) map[string]traces {
	all := make(map[string]traces)
	for _, n := range names {
		all[n] = traces{NodeTraces: kube.NodeTraces{Node: n, Taints: []string{unhealthy}}}
	}
	return all
}

// onNodes returns agents without configuration, on nodes. old reports whether the pod of a node is of an old revision.
func onNodes(old func(node string) bool, names ...string) agents {
	a := agents{map[types.UID]daemonSet{"ds": {name: "gpu/gna", revision: "new"}}, make(map[string][]agentPod)}
	for _, n := range names {
		a.pods[n] = []agentPod{podOf(configuration{}, func(p *agentPod) {
			if p.name = "pod-" + n; old(n) {
				p.revision = "old"
			}
		})}
	}
	return a
}

func runOf(t *testing.T, f *fakeCluster, o options) (Report, error) {
	t.Helper()
	f.started = time.Now()
	o.connect = func(string, string, string) (cluster, error) { return f, nil }
	r, err := o.run(t.Context(), zap.NewNop())
	return *r, err
}

func never(string) bool { return false }

func TestRunWritesNothingWithoutApply(t *testing.T) {
	f := &fakeCluster{traces: tainted("a"), at: func(time.Duration) agents { return onNodes(never, "a") }}
	r, err := runOf(t, f, options{})
	if want := []string{"list", "features"}; err != nil || !slices.Equal(f.calls, want) {
		t.Errorf("%v; calls %v, want %v", err, f.calls, want)
	}
	if text := r.Table(terminal.Output{}); !strings.Contains(text, unhealthy) ||
		!strings.Contains(text, "1 node of 1 node can be cleaned now; --apply does it") {
		t.Errorf("table:\n%s", text)
	}
}

func TestRunWaitsForNewPods(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := &fakeCluster{traces: tainted("a", "b", "c")}
		f.at = func(since time.Duration) agents {
			return onNodes(func(n string) bool { return n == "b" && since < time.Minute || n == "c" }, "a", "b", "c")
		}
		r, err := runOf(t, f, options{apply: true, hook: "job", wait: 3 * time.Minute})
		if took := time.Since(f.started); took > 3*time.Minute || took < 2*time.Minute {
			t.Errorf("ended after %v", took)
		}
		slices.Sort(f.calls)
		if want := "features, list, mark pod-a, mark pod-b, read a, read b, remove a, remove b"; err != nil ||
			strings.Join(f.calls, ", ") != want {
			t.Errorf("%v; calls %v, want %s", err, f.calls, want)
		}
		text := r.Table(terminal.Output{})
		for _, want := range []string{"cleaned 2 of 3 nodes; ", kube.CleanupCommand, "waits: pod gpu/pod-c is not of the newest revision"} {
			if !strings.Contains(text, want) {
				t.Errorf("table without %q:\n%s", want, text)
			}
		}
	})
}

func TestRunEndsAtOnceWithNothingLeft(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := &fakeCluster{
			traces: map[string]traces{"a": {NodeTraces: kube.NodeTraces{Node: "a"}}},
			at:     func(time.Duration) agents { panic("the agents are read") },
		}
		r, err := runOf(t, f, options{apply: true, hook: "job", wait: 3 * time.Minute})
		if err != nil || time.Since(f.started) > 0 || len(f.calls) != 2 || r.Table(terminal.Output{}) != "nothing is left by agents\n" {
			t.Errorf("%v after %v, %v\n%s", err, time.Since(f.started), f.calls, r.Table(terminal.Output{}))
		}
	})
}

func TestRunMarksAgents(t *testing.T) {
	for name, c := range map[string]struct {
		o      options
		fail   func(call, node string) error
		marked string
	}{
		"by hand: of all clean nodes":        {options{apply: true}, nil, "pod-clean, pod-tainted"},
		"hook: of cleaned nodes":             {options{apply: true, hook: "job"}, nil, "pod-tainted"},
		"dry run":                            {options{}, nil, ""},
		"NodeFeatures unknown":               {options{apply: true}, failing("features"), ""},
		"not of a node that is not cleaned":  {options{apply: true}, failing("remove"), "pod-clean"},
		"a node that cannot be read is left": {options{apply: true}, failing("read"), "pod-clean"},
	} {
		t.Run(name, func(t *testing.T) {
			f := &fakeCluster{traces: tainted("tainted"), fail: c.fail, at: func(time.Duration) agents {
				return onNodes(func(n string) bool { return n == "old" }, "tainted", "clean", "old")
			}}
			for _, n := range []string{"clean", "old"} {
				f.traces[n] = traces{NodeTraces: kube.NodeTraces{Node: n}}
			}
			_, err := runOf(t, f, c.o)
			slices.Sort(f.marked)
			if got := strings.Join(f.marked, ", "); got != c.marked || (err != nil) != (c.fail != nil) {
				t.Errorf("%v; told %s, want %s", err, got, c.marked)
			}
		})
	}
}

func failing(calls ...string) func(call, node string) error {
	return func(call, node string) error {
		if slices.Contains(calls, call) {
			return fmt.Errorf("%s %s is forbidden", call, node)
		}
		return nil
	}
}

// TestRunMarksLateAgents has an agent start after its node was cleaned, while the run waits for another node.
func TestRunMarksLateAgents(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := &fakeCluster{traces: tainted("a", "b")}
		f.at = func(since time.Duration) agents {
			all := onNodes(func(n string) bool { return n == "b" && since < time.Minute }, "a", "b")
			if since < 30*time.Second {
				delete(all.pods, "a")
			}
			return all
		}
		r, err := runOf(t, f, options{apply: true, hook: "job", wait: 3 * time.Minute})
		slices.Sort(f.marked)
		if err != nil || !strings.Contains(r.summary(), "cleaned 2 nodes") || !slices.Equal(f.marked, []string{"pod-a", "pod-b"}) {
			t.Errorf("%v; %s, told %v", err, r.summary(), f.marked)
		}
	})
}

// TestRunAwaitsAgents checks that a run waits for the agents of cleaned nodes, which taints may have kept away, but not for agents that
// never start.
func TestRunAwaitsAgents(t *testing.T) {
	for name, c := range map[string]struct {
		pod, started time.Duration // when they are
		selects      string        // the label pool that the DaemonSet selects
		until        time.Duration // the run lasts
		told         bool
	}{
		"no agent is to run":      {time.Hour, time.Hour, "b", 0, false},
		"one may start":           {5 * time.Second, 20 * time.Second, "a", 20*time.Second + maxPause, true},
		"one starts slowly":       {5 * time.Second, 2 * time.Minute, "a", 3 * time.Minute, true},
		"none starts":             {time.Hour, time.Hour, "a", 40 * time.Second, false},
		"one starts, and hangs":   {5 * time.Second, time.Hour, "a", 3 * time.Minute, false},
		"one starts where others": {time.Hour, time.Hour, "", 40 * time.Second, false},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				f := &fakeCluster{traces: tainted("a")}
				node := f.traces["a"]
				node.nodeLabels = map[string]string{"pool": "a"}
				f.traces["a"] = node
				f.at = func(since time.Duration) agents {
					all := onNodes(never, "a")
					set, pod := all.daemonSets["ds"], &corev1.Pod{}
					if c.selects != "" {
						pod.Spec.NodeSelector = map[string]string{"pool": c.selects}
					}
					set.affinity = nodeaffinity.GetRequiredNodeAffinity(pod)
					all.daemonSets["ds"] = set
					if all.pods["a"][0].started = since >= c.started; since < c.pod {
						delete(all.pods, "a")
					}
					return all
				}
				r, err := runOf(t, f, options{apply: true, hook: "job", wait: 3 * time.Minute})
				took := time.Since(f.started)
				if err != nil || r.summary() != "cleaned 1 node" || (len(f.marked) == 1) != c.told {
					t.Errorf("%v; %s, told %v", err, r.summary(), f.marked)
				}
				if took > c.until || c.until > 0 && took < c.until/2 {
					t.Errorf("ended after %v, want %v", took, c.until)
				}
			})
		})
	}
}

// TestHookEndsBeforeDeadline checks that a pod of the hook that starts late ends in time, measured from the creation of its Job, also if
// the API server stops answering.
func TestHookEndsBeforeDeadline(t *testing.T) {
	for age, c := range map[time.Duration]struct {
		answers time.Duration // for so long
		until   time.Duration
		cleaned bool
	}{
		-time.Hour:        {time.Hour, 3 * time.Minute, true}, // this node's clock is behind
		0:                 {time.Hour, 3 * time.Minute, true},
		2 * time.Minute:   {time.Hour, time.Minute, true},
		110 * time.Second: {50 * time.Second, 100 * time.Second, true}, // 210 s in all
		200 * time.Second: {time.Hour, 0, true},
		199 * time.Second: {0, 11 * time.Second, false},
		4 * time.Minute:   {time.Hour, 0, false},
		24 * time.Hour:    {time.Hour, 3 * time.Minute, true}, // this node's clock is ahead
	} {
		t.Run(age.String(), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				f := &fakeCluster{traces: tainted("a", "b"), job: age, at: func(time.Duration) agents {
					return onNodes(func(n string) bool { return n == "b" }, "a", "b")
				}}
				f.hangs = func() bool { return time.Since(f.started) >= c.answers }
				r, _ := runOf(t, f, options{apply: true, hook: "job", wait: 3 * time.Minute})
				took := time.Since(f.started)
				if took > c.until || took < c.until-maxPause || strings.Contains(r.summary(), "cleaned 1 of 2") != c.cleaned {
					t.Errorf("ended after %v, want %v: %s", took, c.until, r.summary())
				}
			})
		})
	}
}

func TestRunErrors(t *testing.T) {
	for name, c := range map[string]struct {
		fail  func(call, node string) error
		until time.Duration // of the failure
		want  string        // the table at the end
		calls int           // of remove
		more  int           // calls if all pauses are the shortest
		err   bool
	}{
		"one node": {
			func(call, node string) error { return failing("remove a")(call+" "+node, "") }, time.Hour, "cleaned 1 of 2 nodes; ",
			22, 19, true,
		},
		"one node for a time": {
			func(call, node string) error { return failing("remove a")(call+" "+node, "") }, 10 * time.Second,
			"cleaned 2 nodes", 6, 1, false,
		},
		"nodes":              {failing("list"), time.Hour, "unknown what agents have left", 0, 0, true},
		"nodes for a time":   {failing("list"), time.Minute, "cleaned 2 nodes", 2, 0, false},
		"agents":             {failing("agents"), time.Hour, "unknown what agents have left", 0, 0, true},
		"agents for a time":  {failing("agents"), time.Minute, "cleaned 2 nodes", 2, 0, false},
		"a pod":              {failing("mark"), time.Hour, "removed, but cannot mark in pod gpu/pod-a", 2, 0, true},
		"a pod for a time":   {failing("mark"), time.Minute, "removed", 2, 0, false},
		"the Job":            {failing("job"), time.Hour, "unknown what agents have left", 0, 0, true},
		"the Job for a time": {failing("job"), time.Minute, "cleaned 2 nodes", 2, 0, false},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				f := &fakeCluster{traces: tainted("a", "b"), at: func(time.Duration) agents { return onNodes(never, "a", "b") }}
				f.fail = func(call, node string) error {
					if time.Since(f.started) < c.until {
						return c.fail(call, node)
					}
					return nil
				}
				r, err := runOf(t, f, options{apply: true, hook: "job", wait: 3 * time.Minute})
				if text := r.Table(terminal.Output{}); (err != nil) != c.err || !strings.Contains(text, c.want) {
					t.Errorf("%v\n%s", err, text)
				}
				removed := slices.DeleteFunc(f.calls, func(call string) bool { return !strings.HasPrefix(call, "remove") })
				if n := len(removed); n < c.calls || n > c.calls+c.more {
					t.Errorf("%d removals, want %d to %d", n, c.calls, c.calls+c.more)
				}
			})
		})
	}
}

func TestHookEndsWithoutError(t *testing.T) {
	for _, hook := range []bool{true, false} {
		cmd := Command()
		args := []string{"--kubeconfig", "/absent", "--apply"}
		if hook {
			args = append(args, "--hook", "job")
		}
		cmd.SetArgs(args)
		cmd.SetOut(new(strings.Builder))
		var log strings.Builder
		cmd.SetErr(&log)
		cmd.SilenceUsage, cmd.SilenceErrors = true, true
		if err := cmd.ExecuteContext(t.Context()); (err == nil) != hook || hook && !strings.Contains(log.String(), kube.CleanupCommand) {
			t.Errorf("hook %v: %v; log %s", hook, err, log.String())
		}
	}
}

func TestParseConfig(t *testing.T) {
	for text, want := range map[string]configuration{
		"":                                {},
		"node: {labels: {output: api}}":   {labels: true},
		"node: {labels: {output: file}}":  {},
		"node: {labels: {output: false}}": {},
		"node: {labels: {output: nodeFeature}}\nhealth: {kubernetes: {enabled: true}}": {feature: true, condition: true},
		`node: {taints: [{when: cordoned, key: a/b, value: v, effect: NoExecute}, {when: anyUnhealthy, key: a/b, effect: NoSchedule}]}`: {
			taints: []string{"a/b:NoExecute", "a/b:NoSchedule"},
		},
	} {
		if got := parseConfig(text); fmt.Sprint(got) != fmt.Sprint(want) {
			t.Errorf("%s: %+v, want %+v", text, got, want)
		}
	}
	if got := parseConfig("node: {taint: []}"); !strings.Contains(got.unknown, "node.taint") {
		t.Errorf("an invalid file: %+v", got)
	}
}

func TestOverrides(t *testing.T) {
	for name, c := range map[string]struct {
		container corev1.Container
		want      string
	}{
		"the chart's": {corev1.Container{
			Args: []string{"--config", "/etc/gpu-node-agent/config.yaml"},
			Env:  []corev1.EnvVar{{Name: "NODE_NAME"}},
		}, ""},
		"another key": {corev1.Container{
			Env:  []corev1.EnvVar{{Name: "GPU_NODE_AGENT_HEALTH_SOCKET"}},
			Args: []string{"--node.idle.after=1h"},
		}, ""},
		"taints":    {corev1.Container{Env: []corev1.EnvVar{{Name: "GPU_NODE_AGENT_NODE_TAINTS"}}}, "variable GPU_NODE_AGENT_NODE_TAINTS"},
		"condition": {corev1.Container{Args: []string{"--health.kubernetes.enabled"}}, "argument --health.kubernetes.enabled"},
		"labels": {
			corev1.Container{Command: []string{"gpu-node-agent", "--node.labels.output=api"}},
			"argument --node.labels.output=api",
		},
		"unknown entries": {corev1.Container{Name: "c", EnvFrom: []corev1.EnvFromSource{{}}}, "envFrom of container c"},
	} {
		if got := overrides(corev1.PodSpec{Containers: []corev1.Container{c.container}}); got != c.want {
			t.Errorf("%s: %q, want %q", name, got, c.want)
		}
	}
}

func TestStarted(t *testing.T) {
	running, ended := corev1.ContainerState{Running: new(corev1.ContainerStateRunning)},
		corev1.ContainerState{Terminated: new(corev1.ContainerStateTerminated)}
	waiting := corev1.ContainerState{Waiting: new(corev1.ContainerStateWaiting)}
	for name, c := range map[string]struct {
		states []corev1.ContainerStatus
		want   bool
	}{
		"no status":       {nil, false},
		"waiting":         {[]corev1.ContainerStatus{{State: waiting}}, false},
		"running":         {[]corev1.ContainerStatus{{State: running}}, true},
		"restarting":      {[]corev1.ContainerStatus{{State: waiting, LastTerminationState: ended}}, true},
		"one of two":      {[]corev1.ContainerStatus{{State: running}, {State: waiting}}, false},
		"ended, no start": {[]corev1.ContainerStatus{{State: ended}}, true},
	} {
		p := &corev1.Pod{Status: corev1.PodStatus{ContainerStatuses: c.states}}
		p.Spec.Containers = make([]corev1.Container, max(1, len(c.states)))
		if got := started(p); got != c.want {
			t.Errorf("%s: %v, want %v", name, got, c.want)
		}
	}
}
