package sim

import (
	"maps"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/gpu-node-agent/gpu-node-agent/health"
)

func devicesOf(t *testing.T, name string, seed int64) []health.Device {
	t.Helper()
	p, err := profileByName(name)
	if err != nil {
		t.Fatal(err)
	}
	return p.devices(seed)
}

// board is what a profile says of a GPU.
type board struct {
	model          string
	mib, reserved  uint64
	capability     health.ComputeCapability
	withoutNVLinks bool
}

func (want board) check(t *testing.T, d health.Device) {
	t.Helper()
	if got := (board{d.Model, d.Memory >> 20, d.Reserved >> 20, d.ComputeCapability, want.withoutNVLinks}); got != want {
		t.Errorf("GPU %d is %+v; want %+v", d.Index, got, want)
	}
}

func TestProfiles(t *testing.T) {
	var (
		h100 = board{"NVIDIA H100 80GB HBM3", 81559, 551, health.ComputeCapability{Major: 9, Minor: 0}, false}
		a100 = board{"NVIDIA A100-SXM4-80GB", 81920, 868, health.ComputeCapability{Major: 8, Minor: 0}, false}
		v100 = board{"Tesla V100-SXM3-32GB", 32768, 258, health.ComputeCapability{Major: 7, Minor: 0}, false}
		l4   = board{"NVIDIA L4", 23034, 435, health.ComputeCapability{Major: 8, Minor: 9}, true}
	)
	tests := []struct {
		name        string
		boards      []board // of each GPU
		mig         int
		buses, numa string      // of each GPU; a digit per NUMA node
		nvlinks     int         // between boards that have them
		zeroToOne   health.Path // from GPU 0 to GPU 1
	}{
		{"h100-8", slices.Repeat([]board{h100}, 8), 0, "1B 43 52 61 9D C3 D1 DF", "00001111", 18, health.PathNode},
		{"a100-8", slices.Repeat([]board{a100}, 8), 0, "07 0F 47 4E 87 90 B7 BD", "33117755", 12, health.PathMultiSwitch},
		{"h100-8-mig", slices.Repeat([]board{h100}, 8), 50, "1B 43 52 61 9D C3 D1 DF", "00001111", 0, health.PathNode},
		{
			"v100-16", slices.Repeat([]board{v100}, 16), 0,
			"34 36 39 3B 57 59 5C 5E B7 B9 BC BE E0 E2 E5 E7", "0000000011111111", 6, health.PathNode,
		},
		{
			"h100-16-mig", slices.Repeat([]board{h100}, 16), 112,
			"34 36 39 3B 57 59 5C 5E B7 B9 BC BE E0 E2 E5 E7", "0000000011111111", 0, health.PathNode,
		},
		{"mixed-4", []board{h100, h100, l4, l4}, 0, "1B 43 9D C3", "0011", 18, health.PathNode},
		{"l4-1", []board{l4}, 0, "00", "0", 0, 0},
		{"none", nil, 0, "", "", 0, 0},
	}
	if len(tests) != len(profileNames()) {
		t.Errorf("profiles %v; the table lacks some", profileNames())
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			devices := devicesOf(t, tt.name, 1)
			gpus := slices.DeleteFunc(slices.Clone(devices), func(d health.Device) bool { return d.Kind != health.KindGPU })
			if migs := len(devices) - len(gpus); len(gpus) != len(tt.boards) || migs != tt.mig {
				t.Fatalf("%d GPUs and %d MIG devices; want %d and %d", len(gpus), migs, len(tt.boards), tt.mig)
			}
			buses := strings.Fields(tt.buses)
			for i, d := range gpus {
				checkPlace(t, i, d, buses[i], int(tt.numa[i]-'0'))
				tt.boards[i].check(t, d)
				if d.MIGMode != (tt.mig > 0) || d.GI != -1 || d.CI != -1 || d.Profile != "" || d.Parent != "" {
					t.Errorf("GPU %d: %+v; want no properties of a MIG device", i, d)
				}
				checkLinks(t, i, gpus, tt.boards, tt.nvlinks)
			}
			if len(gpus) > 1 {
				if l := gpus[0].Links[0]; l.Peer != gpus[1].ID || l.Path != tt.zeroToOne {
					t.Errorf("first link of GPU 0 is %+v; want %v to GPU 1", l, tt.zeroToOne)
				}
				last := len(gpus) - 1
				if l := gpus[0].Links[last-1]; l.Peer != gpus[last].ID || l.Path != health.PathSystem {
					t.Errorf("last link of GPU 0 is %+v; want SYS to GPU %d", l, last)
				}
			}
		})
	}
}

// checkPlace checks the numbers of the i-th GPU, its bus and its NUMA node.
func checkPlace(t *testing.T, i int, d health.Device, bus string, node int) {
	t.Helper()
	if !regexp.MustCompile(`^00000000:` + bus + `:0[0-9]\.0$`).MatchString(d.PCI) {
		t.Errorf("GPU %d is on %s; want bus %s", i, d.PCI, bus)
	}
	if d.Index != i || d.Minor != i || !slices.Equal(d.NUMA, []int{node}) {
		t.Errorf("GPU %d is %+v", i, d)
	}
}

// checkLinks checks that the i-th GPU has a link to each other GPU, with NVLinks if both boards have them.
func checkLinks(t *testing.T, i int, gpus []health.Device, boards []board, nvlinks int) {
	t.Helper()
	links := gpus[i].Links
	if len(links) != len(boards)-1 {
		t.Errorf("GPU %d has %d peers; want %d", i, len(links), len(boards)-1)
	}
	for _, l := range links {
		peer := slices.IndexFunc(gpus, func(d health.Device) bool { return d.ID == l.Peer })
		if peer < 0 || peer == i {
			t.Fatalf("GPU %d: link %+v; want one to another GPU", i, l)
		}
		want := nvlinks
		if boards[i].withoutNVLinks || boards[peer].withoutNVLinks {
			want = 0
		}
		if l.NVLinks != want {
			t.Errorf("GPU %d: link %+v; want %d NVLinks", i, l, want)
		}
	}
}

func TestMIGDevicesFitTheirGPU(t *testing.T) {
	type key struct {
		parent health.DeviceID
		gi     int
	}
	var (
		byID    = map[health.DeviceID]health.Device{}
		seen    = map[key]bool{}
		memory  = map[health.DeviceID]uint64{}
		parts   = map[health.DeviceID]int{}
		perName = map[string]int{}
		compute = map[string]int{"1g.10gb": 1, "2g.20gb": 2, "3g.40gb": 3}
	)
	for _, d := range devicesOf(t, "h100-8-mig", 1) {
		byID[d.ID] = d
		if d.Kind == health.KindGPU {
			continue
		}
		// A GPU precedes its MIG devices.
		parent, ok := byID[d.Parent]
		if !ok {
			t.Fatalf("%s precedes its GPU %s", d.ID, d.Parent)
		}
		if d.Index != parent.Index || d.Minor != parent.Minor || d.PCI != parent.PCI || d.Model != parent.Model ||
			!reflect.DeepEqual(d.NUMA, parent.NUMA) || d.Links != nil || d.MIGMode || d.CI != 0 ||
			d.ComputeCapability != parent.ComputeCapability || d.Reserved != 0 {
			t.Errorf("%+v differs from its GPU %+v", d, parent)
		}
		if k := (key{d.Parent, d.GI}); seen[k] || d.GI < 1 {
			t.Errorf("GPU instance %d of GPU %d is a duplicate or below 1", d.GI, d.Index)
		} else {
			seen[k] = true
		}
		memory[d.Parent] += d.Memory
		parts[d.Parent] += compute[d.Profile]
		perName[d.Profile]++
	}
	for id, n := range parts {
		if n != 7 || memory[id] > byID[id].Memory {
			t.Errorf("GPU %d is partitioned into %d sevenths with %d MiB of %d", byID[id].Index, n, memory[id]>>20, byID[id].Memory>>20)
		}
	}
	if want := map[string]int{"1g.10gb": 46, "2g.20gb": 2, "3g.40gb": 2}; !reflect.DeepEqual(perName, want) {
		t.Errorf("profiles %v; want %v", perName, want)
	}
}

func TestUUIDs(t *testing.T) {
	var (
		gpu = regexp.MustCompile(`^GPU-[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}$`)
		mig = regexp.MustCompile(`^MIG-[0-9a-f]{8}-[0-9a-f]{4}-5[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}$`)
	)
	seen := map[health.DeviceID]bool{}
	for _, seed := range []int64{1, 2} {
		for _, name := range profileNames() {
			devices := devicesOf(t, name, seed)
			if again := devicesOf(t, name, seed); !reflect.DeepEqual(devices, again) {
				t.Errorf("%s with seed %d differs between calls", name, seed)
			}
			for _, d := range devices {
				want := gpu
				if d.Kind == health.KindMIG {
					want = mig
				}
				if !want.MatchString(string(d.ID)) {
					t.Errorf("%q does not have the format of the driver's UUIDs", d.ID)
				}
				if seen[d.ID] {
					t.Errorf("%s: duplicate UUID %s", name, d.ID)
				}
				seen[d.ID] = true
			}
		}
	}
}

// TestFields lists the fields of each kind of device, with either DCGM.
func TestFields(t *testing.T) {
	profiling := []health.Field{1001, 1002, 1004, 1005, 1009, 1010}
	all := slices.Concat([]health.Field{
		67, 100, 101, 112, 140, 150, 155, 156, 202, 203, 204, 206, 207, 230, 250, 251, 252, 253, 311, 393, 394, 395, 396, 449, 526,
	}, profiling, []health.Field{1507, 1523})
	without := func(fields ...health.Field) []health.Field {
		return slices.DeleteFunc(slices.Clone(all), func(f health.Field) bool { return slices.Contains(fields, f) })
	}
	pages := slices.Sorted(slices.Values(append(without(67), 390, 391, 392)))
	tests := []struct {
		profile string
		kind    health.Kind
		want    []health.Field
	}{
		{"v100-16", health.KindGPU, pages},
		{"h100-8", health.KindGPU, all},
		{"a100-8", health.KindGPU, all},
		{"l4-1", health.KindGPU, without(67, 140, 449)},
		{"h100-8-mig", health.KindGPU, without(203, 204, 206, 207, 449)},
		{"h100-8-mig", health.KindMIG, slices.Concat([]health.Field{230, 250, 251, 252, 253}, profiling)},
	}
	baseUnits := map[health.Field]health.Field{
		100: 1603, 101: 1604, 156: 1611, 203: 1613, 204: 1614, 206: 1615, 207: 1616, 250: 1625, 251: 1626, 252: 1627, 253: 1628, 449: 1648,
	}
	check := func(profile string, kind health.Kind, dcgm string, last health.Field, want []health.Field) {
		want = slices.Clone(want)
		for _, f := range want {
			if f, ok := baseUnits[f]; ok && f <= last {
				want = append(want, f)
			}
		}
		slices.Sort(want)
		synctest.Test(t, func(t *testing.T) {
			cfg := profileConfig(profile)
			cfg.DCGM = dcgm
			r := poll(t, open(t, newSource(t, cfg)))
			if len(r.Samples) != len(r.Devices) {
				t.Fatalf("%d samples for %d devices", len(r.Samples), len(r.Devices))
			}
			for i, s := range r.Samples {
				if s.Device != r.Devices[i].ID || s.Presence != health.Present || len(s.XIDs) != 0 || len(s.Incidents) != 0 {
					t.Errorf("%s: sample %+v of %s", profile, s, r.Devices[i].ID)
				}
				if s.Checked != (r.Devices[i].Kind == health.KindGPU) {
					t.Errorf("%s: checked %v of %s", profile, s.Checked, s.Device)
				}
				if got := slices.Sorted(maps.Keys(s.Values)); r.Devices[i].Kind == kind && !reflect.DeepEqual(got, want) {
					t.Errorf("%s, DCGM %s: %s has fields %v; want %v", profile, dcgm, s.Device, got, want)
				}
			}
		})
	}
	for _, tt := range tests {
		check(tt.profile, tt.kind, "4.6", 1612, tt.want)
		check(tt.profile, tt.kind, "4.7", 1650, tt.want)
	}
}

func TestNoGPUs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := poll(t, open(t, newSource(t, profileConfig("none"))))
		if len(r.Devices) != 0 || len(r.Samples) != 0 {
			t.Errorf("got %d devices and %d samples; want none", len(r.Devices), len(r.Samples))
		}
		if want := (health.Versions{Driver: "580.95.05", CUDA: "13.0", DCGM: "4.6.1 (simulated)"}); r.Versions != want {
			t.Errorf("versions %+v; want %+v", r.Versions, want)
		}
	})
}

// TestClocksEvents checks the reasons for low clocks: idle, the power cap with the heaviest jobs, and no others.
func TestClocksEvents(t *testing.T) {
	seen := map[float64]int{}
	polls := readings(t, profileConfig("h100-8"), every(time.Second, 20*time.Minute)...)
	for _, r := range polls {
		for _, s := range r.Samples {
			bits, ok := s.Values[health.FieldClocksEvents]
			seen[bits]++
			if idle := s.Values[health.FieldSMClock] == h100().restSM; !ok || idle != (bits == clocksIdle) {
				t.Fatalf("event bits %v (%v) at %v MHz", bits, ok, s.Values[health.FieldSMClock])
			}
			if w := s.Values[health.FieldPower]; bits == clocksPowerCap && w < 0.95*h100().maxPower {
				t.Fatalf("the power is capped at %v W", w)
			}
		}
	}
	all := len(polls) * 8
	if len(seen) != 3 || seen[clocksIdle] < all/10 || seen[clocksPowerCap] < all/100 || seen[clocksPowerCap] > all/5 || seen[0] < all/3 {
		t.Errorf("of %d samples: %v", all, seen)
	}
}

func TestTexts(t *testing.T) {
	formats := map[health.Field]*regexp.Regexp{
		2:  regexp.MustCompile(`^13\.\d{3}\.\d+(\.\d+)?$`),
		51: regexp.MustCompile(`^(NVIDIA|Tesla)$`),
		53: regexp.MustCompile(`^\d{13}$`),
		56: regexp.MustCompile(`^\d\.\d$`),
		80: regexp.MustCompile(`^\d\.\d+$`),
		82: regexp.MustCompile(`^G\d{3}\.\d{4}\.\d{2}\.\d{2}$`),
		85: regexp.MustCompile(`^[0-9A-F]{2}(\.[0-9A-F]{2}){4}$`),
	}
	serials := map[string]bool{}
	for _, p := range profiles() {
		parent := map[health.DeviceID]health.Device{}
		for _, d := range p.devices(1) {
			if d.Kind == health.KindMIG {
				if !maps.Equal(d.Texts, parent[d.Parent].Texts) {
					t.Errorf("%s: %s: %v; want the texts of its parent", p.name, d.ID, d.Texts)
				}
				continue
			}
			parent[d.ID] = d
			for field, re := range formats {
				if !re.MatchString(d.Texts[field]) {
					t.Errorf("%s: %s: field %d is %q", p.name, d.ID, field, d.Texts[field])
				}
			}
			if len(d.Texts) != len(formats) {
				t.Errorf("%s: %s: %v", p.name, d.ID, d.Texts)
			}
			if serials[d.Texts[53]] {
				t.Errorf("%s: duplicate serial number %s", p.name, d.Texts[53])
			}
			serials[d.Texts[53]] = true
		}
	}
}
