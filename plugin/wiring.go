package plugin

import (
	"slices"
	"sync"

	"github.com/gpu-node-agent/gpu-node-agent/health"
)

// wiring is where the devices of a resource lie and how well their GPUs are connected. It is not
// modified once made.
type wiring struct {
	of     []Device       // what it was made from
	at     map[string]int // the place of each id in of
	device []int          // by place: the device behind the id, replicas of one have one number
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
	t := &wiring{of: r.Devices, at: make(map[string]int, n), device: make([]int, n), gpu: make([]int, n)}
	devices, gpus := make(map[health.DeviceID]int), make(map[health.DeviceID]int)
	var first []*health.DeviceState // by GPU: the first device of it
	for i, d := range r.Devices {
		self := d.State.Device
		t.at[d.ID] = i
		t.device[i] = number(devices, self.ID)
		if self.Parent != "" {
			t.gpu[i] = number(gpus, self.Parent)
		} else {
			t.gpu[i] = number(gpus, self.ID)
		}
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

// number returns the number of an id, the next one if it is new.
func number(of map[health.DeviceID]int, id health.DeviceID) int {
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

// between returns how well two GPUs are connected, where a negative number is a GPU that nobody knows.
func (t *wiring) between(a, b int) int32 {
	if a < 0 || b < 0 || t.score == nil {
		return 0
	}
	return t.score[a][b]
}

// fits reports whether a resource has the same devices, in the same places and with the same
// connections. Their health may differ.
func (t *wiring) fits(r Resource) bool {
	return slices.EqualFunc(t.of, r.Devices, func(a, b Device) bool {
		x, y := &a.State.Device, &b.State.Device
		return x == y || a.ID == b.ID && x.ID == y.ID && x.Parent == y.Parent && x.Kind == y.Kind &&
			slices.Equal(x.NUMA, y.NUMA) && slices.Equal(x.Links, y.Links)
	})
}

// wirings keeps the wiring of one resource from call to call: it changes only with the inventory,
// while there is a snapshot every second.
type wirings struct {
	mu     sync.Mutex // guards newest
	newest *wiring
}

func (c *wirings) get(r Resource) *wiring {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.newest == nil || !c.newest.fits(r) {
		c.newest = newWiring(r)
	}
	return c.newest
}
