package prefer

import (
	"cmp"
	"math/bits"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/deviceid"
)

// unique returns ids without duplicates, each at its first position.
func unique(ids []string) (out []string) {
	for _, id := range ids {
		if !slices.Contains(out, id) {
			out = append(out, id)
		}
	}
	return out
}

// checkChoose checks the invariants of every answer.
func checkChoose(t *testing.T, devices []Device, r Request) {
	t.Helper()
	var a Allocator
	got := a.Choose(devices, r)
	required, pool := unique(r.Required), unique(slices.Concat(r.Required, r.Available))
	if want := max(0, min(r.Size, len(pool))); len(got) != want || len(unique(got)) != want {
		t.Fatalf("got %v, want %d different IDs for %+v", got, want, r)
	}
	for _, id := range got {
		if !slices.Contains(pool, id) {
			t.Fatalf("%s was not available", id)
		}
	}
	if r.Size >= len(required) {
		for _, id := range required {
			if !slices.Contains(got, id) {
				t.Fatalf("%s is missing in %v", id, got)
			}
		}
	}
	if again := a.Choose(devices, r); !slices.Equal(got, again) {
		t.Fatalf("first %v, then %v", got, again)
	}
	switch {
	case len(got) == len(pool) || r.Size <= len(required):
	case slices.ContainsFunc(devices, func(d Device) bool { return d.Alone }):
		checkAlone(t, devices, r, got)
	case a.topology.shared:
		checkShared(t, devices, r, got)
	}
}

// checkAlone checks that all IDs were chosen from one device that is Alone, or from the others, if one of these has enough; and
// that no group was better.
func checkAlone(t *testing.T, devices []Device, r Request, got []string) {
	t.Helper()
	type key struct{ rank, free, first int } // a smaller one is better; of others free and first are -1
	groupOf, rankOf := owners(devices), map[string]int{}
	for id, d := range groupOf {
		rankOf[id] = healthRank(devices[d].State.Verdict.State)
		if !devices[d].Alone {
			groupOf[id] = others
		}
	}
	required, available := map[int]bool{}, map[int][]int{} // groups, and the ranks of their IDs
	known, size := 0, r.Size-len(unique(r.Required))
	for _, id := range unique(slices.Concat(r.Required, r.Available)) {
		group, exists := groupOf[id]
		switch {
		case !exists:
		case slices.Contains(r.Required, id):
			required[group] = true
		default:
			known++
			available[group] = append(available[group], rankOf[id])
		}
	}
	if known <= size {
		return // all of them are taken
	}
	chosen := slices.DeleteFunc(slices.Clone(got), func(id string) bool { return slices.Contains(r.Required, id) })
	if size == 1 && len(required) == 0 && !r.BestFit {
		checkHealthiest(t, rankOf, chosen[0], r)
		return
	}
	best, bestKey := -2, key{}
	for group, ranks := range available {
		if len(ranks) < size || len(required) > 1 || len(required) == 1 && !required[group] {
			continue
		}
		slices.Sort(ranks)
		k := key{ranks[size-1], len(ranks), group}
		if group == others {
			k.free = -1
		}
		if best == -2 || slices.Compare([]int{k.rank, k.free, k.first}, []int{bestKey.rank, bestKey.free, bestKey.first}) < 0 {
			best, bestKey = group, k
		}
	}
	for _, id := range chosen {
		if best != -2 && groupOf[id] != best {
			t.Fatalf("%v, want IDs of %s only, for %+v", got, devices[max(0, best)].State.Device.ID, r)
		}
	}
}

// checkHealthiest checks that no available ID has a better health than the chosen one.
func checkHealthiest(t *testing.T, rankOf map[string]int, chosen string, r Request) {
	t.Helper()
	for id, rank := range rankOf {
		if rank < rankOf[chosen] && slices.Contains(r.Available, id) {
			t.Fatalf("%s was chosen, %s is healthier, for %+v", chosen, id, r)
		}
	}
}

// checkShared checks that no device was chosen again while another was free.
func checkShared(t *testing.T, devices []Device, r Request, got []string) {
	t.Helper()
	state := map[string]*health.DeviceState{} // by ID
	for id, d := range owners(devices) {
		state[id] = devices[d].State
	}
	taken := map[*health.DeviceState]int{}
	for _, id := range got {
		if s := state[id]; s != nil {
			taken[s]++
		}
	}
	again := slices.IndexFunc(got, func(id string) bool { return !slices.Contains(r.Required, id) && taken[state[id]] > 1 })
	if again < 0 {
		return
	}
	for _, id := range slices.Concat(r.Required, r.Available) {
		if s := state[id]; s != nil && healthRank(s.Verdict.State) < rankUnhealthy && taken[s] == 0 {
			t.Fatalf("%s shares a device while %s was free: %v for %+v", got[again], id, got, r)
		}
	}
}

// randomGPUs returns GPUs with random health, NUMA nodes and links.
func randomGPUs(r *rand.Rand, n int) []Device {
	devices := gpus(n)
	for i, d := range devices {
		d.State.Verdict.State = health.State(r.IntN(5))
		for range r.IntN(3) {
			d.State.Device.NUMA = append(d.State.Device.NUMA, r.IntN(4)-1)
		}
		for range r.IntN(n + 2) {
			connect(devices, i, r.IntN(n+1), link(r.IntN(40)-10, health.Path(r.IntN(9))))
		}
	}
	return devices
}

// candidates is a pool of devices of which sets are compared. A set has a bit for each device of the pool.
type candidates struct {
	top  *topology
	pool []Device
}

// indexes returns the positions of a set in the topology, sorted.
func (c *candidates) indexes(set uint) (sorted []int) {
	for i := range c.pool {
		if set>>i&1 == 1 {
			sorted = append(sorted, c.top.number[c.pool[i].State.Device.ID])
		}
	}
	slices.Sort(sorted)
	return sorted
}

func (c *candidates) connections(set uint) (total int32) {
	indexes := c.indexes(set)
	for n, i := range indexes {
		for _, j := range indexes[:n] {
			total += c.top.score[c.top.gpu[i]][c.top.gpu[j]]
		}
	}
	return total
}

func (c *candidates) ranks(set uint) (total int) {
	for i, d := range c.pool {
		if set>>i&1 == 1 {
			total += healthRank(d.State.Verdict.State)
		}
	}
	return total
}

// better reports whether set a is preferred to b: its health is better, else it is connected better, else it leaves a better connected
// rest, else it comes first.
func (c *candidates) better(a, b uint) bool {
	every := uint(1)<<len(c.pool) - 1
	return cmp.Or(
		c.ranks(b)-c.ranks(a), int(c.connections(a)-c.connections(b)), int(c.connections(every&^a)-c.connections(every&^b)),
		slices.Compare(c.indexes(b), c.indexes(a)),
	) > 0
}

// bruteForce examines every set of the pool, which begins with the required IDs, and returns the best.
func bruteForce(devices, pool []Device, required, size int) []string {
	c := &candidates{newTopology(devices), pool}
	best := uint(0)
	for set := range uint(1) << len(pool) {
		if bits.OnesCount(set) != size || bits.TrailingZeros(^set) < required {
			continue
		}
		if best == 0 || c.better(set, best) {
			best = set
		}
	}
	var out []string
	for _, i := range c.indexes(best) {
		out = append(out, string(devices[i].State.Device.ID))
	}
	return out
}

func TestChooseEqualsBruteForce(t *testing.T) {
	r := rand.New(rand.NewPCG(3, 4))
	for range 300 {
		n := 2 + r.IntN(9)
		devices := randomGPUs(r, n)
		pool := slices.Clone(devices)
		r.Shuffle(n, func(i, j int) { pool[i], pool[j] = pool[j], pool[i] })
		pool = pool[:1+r.IntN(n)]
		required := r.IntN(len(pool))
		size := min(required+1+r.IntN(n), len(pool))
		available := all(pool)
		got := choose(devices, Request{Available: available, Required: available[:required], Size: size})
		slices.Sort(got)
		if want := bruteForce(devices, pool, required, size); !slices.Equal(got, slices.Sorted(slices.Values(want))) {
			t.Fatalf("%v, want %v of %v with %d required", got, want, available, required)
		}
	}
}

// markAlone marks the devices whose bit is set.
func markAlone(devices []Device, bits uint32) {
	for i := range devices {
		devices[i].Alone = bits>>(i%32)&1 == 1
	}
}

// Devices of different sizes and health, some of them Alone, and requests of all sizes.
func TestChooseAloneEqualsBruteForce(t *testing.T) {
	r := rand.New(rand.NewPCG(9, 10))
	for range 3000 {
		var devices []Device
		for i, d := range randomGPUs(r, 1+r.IntN(5)) {
			d.Alone = i%3 != 0 || r.IntN(3) > 0
			d.Form, d.Units = deviceid.Form{Kind: deviceid.Replica}, 1+r.IntN(8)
			devices = append(devices, d)
		}
		available := all(devices)
		r.Shuffle(len(available), func(i, j int) { available[i], available[j] = available[j], available[i] })
		available = available[:r.IntN(len(available)+1)]
		required := r.IntN(min(3, len(available)+1))
		checkChoose(t, devices, Request{
			Available: available, Required: available[:required], Size: r.IntN(10), Packed: r.IntN(2) == 0, BestFit: r.IntN(2) == 0,
		})
	}
}

func TestChooseOfManyGPUs(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	for _, n := range []int{100, 200} {
		devices := randomGPUs(r, n)
		checkChoose(t, devices, Request{Available: all(devices), Size: n / 2})
		checkChoose(t, replicas(devices, 3), Request{Available: all(replicas(devices, 3)), Size: n / 2})
	}
}

func FuzzChoose(f *testing.F) {
	for seed := range uint64(1000) {
		r := rand.New(rand.NewPCG(seed, 1))
		bytes := func(n int) []byte {
			b := make([]byte, r.IntN(n))
			for i := range b {
				b[i] = byte(r.IntN(64))
			}
			return b
		}
		f.Add(seed, bytes(40), bytes(16), r.IntN(26)-3)
	}
	f.Add(uint64(1), []byte{0, 1, 2, 3}, []byte{2}, 2)
	f.Add(uint64(2), []byte{}, []byte{9, 9}, -1)
	f.Add(uint64(3), []byte{7, 7, 200}, []byte{}, 1<<31)
	f.Add(uint64(56), []byte("$ "), []byte("1780"), 5) // a required GPU that is now laid out in replicas
	f.Fuzz(func(t *testing.T, seed uint64, available, required []byte, size int) {
		r := rand.New(rand.NewPCG(seed, 0))
		devices := randomGPUs(r, 1+r.IntN(24))
		if n := r.IntN(4); n > 0 {
			devices = replicas(devices, n)
			if seed%5 == 0 {
				markAlone(devices, r.Uint32())
			}
		}
		units := all(devices)
		idsOf := func(from []byte) (to []string) {
			for _, b := range from[:min(len(from), 64)] {
				if n := int(b); n < len(units) {
					to = append(to, units[n])
				} else {
					to = append(to, id(n%32))
				}
			}
			return to
		}
		checkChoose(t, devices, Request{
			Available: idsOf(available), Required: idsOf(required), Size: size, Packed: seed%2 == 1,
			BestFit: seed%4 >= 2,
		})
	})
}
