package plugin

import (
	"crypto/sha256"
	"fmt"
	"math/bits"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"github.com/gpu-node-agent/gpu-node-agent/health"
)

// unique returns ids without repetitions, each where it came first.
func unique(ids []string) (out []string) {
	for _, id := range ids {
		if !slices.Contains(out, id) {
			out = append(out, id)
		}
	}
	return out
}

// checkPrefer checks what must hold for every question.
func checkPrefer(t *testing.T, r Resource, policy string, available, required []string, size int) {
	t.Helper()
	top := newWiring(r)
	got := prefer(top, r, policy, available, required, size)
	pool := unique(slices.Concat(required, available))
	if want := max(0, min(size, len(pool))); len(got) != want {
		t.Fatalf("%d devices, want %d: %v of %v with %v", len(got), want, got, available, required)
	}
	if len(unique(got)) != len(got) {
		t.Fatalf("a device twice: %v", got)
	}
	for _, id := range got {
		if !slices.Contains(pool, id) {
			t.Fatalf("%s was not available", id)
		}
	}
	if musts := unique(required); size >= len(musts) {
		for _, id := range musts {
			if !slices.Contains(got, id) {
				t.Fatalf("%s is missing in %v", id, got)
			}
		}
	}
	if again := prefer(top, r, policy, available, required, size); !slices.Equal(got, again) {
		t.Fatalf("%v, and then %v", got, again)
	}
	if len(got) < len(pool) && size > len(unique(required)) && top.shared {
		checkShared(t, r, pool, required, got)
	}
}

// checkShared checks that no device was taken twice by choice while another one was free.
func checkShared(t *testing.T, r Resource, pool, required, got []string) {
	t.Helper()
	taken := map[health.DeviceID]int{}
	for _, id := range got {
		if _, known := r.device(id); known {
			taken[deviceOf(id)]++
		}
	}
	var twice []string // a device that was taken again though nothing required that
	for _, id := range got {
		if !slices.Contains(required, id) && taken[deviceOf(id)] > 1 {
			twice = append(twice, id)
		}
	}
	for _, id := range pool {
		d, known := r.device(id)
		if known && rank(d.State.Verdict.State) < rankUnhealthy && taken[deviceOf(id)] == 0 && len(twice) > 0 {
			t.Fatalf("%v while %s was free: %v of %v with %v", twice, id, got, pool, required)
		}
	}
}

func randomResource(r *rand.Rand, n int) Resource {
	s := snapshot(n)
	for i := range s.Devices {
		d := &s.Devices[i].Device
		s.Devices[i].Verdict.State = health.State(r.IntN(5))
		d.NUMA = nil
		for range r.IntN(3) {
			d.NUMA = append(d.NUMA, r.IntN(4)-1)
		}
		d.Links = nil
		for range r.IntN(n + 2) {
			d.Links = append(d.Links, health.Link{
				Peer: health.DeviceID(id(r.IntN(n + 1))), NVLinks: r.IntN(40) - 10, Path: health.Path(r.IntN(9)),
			})
		}
	}
	return whole(s)
}

// bruteForce looks at every set and keeps the best: the least ill, then the best connected, then the one
// that leaves the best connected others, then the first.
func bruteForce(r Resource, pool []Device, required, size int) []string {
	top := newWiring(r)
	sum := func(set uint) (total int32) {
		for i := range pool {
			for j := range i {
				if set>>i&1 == 1 && set>>j&1 == 1 {
					total += top.score[top.gpu[top.place(pool[i].ID)]][top.gpu[top.place(pool[j].ID)]]
				}
			}
		}
		return total
	}
	ill := func(set uint) (total int) {
		for i, d := range pool {
			if set>>i&1 == 1 {
				total += rank(d.State.Verdict.State)
			}
		}
		return total
	}
	places := func(set uint) (at []int) {
		for i, d := range pool {
			if set>>i&1 == 1 {
				at = append(at, top.place(d.ID))
			}
		}
		slices.Sort(at)
		return at
	}
	var best uint
	for set := range uint(1) << len(pool) {
		if bits.OnesCount(set) != size || bits.TrailingZeros(^set) < required {
			continue
		}
		if best == 0 {
			best = set
			continue
		}
		every := uint(1)<<len(pool) - 1
		better := ill(best) - ill(set)
		if better == 0 {
			better = int(sum(set) - sum(best))
		}
		if better == 0 {
			better = int(sum(every&^set) - sum(every&^best))
		}
		if better == 0 {
			better = slices.Compare(places(best), places(set))
		}
		if better > 0 {
			best = set
		}
	}
	var out []string
	for _, at := range places(best) {
		out = append(out, r.Devices[at].ID)
	}
	return out
}

func TestPreferIsTheBest(t *testing.T) {
	r := rand.New(rand.NewPCG(3, 4))
	for range 300 {
		n := 2 + r.IntN(9)
		res := randomResource(r, n)
		pool := slices.Clone(res.Devices)
		r.Shuffle(n, func(i, j int) { pool[i], pool[j] = pool[j], pool[i] })
		pool = pool[:1+r.IntN(n)]
		required := r.IntN(len(pool))
		size := min(required+1+r.IntN(n), len(pool))
		available := all(Resource{Devices: pool})
		got := prefer(newWiring(res), res, "", available, available[:required], size)
		want := bruteForce(res, pool, required, size)
		if slices.Sort(got); !slices.Equal(got, slices.Sorted(slices.Values(want))) {
			t.Fatalf("%v, want %v of %v with %d required", got, want, available, required)
		}
	}
}

// What is too much to solve exactly is solved nearly as well.
func TestPreferApproximately(t *testing.T) {
	r := rand.New(rand.NewPCG(5, 6))
	for range 30 {
		const n = 14
		p := newProblem(n, 1+r.IntN(n-1))
		for i := range n {
			for j := range i {
				p.score[i][j] = int32(r.IntN(3) * 100)
				p.score[j][i] = p.score[i][j]
				p.loss[i] += p.score[i][j]
				p.loss[j] += p.score[i][j]
			}
		}
		worth := func(set []int) (w int32) {
			for a, i := range set {
				for _, j := range set[:a] {
					w += p.score[i][j]
				}
			}
			return w
		}
		exact, near := worth(p.solve()), worth(p.approximate())
		if near > exact || near < exact*95/100 {
			t.Errorf("%d of %d: %d, the best is %d", p.k, n, near, exact)
		}
	}
	// Islands of four, with numbers that say nothing of them.
	s := snapshot(32)
	for i := range s.Devices {
		d := &s.Devices[i].Device
		d.NUMA, d.Links = nil, nil
		for j := range s.Devices {
			if i != j && i%8 == j%8 {
				d.Links = append(d.Links, health.Link{Peer: health.DeviceID(id(j)), NVLinks: 4})
			}
		}
	}
	res := whole(s)
	got := prefer(newWiring(res), res, "", less(res, id(0), id(1), id(9)), nil, 4)
	if want := ids(2, 10, 18, 26); !slices.Equal(got, want) {
		t.Errorf("%v, want the island %v", got, want)
	}
}

func TestPreferAnything(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	for range 500 {
		n := 1 + r.IntN(20)
		res := randomResource(r, n)
		if r.IntN(2) == 0 {
			res = replicas(res, 1+r.IntN(4))
		}
		some := func() (out []string) {
			for range r.IntN(2 * n) {
				if r.IntN(10) == 0 {
					out = append(out, id(r.IntN(n+2)))
				} else {
					out = append(out, res.Devices[r.IntN(len(res.Devices))].ID)
				}
			}
			return out
		}
		policy := []string{"", AllocationDistributed, AllocationPacked}[r.IntN(3)]
		checkPrefer(t, res, policy, some(), nil, r.IntN(n+6)-3)
		checkPrefer(t, res, policy, some(), some(), r.IntN(n+6)-3)
	}
	for _, n := range []int{17, 100, 200} {
		res := randomResource(r, n)
		checkPrefer(t, res, "", all(res), nil, n/2)
		checkPrefer(t, replicas(res, 3), "", all(replicas(res, 3)), nil, n/2)
	}
}

func FuzzPrefer(f *testing.F) {
	f.Add(uint64(1), []byte{0, 1, 2, 3}, []byte{2}, 2)
	f.Add(uint64(2), []byte{}, []byte{9, 9}, -1)
	f.Add(uint64(3), []byte{7, 7, 200}, []byte{}, 1<<31)
	f.Add(uint64(56), []byte("$ "), []byte("1780"), 5) // a GPU that is required, and laid out in replicas by now
	f.Fuzz(func(t *testing.T, seed uint64, available, required []byte, size int) {
		r := rand.New(rand.NewPCG(seed, 0))
		res := randomResource(r, 1+r.IntN(24))
		if n := r.IntN(4); n > 0 {
			res = replicas(res, n)
		}
		some := func(from []byte) (to []string) {
			for _, b := range from[:min(len(from), 64)] {
				if n := int(b); n < len(res.Devices) {
					to = append(to, res.Devices[n].ID)
				} else {
					to = append(to, id(n%32))
				}
			}
			return to
		}
		checkPrefer(t, res, []string{AllocationDistributed, AllocationPacked}[seed%2], some(available), some(required), size)
	})
}

func TestWiringIsKept(t *testing.T) {
	var kept wirings
	snap := snapshot(4)
	first := kept.get(whole(snap))
	links := with(snap, 1, health.Healthy)
	links.Devices[1].Device.Links = slices.Clone(links.Devices[1].Device.Links)
	if kept.get(whole(with(links, 0, health.Degraded))) != first {
		t.Error("made anew although only health has changed")
	}
	links.Devices[1].Device.Links[0].NVLinks--
	second := kept.get(whole(links))
	if second == first {
		t.Error("kept although a link has changed")
	}
	if kept.get(whole(snapshot(5))) == second {
		t.Error("kept although there is another GPU")
	}
}

// asked returns ids as the kubelet does: in no order, and as texts of its own.
func asked(r Resource) []string {
	ids := all(r)
	for i, id := range ids {
		ids[i] = strings.Clone(id)
	}
	rand.New(rand.NewPCG(7, 8)).Shuffle(len(ids), func(i, j int) { ids[i], ids[j] = ids[j], ids[i] })
	return ids
}

// named gives devices names as long as real ones.
func named(r Resource) Resource {
	uuid := func(id health.DeviceID) health.DeviceID {
		if id == "" {
			return ""
		}
		kind, number, _ := strings.Cut(string(id), "-")
		sum := sha256.Sum256([]byte(number))
		return health.DeviceID(fmt.Sprintf("%s-%x-%x-%x-%x-%x", kind, sum[:4], sum[4:6], sum[6:8], sum[8:10], sum[10:16]))
	}
	out := Resource{Name: r.Name}
	for _, d := range r.Devices {
		state := *d.State
		state.Device.ID, state.Device.Parent = uuid(state.Device.ID), uuid(state.Device.Parent)
		state.Device.Links = slices.Clone(state.Device.Links)
		for i := range state.Device.Links {
			state.Device.Links[i].Peer = uuid(state.Device.Links[i].Peer)
		}
		out.Devices = append(out.Devices, Device{ID: string(state.Device.ID), State: &state})
	}
	return out
}

// BenchmarkPrefer has what real machines ask, and then what none does: each under a millisecond.
func BenchmarkPrefer(b *testing.B) {
	gpus := func(n int) Resource { return named(whole(snapshot(n))) }
	mig := func(n int) Resource { return named(slices7(n)) }
	mixed := func(n int) Resource { // healthy, and no two connected alike
		r := randomResource(rand.New(rand.NewPCG(7, 8)), n)
		for _, d := range r.Devices {
			d.State.Verdict.State = health.Healthy
		}
		return r
	}
	const half = -1 // of the devices are asked for
	for _, c := range []struct {
		name       string
		r          Resource
		must, size int
	}{
		{"8", gpus(8), 0, 4},
		{"16", gpus(16), 0, 8},
		{"16-mixed", mixed(16), 0, 8}, // what leaves the most sets to look at
		{"17", gpus(17), 0, 8},        // the first that is not looked at exactly
		{"32", gpus(32), 0, half},
		{"64", gpus(64), 0, half},
		{"128", gpus(128), 0, half},
		{"128-all-but-one", gpus(128), 0, 127},
		{"128-must-64", gpus(128), 64, 96},
		{"1000", gpus(1000), 0, half},
		{"8x10", replicas(gpus(8), 10), 0, 4},
		{"8x7MIG", mig(8), 0, 4},
		{"16x7x10", replicas(mig(16), 10), 0, 16},
		{"32x7x10", replicas(mig(32), 10), 0, 4},
		{"32x7x10-half", replicas(mig(32), 10), 0, half},
		{"32x7x10-must", replicas(mig(32), 10), 1000, half},
		{"128x7", mig(128), 0, half},
		{"8x1000", replicas(gpus(8), 1000), 0, 4},
		{"8x1000-half", replicas(gpus(8), 1000), 0, half},
		{"8x1000-must", replicas(gpus(8), 1000), 3000, half},
		{"16x1000", replicas(gpus(16), 1000), 0, 4},
	} {
		b.Run(c.name, func(b *testing.B) {
			var kept wirings
			available, size := asked(c.r), c.size
			if size == half {
				size = len(available) / 2
			}
			b.ReportAllocs()
			for b.Loop() {
				prefer(kept.get(c.r), c.r, AllocationDistributed, available, available[:c.must], size)
			}
		})
	}
}

// BenchmarkGetPreferredAllocation is the same as the kubelet sees it: the first call after a snapshot, which makes
// the layout if no stream has made it yet, and those that follow.
func BenchmarkGetPreferredAllocation(b *testing.B) {
	for _, replicas := range []int{0, 10, 1000, -10, -1000} {
		name, again := "first", false
		if replicas < 0 {
			name, again, replicas = "again", true, -replicas
		}
		b.Run(fmt.Sprintf("8x%d-%s", replicas, name), func(b *testing.B) {
			cfg := DefaultConfig()
			if replicas > 0 {
				cfg.Sharing.TimeSlicing.Resources = []SharedResource{{Name: gpu, Replicas: replicas}}
			}
			snap := snapshot(8)
			var latest health.Latest[Config]
			var snaps health.Latest[health.Snapshot]
			latest.Store(&cfg)
			snaps.Store(snap)
			s := serverOf(gpu, &latest, &snaps)
			req := &pluginapi.PreferredAllocationRequest{ContainerRequests: []*pluginapi.ContainerPreferredAllocationRequest{
				{AvailableDeviceIDs: asked(s.resource()), AllocationSize: 4},
			}}
			b.ReportAllocs()
			for i := 0; b.Loop(); i++ {
				if !again {
					snaps.Store(with(snap, 0, []health.State{health.Healthy, health.Degraded}[i%2]))
				}
				if _, err := s.GetPreferredAllocation(b.Context(), req); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

func BenchmarkWiring16(b *testing.B) {
	r := whole(snapshot(16))
	for b.Loop() {
		newWiring(r)
	}
}
