package main

import (
	"context"
	"fmt"
	"maps"
	"net/http"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/gpu-node-agent/gpu-node-agent/internal/kubelettest"
	"github.com/gpu-node-agent/gpu-node-agent/internal/kubelettest/node"
)

const resource = "nvidia.com/gpu"

// timeline prints events as they occur.
type timeline struct {
	kubelet *kubelettest.Kubelet
	url     string
	start   time.Time

	failed, recovered int // GPUs
}

func (t *timeline) log(actor, format string, args ...any) {
	fmt.Printf("%6.1fs  %-8s %s\n", time.Since(t.start).Seconds(), actor, fmt.Sprintf(format, args...))
}

// print follows the kubelet until ctx ends, and returns the cause. With once set it returns nil after two GPUs have
// failed and recovered, and an error if they do not within two minutes.
func (t *timeline) print(ctx context.Context, once bool) error {
	var previous kubelettest.Resource
	var timeout <-chan time.Time
	if once {
		timeout = time.After(2 * time.Minute)
	}
	for {
		state, changed := t.kubelet.Watch()
		current := state.Resources[resource]
		t.printChanges(ctx, previous, current)
		previous = current
		if once && t.failed >= 2 && t.recovered >= 2 {
			return nil
		}
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-timeout:
			return fmt.Errorf("expected two GPUs to fail and recover within 2m, got %d failures and %d recoveries", t.failed, t.recovered)
		case <-changed:
		}
	}
}

// printChanges prints what has changed for the kubelet, and the metrics of the changed devices.
func (t *timeline) printChanges(ctx context.Context, previous, current kubelettest.Resource) {
	if current.Registrations > previous.Registrations {
		t.log("kubelet", "%s is registered by %s", resource, current.Endpoint)
	}
	if len(previous.Devices) == 0 && len(current.Devices) > 0 {
		t.log("kubelet", "%d devices, %d healthy", current.Capacity(), current.Allocatable())
		for _, d := range current.Devices {
			t.log("", "  %s  NUMA %v", d.ID, d.NUMA)
		}
		t.allocate(ctx)
		return
	}
	for i, d := range current.Devices {
		if i >= len(previous.Devices) || previous.Devices[i].ID != d.ID || previous.Devices[i].Healthy == d.Healthy {
			continue
		}
		health := "UNHEALTHY"
		if d.Healthy {
			t.recovered++
			health = "healthy again"
		} else {
			t.failed++
		}
		t.log("kubelet", "%s is %s: %d of %d are allocatable", d.ID, health, current.Allocatable(), current.Capacity())
		t.printMetrics(ctx, d.ID)
	}
}

// allocate allocates two GPUs to a pod.
func (t *timeline) allocate(ctx context.Context) {
	a, err := t.kubelet.Allocate(ctx, resource, 2)
	if err != nil {
		t.log("kubelet", "Allocate: %v", err)
		return
	}
	for _, name := range slices.Sorted(maps.Keys(a.Response.GetEnvs())) {
		t.log("kubelet", "pod %s/%s requests 2 GPUs; Allocate returns %s=%s", a.Container.Namespace, a.Container.Pod, name, a.Response.GetEnvs()[name])
	}
}

// printMetrics prints the state and the findings of a device as Prometheus sees them.
func (t *timeline) printMetrics(ctx context.Context, id string) {
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	status, text, err := node.Get(ctx, http.DefaultClient, t.url+"/metrics", "")
	if err != nil || status != http.StatusOK {
		t.log("metrics", "status %d, error %v", status, err)
		return
	}
	for line := range strings.Lines(string(text)) {
		state := strings.HasPrefix(line, "gpu_node_agent_device_state") && strings.HasSuffix(line, "1\n")
		finding := strings.HasPrefix(line, "gpu_node_agent_device_finding")
		if (state || finding) && strings.Contains(line, id) {
			t.log("metrics", "%s", abbreviate(strings.TrimSpace(line)))
		}
	}
}

// abbreviate removes the labels that all series have.
func abbreviate(line string) string {
	line = regexp.MustCompile(`(GPU_I_ID|GPU_I_PROFILE|hostname)="[^"]*",`).ReplaceAllString(line, "")
	return regexp.MustCompile(`UUID="(GPU-[0-9a-f]{8})[^"]*"`).ReplaceAllString(line, `UUID="$1…"`)
}
