//go:build cgo && linux

package dcgm

import (
	"math/bits"

	"github.com/NVIDIA/go-dcgm/pkg/dcgm"
	"go.uber.org/zap"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/health/dcgm/lib"
)

// readLinks sets the links from a GPU to the others: the number of NVLinks, or else the path over PCIe. After an error they stay as they
// were, because an NVLink that is down counts only on a GPU with NVLinks.
func (s *session) readLinks(id uint, d *health.Device, gpus map[uint]*health.Device) {
	if len(gpus) < 2 || !s.reaches(id) || !lib.Has("dcgmGetDeviceTopology") {
		return
	}
	peers, err := lib.Peers(id)
	if err != nil {
		s.log.Debug("cannot read the links of a GPU", zap.Uint("dcgm_id", id), zap.Error(err))
		if last := s.deviceOf(entity{dcgm.FE_GPU, id}); last.ID == d.ID {
			d.Links = last.Links
		}
		return
	}
	d.Links = nil
	for _, p := range peers {
		peer, ok := gpus[p.GPU]
		if !ok || p.GPU == id {
			continue
		}
		link := health.Link{Peer: peer.ID, NVLinks: nvLinks(p.Path)}
		if link.NVLinks == 0 {
			link.Path = pciePath(p.Path)
		}
		if link.NVLinks > 0 || link.Path != health.PathUnknown {
			d.Links = append(d.Links, link)
		}
	}
}

// The bits of a path (dcgm_structs.h: DCGM_TOPOLOGY_). The lower eight are the path over PCIe; of the others, one is set and stands for the
// number of NVLinks.
const (
	pcieBits = 8

	pcieBoard        = 0x1
	pcieSingleSwitch = 0x2
	pcieMultiSwitch  = 0x4
	pcieHostBridge   = 0x8
	pcieNode         = 0x10
	pcieSystem       = 0x20
)

func nvLinks(path uint64) int { return bits.Len64(path >> pcieBits) }

func pciePath(path uint64) health.Path {
	switch path & (1<<pcieBits - 1) {
	case pcieSystem:
		return health.PathSystem
	case pcieNode:
		return health.PathNode
	case pcieHostBridge:
		return health.PathHostBridge
	case pcieMultiSwitch:
		return health.PathMultiSwitch
	case pcieSingleSwitch:
		return health.PathSingleSwitch
	case pcieBoard:
		return health.PathBoard
	}
	return health.PathUnknown
}
