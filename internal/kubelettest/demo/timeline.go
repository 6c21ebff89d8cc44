package main

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"regexp"
	"strings"
	"time"

	"github.com/gpu-node-agent/gpu-node-agent/agent/status"
	"github.com/gpu-node-agent/gpu-node-agent/agent/terminal"
	"github.com/gpu-node-agent/gpu-node-agent/internal/kubelettest"
	"github.com/gpu-node-agent/gpu-node-agent/internal/kubelettest/node"
)

const resource = "nvidia.com/gpu"

// timeline prints events as they occur, in lines of at most 80 columns.
type timeline struct {
	kubelet *kubelettest.Kubelet
	url     string
	start   time.Time
	out     io.Writer
	outErr  error          // why out failed
	indexes map[string]int // of the GPUs, by UUID

	failed, recovered int // GPUs
}

// log prints a text, with further lines below its first.
func (t *timeline) log(actor, format string, args ...any) {
	p := terminal.Printer{Output: terminal.Output{Width: 80}}
	label := fmt.Sprintf("%6.1fs  %-8s ", time.Since(t.start).Seconds(), actor)
	p.Paragraph(len(label), terminal.Cell{Text: label + fmt.Sprintf(format, args...)})
	if _, err := io.WriteString(t.out, p.String()); err != nil {
		t.outErr = err
	}
}

// name returns the name of a GPU as the scenario has it, such as "GPU 3".
func (t *timeline) name(id string) string {
	if index, ok := t.indexes[id]; ok {
		return fmt.Sprintf("GPU %d", index)
	}
	return id
}

// readIndexes asks the agent for the indexes of the GPUs.
func (t *timeline) readIndexes(ctx context.Context) {
	s, _, err := status.Ask(ctx, t.url, status.Access{})
	if err != nil {
		t.log("status", "%v", err)
	}
	t.indexes = make(map[string]int)
	for _, d := range s.GPUs {
		t.indexes[string(d.UUID)] = d.Index
	}
}

// print follows the kubelet until ctx ends, and returns the cause, or until out fails, as a closed terminal does. With once
// set it returns nil after two GPUs have failed and recovered, and an error if they do not within two minutes.
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
		if t.outErr != nil {
			return t.outErr
		}
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
		t.log("kubelet", "%s is registered", resource)
	}
	if len(previous.Devices) == 0 && len(current.Devices) > 0 {
		t.readIndexes(ctx)
		t.log("kubelet", "%d devices, %d healthy", current.Capacity(), current.Allocatable())
		for _, d := range current.Devices {
			t.log("", "%s  %s  NUMA %s", t.name(d.ID), d.ID, strings.Trim(fmt.Sprint(d.NUMA), "[]"))
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
		t.log("kubelet", "%s is %s: %d of %d are allocatable", t.name(d.ID), health, current.Allocatable(), current.Capacity())
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
	var names []string
	for _, id := range a.Devices {
		names = append(names, t.name(id))
	}
	t.log("kubelet", "Allocate gives %s to pod %s/%s", strings.Join(names, " and "), a.Container.Namespace, a.Container.Pod)
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

// abbreviate removes the prefix and the labels that all series have, and puts a space between labels, where a line may end.
func abbreviate(line string) string {
	line = regexp.MustCompile(`(UUID|GPU_I_ID|GPU_I_PROFILE|hostname)="[^"]*",`).ReplaceAllString(line, "")
	return strings.ReplaceAll(line, `",`, `", `)
}
