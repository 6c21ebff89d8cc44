package dra

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"math"
	"math/rand/v2"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"go.uber.org/zap"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/util/validation"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/health/judge"
	"github.com/gpu-node-agent/gpu-node-agent/health/sim"
	"github.com/gpu-node-agent/gpu-node-agent/internal/golden"
	"github.com/gpu-node-agent/gpu-node-agent/internal/healthtest"
	"github.com/gpu-node-agent/gpu-node-agent/plugin"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/memlimits"
)

// simulated returns a snapshot of a simulated machine, all devices healthy.
func simulated(t testing.TB, profile string) *health.Snapshot {
	t.Helper()
	cfg := sim.DefaultConfig()
	cfg.Profile = profile
	source, err := sim.New(cfg, zap.NewNop())
	if err != nil {
		t.Fatal(err)
	}
	session, err := source.Open(context.Background())
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = session.Close() }()
	r, err := session.Poll(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	s := &health.Snapshot{At: time.Now(), Source: health.Source{Versions: r.Versions}}
	for _, d := range r.Devices {
		s.Devices = append(s.Devices, health.DeviceState{Device: d, Verdict: health.Verdict{State: health.Healthy}})
	}
	return s
}

func configured(changes ...func(*plugin.Config)) *plugin.Config {
	c := plugin.DefaultConfig()
	c.API = plugin.APIDRA
	for _, change := range changes {
		change(&c)
	}
	return &c
}

func sharedMemory(unit string, devices ...string) func(*plugin.Config) {
	return func(c *plugin.Config) {
		c.Sharing.Memory.Resource, c.Sharing.Memory.Unit, c.Sharing.Memory.Devices = "nvidia.com/gpu-memory", unit, devices
		c.Sharing.Memory.Enforcement = plugin.EnforceNone
	}
}

// devicesOf returns the devices of a pool by name.
func devicesOf(t testing.TB, p Pool) map[string]resourceapi.Device {
	t.Helper()
	all := map[string]resourceapi.Device{}
	for _, s := range p.Slices {
		for _, d := range s.Devices {
			if _, exists := all[d.Name]; exists {
				t.Errorf("two devices have the name %s", d.Name)
			}
			all[d.Name] = d
		}
	}
	if len(all) != len(p.ByName) {
		t.Errorf("%d devices, %d in ByName", len(all), len(p.ByName))
	}
	return all
}

// Each profile has a golden file with the names by slice, and the first device of each kind.
func TestPoolOfProfiles(t *testing.T) {
	for _, profile := range []string{"h100-8", "a100-8", "h100-8-mig", "h100-16-mig", "v100-16", "mixed-4", "l4-1", "none"} {
		snap := simulated(t, profile)
		pool := BuildPool(PoolInput{Config: configured(), Snapshot: snap})
		view := struct {
			Slices  [][]string
			Devices []resourceapi.Device
		}{}
		seen := map[string]bool{}
		for _, s := range pool.Slices {
			names := make([]string, len(s.Devices))
			for i, d := range s.Devices {
				names[i] = d.Name
				kind := fmt.Sprintln(*d.Attributes["productName"].StringValue, d.Attributes["profile"].StringValue != nil)
				if p := d.Attributes["profile"].StringValue; p != nil {
					kind += *p
				}
				if !seen[kind] {
					seen[kind] = true
					view.Devices = append(view.Devices, d)
				}
			}
			view.Slices = append(view.Slices, []string{strings.Join(names, " ")})
		}
		golden.CheckJSON(t, "testdata/pool-"+profile+".json", view)
		if len(pool.Warnings) > 0 {
			t.Errorf("%s: %v", profile, pool.Warnings)
		}
		checkPool(t, pool, snap)
	}
}

// A first taint and a device that is not published do not move other devices to another slice.
func TestSlicesAreStable(t *testing.T) {
	snap := simulated(t, "h100-16-mig")
	build := func(in PoolInput) map[string]int {
		in.Config, in.Snapshot = configured(), snap
		pool := BuildPool(in)
		checkPool(t, pool, snap)
		at := map[string]int{}
		for i, s := range pool.Slices {
			for _, d := range s.Devices {
				at[d.Name] = i
			}
		}
		return at
	}
	before := build(PoolInput{})
	if len(before) != 128 || slices.Max(slices.Collect(maps.Values(before))) != 1 {
		t.Errorf("%d devices in %d slices", len(before), 1+slices.Max(slices.Collect(maps.Values(before))))
	}
	withoutTaints := build(PoolInput{NoTaints: true})
	if len(withoutTaints) != 112 {
		t.Errorf("without taints, %d devices", len(withoutTaints))
	}
	for i := range snap.Devices { // GPU 0 and its MIG devices
		if snap.Devices[i].Device.Index == 0 {
			snap.Devices[i].Verdict = verdict(finding("xid-79", health.Unhealthy))
		}
	}
	if after := build(PoolInput{}); !maps.Equal(before, after) {
		t.Error("a taint moves devices")
	}
	unpublished := build(PoolInput{NoTaints: true})
	if len(unpublished) != 105 {
		t.Errorf("without taints, %d devices when a GPU is unhealthy", len(unpublished))
	}
	for name, i := range unpublished {
		if before[name] != i {
			t.Errorf("%s moves from slice %d to %d", name, before[name], i)
		}
	}
}

func finding(cause string, state health.State) health.Finding {
	return health.Finding{Cause: cause, State: state, Since: time.Date(2026, 1, 2, 3, 4, 5, 678, time.FixedZone("", 3600))}
}

func verdict(findings ...health.Finding) health.Verdict {
	v := health.Verdict{State: health.Healthy, Findings: findings}
	for _, f := range findings {
		v.State = max(v.State, f.State)
	}
	return v
}

func taintsOf(d resourceapi.Device) (all []string) {
	for _, t := range d.Taints {
		all = append(all, strings.TrimPrefix(taintName(t), Domain+"/")+":"+string(t.Effect))
	}
	return all
}

func TestTaints(t *testing.T) {
	const since = "2026-01-02T02:04:05Z"
	many := make([]health.Finding, 0, 40)
	for i := range 20 {
		many = append(many, finding(fmt.Sprintf("xid-%d", i), health.Degraded), finding(fmt.Sprintf("dcgm-%d", i), health.Unhealthy))
	}
	for name, test := range map[string]struct {
		findings []health.Finding
		evictOn  []string
		want     []string
	}{
		"healthy":   {nil, nil, nil},
		"unhealthy": {[]health.Finding{finding("xid-48", health.Unhealthy)}, nil, []string{"xid=48:NoSchedule"}},
		"degraded":  {[]health.Finding{finding("xid-13", health.Degraded)}, nil, []string{"xid=13:None"}},
		"several": {[]health.Finding{
			finding("xid-79", health.Unhealthy), finding("lost", health.Unhealthy),
			finding("xid-13", health.Degraded),
		}, nil, []string{"lost:NoSchedule", "xid=13:None", "xid=79:NoSchedule"}},
		"evicts": {
			[]health.Finding{finding("xid-79", health.Unhealthy), finding("lost", health.Unhealthy)},
			[]string{"xid=79"},
			[]string{"lost:NoSchedule", "xid=79:NoExecute"},
		},
		"degraded evicts": {[]health.Finding{finding("xid-79", health.Degraded)}, []string{"xid=79"}, []string{"xid=79:None"}},
		"by code": {
			[]health.Finding{finding("xid-119", health.Unhealthy), finding("xid-79", health.Unhealthy)},
			[]string{"xid=119"},
			[]string{"xid=79:NoSchedule", "xid=119:NoExecute"},
		},
		"decision": {[]health.Finding{finding("cordoned", health.Unhealthy)}, nil, []string{"cordoned:NoSchedule"}},
		"twice":    {[]health.Finding{finding("lost", health.Degraded), finding("lost", health.Unhealthy)}, nil, []string{"lost:NoSchedule"}},
	} {
		snap := simulated(t, "h100-8")
		snap.Devices[3].Verdict = verdict(test.findings...)
		devices := devicesOf(t, BuildPool(PoolInput{Config: configured(func(c *plugin.Config) { c.DRA.EvictOn = test.evictOn }), Snapshot: snap}))
		if got := taintsOf(devices["gpu-3"]); !slices.Equal(got, test.want) {
			t.Errorf("%s: %q, want %q", name, got, test.want)
		}
		for _, taint := range devices["gpu-3"].Taints {
			if text, _ := json.Marshal(taint.TimeAdded); string(text) != `"`+since+`"` {
				t.Errorf("%s: %s: timeAdded %s, want %s", name, taint.Key, text, since)
			}
		}
		if got := taintsOf(devices["gpu-2"]); got != nil {
			t.Errorf("%s: another GPU has %q", name, got)
		}
	}

	snap := simulated(t, "h100-8")
	snap.Devices[3].Verdict = verdict(many...)
	got := devicesOf(t, BuildPool(PoolInput{Config: configured(), Snapshot: snap}))["gpu-3"].Taints
	if len(got) != 16 || slices.ContainsFunc(got, func(t resourceapi.DeviceTaint) bool { return t.Effect != "NoSchedule" }) {
		t.Errorf("of 40 findings: %+v", got)
	}
}

// An application's XID does not change the taint of a broken GPU, and neither does a restart that restores the finding.
func TestTaintOfXIDs(t *testing.T) {
	snap := simulated(t, "h100-8")
	devices := make([]health.Device, len(snap.Devices))
	for i := range snap.Devices {
		devices[i] = snap.Devices[i].Device
	}
	id := devices[3].ID
	cfg := judge.DefaultConfig()
	var first string
	for i, xids := range [][]int{{48}, {13}, nil, {79}} {
		samples := map[health.DeviceID]health.Sample{id: healthtest.Present(healthtest.XIDs(xids...))}
		snap.Devices = healthtest.Judge(cfg, snap.Devices, 10*(i+1), func(health.DeviceID) bool { return false }, samples, devices...)
		all := devicesOf(t, BuildPool(PoolInput{Config: configured(), Snapshot: snap}))
		for name, d := range all {
			if got, want := taintsOf(d), []string{"xid=48:NoSchedule", "xid=79:NoSchedule"}[:1+i/3]; name == "gpu-3" && !slices.Equal(got, want) ||
				name != "gpu-3" && got != nil {
				t.Errorf("%v: %s has %q", xids, name, got)
			}
		}
		text, err := json.Marshal(all["gpu-3"].Taints[:1])
		if first == "" {
			first = string(text)
		}
		if err != nil || string(text) != first || !strings.Contains(first, healthtest.At(10).UTC().Format(time.RFC3339)) {
			t.Errorf("%v: %s, first %s, %v", xids, text, first, err)
		}
	}
}

// A GPU in MIG mode cannot be allocated, and its MIG devices can.
func TestTaintsOfMIG(t *testing.T) {
	snap := simulated(t, "h100-8-mig")
	devices := devicesOf(t, BuildPool(PoolInput{Config: configured(), Snapshot: snap}))
	gpu, mig := devices["gpu-7"], devices["gpu-7-mig-3g40gb-9-4"]
	if got := taintsOf(gpu); !slices.Equal(got, []string{"mig-mode:NoSchedule"}) || *gpu.Attributes["type"].StringValue != "mig-parent" {
		t.Errorf("GPU in MIG mode: %q", got)
	}
	if text, _ := json.Marshal(gpu.Taints[0].TimeAdded); string(text) != `"2000-01-01T00:00:00Z"` {
		t.Errorf("timeAdded %s", text)
	}
	if mig.Name == "" || mig.Taints != nil {
		t.Errorf("MIG device: %+v", mig)
	}
	for i := range snap.Devices {
		if snap.Devices[i].Device.ID == health.DeviceID(*mig.Attributes["uuid"].StringValue) {
			f := finding("xid-79", health.Unhealthy)
			f.From = snap.Devices[i].Device.Parent
			snap.Devices[i].Verdict = verdict(f)
		}
	}
	devices = devicesOf(t, BuildPool(PoolInput{Config: configured(), Snapshot: snap}))
	if got := taintsOf(devices["gpu-7-mig-3g40gb-9-4"]); !slices.Equal(got, []string{"xid=79:NoSchedule"}) {
		t.Errorf("MIG device with a finding of its parent: %q", got)
	}
}

// MIG devices get the properties of their GPU that NVML has and the snapshot lacks, too.
func TestPropertiesBesideSnapshot(t *testing.T) {
	snap := simulated(t, "h100-8-mig")
	parent, found := snap.Devices[0].Device.ID, false
	for i := range snap.Devices {
		snap.Devices[i].Device.Properties, snap.Devices[i].Device.Texts = nil, nil
	}
	in := PoolInput{
		Config: configured(), Snapshot: snap,
		Properties: map[health.DeviceID]*health.Properties{parent: {Brand: "Nvidia", AddressingMode: "ATS", Serial: "165"}},
	}
	for name, d := range devicesOf(t, BuildPool(in)) {
		for attribute, want := range map[resourceapi.QualifiedName]string{"brand": "Nvidia", "addressingMode": "ATS", AttributeSerial: "165"} {
			got, has := d.Attributes[attribute]
			of := name == "gpu-0" || strings.HasPrefix(name, "gpu-0-")
			if found = found || of && name != "gpu-0"; has != of || has && *got.StringValue != want {
				t.Errorf("%s: %s: %v", name, attribute, got)
			}
		}
	}
	if !found {
		t.Error("no MIG device")
	}
}

// What no claim can get has a warning.
func TestWarningsOfMIG(t *testing.T) {
	gpu := health.Device{ID: "GPU-0", Minor: 0, MIGMode: true}
	part := health.Device{ID: "MIG-0", Parent: "GPU-0", Kind: health.KindMIG, Profile: "1c.3g.40gb", MIGIndex: 0}
	for name, test := range map[string]struct {
		devices []health.Device
		warning string
	}{
		"no MIG devices":                {[]health.Device{gpu}, "no MIG devices"},
		"a part of a GPU instance only": {[]health.Device{gpu, part}, "1c.3g.40gb"},
	} {
		snap := &health.Snapshot{At: time.Now()}
		for _, d := range test.devices {
			snap.Devices = append(snap.Devices, health.DeviceState{Device: d})
		}
		pool := BuildPool(PoolInput{Config: configured(), Snapshot: snap})
		if got := slices.Collect(maps.Keys(pool.ByName)); !slices.Equal(got, []string{"gpu-0"}) {
			t.Errorf("%s: %v", name, got)
		}
		if len(pool.Warnings) != 1 || !strings.Contains(pool.Warnings[0], test.warning) {
			t.Errorf("%s: warnings %q, want one that names %q", name, pool.Warnings, test.warning)
		}
	}
}

func TestFindingTaint(t *testing.T) {
	for _, cause := range []string{"lost", "dcgm-nvlink-down", "too-many-retired-pages", "xid-079", "xid-x"} {
		if got := findingTaint(cause); got.Key != Domain+"/"+cause || got.Value != "" {
			t.Errorf("%s: %+v", cause, got)
		}
	}
	if got := findingTaint("xid-79"); got.Key != TaintXID || got.Value != "79" {
		t.Errorf("%+v", got)
	}
	keys := map[string]string{}
	for _, cause := range []string{
		"", "-", "a b", "a/b", "ä", strings.Repeat("x", 64), strings.Repeat("x", 65), strings.Repeat("-", 80),
		"end-", "\x00",
	} {
		key := findingTaint(cause).Key
		if errs := validation.IsQualifiedName(key); len(errs) > 0 || keys[key] != "" || !strings.HasPrefix(key, Domain+"/") {
			t.Errorf("%q: %s: %v; the key of %q", cause, key, errs, keys[key])
		}
		keys[key] = cause + "."
	}
}

// The time of a clock that is not set does not reach the API server.
func TestTaintTime(t *testing.T) {
	for _, year := range []int{-5, 1, 1969, 1970, 9999, 20000} {
		if got := taintTime(time.Date(year, 6, 1, 0, 0, 0, 0, time.UTC)); got != taintEpoch() {
			t.Errorf("%d: %s", year, got)
		}
	}
}

func TestNames(t *testing.T) {
	gpu := func(minor int) health.Device {
		return health.Device{ID: "GPU-Ab", Kind: health.KindGPU, Minor: minor}
	}
	mig := func(minor int) health.Device {
		return health.Device{ID: "MIG-Ab", Parent: "GPU-Ab", Kind: health.KindMIG, Minor: minor, GI: 7, CI: 0}
	}
	properties := map[health.DeviceID]*health.Properties{"MIG-Ab": {MIG: &health.MIGProperties{ProfileID: 20, PlacementStart: 3}}}
	for name, test := range map[string]struct {
		device     health.Device
		profile    string
		properties map[health.DeviceID]*health.Properties
		names      map[health.DeviceID]string
		want       string
	}{
		"GPU":                             {gpu(3), "", nil, nil, "gpu-3"},
		"GPU, minor unknown":              {gpu(-1), "", nil, nil, "gpu-ab"},
		"remembered":                      {gpu(3), "", nil, map[health.DeviceID]string{"GPU-Ab": "gpu-5", "GPU-0": "gpu-3"}, "gpu-5"},
		"remembered, invalid":             {gpu(3), "", nil, map[health.DeviceID]string{"GPU-Ab": "Gpu.5"}, "gpu-3"},
		"name of another that is missing": {gpu(3), "", nil, map[health.DeviceID]string{"GPU-0": "gpu-3"}, "gpu-3"},
		"MIG device":                      {mig(0), "1g.10gb", properties, nil, "gpu-0-mig-1g10gb-20-3"},
		"MIG device with media engines":   {mig(0), "1g.10gb+me", properties, nil, "gpu-0-mig-1g10gb-me-20-3"},
		"MIG device, properties unknown":  {mig(0), "1g.10gb", nil, nil, "gpu-0-mig-1g10gb-gi7-ci0"},
		"properties found later": {
			mig(0), "1g.10gb", properties,
			map[health.DeviceID]string{"MIG-Ab": "gpu-0-mig-1g10gb-gi7-ci0"},
			"gpu-0-mig-1g10gb-gi7-ci0",
		},
		"MIG device, minor unknown": {mig(-1), "1g.10gb", properties, nil, "mig-ab"},
	} {
		test.device.Profile = test.profile
		snap := &health.Snapshot{At: time.Now(), Devices: []health.DeviceState{{Device: test.device}}}
		pool := BuildPool(PoolInput{Config: configured(), Snapshot: snap, Properties: test.properties, Names: test.names})
		if got := slices.Collect(maps.Keys(pool.ByName)); !slices.Equal(got, []string{test.want}) {
			t.Errorf("%s: %v, want %s", name, got, test.want)
		}
	}
}

// Names stay while minor numbers change, as when a GPU is missing after a reboot.
func TestNamesStay(t *testing.T) {
	snap := simulated(t, "h100-8")
	input := PoolInput{Config: configured(), Snapshot: snap}
	pool := BuildPool(input)
	input.Names = pool.RememberNames(nil)
	first, before := snap.Devices[0].Device.ID, pool.ByName["gpu-1"]
	if len(input.Names) != 8 || input.Names[before] != "gpu-1" {
		t.Fatal(input.Names)
	}
	if again := pool.RememberNames(input.Names); reflect.ValueOf(again).Pointer() != reflect.ValueOf(input.Names).Pointer() {
		t.Error("a new map without a change")
	}
	snap.Devices = snap.Devices[1:]
	for i := range snap.Devices {
		snap.Devices[i].Device.Minor--
	}
	snap.Devices = append(snap.Devices, health.DeviceState{Device: health.Device{ID: "GPU-new", Minor: 7, Index: 7}})
	pool = BuildPool(input)
	if pool.ByName["gpu-1"] != before || pool.ByName["gpu-new"] != "GPU-new" || pool.ByName["gpu-0"] != "" {
		t.Error(pool.ByName)
	}
	names := pool.RememberNames(input.Names)
	if names[first] != "gpu-0" || names["GPU-new"] != "gpu-new" || len(names) != 9 {
		t.Error(names)
	}
	snap.Devices[7].Device = health.Device{ID: "GPU-newer", Minor: 0, Index: 7}
	pool = BuildPool(input) // gpu-0 is free
	names = pool.RememberNames(names)
	if _, left := names[first]; left || names["GPU-newer"] != "gpu-0" || len(names) != 9 {
		t.Error(names)
	}
}

func TestSemanticVersion(t *testing.T) {
	for in, want := range map[string]string{
		"580.95.05": "580.95.5", "535.54.03": "535.54.3", "13.0": "13.0.0", "9": "9.0.0", "580.126.20": "580.126.20", "000.00.0": "0.0.0",
		"": "", "1.2.3.4": "", "1..2": "", "580.95.05-dev": "", "v1.2": "", "1.2 ": "", "-1.2": "", "99999999999.1": "",
	} {
		got, ok := semanticVersion(in)
		if got != want || ok != (want != "") {
			t.Errorf("%q: %q, %v; want %q", in, got, ok, want)
		}
	}
}

func TestPCIBusID(t *testing.T) {
	for in, want := range map[string]string{
		"00000000:1B:00.0": "0000:1b:00.0", "0000FFFF:3b:00.0": "ffff:3b:00.0", "1b:00.0": "0000:1b:00.0", "00010000:1B:00.0": "", "": "",
		"x": "",
	} {
		if got, ok := pciBusID(in); ok != (want != "") || ok && got != want {
			t.Errorf("%q: %q, %v; want %q", in, got, ok, want)
		}
	}
}

func TestArchitecture(t *testing.T) {
	for c, want := range map[[2]int]string{
		{}: "", {2, 1}: "", {3, 5}: "Kepler", {5, 2}: "Maxwell", {6, 1}: "Pascal", {7, 0}: "Volta", {7, 5}: "Turing", {8, 0}: "Ampere",
		{8, 6}: "Ampere", {8, 9}: "Ada Lovelace", {9, 0}: "Hopper",
		{10, 0}: "Blackwell", {10, 3}: "Blackwell", {11, 0}: "Blackwell", {12, 0}: "Blackwell", {13, 0}: "", {99, 9}: "",
	} {
		if got := architecture(health.ComputeCapability{Major: c[0], Minor: c[1]}); got != want {
			t.Errorf("%v: %q, want %q", c, got, want)
		}
	}
}

// Islands of GPUs; a link may be listed on one side only.
func TestIslands(t *testing.T) {
	links := func(nvlinks int, peers ...string) (all []health.Link) {
		for _, p := range peers {
			all = append(all, health.Link{Peer: health.DeviceID("GPU-" + p), NVLinks: nvlinks})
		}
		return all
	}
	snap := &health.Snapshot{}
	for i, l := range [][]health.Link{
		links(4, "2"), links(4, "3", "absent"), nil, nil, links(0, "5", "0"), links(0, "4"),
		links(2, "absent", "6"), links(1, "4"),
	} {
		d := health.Device{ID: health.DeviceID(fmt.Sprintf("GPU-%d", i)), Index: i, Links: l}
		snap.Devices = slices.Insert(snap.Devices, 0, health.DeviceState{Device: d})
	}
	want := map[health.DeviceID]health.DeviceID{
		"GPU-0": "GPU-0", "GPU-2": "GPU-0", "GPU-1": "GPU-1", "GPU-3": "GPU-1", "GPU-4": "GPU-4",
		"GPU-7": "GPU-4",
	}
	if got := islandsOf(snap); !maps.Equal(got, want) {
		t.Errorf("%v, want %v", got, want)
	}
}

// What is unknown, or what the API server would refuse, is absent.
func TestAttributesLeftOut(t *testing.T) {
	d := health.Device{
		ID: "GPU-0", Minor: 0, Model: strings.Repeat("H", 65), PCI: "00010000:1B:00.0", NUMA: []int{0, 1},
		Texts: map[health.Field]string{health.FieldSerial: "\xff"},
	}
	snap := &health.Snapshot{At: time.Now(), Devices: []health.DeviceState{{Device: d}}}
	snap.Source.Versions = health.Versions{Driver: "580.x", CUDA: "13.0"}
	pool := BuildPool(PoolInput{Config: configured(), Snapshot: snap, PCIeRoots: map[string]string{d.PCI: "pci0000:00"}})
	device := devicesOf(t, pool)["gpu-0"]
	got := slices.Sorted(maps.Keys(device.Attributes))
	if want := []resourceapi.QualifiedName{"cudaDriverVersion", "type", "uuid"}; !slices.Equal(got, want) {
		t.Errorf("%v, want %v", got, want)
	}
	if len(device.Capacity) != 0 {
		t.Errorf("%v", device.Capacity)
	}
	for _, name := range []string{"productName", "driverVersion", "serial"} {
		if !slices.ContainsFunc(pool.Warnings, func(w string) bool { return strings.Contains(w, name) && strings.Contains(w, "GPU-0") }) {
			t.Errorf("no warning names %s: %q", name, pool.Warnings)
		}
	}
}

func TestSharedMemory(t *testing.T) {
	text := func(d resourceapi.Device) string {
		c := d.Capacity[capacityMemory]
		s := c.Value.String()
		if p := c.RequestPolicy; p != nil {
			s += " default " + p.Default.String()
			if r := p.ValidRange; r != nil {
				s += " min " + r.Min.String() + " step " + r.Step.String()
			}
			for _, v := range p.ValidValues {
				s += " or " + v.String()
			}
		}
		if d.AllowMultipleAllocations != nil && *d.AllowMultipleAllocations {
			s += " shared"
		}
		return s + " " + strings.Join(taintsOf(d), " ")
	}
	const whole = "81559Mi"
	for name, test := range map[string]struct {
		memory  uint64
		change  func(*plugin.Config)
		in      PoolInput
		want    string // of GPU 0; "-": not published
		warning string
	}{
		"not shared":         {0, nil, PoolInput{}, whole, ""},
		"units of 1 GiB":     {0, sharedMemory("1Gi"), PoolInput{}, "78Gi default 78Gi min 1Gi step 1Gi shared", ""},
		"units of 30 GiB":    {0, sharedMemory("30Gi"), PoolInput{}, "60Gi default 60Gi min 30Gi step 30Gi shared", ""},
		"one unit":           {0, sharedMemory("50Gi"), PoolInput{}, "50Gi default 50Gi or 50Gi shared", ""},
		"no unit":            {0, sharedMemory("90Gi"), PoolInput{}, "-", "unit"},
		"unknown memory":     {1, sharedMemory("1Gi"), PoolInput{}, "-", ""},
		"another GPU shared": {0, sharedMemory("1Gi", "3"), PoolInput{}, whole, ""},
		"no shares":          {0, sharedMemory("1Gi"), PoolInput{NoShares: true}, whole, "shares"},
		"not examined": {
			0, both(sharedMemory("1Gi"), enforced(plugin.EnforceAuto, false)),
			PoolInput{Examined: true},
			"78Gi default 78Gi min 1Gi step 1Gi shared memory-limits:NoSchedule", "",
		},
		"not examined, no taints": {
			0, both(sharedMemory("1Gi"), enforced(plugin.EnforceAuto, false)), PoolInput{Examined: true, NoTaints: true}, "-", "memory-limits",
		},
		"not enforced": {
			0, both(sharedMemory("1Gi"), enforced(plugin.EnforceAuto, true)),
			PoolInput{Examined: true, Capabilities: &memlimits.Capabilities{Driver: map[health.DeviceID]string{"GPU-0": "too old"}}},
			"78Gi default 78Gi min 1Gi step 1Gi shared memory-limits:NoSchedule", "too old",
		},
		"enforced": {
			0, both(sharedMemory("1Gi"), enforced(plugin.EnforceAuto, true)),
			PoolInput{Examined: true, Capabilities: &memlimits.Capabilities{Driver: map[health.DeviceID]string{"GPU-0": ""}}},
			"78Gi default 78Gi min 1Gi step 1Gi shared", "",
		},
	} {
		d := health.Device{ID: "GPU-0", Minor: 0, Memory: 81559 << 20, Reserved: 551 << 20}
		if test.memory > 0 {
			d.Memory = 0
		}
		test.in.Snapshot = &health.Snapshot{At: time.Now(), Devices: []health.DeviceState{{Device: d}}}
		test.in.Config = configured()
		if test.change != nil {
			test.change(test.in.Config)
		}
		pool := BuildPool(test.in)
		got := "-"
		if device, ok := devicesOf(t, pool)["gpu-0"]; ok {
			got = strings.TrimSpace(text(device))
		}
		if got != test.want {
			t.Errorf("%s: %q, want %q", name, got, test.want)
		}
		if all := strings.Join(pool.Warnings, "\n"); !strings.Contains(all, test.warning) || test.warning == "" && test.want != "-" && all != "" {
			t.Errorf("%s: warnings %q, want one that names %q", name, all, test.warning)
		}
		checkPool(t, pool, test.in.Snapshot)
	}
}

func enforced(by string, require bool) func(*plugin.Config) {
	return func(c *plugin.Config) {
		c.Sharing.Memory.Enforcement, c.Sharing.Memory.RequireEnforcement = by, require
	}
}

func both(a, b func(*plugin.Config)) func(*plugin.Config) {
	return func(c *plugin.Config) { a(c); b(c) }
}

func TestPoolIncludeExclude(t *testing.T) {
	for name, test := range map[string]struct {
		profile string
		change  func(*plugin.Config)
		want    int
		warning string
	}{
		"exclude an index":   {"h100-8", func(c *plugin.Config) { c.Exclude = []string{"3"} }, 7, ""},
		"exclude a MIG GPU":  {"h100-8-mig", func(c *plugin.Config) { c.Exclude = []string{"0"} }, 8 + 50 - 8, ""},
		"include by profile": {"h100-8-mig", func(c *plugin.Config) { c.Include = []string{"mig-2g.*"} }, 2, ""},
		"none":               {"h100-8", func(c *plugin.Config) { c.Include = []string{"*A100*"} }, 0, "plugin.include"},
	} {
		pool := BuildPool(PoolInput{Config: configured(test.change), Snapshot: simulated(t, test.profile)})
		if n := len(devicesOf(t, pool)); n != test.want || !strings.Contains(strings.Join(pool.Warnings, ""), test.warning) {
			t.Errorf("%s: %d devices, want %d; warnings %q", name, n, test.want, pool.Warnings)
		}
	}
	if pool := BuildPool(PoolInput{Config: configured(), Snapshot: &health.Snapshot{}}); len(pool.Slices) != 0 {
		t.Error("published before the first poll")
	}
}

// checkPool checks the rules of the API server (pkg/apis/resource/validation of Kubernetes 1.36 and 1.37) and the pool's.
func checkPool(t testing.TB, p Pool, snap *health.Snapshot) {
	t.Helper()
	for _, problem := range problemsOf(p, snap) {
		t.Error(problem)
	}
}

var semver = regexp.MustCompile(`^(0|[1-9]\d*)\.(0|[1-9]\d*)\.(0|[1-9]\d*)$`)

func problemsOf(p Pool, snap *health.Snapshot) (problems []string) {
	bad := func(format string, args ...any) { problems = append(problems, fmt.Sprintf(format, args...)) }
	names, slice := map[string]bool{}, map[health.DeviceID]int{}
	last := -1
	index, parts := map[health.DeviceID]*health.Device{}, map[health.DeviceID]int{}
	for i := range snap.Devices {
		d := &snap.Devices[i].Device
		index[d.ID] = d
		parts[d.GPU()]++
	}
	for i, s := range p.Slices {
		if len(s.Devices) == 0 || len(s.Devices) > 64 {
			bad("slice %d has %d devices", i, len(s.Devices))
		}
		for _, d := range s.Devices {
			device := index[p.ByName[d.Name]]
			switch {
			case device == nil:
				bad("%s is not of the snapshot", d.Name)
				continue
			case names[d.Name]:
				bad("%s twice", d.Name)
			case device.Index < last:
				bad("%s is not by index", d.Name)
			}
			if before, seen := slice[device.GPU()]; seen && before != i && parts[device.GPU()] <= 64 {
				bad("%s is not in the slice of its GPU", d.Name)
			}
			names[d.Name], last, slice[device.GPU()] = true, device.Index, i
			for _, text := range problemsOfDevice(d) {
				bad("%s: %s", d.Name, text)
			}
		}
	}
	return problems
}

func problemsOfDevice(d resourceapi.Device) (problems []string) {
	bad := func(format string, args ...any) { problems = append(problems, fmt.Sprintf(format, args...)) }
	for _, text := range validation.IsDNS1123Label(d.Name) {
		bad("name: %s", text)
	}
	if n := len(d.Attributes) + len(d.Capacity); n > 32 {
		bad("%d attributes and capacities", n)
	}
	for name, a := range d.Attributes {
		if !isQualifiedName(name) || !isAttribute(a) {
			bad("%s: %+v", name, a)
		}
	}
	shared := d.AllowMultipleAllocations != nil && *d.AllowMultipleAllocations
	for name, c := range d.Capacity {
		if !isQualifiedName(name) || !isCapacity(c) {
			bad("%s: %+v, %+v", name, c, c.RequestPolicy)
		}
		if (c.RequestPolicy != nil) != (shared && name == capacityMemory) {
			bad("%s: request policy %v, shared %v", name, c.RequestPolicy, shared)
		}
	}
	names := map[string]bool{}
	if len(d.Taints) > 16 {
		bad("%d taints", len(d.Taints))
	}
	for _, taint := range d.Taints {
		if name := taintName(taint); names[name] || !isTaint(taint) {
			bad("taint %+v", taint)
		} else {
			names[name] = true
		}
	}
	return problems
}

// isQualifiedName reports whether the API server accepts the name of an attribute or a capacity.
func isQualifiedName(name resourceapi.QualifiedName) bool {
	domain, id, qualified := strings.Cut(string(name), "/")
	if !qualified {
		domain, id = "x", domain
	}
	return len(validation.IsDNS1123Subdomain(domain)) == 0 && len(domain) <= 63 && len(validation.IsCIdentifier(id)) == 0 && len(id) <= 32
}

// isAttribute reports whether an attribute has one value that the API server accepts.
func isAttribute(a resourceapi.DeviceAttribute) bool {
	values := 0
	if text := a.StringValue; text != nil {
		values++
		if len(*text) > 64 || *text == "" || !utf8.ValidString(*text) {
			return false
		}
	}
	if version := a.VersionValue; version != nil {
		values++
		if len(*version) > 64 || !semver.MatchString(*version) {
			return false
		}
	}
	if a.IntValue != nil {
		values++
		if *a.IntValue < 0 {
			return false
		}
	}
	if a.BoolValue != nil {
		values++
	}
	return values == 1 && a.IntValues == nil && a.StringValues == nil && a.BoolValues == nil && a.VersionValues == nil
}

// isCapacity reports whether a capacity is not negative, and whether its request policy, if any, has the whole as its default and one range
// or list of values with it.
func isCapacity(c resourceapi.DeviceCapacity) bool {
	policy := c.RequestPolicy
	if c.Value.Sign() < 0 || policy == nil {
		return c.Value.Sign() >= 0
	}
	if policy.Default == nil || policy.Default.Cmp(c.Value) != 0 || (policy.ValidRange == nil) == (len(policy.ValidValues) == 0) {
		return false
	}
	if r := policy.ValidRange; r != nil {
		next := r.Min.DeepCopy()
		next.Add(*r.Step)
		return r.Step.Sign() > 0 && next.Cmp(c.Value) <= 0 && (policy.Default.Value()-r.Min.Value())%r.Step.Value() == 0
	}
	return !slices.ContainsFunc(policy.ValidValues, func(v resource.Quantity) bool { return v.Cmp(*policy.Default) != 0 })
}

// isTaint reports whether the API server accepts a taint as it is: times are whole seconds there.
func isTaint(taint resourceapi.DeviceTaint) bool {
	text, err := json.Marshal(taint.TimeAdded)
	return len(validation.IsQualifiedName(taint.Key))+len(validation.IsValidLabelValue(taint.Value)) == 0 &&
		!taint.TimeAdded.IsZero() && taint.TimeAdded.Nanosecond() == 0 && err == nil && len(text) == len(`"2000-01-01T00:00:00Z"`) &&
		slices.Contains([]resourceapi.DeviceTaintEffect{"None", "NoSchedule", "NoExecute"}, taint.Effect)
}

// randomInput returns an input with values that no driver should have.
func randomInput(r *rand.Rand) PoolInput {
	texts := []string{
		"", " ", "a", "ä", "NVIDIA H100 80GB HBM3", strings.Repeat("x", 64), strings.Repeat("x", 65), strings.Repeat("ä", 33),
		"\xff\xfe", "a\x00b", "-1", "1.2.3", "535.54.03", "1.2.3.4", "99999999999999999999",
	}
	text := func() string { return texts[r.IntN(len(texts))] }
	number := func() int { return []int{-1, 0, 1, 2, 7, 8, 60, 1000, math.MaxInt, math.MinInt}[r.IntN(10)] }
	size := func() uint64 {
		return []uint64{0, 1, 1 << 20, 1 << 30, 80 << 30, math.MaxInt64, math.MaxUint64}[r.IntN(7)]
	}
	snap := &health.Snapshot{At: time.Now(), Source: health.Source{Versions: health.Versions{Driver: text(), CUDA: text()}}}
	in := PoolInput{
		Snapshot: snap, Properties: map[health.DeviceID]*health.Properties{}, Names: map[health.DeviceID]string{},
		PCIeRoots: map[string]string{"00000000:1B:00.0": text()},
		NoTaints:  r.IntN(4) == 0, NoShares: r.IntN(4) == 0, Examined: r.IntN(2) == 0,
	}
	in.Config = configured(func(c *plugin.Config) {
		if r.IntN(2) == 0 {
			sharedMemory([]string{"1Mi", "1Gi", "30Gi", "50Gi"}[r.IntN(4)])(c)
			c.Sharing.Memory.Enforcement = []string{plugin.EnforceAuto, plugin.EnforceMPS, plugin.EnforceNone}[r.IntN(3)]
		}
		c.DRA.EvictOn = []string{"xid=79", text()}
	})
	properties := func() *health.Properties {
		p := &health.Properties{Brand: text(), AddressingMode: text(), Serial: text()}
		if r.IntN(2) == 0 {
			p.MIG = &health.MIGProperties{
				ProfileID: number(), PlacementStart: number(), MemorySlices: number(), Multiprocessors: number(), CopyEngines: number(),
				Decoders: number(), Encoders: number(), JPEGEngines: number(), OFAEngines: number(),
			}
		}
		return p
	}
	add := func(d health.Device) {
		var findings []health.Finding
		for range r.IntN(3) * r.IntN(12) {
			f := finding([]string{"xid-79", "lost", text(), fmt.Sprintf("dcgm-%d", r.IntN(30))}[r.IntN(4)],
				[]health.State{health.Degraded, health.Unhealthy}[r.IntN(2)])
			f.Since = time.Unix(int64(number()), 0)
			findings = append(findings, f)
		}
		if r.IntN(3) == 0 {
			d.Properties = properties()
		}
		if r.IntN(3) == 0 {
			in.Properties[d.ID] = properties()
		}
		if r.IntN(4) == 0 {
			in.Names[d.ID] = []string{"gpu-0", "gpu-1", text()}[r.IntN(3)]
		}
		v := verdict(findings...)
		v.State = []health.State{v.State, health.Unknown}[r.IntN(2)]
		snap.Devices = append(snap.Devices, health.DeviceState{Device: d, Verdict: v})
	}
	for i := range r.IntN(18) {
		d := health.Device{
			ID: health.DeviceID(fmt.Sprintf("GPU-%d%s", i, text())), Index: i, Minor: r.IntN(20) - 1,
			NUMA:  [][]int{nil, {0}, {-1}, {5000}, {0, 1}}[r.IntN(5)],
			Model: text(), PCI: []string{"00000000:1B:00.0", "", text()}[r.IntN(3)], Memory: size(), Reserved: size(),
			ComputeCapability: health.ComputeCapability{Major: number(), Minor: number()}, MIGMode: r.IntN(3) == 0, GI: -1, CI: -1,
			Texts: map[health.Field]string{health.FieldSerial: text()}, Links: []health.Link{{Peer: "GPU-0", NVLinks: r.IntN(2)}},
		}
		add(d)
		for n := range r.IntN(3) * r.IntN(9) * (1 + 10*(r.IntN(20)/19)) {
			m := d
			m.ID, m.Parent, m.Kind, m.Links, m.MIGMode = health.DeviceID(fmt.Sprintf("MIG-%d-%d%s", i, n, text())), d.ID, health.KindMIG, nil, false
			m.GI, m.CI, m.Memory, m.Profile = number(), number(), size(), []string{"1g.10gb", "1g.10gb+me", "1c.3g.40gb", text()}[r.IntN(4)]
			add(m)
		}
	}
	return in
}

// Whatever the devices have, each pool obeys the limits of the API server, and the same input gives the same pool.
func TestRandomPools(t *testing.T) {
	for seed := range uint64(500) {
		in := randomInput(rand.New(rand.NewPCG(seed, 1)))
		pool := BuildPool(in)
		if problems := problemsOf(pool, in.Snapshot); len(problems) > 0 {
			t.Fatalf("seed %d: %s", seed, strings.Join(problems, "\n"))
		}
		if again := BuildPool(in); !reflect.DeepEqual(pool, again) {
			t.Fatalf("seed %d: two pools of one input differ", seed)
		}
		if !in.NoTaints {
			continue
		}
		for _, s := range pool.Slices {
			for _, d := range s.Devices {
				if d.Taints != nil {
					t.Fatalf("seed %d: %s has taints", seed, d.Name)
				}
			}
		}
	}
}

func FuzzSemanticVersion(f *testing.F) {
	for _, s := range []string{"580.95.05", "13.0", "", "1.2.3.4", "01.0.x"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		if v, ok := semanticVersion(s); ok && (!semver.MatchString(v) || len(v) > 64) {
			t.Errorf("%q: %q", s, v)
		}
	})
}

func FuzzFindingTaint(f *testing.F) {
	for _, s := range []string{"xid-79", "", "-", "ä", strings.Repeat("x", 64)} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, cause string) {
		taint := findingTaint(cause)
		if len(validation.IsQualifiedName(taint.Key))+len(validation.IsValidLabelValue(taint.Value)) > 0 {
			t.Errorf("%q: %+v", cause, taint)
		}
	})
}

func BenchmarkBuildPool(b *testing.B) {
	snap := simulated(b, "h100-16-mig")
	for i := range snap.Devices {
		snap.Devices[i].Verdict = verdict(finding("xid-79", health.Unhealthy), finding("xid-13", health.Degraded))
	}
	in := PoolInput{Config: configured(), Snapshot: snap}
	in.Names = func() map[health.DeviceID]string { p := BuildPool(in); return p.RememberNames(nil) }()
	b.ReportAllocs()
	for b.Loop() {
		BuildPool(in)
	}
}

func BenchmarkSamePool(b *testing.B) {
	in := PoolInput{Config: configured(), Snapshot: simulated(b, "h100-16-mig")}
	next, snap := in, *in.Snapshot
	next.Snapshot = &snap
	b.ReportAllocs()
	for b.Loop() {
		if !next.Same(&in) {
			b.Fatal("not the same")
		}
	}
}
