package view

import (
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/gpu-node-agent/gpu-node-agent/agent/kube"
	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/health/durable"
	"github.com/gpu-node-agent/gpu-node-agent/health/statefile"
	"github.com/gpu-node-agent/gpu-node-agent/metrics/processes"
	"github.com/gpu-node-agent/gpu-node-agent/plugin"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/dra"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/memlimits"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/nodelock"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/podresources"
)

var now = time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)

// working is the view of an agent without problems.
func working() View {
	gpu := health.DeviceState{Device: health.Device{ID: "GPU-a"}, Sample: health.Sample{Presence: health.Present}}
	return View{
		At: now, MaxAge: time.Minute, Reload: Reload{OK: true, At: now.Add(-time.Hour)}, PluginConfig: plugin.Config{Enabled: true},
		Snapshot: &health.Snapshot{At: now, Source: health.Source{Status: health.SourceUp}, Devices: []health.DeviceState{gpu}},
		Plugin: plugin.Status{Resources: []plugin.ResourceStatus{
			{Name: "nvidia.com/gpu", Registered: true, Audited: true, Devices: 8, Healthy: 7},
		}},
		StateDir: statefile.Status{Path: "/s"},
	}
}

// settling returns the holders of a kubelet that has just started.
func settling() podresources.Holders {
	return podresources.Holders{At: now, Settling: true, By: map[health.DeviceID][]podresources.Holder{}}
}

// Each fact is one problem of its part, or two; without one there is none.
func TestProblems(t *testing.T) {
	down := durable.Failure{Path: "/x/c.json", Err: "no space", Since: now}
	for name, c := range map[string]struct {
		change func(*View)
		want   []string // level, then the problem
	}{
		"none":        {func(*View) {}, nil},
		"no snapshot": {func(v *View) { v.Snapshot = nil }, []string{"unready source: starting"}},
		"source down": {
			func(v *View) { v.Snapshot.Source = health.Source{Status: health.SourceDown, Err: "refused"} },
			[]string{"unready source: down: refused"},
		},
		"old snapshot": {
			func(v *View) { v.Snapshot.At = now.Add(-2 * time.Minute) },
			[]string{"unready source: GPUs were last measured 2m ago, though the source is up"},
		},
		"within MaxAge": {func(v *View) { v.Snapshot.At = now.Add(-time.Minute) }, nil},
		"old while stalled": {
			func(v *View) { v.Snapshot.At, v.Snapshot.Source.Status = now.Add(-time.Hour), health.SourceStalled },
			[]string{"unready source: stalled"},
		},
		"plugin":            {func(v *View) { v.Plugin.Err = "no kubelet" }, []string{"unready plugin: no kubelet"}},
		"plugin waits":      {func(v *View) { v.Plugin.Err, v.Plugin.WaitsForPods = "claims", true }, []string{"warning plugin: claims"}},
		"dra":               {func(v *View) { v.DRA.Err = "waiting" }, []string{"unready dra: waiting"}},
		"dra waits":         {func(v *View) { v.DRA.Err, v.DRA.WaitsForPods = "pods", true }, []string{"warning dra: pods"}},
		"one lock for both": {func(v *View) { v.Plugin.Err, v.DRA.Err = "lock", "lock" }, []string{"unready plugin: lock"}},
		"other plugin": {
			func(v *View) { v.Plugin.OtherPlugins = map[string]int{"a.b/c": 2} },
			[]string{"warning plugin: another device plugin serves 2 devices"},
		},
		"plugin's warning": {func(v *View) { v.Plugin.Warnings = []string{"left out"} }, []string{"warning plugin: left out"}},
		"lock":             {func(v *View) { v.Lock = nodelock.State{Warning: "no socket"} }, []string{"warning plugin: no socket"}},
		"audit":            {func(v *View) { v.Plugin.AuditErr = "denied" }, []string{"warning plugin: not audited: denied"}},
		"holders":          {func(v *View) { v.Holders.Err = "denied" }, []string{"warning plugin: holders unknown: denied"}},
		"audit and holders": {
			func(v *View) { v.Plugin.AuditErr, v.Holders.Err = "denied", "denied" },
			[]string{"warning plugin: not audited, holders unknown: denied"},
		},
		"no free device": {func(v *View) {
			v.Plugin.Resources[0].Unschedulable = &plugin.Unschedulable{Devices: 1, Pods: []plugin.Pod{{Namespace: "n", Name: "p"}}}
		}, []string{"warning plugin: "}},
		"invalid": {
			func(v *View) { v.Reload = Reload{At: now.Add(-5 * time.Minute), Err: "a: b\nc: d"} },
			[]string{"warning config: invalid: a: b (all errors: gpu-node-agent check-config); the last good"},
		},
		"binding": {func(v *View) {
			v.Snapshot.Bindings = health.Bindings{{}, {Warning: health.BindingWarning{Reason: "replaced", Text: "plugin.exclude: 2"}}}
		}, []string{"warning config: plugin.exclude: 2"}},
		"notes": {func(v *View) {
			v.Notes, v.UnmatchedRefs = []string{"a: no effect"}, []health.UnmatchedRefs{{Key: "health.cordon", Refs: []string{"9"}}}
		}, []string{"note config: a: no effect", "note config: health.cordon: "}},
		"state lost": {func(v *View) { v.StateLoss = "deleted" }, []string{"warning state: deleted"}},
		"state not written": {
			func(v *View) { v.StateDir.Err, v.StateDir.Since = "no space", now },
			[]string{"warning state: /s cannot be written since 2026-01-02T03:04:05Z: no space; findings will be lost on restart"},
		},
		"state not reserved": {func(v *View) { v.StateDir.Unreserved = "NFS" }, []string{"warning state: a full disk would lose findings: NFS"}},
		"checks down": {func(v *View) {
			v.Snapshot.Source.Checks = health.Checks{Status: health.ChecksDown, Err: "mismatch", Since: now.Add(-5 * time.Minute)}
		}, []string{"warning checks: down for 5m: mismatch"}},
		"event sources": {func(v *View) {
			v.Snapshot.Source.Events = []health.EventSourceState{
				{Witness: health.WitnessNVML, Status: health.EventsUp, Err: "1 of 8 GPUs"}, {Witness: health.WitnessKernelLog, Err: "off"},
			}
		}, []string{"warning xids: event source nvml up: 1 of 8 GPUs"}},
		"processes":  {func(v *View) { v.Processes = &processes.Snapshot{Err: "hangs"} }, []string{"warning processes: hangs"}},
		"dra is off": {func(v *View) { v.DRA = dra.Status{} }, nil},
		"dra serves": {func(v *View) { v.DRA = dra.Status{Enabled: true, DriverName: "d", Registered: true, Published: now} }, nil},
		"not published": {
			func(v *View) { v.DRA = dra.Status{DriverName: "d", PublishErr: "forbidden"} },
			[]string{"warning dra: not published: forbidden"},
		},
		"not up to date": {
			func(v *View) {
				v.DRA = dra.Status{DriverName: "d", Published: now.Add(-5 * time.Minute), PublishErr: "forbidden"}
			},
			[]string{"warning dra: not up to date; last published 5m ago: forbidden"},
		},
		"behind for a moment": {func(v *View) { v.DRA = dra.Status{DriverName: "d", Published: now, Behind: true} }, nil},
		"dropped features":    {func(v *View) { v.DRA.DroppedFeatures = []string{"A", "B"} }, []string{"warning dra: the API server lacks A, B"}},
		"checkpoint": {
			func(v *View) { v.DRA.Checkpoint = down },
			[]string{"warning dra: /x/c.json cannot be written since 2026-01-02T03:04:05Z: no space; claims are refused"},
		},
		"dra's warnings": {
			func(v *View) { v.DRA.Unreserved, v.DRA.Warning = "NFS", "releasing" },
			[]string{"warning dra: a full disk would refuse claims: NFS", "warning dra: releasing"},
		},
		"mps":    {func(v *View) { v.MPSErr = "no mps-daemon" }, []string{"warning mps: no mps-daemon"}},
		"memory": {func(v *View) { v.Memory = &memlimits.Snapshot{Err: "denied"} }, []string{"warning memory: limits unknown: denied"}},
		"node": {func(v *View) {
			v.LabelsErr, v.NodeObject = "a", kube.NodeStatus{LabelsErr: "b", FeatureErr: "c", TaintsErr: "d", ConditionErr: "e"}
		}, []string{
			"warning node: node.labels.file: a", "warning node: labels: b", "warning node: NodeFeature: c", "warning node: taints: d",
			"warning node: condition: e",
		}},
		"api": {
			func(v *View) { v.Kube = kube.Status{IdleEnabled: true, ConditionErr: "a", IdleErr: "b"} },
			[]string{"warning api: condition: a", "warning api: events: b"},
		},
		"startup taint": {
			func(v *View) { v.StartupTaint, v.Plugin.Resources[0].Audited = true, false },
			[]string{"warning node: startup taint stays: plugin: nvidia.com/gpu: not audited: "},
		},
		"startup taint while unready": {func(v *View) { v.StartupTaint, v.DRA.Err = true, "waiting" }, []string{"unready dra: waiting"}},
		"waits, and not registered": {
			func(v *View) {
				v.Plugin.Err, v.Plugin.WaitsForPods, v.Plugin.Resources[0].Registered = "claims", true, false
			},
			[]string{"unready plugin: nvidia.com/gpu: not registered", "warning plugin: claims"},
		},
		"holders without a plugin": {
			func(v *View) { v.PluginConfig.Enabled, v.Holders.Err = false, "no kubelet" },
			[]string{"note plugin: holders"},
		},
		"settling": {func(v *View) { v.Holders = settling() }, []string{"note plugin: holders unknown: the kubelet may not"}},
		"pods of no container": {
			func(v *View) { v.Processes = &processes.Snapshot{Warning: "no cgroups"} },
			[]string{"warning processes: no cgroups"},
		},
		"api is off":       {func(v *View) { v.Kube = kube.Status{ConditionErr: "a"} }, nil},
		"no startup taint": {func(v *View) { v.Plugin.Resources[0].Audited = false }, nil},
		"all is offered":   {func(v *View) { v.StartupTaint = true }, nil},
		"the worst is first": {
			func(v *View) { v.StateLoss, v.DRA.Err = "deleted", "waiting" },
			[]string{"unready dra: waiting", "warning state: deleted"},
		},
	} {
		t.Run(name, func(t *testing.T) {
			v := working()
			c.change(&v)
			problems := v.Problems()
			var got []string
			for _, p := range problems {
				got = append(got, string(p.Level)+" "+p.String())
			}
			if !slices.EqualFunc(got, c.want, strings.HasPrefix) {
				t.Errorf("%q, want %q", got, c.want)
			}
			if ready := len(got) == 0 || !strings.HasPrefix(got[0], "unready"); problems.Ready() != ready ||
				len(problems.Texts(Unready)) > 0 == ready {
				t.Errorf("ready: %v", problems.Ready())
			}
		})
	}
}

// Resources with one reason share a problem, and an error of the source is not repeated.
func TestUnreadyProblemsAreShort(t *testing.T) {
	v := working()
	v.Snapshot.Source = health.Source{Status: health.SourceDown, Err: "no libdcgm"}
	v.Plugin = plugin.Status{Err: "no poll: no libdcgm", Resources: []plugin.ResourceStatus{
		{Name: "a", Err: "rejected"}, {Name: "b", Registered: true}, {Name: "c", Err: "rejected"}, {Name: "d"},
	}}
	want := []string{"source: down: no libdcgm", "plugin: no poll", "plugin: d: not registered", "plugin: a, c: rejected"}
	if got := v.Problems().Texts(Unready); !slices.Equal(got, want) {
		t.Errorf("%q, want %q", got, want)
	}
}

// An old snapshot of a source that is up means that the monitor is stuck; a clock that steps does not.
func TestSnapshotAgesByMonotonicClock(t *testing.T) {
	for age, want := range map[time.Duration]bool{39 * time.Second: true, 45 * time.Second: false} {
		synctest.Test(t, func(t *testing.T) {
			v := working()
			v.MaxAge, v.Snapshot.At = 40*time.Second, time.Now()
			<-time.After(age)
			if v.At = time.Now(); v.Problems().Ready() != want {
				t.Errorf("%v: %q", age, v.Problems())
			}
		})
	}
}

func TestSharingProblems(t *testing.T) {
	v := working()
	v.Snapshot.Devices = []health.DeviceState{
		{Device: health.Device{ID: "GPU-a", Index: 0}, MPS: &health.MPSDaemon{PID: 41}},
		{Device: health.Device{ID: "GPU-b", Index: 1}, MPS: &health.MPSDaemon{PID: 42, MultiUser: true}},
		{Device: health.Device{ID: "GPU-c", Index: 2}, MPS: &health.MPSDaemon{PID: 43}}, // no pod holds it
		{Device: health.Device{ID: "GPU-d", Index: 3}},
	}
	v.Holders = podresources.Holders{By: map[health.DeviceID][]podresources.Holder{
		"GPU-a": {{Namespace: "team", Pod: "a"}, {Namespace: "team", Pod: "b"}}, "GPU-b": {{Pod: "a"}, {Pod: "b"}},
	}}
	v.Shares = []plugin.ShareUnits{
		{Device: "GPU-d", Sharing: plugin.SharingMemory, Enforcement: memlimits.None, Reason: "driver 580"},
		{Device: "GPU-b", Sharing: plugin.SharingMemory, Enforcement: memlimits.Driver},
		{Device: "GPU-a", Sharing: plugin.SharingMPS},
	}
	for enforcement, want := range map[string]int{plugin.EnforceDriver: 2, plugin.EnforceAuto: 1, plugin.EnforceNone: 1} {
		v.PluginConfig.Sharing.Memory.Enforcement = enforcement
		all := v.Problems().Texts(Warning)
		if len(all) != want || !strings.Contains(all[0], "GPU-a") || strings.Contains(all[0], "GPU-b") || strings.Contains(all[0], "GPU-c") {
			t.Errorf("%s: %q", enforcement, all)
		}
		if want == 2 && (!strings.Contains(all[1], "GPU-d") || !strings.Contains(all[1], "driver 580") || strings.Contains(all[1], "GPU-b")) {
			t.Errorf("%q", all)
		}
	}
}

// Without a snapshot and a configuration, as in the first moment, nothing panics.
func TestEmptyView(t *testing.T) {
	v := &View{}
	if v.Problems().Ready() || v.SingleUserMPS() != "" || len(v.Unwritten()) > 0 {
		t.Errorf("%q", v.Problems())
	}
	if _, waits := v.WaitsFor(); waits {
		t.Error("it waits")
	}
}

// With plugin.enabled false, the agent is a monitor beside the one that serves.
func TestWaitsFor(t *testing.T) {
	v := View{Lock: nodelock.State{Waits: true, Holder: &nodelock.Holder{Pod: "other"}}}
	if _, waits := v.WaitsFor(); waits {
		t.Error("a monitor waits")
	}
	v.PluginConfig.Enabled = true
	if holder, waits := v.WaitsFor(); !waits || holder != "other" {
		t.Errorf("%q, %v", holder, waits)
	}
}
