//go:build cluster

package cluster

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// pidOf returns the process of a container, as the node numbers it.
func pidOf(t *testing.T, container v1.ContainerStatus) int {
	t.Helper()
	_, id, _ := strings.Cut(container.ContainerID, "://")
	files, err := filepath.Glob("/proc/[0-9]*/cgroup")
	if err != nil {
		t.Fatal(err)
	}
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil || !strings.Contains(string(text), id) {
			continue // the process has ended, or is another one
		}
		pid, err := strconv.Atoi(filepath.Base(filepath.Dir(file)))
		if err != nil {
			t.Fatal(err)
		}
		return pid
	}
	t.Fatalf("no process of container %s", container.ContainerID)
	return 0
}

// TestProcesses lists real processes of containers as processes on simulated GPUs. The agent finds their pods by what the chart mounts.
func TestProcesses(t *testing.T) {
	const pod = "user"
	upgrade(t, oldTag, `config.metrics.processes.enabled=true`)
	awaitAmounts(t, gpu, "8/8")
	one := v1.ResourceRequirements{Limits: v1.ResourceList{gpu: resource.MustParse("1")}}
	grace := int64(1)
	if _, err := theCluster.client.CoreV1().Pods("default").Create(t.Context(),
		&v1.Pod{ObjectMeta: metav1.ObjectMeta{Name: pod}, Spec: v1.PodSpec{
			TerminationGracePeriodSeconds: &grace,
			Containers: []v1.Container{
				{Name: "first", Image: workloadImage, ImagePullPolicy: v1.PullNever, Resources: one},
				{Name: "second", Image: workloadImage, ImagePullPolicy: v1.PullNever, Resources: one},
			},
		}}, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	pids, gpus := make(map[string]int), make(map[string]string)
	for _, container := range []string{"first", "second"} {
		eventually(t, "container "+container+" holds a GPU", func(ctx context.Context) error {
			page, err := scrape(ctx)
			if err != nil {
				return err
			}
			line, err := findLine(page, "gpu_node_agent_device_allocated{", fmt.Sprintf(`pod=%q`, pod), fmt.Sprintf(`container=%q`, container))
			gpus[container] = label(line, "gpu")
			return err
		})
	}
	eventually(t, "the containers run", func(ctx context.Context) error {
		p, err := getPod(ctx, pod)
		if err == nil && p.Status.Phase != v1.PodRunning {
			err = fmt.Errorf("pod is %s", p.Status.Phase)
		}
		if err != nil {
			return err
		}
		for _, c := range p.Status.ContainerStatuses {
			pids[c.Name] = pidOf(t, c)
		}
		return nil
	})
	await := func(series, value, gpu, pod, container string) {
		t.Helper()
		awaitSeries(t, "gpu_node_agent_"+series+"{", fmt.Sprintf(`gpu=%q`, gpu), fmt.Sprintf(`pod=%q`, pod),
			fmt.Sprintf(`container=%q`, container), "} "+value+"\n")
	}
	step(t, "a process has its pod and container", func(t *testing.T) {
		await("processes", "0", gpus["first"], "", "")
		inject(t, "{gpu: %s, processes: [{pid: %d, memory: 1073741824}, {pid: 1, memory: 5}]}", gpus["first"], pids["first"])
		await("process_memory_bytes", "1.073741824e+09", gpus["first"], pod, "first")
		await("process_memory_bytes", "5", gpus["first"], "", "") // of the node
	})
	step(t, "the container is the process's, not the device's", func(t *testing.T) {
		inject(t, "{gpu: %s, processes: [{pid: %d, memory: 7}]}", gpus["first"], pids["second"])
		await("process_memory_bytes", "7", gpus["first"], pod, "second")
	})
	step(t, "a pod without the device has none of its processes", func(t *testing.T) {
		free := 0
		for strconv.Itoa(free) == gpus["first"] || strconv.Itoa(free) == gpus["second"] {
			free++
		}
		inject(t, "{gpu: %d, processes: [{pid: %d, memory: 9}]}", free, pids["first"])
		await("process_memory_bytes", "9", strconv.Itoa(free), "", "")
		awaitSeries(t, "gpu_node_agent_processes_without_pod{", `reason="not_holder"`, "} 1\n")
	})
	step(t, "in the PID namespace of the node", func(t *testing.T) {
		upgrade(t, oldTag, `config.metrics.processes.enabled=true`, `hostPID=true`)
		inject(t, "{gpu: %s, processes: [{pid: %d, memory: 11}]}", gpus["second"], pids["second"])
		await("process_memory_bytes", "11", gpus["second"], pod, "second")
	})
	deletePods(t, pod)
	step(t, "helm uninstall", uninstall)
	awaitAmounts(t, gpu, "8/0") // the pods of the next test wait for its agent
}
