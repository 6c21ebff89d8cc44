package prefer

import (
	"slices"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/deviceid"
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

// topology numbers the devices, units and GPUs of a layout, and scores the connections of the GPUs. A whole GPU has the same number as a
// device and as a unit, if there are no others. It is immutable.
type topology struct {
	layout []Device // that it describes
	number map[health.DeviceID]int
	first  []int     // by device: the number of its first unit
	units  int       // of all devices
	gpu    []int     // by device: the GPU, or the parent of the MIG device
	gpus   int       // their number
	score  [][]int32 // by GPU and GPU, symmetric; nil if there are more than maxScored
	shared bool      // has units of shared devices, or MIG devices
}

// maxScored limits the score matrix, which grows with the square of the GPUs. The largest machines have 16; with more
// than maxScored, health and order decide.
const maxScored = 128

func newTopology(devices []Device) *topology {
	n := len(devices)
	t := &topology{layout: devices, number: make(map[health.DeviceID]int, n), first: make([]int, n), gpu: make([]int, n)}
	gpuNumbers := make(map[health.DeviceID]int)
	var gpus []*health.Device // one device of each
	for i := range devices {
		d := &devices[i].State.Device
		t.number[d.ID], t.first[i] = i, t.units
		t.units += devices[i].Units
		number, exists := gpuNumbers[d.GPU()]
		if !exists {
			number = len(gpus)
			gpuNumbers[d.GPU()] = number
			gpus = append(gpus, d)
		}
		t.gpu[i] = number
		t.shared = t.shared || d.Kind == health.KindMIG || devices[i].Form.Kind != deviceid.Whole
	}
	t.gpus = len(gpus)
	if t.gpus <= maxScored {
		t.score = scores(gpus, gpuNumbers)
	}
	return t
}

// find returns the number of the unit with an ID, and whether the layout has it.
func (t *topology) find(id string) (unit int, found bool) {
	parsed := deviceid.Parse(id)
	device, exists := t.number[parsed.Device()]
	if !exists {
		return 0, false
	}
	n, ok := t.layout[device].Form.Number(parsed)
	return t.first[device] + n, ok && n < t.layout[device].Units
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

// matches reports whether the topology describes these devices: equal units in equal order with equal connections. Their
// health may differ.
func (t *topology) matches(devices []Device) bool {
	return slices.EqualFunc(t.layout, devices, func(old, now Device) bool {
		if old.Form != now.Form || old.Units != now.Units {
			return false
		}
		x, y := &old.State.Device, &now.State.Device
		return x == y ||
			x.ID == y.ID && x.Parent == y.Parent && x.Kind == y.Kind && slices.Equal(x.NUMA, y.NUMA) && slices.Equal(x.Links, y.Links)
	})
}
