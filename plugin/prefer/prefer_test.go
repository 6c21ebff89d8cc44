package prefer

import (
	"fmt"
	"slices"
	"testing"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/deviceid"
)

func id(i int) string { return fmt.Sprintf("GPU-%d", i) }

func ids(numbers ...int) (out []string) {
	for _, i := range numbers {
		out = append(out, id(i))
	}
	return out
}

func all(devices []Device) (out []string) {
	for _, d := range devices {
		for n := range d.Units {
			out = append(out, d.Form.ID(d.State.Device.ID, n).String())
		}
	}
	return out
}

// owners returns for each ID the number of its device.
func owners(devices []Device) map[string]int {
	of := map[string]int{}
	for i := range devices {
		for _, id := range all(devices[i : i+1]) {
			of[id] = i
		}
	}
	return of
}

// without returns the IDs that are available while some are in use.
func without(devices []Device, used ...string) []string {
	return slices.DeleteFunc(all(devices), func(id string) bool { return slices.Contains(used, id) })
}

// gpus returns n healthy GPUs without links or NUMA nodes.
func gpus(n int) []Device {
	devices := make([]Device, n)
	for i := range devices {
		devices[i] = Device{Units: 1, State: &health.DeviceState{
			Device: health.Device{ID: health.DeviceID(id(i)), Index: i}, Verdict: health.Verdict{State: health.Healthy},
		}}
	}
	return devices
}

// hgx returns n GPUs as in an H100 machine: all connected by 18 NVLinks, half of them near each NUMA node.
func hgx(n int) []Device {
	devices := gpus(n)
	for i, d := range devices {
		d.State.Device.NUMA = []int{i * 2 / n}
		for j := range devices {
			if i != j {
				connect(devices, i, j, health.Link{NVLinks: 18, Path: health.PathSystem})
			}
		}
	}
	return devices
}

// connect adds a link that only device i reports.
func connect(devices []Device, i, j int, link health.Link) {
	link.Peer = health.DeviceID(id(j))
	devices[i].State.Device.Links = append(devices[i].State.Device.Links, link)
}

// with returns the devices with device i in another state.
func with(devices []Device, i int, state health.State) []Device {
	next := slices.Clone(devices)
	changed := *next[i].State
	changed.Verdict.State = state
	next[i].State = &changed
	return next
}

// replicas returns the devices with n replicas each.
func replicas(devices []Device, n int) (out []Device) {
	for _, d := range devices {
		out = append(out, Device{State: d.State, Form: deviceid.Form{Kind: deviceid.Replica}, Units: n})
	}
	return out
}

// migs returns n GPUs with seven MIG devices each.
func migs(n int) (devices []Device) {
	for i := range n {
		for gi := range 7 {
			name := fmt.Sprintf("MIG-%d-%d", i, gi)
			devices = append(devices, Device{Units: 1, State: &health.DeviceState{
				Device: health.Device{
					ID: health.DeviceID(name), Parent: health.DeviceID(id(i)), Kind: health.KindMIG, Index: i, GI: gi, NUMA: []int{2 * i / n},
				},
				Verdict: health.Verdict{State: health.Healthy},
			}})
		}
	}
	return devices
}

// pairs returns four GPUs, connected as 0-3 and 1-2. One pair is reported by one side only, the other differently by
// both sides.
func pairs() []Device {
	devices := gpus(4)
	for _, d := range devices {
		d.State.Device.NUMA = []int{0}
	}
	connect(devices, 3, 0, health.Link{NVLinks: 4})
	connect(devices, 3, 9, health.Link{NVLinks: 9}) // absent
	connect(devices, 1, 2, health.Link{NVLinks: 2})
	connect(devices, 1, 0, health.Link{Path: health.PathSystem})
	connect(devices, 2, 1, health.Link{NVLinks: 1})
	return devices
}

// cube returns the hybrid cube mesh of a DGX-1V (`nvidia-smi topo -m`): pairs have two links, one or none.
func cube() []Device {
	devices := gpus(8)
	for i, row := range [8][8]int{
		{0, 1, 1, 2, 2, 0, 0, 0},
		{1, 0, 2, 1, 0, 2, 0, 0},
		{1, 2, 0, 2, 0, 0, 1, 0},
		{2, 1, 2, 0, 0, 0, 0, 1},
		{2, 0, 0, 0, 0, 1, 1, 2},
		{0, 2, 0, 0, 1, 0, 2, 1},
		{0, 0, 1, 0, 1, 2, 0, 2},
		{0, 0, 0, 1, 2, 1, 2, 0},
	} {
		devices[i].State.Device.NUMA = []int{i / 4}
		for j, nvlinks := range row {
			connect(devices, i, j, health.Link{NVLinks: nvlinks, Path: health.PathSystem})
		}
	}
	return devices
}

func choose(devices []Device, r Request) []string { return new(Allocator).Choose(devices, r) }

func TestChooseGPUs(t *testing.T) {
	eight, paths := hgx(8), gpus(4)
	connect(paths, 0, 1, health.Link{Path: health.PathSystem})
	connect(paths, 0, 2, health.Link{Path: health.PathBoard})
	withheld := slices.Clone(eight)
	withheld[0].Withheld = true
	many := gpus(17)
	connect(many, 3, 5, link(4, 0))
	for _, c := range []struct {
		name      string
		devices   []Device
		available []string
		required  []string
		size      int
		want      []string
	}{
		{"first of equals", eight, ids(7, 3, 1, 5), nil, 1, ids(1)},
		{"odd one, so that a pair is left", eight, ids(1, 2, 6), nil, 1, ids(6)},
		{"one NUMA node", eight, ids(0, 1, 4, 5, 6, 7), nil, 4, ids(4, 5, 6, 7)},
		{"smaller NUMA node, so that the other stays whole", eight, ids(0, 1, 2, 3, 6, 7), nil, 2, ids(6, 7)},
		{"best connected pair", pairs(), ids(0, 1, 2, 3), nil, 2, ids(0, 3)},
		{"link reported by one side", pairs(), ids(0, 1, 3), ids(0), 2, ids(0, 3)},
		{"second pair if the first is in use", pairs(), ids(0, 1, 2), nil, 2, ids(1, 2)},
		{"GPU whose pair is in use", pairs(), ids(0, 1, 2), nil, 1, ids(0)},
		{"two links before one", cube(), ids(0, 1, 2, 3, 4, 5, 6, 7), nil, 2, ids(0, 3)},
		{"four of the cube", cube(), ids(0, 1, 2, 3, 4, 5, 6, 7), nil, 4, ids(0, 1, 2, 3)},
		{"better PCIe path", paths, ids(0, 1, 2, 3), nil, 2, ids(0, 2)},
		{"a pair among sixteen", many, all(many[1:]), nil, 2, ids(3, 5)},
		{"the first of more", many, all(many), nil, 2, ids(0, 1)},
		{"required first", eight, ids(0, 1, 2, 6, 7), ids(6), 2, ids(6, 7)},
		{"required and not available", eight, ids(0, 1), ids(6), 2, ids(6, 0)},
		{"healthy before degraded", with(eight, 0, health.Degraded), ids(0, 1, 4), nil, 2, ids(1, 4)},
		{"healthy before unknown health", with(eight, 0, health.Unknown), ids(0, 1, 4), nil, 2, ids(1, 4)},
		{"degraded if there is no other", with(eight, 0, health.Degraded), ids(0, 1), nil, 2, ids(0, 1)},
		{"degraded before unhealthy", with(with(eight, 0, health.Unhealthy), 1, health.Degraded), ids(0, 1, 2), nil, 2, ids(1, 2)},
		{"degraded before withheld", with(withheld, 1, health.Degraded), ids(0, 1, 2), nil, 2, ids(1, 2)},
		{"known before unknown devices", eight, []string{"GPU-x", "GPU-7"}, nil, 1, ids(7)},
		{"more than available", eight, ids(2, 1), nil, 5, ids(1, 2)},
		{"fewer than required", eight, ids(1, 2, 3), ids(3, 2), 1, ids(3)},
		{"size 0", eight, ids(1, 2), nil, 0, nil},
		{"negative size", eight, ids(1, 2), nil, -3, nil},
		{"nothing available", eight, nil, nil, 2, nil},
		{"duplicates", eight, ids(1, 1, 2, 2), ids(2, 2), 2, ids(2, 1)},
		{"empty layout", nil, ids(4, 2), nil, 1, ids(4)},
	} {
		if got := choose(c.devices, Request{Available: c.available, Required: c.required, Size: c.size}); !slices.Equal(got, c.want) {
			t.Errorf("%s: %v, want %v", c.name, got, c.want)
		}
	}
}

func link(nvlinks int, path health.Path) health.Link {
	return health.Link{NVLinks: nvlinks, Path: path}
}

// TestScores pins the score of each kind of connection. Sets are ordered by sums of these, so a changed weight changes
// the choice on some machine.
func TestScores(t *testing.T) {
	near := [2][]int{{1}, {1}}
	for _, c := range []struct {
		name string
		numa [2][]int
		link health.Link
		want int32
	}{
		{"nothing known", [2][]int{}, link(0, 0), 0},
		{"one NUMA node", near, link(0, 0), 5},
		{"two NUMA nodes", [2][]int{{0}, {1}}, link(0, 0), 0},
		{"node -1", [2][]int{{-1}, {-1}}, link(0, 0), 0},
		{"node of one GPU unknown", [2][]int{{0}, nil}, link(0, 0), 0},
		{"across sockets", [2][]int{}, link(0, health.PathSystem), 10},
		{"across host bridges", near, link(0, health.PathNode), 25},
		{"one host bridge", near, link(0, health.PathHostBridge), 35},
		{"several switches", near, link(0, health.PathMultiSwitch), 45},
		{"one switch", near, link(0, health.PathSingleSwitch), 55},
		{"one board", near, link(0, health.PathBoard), 65},
		{"one NVLink", [2][]int{}, link(1, health.PathUnknown), 100},
		{"18 NVLinks across sockets", [2][]int{}, link(18, health.PathSystem), 1810},
		{"18 NVLinks, near", near, link(18, health.PathNode), 1825},
		{"maxNVLinks", [2][]int{}, link(maxNVLinks, health.PathUnknown), 6400},
		{"above maxNVLinks", [2][]int{}, link(1<<30, health.PathUnknown), 6400},
		{"negative NVLinks", [2][]int{}, link(-1, health.PathUnknown), 0},
	} {
		devices := gpus(2)
		devices[0].State.Device.NUMA, devices[1].State.Device.NUMA = c.numa[0], c.numa[1]
		connect(devices, 0, 1, c.link)
		score := newTopology(devices).score
		if score[0][1] != c.want || score[1][0] != c.want || score[0][0] != 0 || score[1][1] != 0 {
			t.Errorf("%s: %v, want %d", c.name, score, c.want)
		}
	}
}

func TestChooseShared(t *testing.T) {
	two, four, mig, both := replicas(hgx(2), 3), replicas(hgx(4), 2), migs(2), replicas(migs(1), 2)
	degraded, unhealthy := replicas(with(hgx(2), 0, health.Degraded), 2), replicas(with(hgx(2), 0, health.Unhealthy), 2)
	withheld := replicas(hgx(2), 2)
	withheld[0].Withheld = true
	const spread, pack = false, true
	for _, c := range []struct {
		name      string
		packed    bool
		devices   []Device
		available []string
		required  []string
		size      int
		want      []string
	}{
		{"GPU used least", spread, two, without(two, "GPU-0::0"), nil, 1, []string{"GPU-1::0"}},
		{"GPU used most", pack, two, without(two, "GPU-1::0"), nil, 1, []string{"GPU-1::1"}},
		{"first GPU of an empty node", pack, two, all(two), nil, 1, []string{"GPU-0::0"}},
		{"two GPUs although packed", pack, two, without(two, "GPU-1::0"), nil, 2, []string{"GPU-0::0", "GPU-1::1"}},
		{"two GPUs although one is used more", spread, two, without(two, "GPU-1::0", "GPU-1::2"), nil, 2, []string{"GPU-0::0", "GPU-1::1"}},
		{"second replica after all devices", spread, two, all(two), nil, 3, []string{"GPU-0::0", "GPU-0::1", "GPU-1::0"}},
		{"required counts as taken", spread, two, all(two), []string{"GPU-0::2"}, 2, []string{"GPU-0::2", "GPU-1::0"}},
		{"healthy before degraded", spread, degraded, []string{"GPU-0::0", "GPU-1::1"}, nil, 1, []string{"GPU-1::1"}},
		{
			"degraded before a second replica", spread, degraded,
			[]string{"GPU-0::0", "GPU-1::0", "GPU-1::1"},
			nil, 2,
			[]string{"GPU-0::0", "GPU-1::0"},
		},
		{
			"second replica before unhealthy", spread, unhealthy,
			[]string{"GPU-0::0", "GPU-1::0", "GPU-1::1"},
			nil, 2,
			[]string{"GPU-1::0", "GPU-1::1"},
		},
		{"second replica before withheld", spread, withheld, all(withheld), nil, 2, []string{"GPU-1::0", "GPU-1::1"}},
		{"unknown devices", spread, two, []string{"GPU-9::0", "GPU-8::0", "GPU-1::2"}, nil, 2, []string{"GPU-1::2", "GPU-9::0"}},
		{
			"near the required one, among equals", spread, four,
			[]string{"GPU-0::0", "GPU-1::0", "GPU-2::0", "GPU-3::0"},
			[]string{"GPU-2::0"},
			2,
			[]string{"GPU-2::0", "GPU-3::0"},
		},
		{"MIG over the GPUs", spread, mig, all(mig), nil, 4, []string{"MIG-0-0", "MIG-0-1", "MIG-1-0", "MIG-1-1"}},
		{"MIG from one GPU", pack, mig, without(mig, "MIG-1-0"), nil, 4, []string{"MIG-1-1", "MIG-1-2", "MIG-1-3", "MIG-1-4"}},
		{"MIG from the next GPU if one is full", pack, mig, all(mig)[:8], nil, 2, []string{"MIG-0-0", "MIG-1-0"}},
		{"replicas of MIG devices: not the same twice", pack, both, without(both, "MIG-0-3::0"), nil, 2, []string{"MIG-0-0::0", "MIG-0-3::1"}},
		{"replicas of MIG devices: the one used least", spread, both, without(both, "MIG-0-0::0"), nil, 1, []string{"MIG-0-1::0"}},
	} {
		if got := choose(c.devices, Request{Available: c.available, Required: c.required, Size: c.size, Packed: c.packed}); !slices.Equal(got,
			c.want) {
			t.Errorf("%s: %v, want %v", c.name, got, c.want)
		}
	}
}

func TestChooseAlone(t *testing.T) {
	// three has 3 IDs of each of 3 GPUs that are Alone. mixed has GPU-0 whole, GPU-1 and GPU-2 in 3 IDs that are Alone, GPU-3 whole.
	three := replicas(hgx(3), 3)
	markAlone(three, 1<<0|1<<1|1<<2)
	degraded, unhealthy := replicas(with(hgx(3), 0, health.Degraded), 3), replicas(with(hgx(3), 0, health.Unhealthy), 3)
	markAlone(degraded, 1<<0|1<<1|1<<2)
	markAlone(unhealthy, 1<<0|1<<1|1<<2)
	whole := hgx(4)
	mixed := slices.Concat(whole[:1], replicas(whole[1:3], 3), whole[3:])
	markAlone(mixed, 1<<1|1<<2)
	withheld := slices.Clone(three)
	withheld[0].Withheld = true
	const policy, bestFit = false, true
	for _, c := range []struct {
		name      string
		bestFit   bool
		packed    bool
		devices   []Device
		available []string
		required  []string
		size      int
		want      []string
	}{
		{"one device", policy, false, three, all(three), nil, 2, []string{"GPU-0::0", "GPU-0::1"}},
		{"all of one device", policy, false, three, without(three, "GPU-0::1"), nil, 3, []string{"GPU-1::0", "GPU-1::1", "GPU-1::2"}},
		{
			"fewest free that suffice", policy, false, three, without(three, "GPU-1::0", "GPU-2::0", "GPU-2::1"), nil, 2,
			[]string{"GPU-1::1", "GPU-1::2"},
		},
		{"single: used least", policy, false, three, without(three, "GPU-0::0"), nil, 1, []string{"GPU-1::0"}},
		{"single: used most", policy, true, three, without(three, "GPU-1::0"), nil, 1, []string{"GPU-1::1"}},
		{"single: best fit", bestFit, false, three, without(three, "GPU-1::0"), nil, 1, []string{"GPU-1::1"}},
		{"healthy before best fit", bestFit, false, degraded, without(three, "GPU-0::0"), nil, 2, []string{"GPU-1::0", "GPU-1::1"}},
		{
			"degraded if no other has enough", policy, false, degraded, without(three, "GPU-1::0", "GPU-2::1"), nil, 3,
			[]string{"GPU-0::0", "GPU-0::1", "GPU-0::2"},
		},
		{"unhealthy last", bestFit, false, unhealthy, without(three, "GPU-0::0"), nil, 2, []string{"GPU-1::0", "GPU-1::1"}},
		{"withheld last", bestFit, false, withheld, without(three, "GPU-0::0"), nil, 2, []string{"GPU-1::0", "GPU-1::1"}},
		{"device of the required", policy, false, three, all(three), []string{"GPU-1::2"}, 2, []string{"GPU-1::2", "GPU-1::0"}},
		{
			"single beside a required one", policy, false, three, without(three, "GPU-1::1"),
			[]string{"GPU-1::2"},
			2,
			[]string{"GPU-1::2", "GPU-1::0"},
		},
		{
			"none has enough: fewest devices", bestFit, false, three, without(three, "GPU-0::0", "GPU-1::0"), nil, 4,
			[]string{"GPU-0::1", "GPU-2::0", "GPU-2::1", "GPU-2::2"},
		},
		{"whole GPUs before shares", policy, false, mixed, all(mixed), nil, 2, []string{"GPU-0", "GPU-3"}},
		{
			"shares of one GPU if there are not enough whole ones", policy, false, mixed, all(mixed), nil, 3,
			[]string{"GPU-1::0", "GPU-1::1", "GPU-1::2"},
		},
		{
			"shares of one GPU if a whole one is unhealthy", policy, false, with(mixed, 0, health.Unhealthy), all(mixed), nil, 2,
			[]string{"GPU-1::0", "GPU-1::1"},
		},
		{"beside a required whole GPU", policy, false, mixed, all(mixed), []string{"GPU-3"}, 2, []string{"GPU-3", "GPU-0"}},
		{"unknown devices", policy, false, three, []string{"GPU-9::0", "GPU-1::0"}, nil, 2, []string{"GPU-1::0", "GPU-9::0"}},
	} {
		got := choose(c.devices, Request{Available: c.available, Required: c.required, Size: c.size, Packed: c.packed, BestFit: c.bestFit})
		if !slices.Equal(got, c.want) {
			t.Errorf("%s: %v, want %v", c.name, got, c.want)
		}
	}
}

func TestAllocatorKeepsTopology(t *testing.T) {
	var a Allocator
	topologyOf := func(devices []Device) *topology {
		a.Choose(devices, Request{})
		return a.topology
	}
	devices := hgx(4)
	first := topologyOf(devices)
	if topologyOf(with(devices, 0, health.Degraded)) != first {
		t.Error("rebuilt although only health changed")
	}
	relinked := with(devices, 1, health.Healthy)
	relinked[1].State.Device.Links = slices.Clone(relinked[1].State.Device.Links)
	relinked[1].State.Device.Links[0].NVLinks--
	second := topologyOf(relinked)
	if second == first {
		t.Error("kept although a link changed")
	}
	if topologyOf(hgx(5)) == second {
		t.Error("kept although a GPU was added")
	}
}
