package metrics

import (
	"math"
	"strconv"
	"strings"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/plugin"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/dra"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/podresources"
)

// GPUShares tell which part of a GPU a holder has.
type GPUShares struct {
	devices map[health.DeviceID]*health.Device
	shares  map[health.DeviceID][]plugin.ShareUnits
	claims  *dra.Claims
}

// NewGPUShares returns the parts of the GPUs of a snapshot. claims may be nil.
func NewGPUShares(devices []health.DeviceState, shares []plugin.ShareUnits, claims *dra.Claims) GPUShares {
	g := GPUShares{make(map[health.DeviceID]*health.Device, len(devices)), nil, claims}
	for i := range devices {
		g.devices[devices[i].Device.ID] = &devices[i].Device
	}
	if len(shares) > 0 {
		g.shares = make(map[health.DeviceID][]plugin.ShareUnits, len(shares))
	}
	for _, u := range shares {
		g.shares[u.Device] = append(g.shares[u.Device], u)
	}
	return g
}

// Of returns the part of a GPU that each of the holders of a device has, 0 if it is unknown. Holders of the same unit or claim, such as
// containers of one pod, have equal parts. All together have at most the device.
func (g GPUShares) Of(id health.DeviceID, holders []podresources.Holder) []float64 {
	return g.appendTo(nil, id, holders)
}

// appendTo appends what Of returns to parts.
func (g GPUShares) appendTo(parts []float64, id health.DeviceID, holders []podresources.Holder) []float64 {
	d := g.devices[id]
	if d == nil {
		return append(parts, make([]float64, len(holders))...)
	}
	of := g.ofDevice(d)
	if len(holders) == 1 {
		return append(parts, of*g.ofUnit(d, holders[0]))
	}
	holdersOf := make(map[podresources.Holder]int, len(holders))
	for _, h := range holders {
		holdersOf[unitOf(h)]++
	}
	first, all := len(parts), 0.0
	for _, h := range holders {
		part := of * g.ofUnit(d, h) / float64(holdersOf[unitOf(h)])
		parts, all = append(parts, part), all+part
	}
	if all > of*(1+1e-9) { // some hold it as it was shared before: it still counts once
		for i := first; i < len(parts); i++ {
			parts[i] *= of / all
		}
	}
	return parts
}

// unitOf identifies what a holder shares with others: holders of the same unit have equal results.
func unitOf(h podresources.Holder) podresources.Holder {
	if !h.ByClaim() {
		h.Namespace = ""
	}
	h.Pod, h.Container = "", ""
	return h
}

// memorySlices is how many parts the memory of a GPU has: "the GPU memory slice is roughly one eighth of the total GPU memory
// resources" (NVIDIA's MIG user guide). Every profile has a whole number of them, on GPUs with four compute slices an even one.
const memorySlices = 8

// ofDevice returns the part of its GPU that a device has, 0 if it is unknown.
func (g GPUShares) ofDevice(d *health.Device) float64 {
	if d.Kind == health.KindGPU {
		return 1
	}
	parent := g.devices[d.Parent]
	if parent == nil || parent.Memory == 0 || d.Memory == 0 || d.Memory > parent.Memory {
		return 0
	}
	part := max(1, math.Round(memorySlices*float64(d.Memory)/float64(parent.Memory))) / memorySlices
	if ci, gi, several := strings.Cut(d.Profile, "c."); several { // a compute instance, such as 1c.3g.40gb, of several that share the memory
		slices, _, _ := strings.Cut(gi, "g.")
		compute, err1 := strconv.Atoi(ci)
		of, err2 := strconv.Atoi(slices)
		if err1 != nil || err2 != nil || compute < 1 || of < compute {
			return 0
		}
		part *= float64(compute) / float64(of)
	}
	return part
}

// withoutMIG returns the part of its GPU that a device has. A GPU has what its MIG devices leave.
func (g GPUShares) withoutMIG(d *health.Device) float64 {
	part := g.ofDevice(d)
	if d.MIGMode {
		for _, other := range g.devices {
			if other.Parent == d.ID {
				part -= g.ofDevice(other)
			}
		}
	}
	return max(0, part)
}

// ofUnit returns the part of a device that one unit has, 0 if it is unknown.
func (g GPUShares) ofUnit(d *health.Device, h podresources.Holder) float64 {
	if h.ByClaim() {
		if h.Claim.ShareID == "" {
			return 1
		}
		return g.ofClaim(d, h)
	}
	for _, u := range g.shares[d.ID] {
		if u.Resource == h.Resource && u.HasUnit(h.DeviceID) {
			return 1 / float64(u.Total)
		}
	}
	if isShare(h) {
		return 0 // of another plugin, or from before a change of the configuration
	}
	return 1
}

// ofClaim returns the part of a device that a share of a claim has.
func (g GPUShares) ofClaim(d *health.Device, h podresources.Holder) float64 {
	if g.claims == nil || d.Memory == 0 {
		return 0
	}
	for _, claim := range g.claims.ByUID {
		for i := range claim.Devices {
			if c := &claim.Devices[i]; c.Device == d.ID && string(c.ShareID) == h.Claim.ShareID {
				return min(1, float64(c.Memory)/float64(d.Memory))
			}
		}
	}
	return 0
}
