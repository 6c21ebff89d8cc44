package binarytest

import (
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// A process on a device belongs to the pod that holds the device. A process whose pod is unknown or does not hold the device has no pod.
func TestProcesses(t *testing.T) {
	t.Parallel()
	const uid, containerID = "0f4b7c1e-2d3a-4b5c-8d9e-0a1b2c3d4e5f", "3b4c5d6e7f8091a2b3c4d5e6f708192a3b4c5d6e7f8091a2b3c4d5e6f7081920"
	p := newProcess(t, "source: {mode: sim, interval: 1s, stallAfter: 1s, sim: {control: DIR/sim.sock}}")
	k := p.startKubelet()
	p.launch("GPU_NODE_AGENT_METRICS_PROCESSES_ENABLED=true", "GPU_NODE_AGENT_METRICS_PROCESSES_PROC="+p.Dir+"/proc",
		"GPU_NODE_AGENT_METRICS_PROCESSES_POD_LOGS="+p.Dir+"/log/pods")
	p.awaitAllocatable(k, 8)
	a := p.allocate(k)
	pod := a.Container
	write := func(path, text string) {
		path = filepath.Join(p.Dir, path)
		if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	write(fmt.Sprintf("log/pods/%s_%s_%s/%s/0.log", pod.Namespace, pod.Pod, uid, pod.Name), "")
	write("proc/4242/cgroup", "0::/../../kubepods-burstable-pod"+strings.ReplaceAll(uid, "-", "_")+".slice/cri-containerd-"+containerID+
		".scope\n")
	held := 0
	for _, gpu := range p.snapshot().GPUs {
		if len(gpu.Holders) > 0 {
			held = gpu.Index
		}
	}
	free := (held + 1) % 8
	p.awaitSeries("processes", held, "", "0")

	p.sim(fmt.Sprintf("{gpu: %d, processes: [{pid: 4242, memory: 1073741824}, {pid: 4242, memory: 1073741824, kind: graphics}, {pid: 7, "+
		"memory: 1048576}]}", held))
	p.sim(fmt.Sprintf("{gpu: %d, processes: [{pid: 4242, memory: 2097152}]}", free))
	p.awaitSeries("process_memory_bytes", held, pod.Pod, "1.073741824e+09")
	p.awaitSeries("processes", held, pod.Pod, "1")
	p.awaitSeries("process_memory_bytes", held, "", "1.048576e+06") // an unknown process
	p.awaitSeries("process_memory_bytes", free, "", "2.097152e+06") // the pod does not hold this device
	p.awaitMetrics(`gpu_node_agent_processes_without_pod{reason="not_holder"} 1`,
		`gpu_node_agent_processes_without_pod{reason="unreadable"} 1`)
	p.sim(fmt.Sprintf("{gpu: %d, processes: []}", held))
	p.awaitSeries("processes", held, "", "0")

	p.sim("{source: stalled}") // the driver hangs
	p.awaitMetrics("gpu_node_agent_processes_up 0")
	p.awaitPage("/readyz", http.StatusServiceUnavailable, "processes: ")
	if _, page := p.get("/metrics"); strings.Contains(page, "gpu_node_agent_processes{") {
		t.Error("processes are exported while they cannot be listed")
	}
	p.sim("{source: up}")
	p.awaitSeries("processes", held, "", "0")

	p.command(0, "detach", "--for", "1m", "--force")
	p.await("the end of the series", func() bool {
		_, page := p.get("/metrics")
		return !strings.Contains(page, "gpu_node_agent_process")
	})
	p.command(0, "attach")
	p.awaitSeries("processes", held, "", "0")
}

// awaitSeries waits for the value of a series of a device's processes.
func (p *process) awaitSeries(name string, gpu int, pod, value string) {
	p.t.Helper()
	series := regexp.MustCompile(fmt.Sprintf(`(?m)^gpu_node_agent_%s\{.*gpu="%d",.*,pod="%s"\} %s$`, name, gpu, pod, regexp.QuoteMeta(value)))
	p.await(series.String(), func() bool {
		_, page := p.get("/metrics")
		return series.MatchString(page)
	})
}
