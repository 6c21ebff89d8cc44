package plugin

import (
	"fmt"
	"slices"
	"testing"

	"github.com/gpu-node-agent/gpu-node-agent/health"
)

// pairs is a machine whose GPUs are joined two and two: 0-3, 1-2.
func pairs() *health.Snapshot {
	s := snapshot(4)
	for i := range s.Devices {
		s.Devices[i].Device.NUMA = []int{0}
		s.Devices[i].Device.Links = nil
	}
	// Said by one side only, and by both sides differently.
	s.Devices[3].Device.Links = []health.Link{{Peer: "GPU-0", NVLinks: 4}, {Peer: "GPU-gone", NVLinks: 9}}
	s.Devices[1].Device.Links = []health.Link{{Peer: "GPU-2", NVLinks: 2}, {Peer: "GPU-0", Path: health.PathSystem}}
	s.Devices[2].Device.Links = []health.Link{{Peer: "GPU-1", NVLinks: 1}}
	return s
}

// cube is the hybrid cube mesh of the first eight-GPU NVLink machines: some pairs have two links, some
// one, some none (`nvidia-smi topo -m` of a DGX-1V).
func cube() *health.Snapshot {
	s := snapshot(8)
	links := [8][8]int{
		{0, 1, 1, 2, 2, 0, 0, 0},
		{1, 0, 2, 1, 0, 2, 0, 0},
		{1, 2, 0, 2, 0, 0, 1, 0},
		{2, 1, 2, 0, 0, 0, 0, 1},
		{2, 0, 0, 0, 0, 1, 1, 2},
		{0, 2, 0, 0, 1, 0, 2, 1},
		{0, 0, 1, 0, 1, 2, 0, 2},
		{0, 0, 0, 1, 2, 1, 2, 0},
	}
	for i := range s.Devices {
		for j := range s.Devices[i].Device.Links {
			l := &s.Devices[i].Device.Links[j]
			for k := range links[i] {
				if l.Peer == health.DeviceID(id(k)) {
					l.NVLinks = links[i][k]
				}
			}
		}
	}
	return s
}

func ids(is ...int) (out []string) {
	for _, i := range is {
		out = append(out, id(i))
	}
	return out
}

func whole(s *health.Snapshot) Resource { return find(Layout(DefaultConfig(), s), gpu) }

func TestPreferGPUs(t *testing.T) {
	eight := snapshot(8)
	path := snapshot(4)
	for i := range path.Devices {
		path.Devices[i].Device.NUMA, path.Devices[i].Device.Links = nil, nil
	}
	path.Devices[0].Device.Links = []health.Link{{Peer: "GPU-1", Path: health.PathSystem}, {Peer: "GPU-2", Path: health.PathBoard}}
	for _, c := range []struct {
		name      string
		snap      *health.Snapshot
		available []string
		required  []string
		size      int
		want      []string
	}{
		{"the first of equals", eight, ids(7, 3, 1, 5), nil, 1, ids(1)},
		{"the odd one, so that a pair is left", eight, ids(1, 2, 6), nil, 1, ids(6)},
		{"one NUMA node", eight, ids(0, 1, 4, 5, 6, 7), nil, 4, ids(4, 5, 6, 7)},
		{"the smaller NUMA node, so that the other stays whole", eight, ids(0, 1, 2, 3, 6, 7), nil, 2, ids(6, 7)},
		{"the best connected pair", pairs(), ids(0, 1, 2, 3), nil, 2, ids(0, 3)},
		{"a link that only one side knows", pairs(), ids(0, 1, 3), ids(0), 2, ids(0, 3)},
		{"the second pair when the first is broken", pairs(), ids(0, 1, 2), nil, 2, ids(1, 2)},
		{"one that has no pair any more", pairs(), ids(0, 1, 2), nil, 1, ids(0)},
		{"two links before one", cube(), ids(0, 1, 2, 3, 4, 5, 6, 7), nil, 2, ids(0, 3)},
		{"four of the cube", cube(), ids(0, 1, 2, 3, 4, 5, 6, 7), nil, 4, ids(0, 1, 2, 3)},
		{"the better PCIe way", path, ids(0, 1, 2, 3), nil, 2, ids(0, 2)},
		{"required first", eight, ids(0, 1, 2, 6, 7), ids(6), 2, ids(6, 7)},
		{"required, and not available", eight, ids(0, 1), ids(6), 2, ids(6, 0)},
		{"healthy before degraded", with(eight, 0, health.Degraded), ids(0, 1, 4), nil, 2, ids(1, 4)},
		{"healthy before unknown", with(eight, 0, health.Unknown), ids(0, 1, 4), nil, 2, ids(1, 4)},
		{"degraded when there is no other", with(eight, 0, health.Degraded), ids(0, 1), nil, 2, ids(0, 1)},
		{"degraded before unhealthy", with(with(eight, 0, health.Unhealthy), 1, health.Degraded), ids(0, 1, 2), nil, 2, ids(1, 2)},
		{"known before unknown devices", eight, []string{"GPU-x", "GPU-7"}, nil, 1, ids(7)},
		{"more than there are", eight, ids(2, 1), nil, 5, ids(1, 2)},
		{"fewer than required", eight, ids(1, 2, 3), ids(3, 2), 1, ids(3)},
		{"none", eight, ids(1, 2), nil, 0, nil},
		{"less than none", eight, ids(1, 2), nil, -3, nil},
		{"from none", eight, nil, nil, 2, nil},
		{"duplicates", eight, ids(1, 1, 2, 2), ids(2, 2), 2, ids(2, 1)},
		{"without a snapshot", nil, ids(4, 2), nil, 1, ids(4)},
	} {
		r := whole(c.snap)
		got := prefer(newWiring(r), r, "", c.available, c.required, c.size)
		if !slices.Equal(got, c.want) {
			t.Errorf("%s: %v, want %v", c.name, got, c.want)
		}
	}
}

// joined is a machine of GPUs without links, all far from each other but for those given.
func joined(n int, numa map[int]int, links map[[2]int]health.Link) *health.Snapshot {
	s := snapshot(n)
	for i := range s.Devices {
		d := &s.Devices[i].Device
		d.NUMA, d.Links = nil, nil
		if node, known := numa[i]; known {
			d.NUMA = []int{node}
		}
		for pair, link := range links {
			if pair[0] == i {
				link.Peer = health.DeviceID(id(pair[1]))
				d.Links = append(d.Links, link)
			}
		}
	}
	return s
}

// TestScores pins what each kind of connection is worth. The order of sets of GPUs follows from sums of these, so another
// weight anywhere is another choice on some machine.
func TestScores(t *testing.T) {
	link := func(nvlinks int, path health.Path) map[[2]int]health.Link {
		return map[[2]int]health.Link{{0, 1}: {NVLinks: nvlinks, Path: path}}
	}
	near := map[int]int{0: 1, 1: 1}
	for _, c := range []struct {
		name  string
		numa  map[int]int
		links map[[2]int]health.Link
		want  int32
	}{
		{"nothing known", nil, nil, 0},
		{"one NUMA node", near, nil, 5},
		{"two NUMA nodes", map[int]int{0: 0, 1: 1}, nil, 0},
		{"Linux knows no node of either", map[int]int{0: -1, 1: -1}, nil, 0},
		{"of one no node is known", map[int]int{0: 0}, nil, 0},
		{"across sockets", nil, link(0, health.PathSystem), 10},
		{"across host bridges", near, link(0, health.PathNode), 25},
		{"one host bridge", near, link(0, health.PathHostBridge), 35},
		{"several switches", near, link(0, health.PathMultiSwitch), 45},
		{"one switch", near, link(0, health.PathSingleSwitch), 55},
		{"one board", near, link(0, health.PathBoard), 65},
		{"one NVLink", nil, link(1, health.PathUnknown), 100},
		{"18 NVLinks across sockets", nil, link(18, health.PathSystem), 1810},
		{"18 NVLinks, near", near, link(18, health.PathNode), 1825},
		{"as many as are believed", nil, link(64, health.PathUnknown), 6400},
		{"more than that", nil, link(1<<30, health.PathUnknown), 6400},
		{"less than none", nil, link(-1, health.PathUnknown), 0},
	} {
		score := newWiring(whole(joined(2, c.numa, c.links))).score
		if score[0][1] != c.want || score[1][0] != c.want || score[0][0] != 0 || score[1][1] != 0 {
			t.Errorf("%s: %v, want %d", c.name, score, c.want)
		}
	}
}

// TestPreferWeighsConnections chooses two or three GPUs that are connected in one way over those connected in another.
func TestPreferWeighsConnections(t *testing.T) {
	type links = map[[2]int]health.Link
	for _, c := range []struct {
		name  string
		numa  map[int]int
		links links
		n     int
		want  []string
	}{
		{"a NUMA node over nothing", map[int]int{2: 1, 3: 1}, nil, 4, ids(2, 3)},
		{"no NUMA node is none", map[int]int{0: -1, 1: -1, 2: 1, 3: 1}, nil, 4, ids(2, 3)},
		{"a better path over a NUMA node", map[int]int{0: 0, 1: 0}, links{{0, 1}: {Path: health.PathNode}, {2, 3}: {Path: health.PathHostBridge}}, 4, ids(2, 3)},
		{"an NVLink over the best path and a NUMA node", map[int]int{0: 0, 1: 0}, links{{0, 1}: {Path: health.PathBoard}, {2, 3}: {NVLinks: 1}}, 4, ids(2, 3)},
		{"18 NVLinks over 17", nil, links{{0, 1}: {NVLinks: 17}, {2, 3}: {NVLinks: 18}}, 4, ids(2, 3)},
		{"three near over a path across sockets", map[int]int{3: 1, 4: 1, 5: 1}, links{{0, 1}: {Path: health.PathSystem}}, 6, ids(3, 4, 5)},
		{"two such paths over three near", map[int]int{0: 1, 1: 1, 2: 1}, links{{3, 4}: {Path: health.PathSystem}, {4, 5}: {Path: health.PathSystem}}, 6, ids(3, 4, 5)},
	} {
		r := whole(joined(c.n, c.numa, c.links))
		if got := prefer(newWiring(r), r, "", all(r), nil, len(c.want)); !slices.Equal(got, c.want) {
			t.Errorf("%s: %v, want %v", c.name, got, c.want)
		}
	}
}

// replicas returns n replicas of each device of a resource.
func replicas(r Resource, n int) Resource {
	out := Resource{Name: r.Name}
	for _, d := range r.Devices {
		for i := range n {
			out.Devices = append(out.Devices, Device{ID: fmt.Sprintf("%s%s%d", d.ID, replicaSep, i), State: d.State})
		}
	}
	return out
}

// slices7 returns n GPUs cut in seven each.
func slices7(n int) Resource {
	var r Resource
	for i := range n {
		for gi := range 7 {
			r.Devices = append(r.Devices, Device{ID: fmt.Sprintf("MIG-%d-%d", i, gi), State: &health.DeviceState{
				Device: health.Device{
					ID: health.DeviceID(fmt.Sprintf("MIG-%d-%d", i, gi)), Parent: health.DeviceID(id(i)), Kind: health.KindMIG,
					Index: i, GI: gi, NUMA: []int{2 * i / n},
				},
				Verdict: health.Verdict{State: health.Healthy},
			}})
		}
	}
	return r
}

func all(r Resource) (out []string) {
	for _, d := range r.Devices {
		out = append(out, d.ID)
	}
	return out
}

// less returns what is available when some is in use.
func less(r Resource, used ...string) []string {
	return slices.DeleteFunc(all(r), func(id string) bool { return slices.Contains(used, id) })
}

func TestPreferShared(t *testing.T) {
	two := replicas(whole(snapshot(2)), 3)
	four := replicas(whole(snapshot(4)), 2)
	mig := slices7(2)
	both := replicas(slices7(1), 2)
	const spread, pack = AllocationDistributed, AllocationPacked
	for _, c := range []struct {
		name      string
		policy    string
		r         Resource
		available []string
		required  []string
		size      int
		want      []string
	}{
		{"from the GPU used least", spread, two, less(two, "GPU-0::0"), nil, 1, []string{"GPU-1::0"}},
		{"from the GPU used most", pack, two, less(two, "GPU-1::0"), nil, 1, []string{"GPU-1::1"}},
		{"the first GPU of an empty node", pack, two, all(two), nil, 1, []string{"GPU-0::0"}},
		{"no policy is distributed", "", two, less(two, "GPU-0::0"), nil, 1, []string{"GPU-1::0"}},
		{"two GPUs although packed", pack, two, less(two, "GPU-1::0"), nil, 2, []string{"GPU-0::0", "GPU-1::1"}},
		{"two GPUs although one is used more", spread, two, less(two, "GPU-1::0", "GPU-1::2"), nil, 2, []string{"GPU-0::0", "GPU-1::1"}},
		{"again only when all are taken", spread, two, all(two), nil, 3, []string{"GPU-0::0", "GPU-0::1", "GPU-1::0"}},
		{"required counts as taken", spread, two, all(two), []string{"GPU-0::2"}, 2, []string{"GPU-0::2", "GPU-1::0"}},
		{"healthy before degraded", spread, replicas(whole(with(snapshot(2), 0, health.Degraded)), 2), []string{"GPU-0::0", "GPU-1::1"}, nil, 1, []string{"GPU-1::1"}},
		{"degraded before a second one of the same", spread, replicas(whole(with(snapshot(2), 0, health.Degraded)), 2), []string{"GPU-0::0", "GPU-1::0", "GPU-1::1"}, nil, 2, []string{"GPU-0::0", "GPU-1::0"}},
		{"a second one before an unhealthy one", spread, replicas(whole(with(snapshot(2), 0, health.Unhealthy)), 2), []string{"GPU-0::0", "GPU-1::0", "GPU-1::1"}, nil, 2, []string{"GPU-1::0", "GPU-1::1"}},
		{"nobody knows it", spread, two, []string{"GPU-9::0", "GPU-8::0", "GPU-1::2"}, nil, 2, []string{"GPU-1::2", "GPU-9::0"}},
		{"near what is taken, among equals", spread, four, []string{"GPU-0::0", "GPU-1::0", "GPU-2::0", "GPU-3::0"}, []string{"GPU-2::0"}, 2, []string{"GPU-2::0", "GPU-3::0"}},
		{"MIG over the GPUs", spread, mig, all(mig), nil, 4, []string{"MIG-0-0", "MIG-0-1", "MIG-1-0", "MIG-1-1"}},
		{"MIG from one GPU", pack, mig, less(mig, "MIG-1-0"), nil, 4, []string{"MIG-1-1", "MIG-1-2", "MIG-1-3", "MIG-1-4"}},
		{"MIG from the next GPU when one is full", pack, mig, less(mig, all(mig)[8:]...), nil, 2, []string{"MIG-0-0", "MIG-1-0"}},
		{"replicas of MIG: not the same twice", pack, both, less(both, "MIG-0-3::0"), nil, 2, []string{"MIG-0-0::0", "MIG-0-3::1"}},
		{"replicas of MIG: the one used least", spread, both, less(both, "MIG-0-0::0"), nil, 1, []string{"MIG-0-1::0"}},
	} {
		got := prefer(newWiring(c.r), c.r, c.policy, c.available, c.required, c.size)
		if !slices.Equal(got, c.want) {
			t.Errorf("%s: %v, want %v", c.name, got, c.want)
		}
	}
}
