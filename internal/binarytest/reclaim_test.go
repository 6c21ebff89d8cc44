package binarytest

import (
	"encoding/json"
	"fmt"
	"math"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/gpu-node-agent/gpu-node-agent/agent/reclaim"
	"github.com/gpu-node-agent/gpu-node-agent/agent/status"
)

// A dry run with objects from a file finds the idle Deployment with its GPU-hours, and leaves the others alone. It needs no API server, and
// an invalid configuration of the agent does not matter.
func TestReclaimDryRun(t *testing.T) {
	t.Parallel()
	p := newProcess(t, `source: {mode: sim, interval: 1s, sim: {scenario: [{at: 0s, gpu: 0, processes: []}, {at: 0s, gpu: 1, processes: [{pid: 4242, sm: 0.9}]}]}}
plugin: {kubeletDir: DIR}`)
	k := p.startKubelet()
	p.launch("NODE_NAME=node-1", "GPU_NODE_AGENT_METRICS_PROCESSES_ENABLED=true")
	p.awaitAllocatable(k, 8)
	for range 8 {
		p.allocate(k)
	}
	// holders returns the pods that hold GPUs, and that of GPU 1.
	holders := func() (all map[string]*status.Idle, worker string) {
		all = make(map[string]*status.Idle)
		for _, d := range p.snapshot().GPUs {
			for _, h := range d.Holders {
				if d.Index == 1 {
					worker = h.Pod // whose process is not known to be its own
				} else if h.Idle == nil || h.Idle.NoProcess == nil {
					continue
				}
				all[h.Pod] = h.Idle
			}
		}
		return all, worker
	}
	var idle []string
	var busy string
	p.await("seven idle pods and a busy one", func() bool {
		all, worker := holders()
		idle, busy = nil, worker
		for pod, i := range all {
			if pod != worker && i.NoWork != nil && *i.NoWork >= 2 && *i.NoProcess >= 2 {
				idle = append(idle, pod)
			}
		}
		return len(idle) == 7 && all[worker] != nil && all[worker].Observed >= 2
	})
	slices.Sort(idle)
	ready := func(ago time.Duration) string { return time.Now().Add(-ago).UTC().Format(time.RFC3339) }
	var objects strings.Builder
	pod := func(name, node, metadata, since string) {
		fmt.Fprintf(&objects, `---
apiVersion: v1
kind: Pod
metadata: {name: %s, %s}
spec: {nodeName: %s, containers: [{name: main, resources: {limits: {nvidia.com/gpu: 1}}}]}
status: {conditions: [{type: Ready, status: "True", lastTransitionTime: %q}]}
`, name, metadata, node, since)
	}
	objects.WriteString("{apiVersion: apps/v1, kind: Deployment, metadata: {name: web}}\n")
	pod(idle[0], "node-1", "labels: {pod-template-hash: x1}, ownerReferences: [{apiVersion: apps/v1, kind: ReplicaSet, name: web-x1, "+
		"controller: true}]", ready(2*time.Hour))
	pod(idle[1], "node-1", "annotations: {gpu-node-agent/reclaim-opt-out: ''}", ready(2*time.Hour))
	pod(idle[2], "node-1", "annotations: {}", ready(0))
	pod(busy, "node-1", "annotations: {}", ready(2*time.Hour))
	pod("elsewhere", "node-2", "annotations: {}", ready(2*time.Hour))
	write := func(name, text string) string {
		path := filepath.Join(p.Dir, name)
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	objectsFile := write("objects.yaml", objects.String())
	for _, evidence := range []string{"noWork", "noProcess"} {
		policy := write("policy.yaml", "namespaces: [default]\nidle: {after: 1s, evidence: "+evidence+"}\nnotice: 0s\n")
		cmd := exec.CommandContext(t.Context(), binary, "reclaim", "--policy", policy, "--objects", objectsFile, "--snapshot", p.URL, "-o",
			"json")
		cmd.Env = append(os.Environ(), raceOptions)
		out, err := cmd.Output()
		if err != nil {
			t.Fatalf("%v: %s", err, out)
		}
		t.Logf("%s", out)
		var r reclaim.Report
		if err := json.Unmarshal(out, &r); err != nil {
			t.Fatal(err)
		}
		if len(r.Actions) != 1 {
			t.Fatalf("%s", out)
		}
		a := r.Actions[0]
		all, _ := holders()
		most := max(*all[idle[0]].NoWork, *all[idle[0]].NoProcess) / 3600
		if a.Kind != reclaim.ActionScale || a.String() != "Deployment default/web" || a.GPUs != 1 || a.GPUHours < 2.0/3600-1e-6 ||
			a.GPUHours > most+1e-6 ||
			math.Abs(a.Idle/3600-a.GPUHours) > 1e-6 || a.Evidence != evidence || a.Done || !r.DryRun {
			t.Errorf("%+v, expected at most %f GPU-hours", a, most)
		}
		got := make(map[string]reclaim.Reason)
		for _, s := range r.Skipped {
			got[s.Name] = s.Reason
		}
		for name, want := range map[string]reclaim.Reason{
			idle[1]: reclaim.ReasonOptedOut, idle[2]: reclaim.ReasonYoung, busy: reclaim.ReasonBusy, "elsewhere": reclaim.ReasonNoAgent,
		} {
			if got[name] != want {
				t.Errorf("%s: %s: %q, want %q", evidence, name, got[name], want)
			}
		}
	}
}
