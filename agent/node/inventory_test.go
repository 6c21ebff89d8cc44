package node

import (
	"maps"
	"slices"
	"strings"
	"testing"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/plugin"
)

// gfdLabels returns the labels without the agent's own.
func gfdLabels(labels map[string]string) map[string]string {
	all := maps.Clone(labels)
	maps.DeleteFunc(all, func(key, _ string) bool { return key[:len(ownPrefix)] == ownPrefix })
	return all
}

// What happens to GPUs and sources changes no label of GFD.
func TestLabelsStay(t *testing.T) {
	devices := append(gpus(2, a100, "1g.5gb", "1g.5gb"), gpu(2, a100)...)
	serve := serving(migStrategy(plugin.MIGMixed), timeSlicing("", 3))
	first := snapshotOf(devices)
	before := (&inventory{}).update(first, serve(first), hostOf(devices))
	change := func(edit func(*health.DeviceState)) *health.Snapshot {
		s := snapshotOf(slices.Clone(devices))
		for i := range s.Devices {
			edit(&s.Devices[i])
		}
		return s
	}
	lost := func(d *health.DeviceState) {
		d.Sample = health.Sample{Device: d.Device.ID, Presence: health.Lost}
		d.Verdict.State = health.Unhealthy
	}
	for name, snap := range map[string]*health.Snapshot{
		"lost GPU": change(func(d *health.DeviceState) {
			if d.Device.GPU() == "GPU-2" {
				lost(d)
			}
		}),
		"all GPUs lost": change(lost),
		"blind":         change(func(d *health.DeviceState) { d.Sample = health.Sample{Device: d.Device.ID, Stale: true} }),
		"restored without properties": change(func(d *health.DeviceState) {
			d.Device.Properties, d.Device.ComputeCapability, d.Sample.Values = nil, health.ComputeCapability{}, nil
			d.Device.Memory, d.Device.Model = 0, ""
			d.Verdict = health.Verdict{}
		}),
		"no GPU listed": snapshotOf(nil),
	} {
		t.Run(name, func(t *testing.T) {
			snap.Source.Status, snap.Source.Versions = health.SourceDown, health.Versions{}
			after := before.update(snap, serve(snap), &host{})
			if want, got := gfdLabels(before.labels()), gfdLabels(after.labels()); !maps.Equal(got, want) {
				t.Errorf("got\n%s\nwant\n%s", text(got), text(want))
			}
		})
	}
}

// A device keeps its values when devices before it in the list are removed.
func TestLabelsStayWhenDevicesMove(t *testing.T) {
	devices := append(append(gpu(0, l4), gpu(1, h100)...), gpu(2, a100)...)
	first := snapshotOf(devices)
	before := (&inventory{}).update(first, serving()(first), hostOf(devices))
	left := snapshotOf([]health.DeviceState{devices[2]})
	left.Devices[0].Device.Model, left.Devices[0].Device.Memory, left.Devices[0].Device.ComputeCapability = "", 0, health.ComputeCapability{}
	if got, want := before.update(left, serving()(left), &host{}).labels(), labelsOf(gpu(2, a100)); !maps.Equal(got, want) {
		t.Errorf("got\n%s\nwant\n%s", text(got), text(want))
	}
}

// What really changes is in the labels, and nothing stays of other devices.
func TestLabelsChange(t *testing.T) {
	devices := gpus(4, h100)
	first := snapshotOf(devices)
	serve := serving()
	before := (&inventory{}).update(first, serve(first), hostOf(devices))
	saved := *before
	saved.OtherBoot = true
	simulated, another := snapshotOf(nil), snapshotOf(nil)
	simulated.Source.Kind, another.Source.Inventory = "sim", "another host"
	for name, c := range map[string]struct {
		before *inventory
		snap   *health.Snapshot
		count  string // "": no labels
	}{
		"removed GPU":                 {before, snapshotOf(gpus(3, h100)), "3"},
		"no GPU of another source":    {before, simulated, ""},
		"no GPU of another host":      {before, another, ""},
		"no GPU since a reboot":       {&saved, snapshotOf(nil), ""},
		"removed GPU since a reboot":  {&saved, snapshotOf(gpus(2, h100)), "2"},
		"other models since a reboot": {&saved, snapshotOf(gpus(1, l4)), "1"},
	} {
		t.Run(name, func(t *testing.T) {
			labels := c.before.update(c.snap, serve(c.snap), &host{}).labels()
			if got := labels["nvidia.com/gpu.count"]; got != c.count || c.count == "" && len(labels) > 0 {
				t.Errorf("got %s", text(labels))
			}
		})
	}
}

// The strategy single serves what is left when a GPU differs, and the labels say so.
func TestLabelsOfWhatIsServed(t *testing.T) {
	config := plugin.DefaultConfig()
	config.MIGStrategy = plugin.MIGSingle
	var configs health.Latest[plugin.Config]
	configs.Store(&config)
	var snapshots health.Latest[health.Snapshot]
	p := plugin.New(&configs, &snapshots, nop)
	follow := func(devices []health.DeviceState) map[string]string {
		s := snapshotOf(devices)
		snapshots.Store(s)
		return (&inventory{}).update(s, p.Serving(s), hostOf(devices)).labels()
	}
	const product, count = "nvidia.com/gpu.product", "nvidia.com/gpu.count"
	if l := follow(gpus(2, a100, "1g.5gb", "1g.5gb")); l[count] != "4" || l[product] != "NVIDIA-A100-SXM4-40GB-MIG-1g.5gb" {
		t.Errorf("at first: %s", text(l))
	}
	unlike := append(gpu(0, a100, "1g.5gb", "1g.5gb"), gpu(1, a100, "3g.20gb")...)
	if l := follow(unlike); l[count] != "2" || l[product] != "NVIDIA-A100-SXM4-40GB-MIG-1g.5gb" {
		t.Errorf("after a change of one GPU: %s", text(l))
	}
	if l := labelsOf(unlike, migStrategy(plugin.MIGSingle)); l[count] != "0" || l[product] != "NVIDIA-A100-SXM4-40GB-MIG-INVALID" {
		t.Errorf("after a restart: %s", text(l))
	}
	exclude := func(c *plugin.Config) { c.Exclude = []string{"0"} }
	if l := labelsOf(gpu(0, a100, "1g.5gb"), migStrategy(plugin.MIGSingle), exclude); l[count] != "1" ||
		l[product] != "NVIDIA-A100-SXM4-40GB-MIG-1g.5gb" {
		t.Errorf("the only MIG device, excluded: %s", text(l))
	}
	exclude = func(c *plugin.Config) { c.Exclude = []string{"0", "1"} }
	if l := labelsOf(gpus(2, a100), migStrategy(plugin.MIGSingle), exclude); l[count] != "2" || l[product] != "NVIDIA-A100-SXM4-40GB" {
		t.Errorf("without MIG, excluded: %s", text(l))
	}
	if l := labelsOf(append(gpu(0, h100), gpu(1, a100, []string{}...)...), migStrategy(plugin.MIGSingle),
		exclude); l[product] != "NVIDIA-A100-SXM4-40GB-MIG-INVALID" {
		t.Errorf("the second one in MIG mode: %s", text(l))
	}
	if l := follow(gpus(2, a100)); l[count] != "2" || l[product] != "NVIDIA-A100-SXM4-40GB" {
		t.Errorf("without MIG: %s", text(l))
	}
	if l := follow(append(gpu(0, a100), gpu(1, a100, "1g.5gb")...)); l[count] != "2" || l[product] != "NVIDIA-A100-SXM4-40GB" ||
		l["nvidia.com/gpu.replicas"] != "1" {
		t.Errorf("after MIG was enabled on one GPU: %s", text(l))
	}
}

// Whichever order the devices have, the labels are the same.
func TestLabelsOfMixedModels(t *testing.T) {
	devices := append(append(gpu(0, l4), gpu(1, h100)...), append(gpu(2, a100), gpu(3, l4)...)...)
	devices = append(devices, gpu(4, h100)...)
	want := text(labelsOf(devices))
	for range 20 {
		if got := text(labelsOf(devices)); got != want {
			t.Fatalf("got\n%s\nwant\n%s", got, want)
		}
		devices = append(devices[1:], devices[0])
	}
	if got := labelsOf(devices)["nvidia.com/gpu.product"]; got != "NVIDIA-H100-80GB-HBM3" { // before L4 by name
		t.Error(got)
	}
}

// The API server refuses a key of more than 63 characters, so a profile with such a name has no labels.
func TestLabelsOfLongProfile(t *testing.T) {
	for attribute, want := range map[string]bool{strings.Repeat("x", 35): true, strings.Repeat("x", 36): false} {
		devices := gpu(0, a100, "1g.5gb")
		devices[1].Device.Profile = "1g.5gb+" + attribute
		labels := labelsOf(devices, migStrategy(plugin.MIGMixed))
		wantValid(t, labels)
		if _, exists := labels["nvidia.com/mig-1g.5gb."+attribute+".count"]; exists != want {
			t.Errorf("%d characters: %s", len(attribute), text(labels))
		}
	}
}

// What is unknown of a GPU is not in the labels of the others, and no label.
func TestLabelsOfUnknownProperties(t *testing.T) {
	devices := append(gpus(3, health.Device{}), gpu(3, a100)...)
	want := map[string]string{"product": "NVIDIA-A100-SXM4-40GB", "count": "1", "memory": "40960", "family": "ampere"}
	for _, devices := range [][]health.DeviceState{devices, slices.Concat(devices[3:], devices[:3])} {
		labels := labelsOf(devices)
		for name, want := range want {
			if got := labels["nvidia.com/gpu."+name]; got != want {
				t.Errorf("%s: %q, want %q", name, got, want)
			}
		}
	}
	labels := labelsOf(devices[:3])
	for name := range want {
		if got, exists := labels["nvidia.com/gpu."+name]; exists && name != "count" || name == "count" && got != "3" {
			t.Errorf("unknown %s: %q", name, got)
		}
	}

	mig := gpu(0, a100, "1g.5gb", "1g.5gb")
	mig[1].Device.Properties, mig[1].Device.Memory = nil, 0
	labels = labelsOf(mig, migStrategy(plugin.MIGMixed)) // the second one has the properties
	if got := labels["nvidia.com/mig-1g.5gb.multiprocessors"]; got != "14" {
		t.Errorf("multiprocessors %q", got)
	}
	mig[2].Device.Properties = nil
	labels = labelsOf(mig, migStrategy(plugin.MIGMixed))
	for name, want := range map[string]string{"count": "2", "slices.gi": "1", "multiprocessors": "-", "engines.copy": "-", "memory": "-"} {
		if got, exists := labels["nvidia.com/mig-1g.5gb."+name]; exists != (want != "-") || exists && got != want {
			t.Errorf("MIG devices without properties: %s %q, want %q", name, got, want)
		}
	}
}

func TestModeAndClique(t *testing.T) {
	const vga, controller = "0x030000", "0x030200"
	for name, c := range map[string]struct {
		classes, cliques [2]string
		mode, clique     string // "-": no label
	}{
		"compute":       {classes: [2]string{controller, controller}, mode: "compute", clique: "-"},
		"graphics":      {classes: [2]string{vga, vga}, mode: "graphics", clique: "-"},
		"both":          {classes: [2]string{controller, vga}, mode: "unknown", clique: "-"},
		"another class": {classes: [2]string{"0x120000", "0x120000"}, mode: "unknown", clique: "-"},
		"one unknown":   {classes: [2]string{"", vga}, mode: "graphics", clique: "-"},
		"unknown":       {mode: "-", clique: "-"},
		"clique":        {cliques: [2]string{"a-b.1", "a-b.1"}, mode: "-", clique: "a-b.1"},
		"one clique":    {cliques: [2]string{"", "a-b.1"}, mode: "-", clique: "a-b.1"},
		"cliques":       {cliques: [2]string{"a-b.1", "a-b.2"}, mode: "-", clique: "-"},
	} {
		t.Run(name, func(t *testing.T) {
			devices := gpus(2, h100)
			h := &host{devices: map[health.DeviceID]hostDevice{}, known: health.KnownProperties{}}
			for i := range devices {
				h.devices[devices[i].Device.ID] = hostDevice{class: c.classes[i]}
				h.known[devices[i].Device.ID] = &health.Properties{Clique: c.cliques[i]}
			}
			s := snapshotOf(devices)
			labels := (&inventory{}).update(s, serving()(s), h).labels()
			for label, want := range map[string]string{"nvidia.com/gpu.mode": c.mode, "nvidia.com/gpu.clique": c.clique} {
				if got, exists := labels[label]; exists != (want != "-") || exists && got != want {
					t.Errorf("%s=%s, want %s", label, got, want)
				}
			}
			if labels["nvidia.com/gpu.machine"] != "unknown" {
				t.Error("machine", labels["nvidia.com/gpu.machine"])
			}
		})
	}
}

func TestFamily(t *testing.T) {
	for c, want := range map[health.ComputeCapability]string{
		{Major: 1, Minor: 3}: "tesla", {Major: 2, Minor: 1}: "fermi", {Major: 3, Minor: 7}: "kepler", {Major: 4}: "undefined",
		{Major: 5, Minor: 2}: "maxwell", {Major: 6}: "pascal", {Major: 7}: "volta", {Major: 7, Minor: 2}: "volta", {Major: 7, Minor: 5}: "turing",
		{Major: 8, Minor: 6}: "ampere", {Major: 8, Minor: 9}: "ada-lovelace", {Major: 9}: "hopper", {Major: 10, Minor: 3}: "blackwell",
		{Major: 11}: "undefined", {Major: 12}: "blackwell", {Major: 13}: "rubin", {Major: 99}: "undefined",
	} {
		if got := family(c); got != want {
			t.Errorf("%v: %s, want %s", c, got, want)
		}
	}
}

func TestVersionLabels(t *testing.T) {
	for name, c := range map[string]struct{ driver, cuda, full, revision, runtime string }{
		"usual":         {"580.126.20", "13.0", "580.126.20", "20", "13.0"},
		"no revision":   {"470.82", "11.4", "470.82", "", "11.4"},
		"one part":      {"580", "13", "-", "-", "-"},
		"four parts":    {"1.2.3.4", "", "-", "-", "-"},
		"nothing known": {"", "", "-", "-", "-"},
	} {
		t.Run(name, func(t *testing.T) {
			labels := make(labelSet)
			labels.addVersions(&inventory{Driver: c.driver, CUDA: c.cuda})
			for label, want := range map[string]string{
				"cuda.driver-version.full": c.full, "cuda.driver.rev": c.revision,
				"cuda.runtime-version.full": c.runtime,
			} {
				if got, exists := labels[gfdPrefix+label]; exists != (want != "-") || exists && got != want {
					t.Errorf("%s=%s, want %s", label, got, want)
				}
			}
		})
	}
}

// FuzzLabels checks that the API server accepts the labels whatever the driver and the machine call things.
func FuzzLabels(f *testing.F) {
	f.Add("NVIDIA H100 80GB HBM3", "DGXH100", "1g.10gb", "580.126.20", "13.0")
	f.Add("NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition with a name that is far too long", " \t(C) Ünïcode\n", "1c.1g.24gb+me.all",
		"x.y.z", ".")
	f.Add("-_.", "...", "+", "-.-", "_._")
	f.Fuzz(func(t *testing.T, model, machine, profile, driver, cuda string) {
		d := device{
			ID: "GPU-0", Model: model, Memory: 1 << 30, MIGMode: true, Class: machine, Clique: machine, VGPU: &vgpu{machine, driver},
			Sharing: plugin.SharingMPS, Replicas: 2,
		}
		m := device{
			ID: "MIG-0", Parent: "GPU-0", Model: model, Profile: profile, Sharing: plugin.SharingTimeSlicing, Replicas: 2,
			Instance: &health.MIGProperties{},
		}
		for _, strategy := range []string{plugin.MIGNone, plugin.MIGSingle, plugin.MIGMixed} {
			n := inventory{Machine: machine, Driver: driver, CUDA: cuda, MIGStrategy: strategy, Devices: []device{d, m}}
			labels := n.labels()
			wantValid(t, labels)
			if labels["nvidia.com/gpu.machine"] == "" || labels["nvidia.com/gpu.count"] == "" {
				t.Error(text(labels))
			}
		}
	})
}

func BenchmarkUpdate(b *testing.B) {
	for name, devices := range map[string][]health.DeviceState{
		"8GPUs":        gpus(8, h100),
		"16GPUs112MIG": gpus(16, a100, slices.Repeat([]string{"1g.5gb"}, 7)...),
	} {
		b.Run(name, func(b *testing.B) {
			serve, s, h := serving(migStrategy(plugin.MIGMixed)), snapshotOf(devices), hostOf(devices)
			n := &inventory{}
			for b.Loop() {
				n = n.update(s, serve(s), h)
			}
		})
	}
}

func BenchmarkLabels(b *testing.B) {
	devices := gpus(16, a100, slices.Repeat([]string{"1g.5gb"}, 7)...)
	s := snapshotOf(devices)
	n := (&inventory{}).update(s, serving(migStrategy(plugin.MIGMixed))(s), hostOf(devices))
	for b.Loop() {
		n.labels()
	}
}
