package prometheus

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"strings"
	"testing"
)

// notInStory are the alerts that the story below does not bring about: they need hours, other programs, or faults that
// the simulator does not have. Their unit tests are in rules.
var notInStory = []string{
	"GPUMemoryNearlyFull", "GPUAllocatedButIdle", "GPUAgentMissing", "GPUKubeletDisagrees", "GPUAllocationErrors",
	"GPUPodLabelsUnknown", "GPUAgentRestarting", "GPUWaitsForReset", "GPUAgentStateNotKept", "GPUAgentAPIErrors",
	"GPUAgentServesNothing",
}

// TestStory lets GPUs, the source, the configuration, the kubelet and the agent fail, one after the other, and holds
// what Prometheus makes of it against what people should see.
func TestStory(t *testing.T) {
	n := newNode(t)
	seen := make(map[string]bool)
	// raised waits for an alert of node-1 that has these labels. How long it is pending is for the unit tests.
	raised := func(name string, labels ...string) {
		t.Helper()
		n.eventually(name+" "+strings.Join(labels, " "), func(ctx context.Context) error { return n.alerted(ctx, name, labels) })
		seen[name] = true
	}
	gone := func(name string, labels ...string) {
		t.Helper()
		n.eventually("no more "+name+" "+strings.Join(labels, " "), func(ctx context.Context) error {
			if n.alerted(ctx, name, labels) == nil {
				return fmt.Errorf("%s is there", name)
			}
			return nil
		})
	}

	n.eventually("the kubelet has eight GPUs", func(context.Context) error {
		if _, usable := n.kubelet.Count(gpuResource); usable != 8 {
			return fmt.Errorf("it has %d", usable)
		}
		return nil
	})
	n.check12239(t.Context())
	n.run("team-a", "train", 2)
	n.run("team-b", "notebook", 1)
	n.eventually("Prometheus knows who holds GPUs, and that they are idle", func(ctx context.Context) error {
		return n.wants(ctx, `gpu_node_agent_device_idle_seconds_total{instance="node-1", pod=~"train|notebook", container="work"} > 1`, 3)
	})
	n.check12239(t.Context())

	n.inject(`{gpu: 3, xid: 79}`, `{gpu: 3, lost: true}`, `{gpu: 1, rowRemapPending: true}`, `{gpu: 2, temperature: 97}`,
		`{gpu: 6, recoveryAction: reboot}`)
	for range 8 {
		n.inject(`{gpu: 5, xid: 31}`)
	}
	raised("GPUUnhealthy", "gpu=3", "cause=xid-79")
	raised("GPUUnhealthy", "gpu=3", "cause=lost")
	raised("GPUUnhealthy", "gpu=6", "cause=recovery-action")
	raised("GPUDegraded", "gpu=1", "cause=row-remap-pending")
	raised("GPUHot", "gpu=2")
	raised("GPUXIDRate", "gpu=5")
	raised("GPUXID", "gpu=3")
	raised("GPUAgentFieldsUnknown")

	// Both nodes are this one, scraped at moments of its own for each.
	n.eventually("node-2 shows it too", func(ctx context.Context) error {
		return n.wants(ctx, `gpu_node_agent_xid_errors_total{instance="node-2", gpu="5", xid="31"} == 8`, 1)
	})
	n.checkPanels(true)
	n.checkPanels(false)
	for title, want := range map[string]float64{
		"GPUs": 2 * 8, "Allocated": 2 * 3, "Healthy": 4.0 / 8, "Unhealthy": 2 * 2, "Degraded": 2 * 2, "Allocated and idle": 0,
	} {
		n.eventually("the fleet's panel "+title+" is right", func(context.Context) error {
			if got := n.panel("fleet.json", title); len(got) != 1 || got[0].value != want {
				return fmt.Errorf("it shows %v, want %v", got, want)
			}
			return nil
		})
	}
	held := make(map[string]float64)
	for _, s := range n.panel("fleet.json", "Devices held, by namespace") {
		held[s.labels["namespace"]] = s.value
	}
	if want := map[string]float64{"team-a": 2, "team-b": 1}; !maps.Equal(held, want) {
		t.Errorf("the fleet's namespaces hold %v, want %v", held, want) // by UUID: twice the same
	}
	n.checkRules(t.Context())

	n.inject(`{gpu: 6, recoveryAction: none}`, `{gpu: 3, lost: false}`)
	gone("GPUUnhealthy", "gpu=6")
	gone("GPUUnhealthy", "gpu=3")

	n.inject(`{source: stalled}`)
	raised("GPUSourceStalled")
	n.inject(`{source: down}`)
	raised("GPUSourceDown")
	n.inject(`{source: up}`)
	gone("GPUSourceDown")
	gone("GPUSourceStalled")

	n.configure("loud")
	raised("GPUAgentConfigReloadFailed")
	n.configure("info")
	gone("GPUAgentConfigReloadFailed")

	n.stopKubelet()
	raised("GPUAgentNotRegistered", "resource=nvidia.com/gpu")
	raised("GPUHoldersUnknown")

	n.agent.kill()
	raised("GPUAgentDown", "job=gpu-node-agent")
	n.eventually("GPUAgentAbsent", func(ctx context.Context) error {
		return n.wants(ctx, `ALERTS{alertname="GPUAgentAbsent"}`, 1)
	})
	seen["GPUAgentAbsent"] = true
	n.eventually("GPUAgentDown by what the target has shown", func(ctx context.Context) error {
		return n.wants(ctx, `ALERTS{alertname="GPUAgentDown", job="gpus", cluster="east", instance="node-2"}`, 1)
	})

	for _, name := range notInStory {
		if seen[name] {
			t.Errorf("%s is in the story: take it off notInStory", name)
		}
		seen[name] = true
	}
	for _, rules := range rules(t) {
		for _, r := range rules {
			if r.Alert != "" && !seen[r.Alert] {
				t.Errorf("%s is not in the story: bring it about, or put it into notInStory", r.Alert)
			}
		}
	}
}

// alerted checks that an alert of node-1 is pending or firing, and that its words are whole.
func (n *node) alerted(ctx context.Context, name string, labels []string) error {
	n.t.Helper()
	alerts, err := n.prom.alerts(ctx)
	if err != nil {
		return err
	}
	want := map[string]string{"alertname": name, "instance": "node-1"}
	for _, l := range labels {
		k, v, _ := strings.Cut(l, "=")
		want[k] = v
	}
	var names []string
alerts:
	for _, a := range alerts {
		names = append(names, a.Labels["alertname"])
		for k, v := range want {
			if a.Labels[k] != v {
				continue alerts
			}
		}
		for k, text := range a.Annotations {
			if strings.Contains(text, "error expanding") {
				n.t.Errorf("%s: %s: %s", name, k, text)
			}
		}
		return nil
	}
	return fmt.Errorf("no alert %v; there are %v", want, names)
}

// checkRules checks that Prometheus can evaluate every rule, and that what is recorded is there for both nodes.
func (n *node) checkRules(ctx context.Context) {
	n.t.Helper()
	all, err := n.prom.rules(ctx)
	if err != nil || len(all) == 0 {
		n.t.Fatalf("%d rules, %v", len(all), err)
	}
	for _, r := range all {
		if r.Health != "ok" {
			n.t.Errorf("%s: %s: %s", r.Name, r.Health, r.LastError)
		}
		if r.Type != "recording" {
			continue
		}
		for _, cluster := range []string{"", "east"} {
			n.eventually(r.Name+" of cluster "+cluster, func(ctx context.Context) error {
				got, err := n.prom.query(ctx, fmt.Sprintf("%s{cluster=%q}", r.Name, cluster))
				if err == nil && len(got) == 0 {
					err = errors.New("no series")
				}
				return err
			})
		}
	}
}
