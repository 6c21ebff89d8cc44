package metrics

import (
	"bytes"
	"maps"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/common/expfmt"
	"k8s.io/apimachinery/pkg/types"

	"github.com/gpu-node-agent/gpu-node-agent/agent/kube"
	"github.com/gpu-node-agent/gpu-node-agent/agent/view"
	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/health/driver"
	"github.com/gpu-node-agent/gpu-node-agent/health/judge"
	"github.com/gpu-node-agent/gpu-node-agent/health/statefile"
	"github.com/gpu-node-agent/gpu-node-agent/internal/healthtest"
	"github.com/gpu-node-agent/gpu-node-agent/metrics/exposition"
	"github.com/gpu-node-agent/gpu-node-agent/metrics/fields"
	"github.com/gpu-node-agent/gpu-node-agent/metrics/processes"
	"github.com/gpu-node-agent/gpu-node-agent/plugin"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/dra"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/memlimits"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/podresources"
)

var now = time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)

// testNode is a node with a healthy GPU, a lost one, and one in MIG mode with characters to escape in its model.
func testNode() *health.Snapshot {
	full := map[health.Field]float64{}
	for i, f := range testConfig(fields.SetDefault).Chosen.IDs() {
		full[f] = float64(i) + 0.5
	}
	full[health.FieldXID] = 31
	h100 := "NVIDIA H100 80GB HBM3"
	served, notServed := mig("MIG-2", 2, 0, 1024), mig("MIG-3", 2, 1, 1024) // two compute instances of one GPU instance
	served.MPS = &health.MPSDaemon{
		Ready: true, PID: 41, Restarts: 2, ThreadPercentage: 25, PinnedMemory: 2 << 30,
		Servers: []health.MPSServer{{PID: 50, Status: "ACTIVE", Clients: []int{61, 62}}, {PID: 51, Clients: []int{63}}},
	}
	notServed.MPS = &health.MPSDaemon{Cause: health.CauseMPSDown, Reason: "exit status 1"}
	return &health.Snapshot{
		Seq: 7, At: now.Add(-2500 * time.Millisecond),
		Source: health.Source{
			Status: health.SourceUp, Reconnects: 2, Polls: 9, PollTook: 4 * time.Millisecond,
			Versions: health.Versions{Driver: "580.95.05", CUDA: "13.0", DCGM: "4.6.0", Engine: "4.5.1"},
			Checks:   health.Checks{Status: health.ChecksUp},
			Events:   []health.EventSourceState{{Witness: health.WitnessNVML, Status: health.EventsUp}, {Witness: health.WitnessKernelLog}},
			XIDGap:   health.XIDGap{Since: now.Add(-time.Hour), Until: now.Add(-59 * time.Minute), Total: 90 * time.Second},
			Incidents: []health.Incident{ // of the daemon and the domain
				{System: "imex", Code: 122, Severity: health.SeverityFail}, {System: "imex", Code: 122, Severity: health.SeverityFail},
			},
		},
		Bindings: health.Bindings{
			{IndexRef: health.IndexRef{Key: judge.KeyCordon, Entry: "1"}, GPU: "GPU-b"},
			{
				IndexRef: health.IndexRef{Key: "plugin.exclude", Entry: "2:1"}, GPU: "GPU-b",
				Warning: health.BindingWarning{Reason: health.BindingRenumbered},
			},
		},
		Devices: []health.DeviceState{
			{
				Device: health.Device{
					ID: "GPU-a", Index: 0, Minor: 1, PCI: "00000000:1B:00.0", Model: h100, NUMA: []int{0, 1}, Memory: 80 << 30,
					Links: []health.Link{{Peer: "GPU-b", NVLinks: 18}, {Peer: "GPU-c", Path: health.PathSystem}},
				},
				Sample:  health.Sample{Values: full},
				Verdict: health.Verdict{State: health.Healthy},
				XIDs:    healthtest.Counted(map[int]uint64{31: 3, 43: 1, 137: 1}, health.XID{Code: 137, At: now.Add(-time.Minute)}),
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
				Sample:  health.Sample{Values: map[health.Field]float64{health.FieldGPUTemp: 41, health.FieldXID: 0}},
				Verdict: health.Verdict{State: health.Degraded},
			},
			mig("MIG-1", 1, 0, 512),
			served,
			notServed,
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

var both = []string{fields.Names48, fields.Names49}

// testConfig is a configuration with these fields and sets.
func testConfig(names ...string) *Config { return namedConfig([]string{fields.Names48}, names...) }

// namedConfig is a configuration with these generations of names, and these fields and sets.
func namedConfig(generations []string, names ...string) *Config {
	c := DefaultConfig()
	c.Fields, c.Names = nil, generations
	for _, name := range names {
		c.Fields = append(c.Fields, fields.Spec{Name: name})
	}
	c, err := c.Resolve(os.ReadFile)
	if err != nil {
		panic(err) // it reads no file
	}
	return &c
}

// testHolders are containers with a whole GPU, with two replicas of another GPU, with a third replica of it, and with a
// MIG device.
func testHolders() podresources.Holders {
	const gpu, part = "nvidia.com/gpu", "nvidia.com/mig-1g.10gb"
	return podresources.Holders{At: now.Add(-time.Second), By: map[health.DeviceID][]podresources.Holder{
		"GPU-a": {{Namespace: "team", Pod: "train-0", Container: "main", Resource: gpu, DeviceID: "GPU-a"}},
		"GPU-c": {
			{Namespace: "team", Pod: "nb-1", Container: "nb", Resource: gpu, DeviceID: "GPU-c::0"},
			{Namespace: "team", Pod: "nb-1", Container: "nb", Resource: gpu, DeviceID: "GPU-c::2"},
			{Namespace: "team", Pod: "nb-2", Container: "nb", Resource: gpu, DeviceID: "GPU-c::1"},
		},
		"MIG-1": {{Namespace: "infer", Pod: "web", Container: "model", Resource: part, DeviceID: "MIG-1"}},
	}}
}

// testProcesses are the processes of testHolders, of a container that holds no device, and of the host. The processes of GPU-b are unknown.
func testProcesses() *processes.Snapshot {
	return &processes.Snapshot{
		ProcessReading: driver.ProcessReading{At: now, Measured: []health.DeviceID{"GPU-a", "GPU-c", "MIG-1", "MIG-2"}},
		Usage: []processes.Usage{
			{Device: "GPU-a", Processes: 2, Memory: 300 << 20, HasMemory: true, SM: 0, HasSM: true},
			{
				Device: "GPU-a", Container: processes.Container{Namespace: "team", Pod: "train-0", Name: "main"}, Processes: 8, Memory: 70 << 30,
				HasMemory: true, SM: .875, HasSM: true,
			},
			{Device: "GPU-a", Container: processes.Container{Name: processes.Other}, Processes: 3},
			{
				Device: "MIG-1", Container: processes.Container{Namespace: "infer", Pod: "web", Name: "model"}, Processes: 1, Memory: 1 << 30,
				HasMemory: true,
			},
		},
		WithoutPod: map[processes.Reason]int{processes.ReasonHost: 1, processes.ReasonNotHolder: 1},
	}
}

// testShares are the units of a device that is shared by memory, of two that MPS serves, the second with unknown holders, and of a
// time-sliced one.
func testShares() []plugin.ShareUnits {
	const memory, part, gpu = "nvidia.com/gpu-memory", "nvidia.com/mig-1g.10gb.shared", "nvidia.com/gpu"
	return []plugin.ShareUnits{
		{Resource: gpu, Device: "GPU-c", Sharing: plugin.SharingTimeSlicing, Total: 4, Free: 1, Largest: 1},
		{
			Resource: memory, Device: "GPU-b", Sharing: plugin.SharingMemory, Unit: 1 << 30, Total: 78, Free: 38, Enforcement: memlimits.None,
			Reason: "driver 580",
		},
		{Resource: part, Device: "MIG-2", Sharing: plugin.SharingMPS, Total: 4, Free: 3, Largest: 1},
		{Resource: part, Device: "MIG-3", Sharing: plugin.SharingMPS, Total: 4, Free: -1, Largest: -1},
	}
}

// testMemory are the containers on GPU-b: one that the driver limits, and one that nothing does.
func testMemory() *memlimits.Snapshot {
	c := memlimits.Container{
		Namespace: "team", Pod: "chat-0", Name: "llm", Device: "GPU-b", Resource: "nvidia.com/gpu-memory", Units: 10,
		Limit: 10 << 30,
	}
	limited := c
	limited.Pod, limited.Units, limited.Limit, limited.Enforcement, limited.Used, limited.HasUsed = "chat-1", 30, 30<<30, memlimits.Driver,
		5<<30, true
	c.Enforcement, c.Reason = memlimits.None, "the container has no control group"
	return &memlimits.Snapshot{Containers: []memlimits.Container{c, limited}}
}

// testDRA is a driver with one failure of each kind, and calls in the first, the third and above the last bucket.
func testDRA() dra.Status {
	durations := dra.Durations{Counts: make([]uint64, len(dra.DurationBounds())+1), Sum: 40.5}
	durations.Counts[0], durations.Counts[2], durations.Counts[len(durations.Counts)-1] = 3, 2, 1
	return dra.Status{
		Enabled: true, Registered: true, Published: now, Slices: 2, Devices: 9, Tainted: 1,
		PublishErrors: map[string]uint64{"conflict": 1}, PrepareErrors: map[string]uint64{"unhealthy_device": 2},
		Prepares: durations, Unprepares: dra.Durations{Counts: make([]uint64, len(dra.DurationBounds())+1)},
	}
}

// testSource is Sources with the view that a scrape takes, which a test can change.
type testSource struct {
	Sources
	*view.View
}

func collectorOf(src testSource) *collector { return newCollector(src.Sources) }

// testSources provides a snapshot, the default fields, and totals that were updated a minute ago and now.
func testSources(s *health.Snapshot) testSource {
	return configuredSources(s, testConfig(fields.SetDefault))
}

func configuredSources(s *health.Snapshot, c *Config) testSource {
	configs := new(health.Latest[Config])
	configs.Store(c)
	totals := NewTotals(TotalsInputs{
		Config: configs, Snapshots: new(health.Latest[health.Snapshot]), Holders: testHolders,
		Processes: testProcesses,
	})
	if s != nil {
		for _, at := range []time.Time{now.Add(-time.Minute), now} {
			totals.now = func() time.Time { return at }
			totals.update(s)
		}
	}
	v := &view.View{
		At: now, Node: "node-1", Version: "1.2.3", Revision: "abc",
		Reload: view.Reload{OK: true, At: now.Add(-time.Hour)}, PluginConfig: plugin.Config{Enabled: true},
		UnmatchedRefs: []health.UnmatchedRefs{
			{Key: "health.cordon", Refs: []string{"9", "GPU-9"}},
			{Key: "plugin.exclude", Refs: []string{"0:7"}},
		},
		Snapshot: s,
		Plugin: plugin.Status{
			Resources: []plugin.ResourceStatus{{
				Name: "nvidia.com/gpu", Registered: true, Registrations: 2, Streams: 1, Allocations: 5,
				AllocationErrors: map[string]uint64{"unknown_device": 1}, Devices: 3, Healthy: 2, Unschedulable: &plugin.Unschedulable{Devices: 1},
			}},
			OtherPlugins: map[string]int{"example.com/gpu": 2},
		},
		DRA: testDRA(), Claims: &dra.Claims{ByUID: map[types.UID]dra.Claim{"1": {}, "2": {}}},
		Holders: testHolders(), Processes: testProcesses(), Shares: testShares(), Memory: testMemory(),
		CDIRuntime:      &view.CDIRuntime{Version: "containerd://2.1.4", Support: "supported"},
		NodeDevices:     map[view.SeenBy]int{view.SeenByPCI: 4, view.SeenByDriver: 3, view.OfferedToPods: 0},
		Kube:            kube.Status{Enabled: true, Writes: 4, Events: 3, Dropped: 2, Errors: 1},
		NodeObject:      kube.NodeStatus{Enabled: true, Writes: 6, Errors: 5, LabelsLeft: true, TaintsLeft: true},
		PodLabelsStatus: view.PodLabels{Enabled: true, Up: true},
		StateDir: statefile.Status{
			Path: "/var/lib/gpu-node-agent", Err: "no space left on device", Since: now.Add(-time.Minute), Unread: now,
		},
		LogDropped: 12, ConnectionsDropped: 13,
	}
	return testSource{Sources{Config: configs, View: func() *view.View { return v }, Totals: totals}, v}
}

// fullNode is testNode with a value for each field of the first GPU.
func fullNode() *health.Snapshot {
	s := testNode()
	d := &s.Devices[0]
	d.Sample.Values = fieldValues(1)
	d.Sample.XIDs = []health.XID{{Code: 31, At: now}}
	d.Sample.Checked = true
	d.Sample.Incidents = []health.Incident{
		{System: "memory", Code: 4, Severity: health.SeverityFail},
		{System: "memory", Code: 6, Severity: health.SeverityWarn},
		{System: "xid", Code: 99, Severity: health.SeverityWarn},
	}
	return s
}

// fieldValues returns the number of each field of the table, multiplied.
func fieldValues(factor float64) map[health.Field]float64 {
	values := make(map[health.Field]float64)
	for _, f := range fields.List(nil) {
		values[f.ID] = factor * float64(f.ID)
	}
	return values
}

// setValues sets the values of all devices.
func setValues(s *health.Snapshot, values map[health.Field]float64) *health.Snapshot {
	for i := range s.Devices {
		s.Devices[i].Sample.Values = maps.Clone(values)
	}
	return s
}

// render returns the page of a scrape as text.
func render(t *testing.T, c *collector) string {
	t.Helper()
	p, done := c.collect()
	defer done()
	return pageText(t, p)
}

// pageText omits the metrics of the process and of the Go runtime, which change.
func pageText(t *testing.T, p *exposition.Page) string {
	t.Helper()
	var text bytes.Buffer
	for _, f := range p.Families() {
		if strings.HasPrefix(f.GetName(), "process_") || strings.HasPrefix(f.GetName(), "go_") {
			continue
		}
		if _, err := expfmt.MetricFamilyToText(&text, f); err != nil {
			t.Fatal(err)
		}
	}
	return regexp.MustCompile(`goversion="[^"]*"`).ReplaceAllString(text.String(), `goversion="go"`)
}

// series returns the lines of a metric that contain all parts.
func series(page, name string, parts ...string) []string {
	var found []string
	for line := range strings.Lines(page) {
		isSeries := strings.HasPrefix(line, name+"{") || strings.HasPrefix(line, name+" ")
		if isSeries && !slices.ContainsFunc(parts, func(p string) bool { return !strings.Contains(line, p) }) {
			found = append(found, strings.TrimSuffix(line, "\n"))
		}
	}
	return found
}

// expectSeries checks the number of series of a metric that contain all parts.
func expectSeries(t *testing.T, page string, want int, name string, parts ...string) {
	t.Helper()
	if got := series(page, name, parts...); len(got) != want {
		t.Errorf("%d series of %s with %q, want %d:\n%s", len(got), name, parts, want, strings.Join(series(page, name), "\n"))
	}
}
