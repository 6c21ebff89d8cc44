package prometheus

import (
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/gpu-node-agent/gpu-node-agent/e2e/internal/node"
	"github.com/gpu-node-agent/gpu-node-agent/e2e/internal/promapi"
)

// untestedAlerts lists the alerts that the test below does not cause: they need hours, other programs, or faults that the
// simulation lacks. Their unit tests are in rules.
var untestedAlerts = []string{
	"GPUMemoryNearlyFull", "GPUAllocatedButIdle", "GPUAllocatedWithoutProcess", "GPUAgentMissing", "GPUKubeletDisagrees",
	"GPUAllocationErrors",
	"GPUPodLabelsUnknown", "GPUAgentRestarting", "GPUWaitsForReset", "GPUAgentStateNotKept", "GPUAgentIndexAmbiguous", "GPUAgentAPIErrors",
	"GPUNodeLeftovers",
	"GPUAgentServesNothing", "GPUSourceDetached", "GPUMeasurementsStuck", "GPUMPSRestarted", "GPUMemoryOverUse",
	"GPUDRANotPublished", "GPURuntimeIgnoresCDI", "GPUDRAPrepareErrors", "GPUDRAHandover", "GPUNotSeen", "GPUAgentWaits", "GPUServedTwice",
}

// TestAlertsAndDashboards makes GPUs, the source, the configuration, the kubelet and the agent fail one after the other, and checks
// the alerts and dashboards in Prometheus.
func TestAlertsAndDashboards(t *testing.T) {
	n := newMachine(t)
	mpsDaemon := n.StartMPSDaemon()
	covered := make(map[string]bool)
	// awaitAlert waits until an alert of node-1 with these labels or annotations is pending or firing. The unit tests check
	// the time it is pending.
	awaitAlert := func(name string, labels ...string) {
		t.Helper()
		n.Eventually(name+" "+strings.Join(labels, " "), func() error { return n.checkAlert(name, labels) })
		covered[name] = true
	}
	awaitResolved := func(name string, labels ...string) {
		t.Helper()
		n.Eventually("resolved: "+name+" "+strings.Join(labels, " "), func() error {
			found, _, err := n.findAlert(name, labels)
			if err == nil && found {
				err = fmt.Errorf("%s is still pending or firing", name)
			}
			return errors.Join(err, n.checkSeries("up == 1", 2)) // after a failed scrape the alert would be missing too
		})
	}

	n.Eventually("the kubelet has six GPUs, and shares of two", func() error {
		return errors.Join(n.KubeletHas(node.GPU, 6, 6), n.KubeletHas(memoryUnits, 78, 78), n.KubeletHas(mpsShares, 4, 4))
	})
	n.awaitDashboard12239("node-1")
	n.runPod("team-a", "train", node.GPU, 2)
	n.runPod("team-b", "notebook", node.GPU, 1)
	n.runPod("team-c", "chat", memoryUnits, 10)
	n.runPod("team-c", "batch", mpsShares, 1)
	n.Eventually("Prometheus has the holders, and their GPUs are idle", func() error {
		return n.checkSeries(`gpu_node_agent_device_idle_seconds_total{instance="node-1", pod=~"train|notebook", container="work"} > 1`, 3)
	})
	n.awaitDashboard12239("node-1")

	for _, event := range []string{
		`{gpu: 3, xid: 79}`, `{gpu: 3, lost: true}`, `{gpu: 1, rowRemapPending: true}`, `{gpu: 2, temperature: 97, clocksSlowed: true}`,
		`{gpu: 6, recoveryAction: reboot}`, `{gpu: 5, xid: 31, times: 8}`, `{gpu: 0, processes: [{pid: 1, memory: 1073741824, sm: 0.5}]}`,
	} {
		n.Inject("%s", event)
	}
	awaitAlert("GPUUnhealthy", "gpu=3", "cause=xid-79")
	n.Eventually("one alert for both causes", func() error {
		return errors.Join(n.checkSeries(`gpu_node_agent_device_finding{instance="node-1", gpu="3"}`, 2),
			n.checkSeries(`ALERTS{alertname="GPUUnhealthy", instance="node-1", gpu="3"}`, 1))
	})
	awaitAlert("GPUUnhealthy", "gpu=6", "cause=recovery-action")
	awaitAlert("GPUDegraded", "gpu=1", "cause=row-remap-pending")
	awaitAlert("GPUHot", "gpu=2")
	awaitAlert("GPUXIDRate", "gpu=5")
	awaitAlert("GPUXID", "gpu=3")
	awaitAlert("GPUAgentFieldsUnknown")

	// Prometheus scrapes both nodes from this one, at different times.
	n.Eventually("node-2 has the XIDs too", func() error {
		return n.checkSeries(`gpu_node_agent_xid_errors_total{instance="node-2", gpu="5", xid="31"} == 8`, 1)
	})
	n.checkPanels(true)
	n.checkPanels(false)
	for title, want := range map[string]float64{
		"GPUs": 2 * 8, "Allocated": 2 * 5, "Healthy": 4.0 / 8, "Unhealthy": 2 * 2, "Degraded": 2 * 2, "Allocated and idle": 0,
	} {
		n.Eventually("the fleet's panel "+title+" is right", func() error {
			result, err := n.panel("fleet.json", title)
			if err == nil && (len(result) != 1 || result[0].Value != want) {
				err = fmt.Errorf("it shows %v, want %v", result, want)
			}
			return err
		})
	}
	n.Eventually("the fleet's panel of namespaces is right", func() error {
		result, err := n.panel("fleet.json", "Devices held, by namespace")
		held := make(map[string]float64)
		for _, s := range result {
			held[s.Labels["namespace"]] = s.Value
		}
		if want := map[string]float64{"team-a": 2 * 2, "team-b": 2 * 1, "team-c": 2 * 2}; err == nil && !maps.Equal(held, want) {
			err = fmt.Errorf("namespaces hold %v, want %v", held, want) // both nodes have the same UUIDs
		}
		return err
	})
	n.checkRules()
	n.checkDocuments()

	n.checkShares()
	if err := mpsDaemon.Stop(); err != nil { // which ends the daemons
		t.Error(err)
	}
	awaitAlert("GPUMPSNotReady", "gpu=7", "namespace=team-c", "pod=batch")

	n.Inject(`{gpu: 6, recoveryAction: none}`)
	n.Inject(`{gpu: 3, lost: false}`)
	awaitResolved("GPUUnhealthy", "gpu=6")
	awaitResolved("GPUUnhealthy", "gpu=3")

	gpu := n.awaitGPU(`gpu_node_agent_device_allocated{instance="node-1", pod="notebook"}`, 1)
	n.Inject(`{gpu: %s, lost: true}`, gpu)
	awaitAlert("GPUUnhealthy", "gpu="+gpu, "namespace=team-b", "pod=notebook")
	awaitAlert("GPUUnschedulable", "resource=nvidia.com/gpu", "pods=team-b/notebook")
	n.Inject(`{gpu: %s, lost: false}`, gpu)
	awaitResolved("GPUUnschedulable")

	n.Inject(`{source: stalled}`)
	awaitAlert("GPUSourceStalled")
	n.Inject(`{source: down}`)
	awaitAlert("GPUSourceDown")
	n.Inject(`{source: up}`)
	awaitResolved("GPUSourceDown")
	awaitResolved("GPUSourceStalled")
	n.Inject(`{source: checksDown}`)
	awaitAlert("GPUHealthChecksDown")
	n.Inject(`{source: up}`)
	awaitResolved("GPUHealthChecksDown")
	n.Inject(`{events: down}`)
	awaitAlert("GPUEventSourceDown", "witness=nvml")
	n.Inject(`{events: up}`)
	awaitResolved("GPUEventSourceDown")

	n.configure("loud")
	awaitAlert("GPUAgentConfigReloadFailed")
	n.configure("info")
	awaitResolved("GPUAgentConfigReloadFailed")

	n.StopKubelet()
	awaitAlert("GPUAgentNotRegistered", "resource=nvidia.com/gpu")
	awaitAlert("GPUHoldersUnknown")

	n.KillAgent()
	awaitAlert("GPUAgentDown", "job=gpu-node-agent")
	n.Eventually("GPUAgentAbsent", func() error {
		return n.checkSeries(`ALERTS{alertname="GPUAgentAbsent"}`, 1)
	})
	covered["GPUAgentAbsent"] = true
	n.Eventually("GPUAgentDown has the target's labels", func() error {
		return n.checkSeries(`ALERTS{alertname="GPUAgentDown", job="gpus", cluster="east", instance="node-2"}`, 1)
	})

	for _, name := range untestedAlerts {
		if covered[name] {
			t.Errorf("%s has a test: remove it from untestedAlerts", name)
		}
		covered[name] = true
	}
	for _, rules := range rules(t) {
		for _, r := range rules {
			if r.Alert != "" && !covered[r.Alert] {
				t.Errorf("%s has no test: cause it, or add it to untestedAlerts", r.Alert)
			}
		}
	}
}

// checkShares checks the numbers about shared GPUs.
func (n machine) checkShares() {
	n.T.Helper()
	for expr, want := range map[string]float64{
		`gpu_node_agent_share_units{gpu="4", sharing="memory", state="total"}`:                                     78,
		`gpu_node_agent_share_units{gpu="4", sharing="memory", state="free"}`:                                      68,
		`gpu_node_agent_share_units{gpu="4", sharing="memory", state="largest"}`:                                   68,
		`gpu_node_agent_share_units{gpu="7", sharing="mps", state="total"}`:                                        4,
		`gpu_node_agent_share_units{gpu="7", sharing="mps", state="free"}`:                                         3,
		`gpu_node_agent_share_units{gpu="7", sharing="mps", state="largest"}`:                                      1,
		`gpu_node_agent_mps_daemon_up{gpu="7"}`:                                                                    1,
		`gpu_node_agent_mps_active_thread_ratio{gpu="7"}`:                                                          0.25,
		`gpu_node_agent_container_memory_limit_bytes{gpu="4", namespace="team-c", pod="chat", enforcement="none"}`: 10 << 30,
	} {
		n.Eventually(expr, func() error {
			result, err := n.prom.Query(n.T.Context(), strings.Replace(expr, "{", `{instance="node-1", `, 1))
			if err == nil && (len(result) != 1 || result[0].Value != want) {
				err = fmt.Errorf("%v, want %v", result, want)
			}
			return err
		})
	}
}

// checkDocuments checks that the queries in the documents have data.
func (n machine) checkDocuments() {
	n.T.Helper()
	queries := 0
	files, err := filepath.Glob(filepath.Join("..", "..", "docs", "*.md"))
	for _, file := range files {
		text, bad := os.ReadFile(file)
		err = errors.Join(err, bad)
		for _, m := range regexp.MustCompile("(?s)```promql\n(.*?)```").FindAllSubmatch(text, -1) {
			queries++
			expr := strings.ReplaceAll(string(m[1]), "[1h:1m]", "[10m:1s]") // the test has no history
			n.Eventually(filepath.Base(file)+": "+expr, func() error {
				result, err := n.prom.Query(n.T.Context(), expr)
				if err == nil && len(result) == 0 {
					err = errors.New("no series")
				}
				return err
			})
		}
	}
	if err != nil || queries == 0 {
		n.T.Errorf("%d queries in %q: %v", queries, files, err)
	}
}

// checkAlert checks that an alert is pending or firing.
func (n machine) checkAlert(name string, labels []string) error {
	n.T.Helper()
	found, active, err := n.findAlert(name, labels)
	if err == nil && !found {
		err = fmt.Errorf("no %s with %v; pending or firing: %v", name, labels, active)
	}
	return err
}

// findAlert reports whether an alert of node-1 is pending or firing, with the names of all such alerts, and checks that its
// annotations expand.
func (n machine) findAlert(name string, labels []string) (found bool, active []string, err error) {
	n.T.Helper()
	alerts, err := n.prom.Alerts(n.T.Context())
	if err != nil {
		return false, nil, err
	}
	want := map[string]string{"alertname": name, "instance": "node-1"}
	for _, l := range labels {
		k, v, _ := strings.Cut(l, "=")
		want[k] = v
	}
alerts:
	for _, a := range alerts {
		active = append(active, a.Labels["alertname"])
		for k, v := range want {
			if a.Labels[k] != v && a.Annotations[k] != v {
				continue alerts
			}
		}
		for k, text := range a.Annotations {
			if strings.Contains(text, "error expanding") {
				n.T.Errorf("%s: %s: %s", name, k, text)
			}
		}
		return true, active, nil
	}
	return false, active, nil
}

// checkRules waits until Prometheus has evaluated every rule without errors and has the recorded series of both nodes.
func (n machine) checkRules() {
	n.T.Helper()
	var all []promapi.RuleHealth
	n.Eventually("every rule is evaluated", func() (err error) {
		all, err = n.prom.Rules(n.T.Context())
		if err == nil && len(all) == 0 {
			err = errors.New("no rules")
		}
		for _, r := range all {
			if r.Health != "ok" {
				err = errors.Join(err, fmt.Errorf("%s: %s: %s", r.Name, r.Health, r.LastError))
			}
		}
		return err
	})
	for _, r := range all {
		// A price is of no cluster, and no node has gone.
		if r.Type != "recording" || strings.HasPrefix(r.Name, "model:") || r.Name == "instance:gpu_node_agent_gone_gpus:count" {
			continue
		}
		for _, cluster := range []string{"", "east"} {
			n.Eventually(r.Name+" of cluster "+cluster, func() error {
				result, err := n.prom.Query(n.T.Context(), fmt.Sprintf("%s{cluster=%q}", r.Name, cluster))
				if err == nil && len(result) == 0 {
					err = errors.New("no series")
				}
				return err
			})
		}
	}
}
