package metrics

import (
	"bytes"
	"flag"
	"os"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil/promlint"
	"github.com/prometheus/common/expfmt"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/plugin"
)

var update = flag.Bool("update", false, "write the golden exposition anew")

var now = time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)

// node is a node with a good GPU, a lost one, and a partitioned one with a bad label in its name.
func node() *health.Snapshot {
	full := map[health.Field]float64{}
	for i, f := range chosen(SetDefault).IDs() {
		full[f] = float64(i) + 0.5
	}
	full[health.FieldXID] = 31
	h100 := "NVIDIA H100 80GB HBM3"
	return &health.Snapshot{
		Seq: 7, At: now.Add(-2500 * time.Millisecond),
		Source: health.Source{
			Status: health.SourceUp, Reconnects: 2, Polls: 9, PollTook: 4 * time.Millisecond,
			Versions: health.Versions{Driver: "580.95.05", CUDA: "13.0", DCGM: "4.6.0", Engine: "4.5.1"},
		},
		Devices: []health.DeviceState{
			{
				Device: health.Device{
					ID: "GPU-a", Index: 0, Minor: 1, PCI: "00000000:1B:00.0", Model: h100, NUMA: []int{0, 1}, Memory: 80 << 30,
					Links: []health.Link{{Peer: "GPU-b", NVLinks: 18}, {Peer: "GPU-c", Path: health.PathSystem}},
				},
				Sample:    health.Sample{Values: full},
				Verdict:   health.Verdict{State: health.Healthy},
				XIDCounts: map[int]uint64{31: 3, 43: 1, 137: 1},
				LastXID:   health.XID{Code: 137, At: now.Add(-time.Minute)},
			},
			{
				Device: health.Device{ID: "GPU-b", Index: 1, PCI: "00000000:43:00.0", Model: h100},
				Verdict: health.Verdict{State: health.Unhealthy, Findings: []health.Finding{
					{Cause: "xid-79", State: health.Unhealthy, Action: health.ActionRebootNode},
					{Cause: "temperature", State: health.Degraded, Action: health.ActionCheckCooling},
				}},
			},
			{
				Device:  health.Device{ID: "GPU-c", Index: 2, PCI: "00000000:52:00.0", Model: "a \"model\"\nof \\ its own", MIGMode: true},
				Sample:  health.Sample{Values: map[health.Field]float64{health.FieldGPUTemp: 41}},
				Verdict: health.Verdict{State: health.Degraded},
			},
			mig("MIG-1", 1, 0, 512),
			mig("MIG-2", 2, 0, 1024),
			mig("MIG-3", 2, 1, 1024), // a second compute instance of the GPU instance above
		},
	}
}

func mig(id health.DeviceID, gi, ci int, used float64) health.DeviceState {
	return health.DeviceState{
		Device: health.Device{
			ID: id, Parent: "GPU-c", Kind: health.KindMIG, Index: 2, PCI: "00000000:52:00.0", Model: "NVIDIA H100 80GB HBM3",
			Profile: "1g.10gb", GI: gi, CI: ci,
		},
		Sample:  health.Sample{Values: map[health.Field]float64{health.FieldFBUsed: used}},
		Verdict: health.Verdict{State: health.Unknown},
	}
}

// config is a configuration with these fields.
func config(fields ...string) *Config {
	c := DefaultConfig()
	c.Fields = nil
	for _, f := range fields {
		c.Fields = append(c.Fields, FieldSpec{Name: f})
	}
	c, err := c.Resolve()
	if err != nil {
		panic(err) // there is no file
	}
	return &c
}

func chosen(fields ...string) Selection { return config(fields...).Chosen }

// holders is who has what: a whole GPU, two replicas of another by one container and a third by another pod's,
// and a MIG device.
func holders() plugin.Holders {
	const gpu, part = "nvidia.com/gpu", "nvidia.com/mig-1g.10gb"
	return plugin.Holders{At: now.Add(-time.Second), By: map[health.DeviceID][]plugin.Holder{
		"GPU-a": {{Namespace: "team", Pod: "train-0", Container: "main", Resource: gpu, DeviceID: "GPU-a"}},
		"GPU-c": {
			{Namespace: "team", Pod: "nb-1", Container: "nb", Resource: gpu, DeviceID: "GPU-c::0"},
			{Namespace: "team", Pod: "nb-1", Container: "nb", Resource: gpu, DeviceID: "GPU-c::2"},
			{Namespace: "team", Pod: "nb-2", Container: "nb", Resource: gpu, DeviceID: "GPU-c::1"},
		},
		"MIG-1": {{Namespace: "infer", Pod: "web", Container: "model", Resource: part, DeviceID: "MIG-1"}},
	}}
}

func sources(s *health.Snapshot) Sources { return sourcesOf(s, config(SetDefault)) }

// sourcesOf has the totals of one fold a minute ago and one now.
func sourcesOf(s *health.Snapshot, c *Config) Sources {
	latest, configs := new(health.Latest[health.Snapshot]), new(health.Latest[Config])
	configs.Store(c)
	totals := NewTotals(configs, latest, holders)
	if s != nil {
		latest.Store(s)
		for _, at := range []time.Time{now.Add(-time.Minute), now} {
			totals.now = func() time.Time { return at }
			totals.fold(s)
		}
	}
	return Sources{
		Config: configs, Snapshots: latest, Totals: totals, Holders: holders,
		Plugin: func() plugin.Status {
			return plugin.Status{Resources: []plugin.ResourceStatus{{
				Name: "nvidia.com/gpu", Registered: true, Registrations: 2, Streams: 1, Allocations: 5,
				AllocationErrors: map[string]uint64{"unknown_device": 1}, Devices: 3, Healthy: 2,
			}}}
		},
		Reload:      func() Reload { return Reload{OK: true, At: now.Add(-time.Hour)} },
		Kubernetes:  func() (Kubernetes, bool) { return Kubernetes{Writes: 4, Events: 3, Dropped: 2, Errors: 1}, true },
		PodLabelsUp: func() (bool, bool) { return true, true },
		StateFileUp: func() (bool, bool) { return false, true },
		LogDropped:  func() uint64 { return 12 },
		Now:         func() time.Time { return now },
		Hostname:    "node-1", Version: "1.2.3", Revision: "abc",
	}
}

// exposition is a page without what differs from run to run.
func exposition(t *testing.T, g *Gatherer) string {
	t.Helper()
	families, done, err := g.Gather()
	defer done()
	if err != nil {
		t.Fatal(err)
	}
	var page bytes.Buffer
	for _, f := range families {
		if strings.HasPrefix(f.GetName(), "process_") || strings.HasPrefix(f.GetName(), "go_") {
			continue
		}
		if _, err := expfmt.MetricFamilyToText(&page, f); err != nil {
			t.Fatal(err)
		}
	}
	return regexp.MustCompile(`goversion="[^"]*"`).ReplaceAllString(page.String(), `goversion="go"`)
}

func TestExposition(t *testing.T) {
	const golden = "testdata/exposition.txt"
	got := exposition(t, NewGatherer(sources(node())))
	if *update {
		if err := os.WriteFile(golden, []byte(got), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(golden)
	if err != nil {
		t.Fatal(err)
	}
	if got != string(want) {
		t.Errorf("the exposition differs from %s (go test ./metrics -update):\n%s", golden, got)
	}
}

// Before the first poll the agent's own series are there, and no device's.
func TestExpositionWithoutSnapshot(t *testing.T) {
	got := exposition(t, NewGatherer(sources(nil)))
	if strings.Contains(got, "DCGM_") || strings.Contains(got, "device_state") {
		t.Errorf("devices out of nothing:\n%s", got)
	}
	for _, name := range []string{"gpu_node_agent_plugin_registered", "gpu_node_agent_build_info", "gpu_node_agent_config_last_reload_successful"} {
		if !strings.Contains(got, name) {
			t.Errorf("%s is not there:\n%s", name, got)
		}
	}
	down := &health.Snapshot{Source: health.Source{Status: health.SourceDown, Err: "refused"}}
	got = exposition(t, NewGatherer(sources(down)))
	if !strings.Contains(got, "gpu_node_agent_source_up 0") || strings.Contains(got, "snapshot_age") {
		t.Errorf("a source that was never up:\n%s", got)
	}
}

// No value leaves no series: a lost GPU shows its state, and nothing that it does not measure.
func TestLostDeviceHasNoStaleValues(t *testing.T) {
	got := exposition(t, NewGatherer(sources(node())))
	for line := range strings.Lines(got) {
		if strings.HasPrefix(line, "DCGM_") && strings.Contains(line, `"GPU-b"`) {
			t.Errorf("stale: %s", line)
		}
	}
	if !strings.Contains(got, `gpu_node_agent_device_state{GPU_I_ID="",GPU_I_PROFILE="",UUID="GPU-b",gpu="1",hostname="node-1",state="unhealthy"} 1`) {
		t.Errorf("the lost GPU's state is not there:\n%s", got)
	}
}

// The XID of a second compute instance is the GPU instance's.
func TestXIDOfAnyComputeInstance(t *testing.T) {
	s := node()
	last := &s.Devices[len(s.Devices)-1]
	last.Sample.Values = map[health.Field]float64{health.FieldXID: 43}
	last.LastXID = health.XID{Code: 43, At: now}
	got := exposition(t, NewGatherer(sources(s)))
	if !regexp.MustCompile(`DCGM_FI_DEV_XID_ERRORS\{.*GPU_I_ID="2".*err_code="43".*\} 43`).MatchString(got) {
		t.Errorf("the XID is not there:\n%s", got)
	}
}

// What was measured is not shown for ever when the source is away; what is thought of the devices is.
func TestASourceThatIsAwayHasNoMeasurements(t *testing.T) {
	for _, c := range []struct {
		age   time.Duration
		shown bool
	}{{staleAfter - time.Second, true}, {staleAfter, false}} {
		away := node()
		away.Source.Status, away.At = health.SourceStalled, now.Add(-c.age)
		got := exposition(t, NewGatherer(sources(away)))
		if strings.Contains(got, "DCGM_FI_DEV_GPU_TEMP{") != c.shown {
			t.Errorf("%v without a measurement: shown %v, want %v", c.age, !c.shown, c.shown)
		}
		if !strings.Contains(got, `state="unhealthy"} 1`) {
			t.Errorf("%v without a measurement, and no states:\n%s", c.age, got)
		}
	}
}

// The names of our own series are in Prometheus's style. dcgm-exporter's are what they are.
func TestNames(t *testing.T) {
	families, done, err := NewGatherer(sources(node())).Gather()
	defer done()
	if err != nil {
		t.Fatal(err)
	}
	problems, err := promlint.NewWithMetricFamilies(families).Lint()
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range problems {
		if strings.HasPrefix(p.Metric, namespace) {
			t.Errorf("%s: %s", p.Metric, p.Text)
		}
	}
}

// What is off, or not wired, has no series.
func TestPartsThatAreOff(t *testing.T) {
	off := func() (bool, bool) { return true, false }
	for name, part := range map[string]Sources{
		"off": {PodLabelsUp: off, StateFileUp: off, Kubernetes: func() (Kubernetes, bool) { return Kubernetes{Writes: 1}, false }},
		"nil": {},
	} {
		src := sources(node())
		src.PodLabelsUp, src.StateFileUp, src.Kubernetes, src.LogDropped = part.PodLabelsUp, part.StateFileUp, part.Kubernetes, part.LogDropped
		page := exposition(t, NewGatherer(src))
		for _, unwanted := range []string{"_kubernetes_", "_pod_labels_up", "_state_file_up", "_log_dropped_total"} {
			if strings.Contains(page, unwanted) {
				t.Errorf("%s: there is %s", name, unwanted)
			}
		}
	}
}
