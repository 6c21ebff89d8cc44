package prefer

import (
	"slices"

	"github.com/gpu-node-agent/gpu-node-agent/health"
)

// The scores. Those of a pair of GPUs add up: one NVLink outweighs every PCIe path, and one step of the path outweighs a
// common NUMA node.
const (
	scoreNVLink = 100 // for each NVLink
	scorePath   = 10  // for each step of health.Path, of which there are 6
	scoreNUMA   = 5   // for a common NUMA node
	maxNVLinks  = 64  // counted for one pair; an H100 has 18

	rankHealthy   = 0
	rankUnknown   = 1
	rankDegraded  = 2
	rankUnhealthy = 3 // Allocate refuses these
)

func healthRank(s health.State) int {
	switch s {
	case health.Healthy:
		return rankHealthy
	case health.Unknown:
		return rankUnknown
	case health.Degraded:
		return rankDegraded
	default:
		return rankUnhealthy
	}
}

// topology maps the IDs of a layout to devices and GPUs, and scores the connections of the GPUs. It is immutable.
type topology struct {
	layout []Device       // that it describes
	index  map[string]int // of an ID in the layout
	device []int          // by ID
	gpu    []int          // by ID: the GPU, or the parent of the MIG device
	ids    [][]int        // by device, ascending
	gpus   int            // their number
	score  [][]int32      // by GPU and GPU, symmetric; nil if there are more than maxScored
	shared bool           // has replicas or MIG devices
}

// maxScored limits the score matrix, which grows with the square of the GPUs. The largest machines have 16; with more
// than maxScored, health and order decide.
const maxScored = 128

func newTopology(devices []Device) *topology {
	n := len(devices)
	t := &topology{layout: devices, index: make(map[string]int, n), device: make([]int, n), gpu: make([]int, n)}
	deviceNumbers, gpuNumbers := make(map[health.DeviceID]int), make(map[health.DeviceID]int)
	var first []*health.Device // by GPU
	for i, d := range devices {
		dev := &d.State.Device
		t.index[d.ID] = i
		t.device[i] = numberOf(deviceNumbers, dev.ID)
		if t.device[i] == len(t.ids) {
			t.ids = append(t.ids, nil)
		}
		t.ids[t.device[i]] = append(t.ids[t.device[i]], i)
		t.gpu[i] = numberOf(gpuNumbers, dev.GPU())
		if t.gpu[i] == len(first) {
			first = append(first, dev)
		}
		t.shared = t.shared || dev.Kind == health.KindMIG || d.ID != string(dev.ID)
	}
	t.gpus = len(first)
	if t.gpus <= maxScored {
		t.score = scores(first, gpuNumbers)
	}
	return t
}

// numberOf returns the number of an ID, and gives a new ID the next one.
func numberOf(numbers map[health.DeviceID]int, id health.DeviceID) int {
	n, exists := numbers[id]
	if !exists {
		n = len(numbers)
		numbers[id] = n
	}
	return n
}

// scores returns the score of each pair of GPUs. An absent link scores 0. If the two sides of a link disagree, or only
// one reports it, the better one counts.
func scores(gpus []*health.Device, numbers map[health.DeviceID]int) [][]int32 {
	score := newMatrix(len(gpus))
	for i, g := range gpus {
		for _, l := range g.Links {
			if j, found := numbers[l.Peer]; found && i != j {
				pair := int32(min(max(0, l.NVLinks), maxNVLinks))*scoreNVLink + int32(l.Path)*scorePath
				score[i][j] = max(score[i][j], pair)
				score[j][i] = score[i][j]
			}
		}
	}
	for i := range gpus {
		for j := range i {
			if sameNUMA(gpus[i].NUMA, gpus[j].NUMA) {
				score[i][j] += scoreNUMA
				score[j][i] += scoreNUMA
			}
		}
	}
	return score
}

func newMatrix(n int) [][]int32 {
	rows, cells := make([][]int32, n), make([]int32, n*n)
	for i := range rows {
		rows[i], cells = cells[:n], cells[n:]
	}
	return rows
}

// sameNUMA reports whether two devices have a common NUMA node. Linux reports node -1 for none.
func sameNUMA(a, b []int) bool {
	return slices.ContainsFunc(a, func(n int) bool { return n >= 0 && slices.Contains(b, n) })
}

// matches reports whether the topology describes these devices: equal IDs in equal order with equal connections. Their
// health may differ.
func (t *topology) matches(devices []Device) bool {
	var equal struct{ old, now *health.DeviceState } // the last pair compared; replicas of one device are adjacent
	return slices.EqualFunc(t.layout, devices, func(old, now Device) bool {
		if old.ID != now.ID {
			return false
		}
		if old.State == now.State || old.State == equal.old && now.State == equal.now {
			return true
		}
		x, y := &old.State.Device, &now.State.Device
		if x.ID != y.ID || x.Parent != y.Parent || x.Kind != y.Kind || !slices.Equal(x.NUMA, y.NUMA) || !slices.Equal(x.Links, y.Links) {
			return false
		}
		equal.old, equal.now = old.State, now.State
		return true
	})
}
