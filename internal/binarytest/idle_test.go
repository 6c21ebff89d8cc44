package binarytest

import (
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpu-node-agent/gpu-node-agent/agent/status"
	"github.com/gpu-node-agent/gpu-node-agent/internal/apiservertest"
	"github.com/gpu-node-agent/gpu-node-agent/internal/kubelettest"
)

// Of two containers that share a GPU, the one without a process is idle while the other works. Its times continue after a restart of
// the agent, but the next container of the same name has its own.
func TestIdleSharer(t *testing.T) {
	t.Parallel()
	const uid = "0f4b7c1e-2d3a-4b5c-8d9e-0a1b2c3d4e5f"
	p := newProcess(t, "source: {mode: sim, interval: 1s, sim: {control: DIR/sim.sock}}\n"+
		"plugin: {kubeletDir: DIR, allocationPolicy: packed, sharing: {timeSlicing: {resources: [{name: nvidia.com/gpu, replicas: 2}]}}}")
	k := p.startKubelet()
	launch := func() {
		p.launch("GPU_NODE_AGENT_METRICS_PROCESSES_ENABLED=true", "GPU_NODE_AGENT_METRICS_PROCESSES_PROC="+p.Dir+"/proc",
			"GPU_NODE_AGENT_METRICS_PROCESSES_POD_LOGS="+p.Dir+"/log/pods")
		p.awaitAllocatable(k, 16)
	}
	launch()
	first, second := p.allocate(k), p.allocate(k)
	gpu := func(a kubelettest.Allocation) string { id, _, _ := strings.Cut(a.Devices[0], "::"); return id }
	if gpu(first) != gpu(second) {
		t.Fatalf("the pods do not share a GPU: %q, %q", first.Devices, second.Devices)
	}
	index := 0
	for _, d := range p.snapshot().GPUs {
		if string(d.UUID) == gpu(first) {
			index = d.Index
		}
	}
	for path, text := range map[string]string{
		fmt.Sprintf("log/pods/%s_%s_%s/%s/0.log", first.Container.Namespace, first.Container.Pod, uid, first.Container.Name): "",
		"proc/4242/cgroup": "0::/kubepods/burstable/pod" + uid + "/" + strings.Repeat("3b", 32) + "\n",
	} {
		path = filepath.Join(p.Dir, path)
		if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	use := func(sm string) {
		p.sim(fmt.Sprintf("{gpu: %d, processes: [{pid: 4242, memory: 1073741824, sm: %s}]}", index, sm))
	}
	// value returns the value of a pod's series, -1 if there is none.
	value := func(name, pod string) float64 {
		_, page := p.get("/metrics")
		m := regexp.MustCompile(`(?m)^gpu_node_agent_device_` + name + `\{.*,pod="` + pod + `"\} (\S+)$`).FindStringSubmatch(page)
		if m == nil {
			return -1
		}
		v, err := strconv.ParseFloat(m[1], 64)
		if err != nil {
			t.Fatal(err)
		}
		return v
	}
	use("0.5")
	worker, idler := first.Container.Pod, second.Container.Pod
	p.await("the worker's process", func() bool {
		return value("no_process_for_seconds", worker) == 0 && value("idle_for_seconds", worker) == 0
	})
	p.await("the idle sharer", func() bool {
		return value("no_process_for_seconds", idler) >= 1 && value("idle_for_seconds", idler) >= 1
	})
	use("0.01")
	p.await("a process without work", func() bool {
		return value("no_process_for_seconds", worker) == 0 && value("idle_for_seconds", worker) >= 1
	})

	c := first.Container
	p.awaitPage("/", http.StatusOK, fmt.Sprintf("%s/%s (%s): 1 process, 1.0 GiB, SM 1 %%", c.Namespace, c.Pod, c.Name))
	if usage := p.snapshot().GPUs[index].Processes; usage == nil || len(*usage) != 1 || (*usage)[0].Pod != worker ||
		*(*usage)[0].Memory != 1<<30 {
		t.Errorf("processes %+v", usage)
	}

	// As if the containers had been idle for two hours.
	p.stop()
	awaitLoss(t, k)
	const twoHours = 7200
	longer := regexp.MustCompile(`((sinceBusy|withoutProcess|observed)Nanoseconds":)[0-9]+`).ReplaceAllString(readFile(p.nodeFile()),
		"${1}7200000000000")
	if n := strings.Count(longer, "7200000000000"); n != 5 {
		t.Fatalf("%d times in %s", n, longer)
	}
	if err := os.WriteFile(p.nodeFile(), []byte(longer), 0o600); err != nil {
		t.Fatal(err)
	}
	launch()
	p.await("the idle sharer's times", func() bool {
		return value("no_process_for_seconds", idler) >= twoHours && value("idle_for_seconds", idler) >= twoHours
	})
	p.await("the worker's time", func() bool { return value("idle_for_seconds", worker) > 0 })

	// While the agent is down the pod ends, and the next one of the name gets the same device afterwards.
	p.Kill()
	awaitLoss(t, k)
	k.Free(resource, second.Devices...)
	launch()
	next, err := k.AllocateTo(t.Context(), second.Container, resource, 1)
	if err != nil || !slices.Equal(next.Devices, second.Devices) {
		t.Fatalf("%+v, %v; want %q", next, err, second.Devices)
	}
	p.await("the next pod", func() bool { v := value("idle_for_seconds", idler); return v >= 0 && v < twoHours })
}

// A pod that does not use its GPUs gets an event, and the snapshot has its idle times, by its processes or, if these are not measured, by
// their work. health.kubernetes.enabled is false.
func TestIdlePodIsReported(t *testing.T) {
	t.Parallel()
	for evidence, message := range map[string]string{
		"noProcess": "no process on the GPU of the pod for ",
		"noWork":    "; whether a model is loaded is unknown. ",
	} {
		t.Run(evidence, func(t *testing.T) {
			t.Parallel()
			checkIdlePod(t, evidence, message)
		})
	}
}

func checkIdlePod(t *testing.T, evidence, message string) {
	api := apiservertest.New(t)
	p := newProcess(t, "source: {mode: sim, interval: 1s, sim: {scenario: [{at: 0s, gpu: 0, processes: []}]}}\nplugin: {kubeletDir: "+
		"DIR}\nnode: {idle: {after: 3s}}")
	k := p.startKubelet()
	processes := evidence == "noProcess"
	p.launch("NODE_NAME=node-1", "GPU_NODE_AGENT_METRICS_PROCESSES_ENABLED="+strconv.FormatBool(processes),
		"GPU_NODE_AGENT_METRICS_PROCESSES_PROC="+p.Dir, "GPU_NODE_AGENT_METRICS_PROCESSES_POD_LOGS="+p.Dir,
		"GPU_NODE_AGENT_HEALTH_KUBERNETES_KUBECONFIG="+api.Kubeconfig(t))
	p.awaitAllocatable(k, 8)
	pod := p.allocate(k).Container
	api.Put(&corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: pod.Namespace, Name: pod.Pod, UID: "uid-of-pod"}, Spec: corev1.PodSpec{NodeName: "node-1"},
		Status: corev1.PodStatus{Conditions: []corev1.PodCondition{
			{Type: corev1.PodReady, Status: corev1.ConditionTrue, LastTransitionTime: metav1.NewTime(time.Now().Add(-time.Hour))},
		}},
	})
	p.await("the event", func() bool { return len(api.Events()) > 0 })
	if e := api.Events()[0]; e.Reason != "GPUIdle" || e.InvolvedObject.Name != pod.Pod || e.InvolvedObject.UID != "uid-of-pod" ||
		e.Count != 1 || !strings.Contains(e.Message, message) {
		t.Errorf("%+v", e)
	}
	var idle *status.Idle
	for _, d := range p.snapshot().GPUs {
		for _, h := range d.Holders {
			if idle = h.Idle; h.Pod != pod.Pod || h.GPUShare == nil || *h.GPUShare != 1 {
				t.Errorf("%+v", h)
			}
		}
	}
	if idle == nil || idle.Evidence != evidence || (idle.NoProcess != nil) != processes || idle.NoWork == nil || *idle.NoWork < 3 ||
		*idle.NoWork > idle.Observed || processes && (*idle.NoProcess < 3 || *idle.NoProcess > idle.Observed || !idle.NeverUsed) {
		t.Errorf("%+v", idle)
	}
	for _, series := range []string{`pci"} 8`, `driver"} 8`, `offered"} 8`, `kubelet"} 8`} {
		p.awaitPage("/metrics", http.StatusOK, `gpu_node_agent_node_devices{seen_by="`+series)
	}
}
