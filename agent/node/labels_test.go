package node

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"

	"go.uber.org/zap"
	"k8s.io/apimachinery/pkg/api/validate/content"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/internal/golden"
	"github.com/gpu-node-agent/gpu-node-agent/internal/healthtest"
	"github.com/gpu-node-agent/gpu-node-agent/plugin"
)

// The models of the tests, with what GFD prints for them.
var (
	h100 = health.Device{Model: "NVIDIA H100 80GB HBM3", Memory: 81559 << 20, ComputeCapability: health.ComputeCapability{Major: 9}}
	a100 = health.Device{Model: "NVIDIA A100-SXM4-40GB", Memory: 40960 << 20, ComputeCapability: health.ComputeCapability{Major: 8}}
	l4   = health.Device{Model: "NVIDIA L4", Memory: 23034 << 20, ComputeCapability: health.ComputeCapability{Major: 8, Minor: 9}}
)

// The MIG profiles of an A100 40GB (nvidia-smi mig -lgip).
var a100Profiles = map[string]health.Device{
	"1g.5gb": {
		Profile: "1g.5gb", Memory: 4864 << 20,
		Properties: &health.Properties{MIG: &health.MIGProperties{ProfileID: 19, Multiprocessors: 14, CopyEngines: 1}},
	},
	"3g.20gb": {
		Profile: "3g.20gb", Memory: 19968 << 20,
		Properties: &health.Properties{MIG: &health.MIGProperties{ProfileID: 9, Multiprocessors: 42, CopyEngines: 3, Decoders: 2}},
	},
	"1g.5gb+me": {
		Profile: "1g.5gb+me", Memory: 4864 << 20,
		Properties: &health.Properties{MIG: &health.MIGProperties{
			ProfileID: 20, Multiprocessors: 14, CopyEngines: 1, Decoders: 1, JPEGEngines: 1,
			OFAEngines: 1,
		}},
	},
	"1c.3g.20gb": {
		Profile: "1c.3g.20gb", Memory: 19968 << 20,
		Properties: &health.Properties{MIG: &health.MIGProperties{ProfileID: 9, Multiprocessors: 42, CopyEngines: 3, Decoders: 2}},
	},
}

// gpu returns a healthy GPU with MIG devices of these profiles; in MIG mode if they are not nil.
func gpu(index int, model health.Device, profiles ...string) (all []health.DeviceState) {
	d := model
	d.ID, d.Index, d.GI, d.CI, d.MIGIndex = health.DeviceID(fmt.Sprintf("GPU-%d", index)), index, -1, -1, -1
	d.PCI, d.MIGMode = fmt.Sprintf("00000000:%02X:00.0", index), profiles != nil
	values := map[health.Field]float64{}
	if model.Model != l4.Model {
		values[health.FieldMIGMode] = 0
	}
	all = append(all, state(d, health.Healthy, values))
	for i, profile := range profiles {
		m := a100Profiles[profile]
		m.ID, m.Parent, m.Kind = health.DeviceID(fmt.Sprintf("MIG-%d-%d", index, i)), d.ID, health.KindMIG
		m.Index, m.GI, m.MIGIndex, m.Model, m.ComputeCapability = index, i, i, d.Model, d.ComputeCapability
		all = append(all, state(m, health.Healthy, nil))
	}
	return all
}

func state(d health.Device, s health.State, values map[health.Field]float64) health.DeviceState {
	return health.DeviceState{
		Device: d, Verdict: health.Verdict{State: s},
		Sample: health.Sample{Device: d.ID, Presence: health.Present, Values: values},
	}
}

var nop = zap.NewNop()

func gpus(n int, model health.Device, profiles ...string) (all []health.DeviceState) {
	for i := range n {
		all = append(all, gpu(i, model, profiles...)...)
	}
	return all
}

func snapshotOf(devices []health.DeviceState) *health.Snapshot {
	return &health.Snapshot{
		At: healthtest.Epoch, Devices: devices,
		Source: health.Source{Kind: "dcgm", Status: health.SourceUp, Versions: health.Versions{Driver: "580.126.20", CUDA: "13.0"}},
	}
}

// hostOf returns the host of a DGX with 3D controllers.
func hostOf(devices []health.DeviceState) *host {
	h := &host{machine: "DGXH100", devices: map[health.DeviceID]hostDevice{}}
	for _, d := range devices {
		if d.Device.Kind == health.KindGPU {
			h.devices[d.Device.ID] = hostDevice{class: simulatedClass}
		}
	}
	return h
}

// serving returns the function of a plugin.
func serving(changes ...func(*plugin.Config)) func(*health.Snapshot) plugin.Serving {
	config := plugin.DefaultConfig()
	for _, change := range changes {
		change(&config)
	}
	var configs health.Latest[plugin.Config]
	configs.Store(&config)
	return plugin.New(&configs, new(health.Latest[health.Snapshot]), nop).Serving
}

func labelsOf(devices []health.DeviceState, changes ...func(*plugin.Config)) map[string]string {
	snap := snapshotOf(devices)
	return (&inventory{}).update(snap, serving(changes...)(snap), hostOf(devices)).labels()
}

func text(labels map[string]string) string {
	var b strings.Builder
	for _, key := range slices.Sorted(maps.Keys(labels)) {
		fmt.Fprintf(&b, "%s=%s\n", key, labels[key])
	}
	return b.String()
}

func migStrategy(s string) func(*plugin.Config) { return func(c *plugin.Config) { c.MIGStrategy = s } }

func timeSlicing(rename string, replicas int, devices ...string) func(*plugin.Config) {
	return func(c *plugin.Config) {
		c.Sharing.TimeSlicing.Resources = []plugin.SharedResource{{Name: "nvidia.com/gpu", Replicas: replicas, Rename: rename, Devices: devices}}
	}
}

func byMPS(c *plugin.Config) {
	c.Sharing.MPS.Resources = []plugin.MPSResource{{Name: "nvidia.com/gpu", Replicas: 10}}
}

func TestLabels(t *testing.T) {
	single, mixed := migStrategy(plugin.MIGSingle), migStrategy(plugin.MIGMixed)
	unlike := append(gpu(0, a100, "1g.5gb"), gpu(1, a100, "3g.20gb")...)
	for name, c := range map[string]struct {
		devices []health.DeviceState
		config  []func(*plugin.Config)
	}{
		"h100":                {devices: gpus(8, h100)},
		"h100-single-without": {gpus(8, h100), []func(*plugin.Config){single}},
		"no-gpu":              {},
		"mixed-models":        {devices: append(append(gpu(0, l4), gpu(1, h100)...), gpu(2, h100)...)},
		"a100-none":           {devices: gpus(2, a100, "1g.5gb", "1g.5gb")},
		"a100-single":         {gpus(8, a100, slices.Repeat([]string{"1g.5gb"}, 7)...), []func(*plugin.Config){single}},
		"a100-single-sliced":  {gpus(2, a100, "1g.5gb", "1g.5gb"), []func(*plugin.Config){single, timeSlicing("", 4)}},
		"a100-single-unlike":  {unlike, []func(*plugin.Config){single}},
		"a100-single-partly":  {append(gpu(0, a100, "1g.5gb"), gpu(1, a100)...), []func(*plugin.Config){single}},
		"a100-single-empty":   {append(gpu(0, a100, "1g.5gb"), gpu(1, a100, []string{}...)...), []func(*plugin.Config){single}},
		"a100-single-excluded": {
			gpus(2, a100, "1g.5gb", "1g.5gb"),
			[]func(*plugin.Config){single, func(c *plugin.Config) { c.Exclude = []string{"0", "1"} }},
		},
		"a100-mixed":           {append(gpu(0, a100, "3g.20gb", "1g.5gb", "1g.5gb+me"), gpu(1, a100)...), []func(*plugin.Config){mixed}},
		"a100-mixed-instances": {gpu(0, a100, "1c.3g.20gb", "1c.3g.20gb"), []func(*plugin.Config){mixed}},
		"a100-mixed-mps":       {append(gpu(0, a100, "3g.20gb"), gpu(1, a100)...), []func(*plugin.Config){mixed, byMPS}},
		"h100-sliced":          {gpus(8, h100), []func(*plugin.Config){timeSlicing("", 4)}},
		"h100-sliced-renamed":  {gpus(8, h100), []func(*plugin.Config){timeSlicing("nvidia.com/gpu.shared", 4)}},
		"h100-sliced-partly":   {gpus(8, h100), []func(*plugin.Config){timeSlicing("", 4, "6", "7")}},
		"h100-mps":             {gpus(8, h100), []func(*plugin.Config){byMPS}},
		"h100-memory": {
			gpus(8, h100),
			[]func(*plugin.Config){func(c *plugin.Config) { c.Sharing.Memory.Resource = "nvidia.com/gpu-memory" }},
		},
		"h100-disabled": {gpus(8, h100), []func(*plugin.Config){mixed, timeSlicing("", 4), func(c *plugin.Config) { c.Enabled = false }}},
		"a100-dra":      {gpus(2, a100, "1g.5gb"), []func(*plugin.Config){mixed, func(c *plugin.Config) { c.API = plugin.APIDRA }}},
	} {
		t.Run(name, func(t *testing.T) {
			labels := labelsOf(c.devices, c.config...)
			golden.Check(t, "testdata/"+name+".txt", text(labels))
			wantValid(t, labels)
		})
	}
}

// Each label that a device may have is in a golden file, because a test of the chart checks that the policy admits these.
func TestLabelsOfVirtualGPU(t *testing.T) {
	devices := gpus(1, a100)
	devices[0].Device.Properties = &health.Properties{Clique: "00112233-4455-6677-8899-001122334455.1"}
	snap, found := snapshotOf(devices), hostOf(devices)
	found.devices["GPU-0"] = hostDevice{class: simulatedClass, vgpu: &vgpu{"580.95.02", "r580_95"}}
	labels := (&inventory{}).update(snap, serving()(snap), found).labels()
	golden.Check(t, "testdata/virtual.txt", text(labels))
	wantValid(t, labels)
}

// A long name of a model loses its end, and the suffix that tells its devices apart stays.
func TestLabelsOfLongModel(t *testing.T) {
	model := a100
	model.Model = "NVIDIA " + strings.Repeat("Long Name ", 10)
	for suffix, c := range map[string]struct {
		devices []health.DeviceState
		config  []func(*plugin.Config)
	}{
		"":                   {devices: gpus(2, model)},
		"-SHARED":            {gpus(2, model), []func(*plugin.Config){timeSlicing("", 4)}},
		"-MIG-1g.5gb":        {gpus(2, model, "1g.5gb"), []func(*plugin.Config){migStrategy(plugin.MIGSingle)}},
		"-MIG-1g.5gb-SHARED": {gpus(2, model, "1g.5gb"), []func(*plugin.Config){migStrategy(plugin.MIGSingle), timeSlicing("", 4)}},
	} {
		labels := labelsOf(c.devices, c.config...)
		wantValid(t, labels)
		product := labels["nvidia.com/gpu.product"]
		name, found := strings.CutSuffix(product, suffix)
		if !found || !strings.HasPrefix(sanitize(model.Model), name) || len(product) < maxValue-1 {
			t.Errorf("product %q, want one of at most %d characters that ends in %q", product, maxValue, suffix)
		}
	}
}

// A GPU counts as the worst of itself and its MIG devices.
func TestLabelsCountHealth(t *testing.T) {
	states := func(devices []health.DeviceState, states ...health.State) []health.DeviceState {
		for i, s := range states {
			devices[i].Verdict.State = s
		}
		return devices
	}
	const unknown, healthy, degraded, unhealthy = health.Unknown, health.Healthy, health.Degraded, health.Unhealthy
	for name, c := range map[string]struct {
		devices []health.DeviceState
		want    string // healthy, degraded, unhealthy
	}{
		"GPUs":                     {states(gpus(6, l4), unhealthy, healthy, degraded, healthy, unknown, healthy), "3 1 1"},
		"first MIG device":         {states(gpu(0, a100, "1g.5gb", "1g.5gb"), healthy, unhealthy, healthy), "0 0 1"},
		"last MIG device":          {states(gpu(0, a100, "1g.5gb", "1g.5gb"), healthy, degraded, unhealthy), "0 0 1"},
		"GPU with MIG devices":     {states(gpu(0, a100, "1g.5gb", "1g.5gb"), degraded, healthy, healthy), "0 1 0"},
		"MIG device of one of two": {states(gpus(2, a100, "1g.5gb"), healthy, healthy, healthy, degraded), "1 1 0"},
	} {
		labels := labelsOf(c.devices)
		got := fmt.Sprint(labels["gpu-node-agent/gpus-healthy"], " ", labels["gpu-node-agent/gpus-degraded"], " ",
			labels["gpu-node-agent/gpus-unhealthy"])
		if got != c.want {
			t.Errorf("%s: %q, want %q", name, got, c.want)
		}
	}
}

// wantValid fails unless the API server accepts all labels.
func wantValid(t *testing.T, labels map[string]string) {
	t.Helper()
	for key, value := range labels {
		if reasons := append(content.IsLabelKey(key), content.IsLabelValue(value)...); len(reasons) > 0 {
			t.Errorf("%s=%s: %s", key, value, strings.Join(reasons, "; "))
		}
	}
}
