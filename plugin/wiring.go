package plugin

import (
	"slices"
	"strings"
	"sync"

	"github.com/gpu-node-agent/gpu-node-agent/health"
)

// wiring is where the devices of a resource lie and how well their GPUs are connected. It is not
// modified once made.
type wiring struct {
	of     []Device       // what it was made from
	stems  map[string]int // by id without the number of a replica: its number in ids
	ids    [][]int32      // by that, and by the number of the replica: one more than its place in of, 0 if there is none
	device []int          // by place: the device behind the id, replicas of one have one number
	parts  [][]int        // by device: its places, in their order
	gpu    []int          // by place: the GPU that the device is, or is a part of
	units  []int          // by GPU: how many ids it has
	score  [][]int32      // by GPU and GPU: how well connected, the same both ways; nil if there are too many
	shared bool           // some id is a replica or a MIG device
}

// maxConnected bounds the GPUs whose connections are looked at: the matrix grows with its square. The
// largest machine has 16; beyond the bound health and order decide.
const maxConnected = 128

func newWiring(r Resource) *wiring {
	n := len(r.Devices)
	t := &wiring{of: r.Devices, stems: make(map[string]int), device: make([]int, n), gpu: make([]int, n)}
	devices, gpus := make(map[health.DeviceID]int), make(map[health.DeviceID]int)
	var first []*health.DeviceState // by GPU: the first device of it
	for i, d := range r.Devices {
		self := &d.State.Device
		t.add(d.ID, i)
		t.device[i] = number(devices, self.ID)
		if t.device[i] == len(t.parts) {
			t.parts = append(t.parts, nil)
		}
		t.parts[t.device[i]] = append(t.parts[t.device[i]], i)
		t.gpu[i] = number(gpus, gpuOf(self))
		if t.gpu[i] == len(first) {
			first, t.units = append(first, d.State), append(t.units, 0)
		}
		t.units[t.gpu[i]]++
		t.shared = t.shared || self.Kind == health.KindMIG || d.ID != string(self.ID)
	}
	if len(first) <= maxConnected {
		t.score = scores(first, gpus)
	}
	return t
}

// add notes the place of an id.
func (t *wiring) add(id string, place int) {
	stem, replica := cutReplica(id)
	n := number(t.stems, stem)
	if n == len(t.ids) {
		t.ids = append(t.ids, nil)
	}
	if missing := replica + 1 - len(t.ids[n]); missing > 0 {
		t.ids[n] = append(t.ids[n], make([]int32, missing)...)
	}
	t.ids[n][replica] = int32(place) + 1
}

// place returns where an id is in the layout, -1 if it is not there.
func (t *wiring) place(id string) int {
	stem, replica := cutReplica(id)
	n, known := t.stems[stem]
	if !known || replica >= len(t.ids[n]) {
		return -1
	}
	return int(t.ids[n][replica]) - 1
}

// cutReplica parts the number of a replica from an id, counted from 1. What does not end as replicaIDs writes it
// is whole, and its number 0: no two ids come to the same.
func cutReplica(id string) (stem string, replica int) {
	const digits = 4 // no more than maxReplicas has
	i, scale := len(id), 1
	for ; i > 0 && id[i-1] >= '0' && id[i-1] <= '9' && len(id)-i <= digits; i-- {
		replica += int(id[i-1]-'0') * scale
		scale *= 10
	}
	n := len(id) - i
	if n == 0 || n > digits || n > 1 && id[i] == '0' || !strings.HasSuffix(id[:i], replicaSep) {
		return id, 0
	}
	return id[:i-len(replicaSep)], replica + 1
}

// number returns the number of an id, the next one if it is new.
func number[ID ~string](of map[ID]int, id ID) int {
	n, known := of[id]
	if !known {
		n = len(of)
		of[id] = n
	}
	return n
}

// What a connection is worth. One NVLink beats every way over PCIe, a better way over PCIe beats a
// common NUMA node.
const (
	worthNVLink = 100
	worthPath   = 10
	worthNUMA   = 5
	maxNVLinks  = 64 // of one pair; real ones have 18
)

func worth(l health.Link) int32 {
	return int32(min(max(0, l.NVLinks), maxNVLinks))*worthNVLink + int32(l.Path)*worthPath
}

// scores returns how well each two GPUs are connected. A link that is missing is worth nothing; where
// the two sides of a link disagree, or one says nothing, the better one counts.
func scores(gpus []*health.DeviceState, numbers map[health.DeviceID]int) [][]int32 {
	n := len(gpus)
	score, cells := make([][]int32, n), make([]int32, n*n)
	for i := range score {
		score[i], cells = cells[:n], cells[n:]
	}
	for i, g := range gpus {
		for _, link := range g.Device.Links {
			if j, known := numbers[link.Peer]; known && i != j {
				score[i][j] = max(score[i][j], worth(link))
				score[j][i] = score[i][j]
			}
		}
	}
	for i := range gpus {
		for j := range i {
			if sameNUMA(gpus[i].Device.NUMA, gpus[j].Device.NUMA) {
				score[i][j] += worthNUMA
				score[j][i] += worthNUMA
			}
		}
	}
	return score
}

func sameNUMA(a, b []int) bool {
	return slices.ContainsFunc(a, func(n int) bool { return n >= 0 && slices.Contains(b, n) })
}

// fits reports whether a resource has the same devices, in the same places and with the same
// connections. Their health may differ.
func (t *wiring) fits(r Resource) bool {
	if len(t.of) != len(r.Devices) {
		return false
	}
	var before struct{ old, now *health.DeviceState } // replicas of one device are side by side
	for i := range t.of {
		old, now := &t.of[i], &r.Devices[i]
		if old.ID != now.ID {
			return false
		}
		if old.State == now.State || old.State == before.old && now.State == before.now {
			continue
		}
		x, y := &old.State.Device, &now.State.Device
		if x.ID != y.ID || x.Parent != y.Parent || x.Kind != y.Kind || !slices.Equal(x.NUMA, y.NUMA) || !slices.Equal(x.Links, y.Links) {
			return false
		}
		before.old, before.now = old.State, now.State
	}
	return true
}

// wirings keeps the wiring of one resource from call to call: it changes only with the inventory,
// while there is a snapshot every second.
type wirings struct {
	mu     sync.Mutex // guards everything below
	newest *wiring
	fitted []Device // what newest was last found to fit
}

func (c *wirings) get(r Resource) *wiring {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.newest != nil && len(r.Devices) > 0 && len(r.Devices) == len(c.fitted) && &r.Devices[0] == &c.fitted[0] {
		return c.newest
	}
	if c.newest == nil || !c.newest.fits(r) {
		c.newest = newWiring(r)
	}
	c.fitted = r.Devices
	return c.newest
}
