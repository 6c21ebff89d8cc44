//go:build cgo && linux

package dcgm

import (
	"github.com/NVIDIA/go-dcgm/pkg/dcgm"
	"go.uber.org/zap"

	"github.com/gpu-node-agent/gpu-node-agent/health"
)

// readLinks sets the links from a GPU to the others. Through go-dcgm, DCGM returns either the number of NVLinks or the
// path over PCIe. After an error the links stay unknown: they are a hint for placement.
func (s *session) readLinks(id uint, d *health.Device, gpus map[uint]*health.Device, status dcgm.EntityStatus) {
	if len(gpus) < 2 || !reachable(status) || !hasFunction("dcgmGetDeviceTopology") || !hasFunction("dcgmGetDeviceAttributes") {
		return
	}
	links, err := dcgm.GetDeviceTopology(id)
	if err != nil {
		s.log.Debug("cannot read the links of a GPU", zap.Uint("dcgm_id", id), zap.Error(err))
		return
	}
	d.Links = nil
	for _, l := range links {
		peer, ok := gpus[l.GPU]
		if !ok || l.GPU == id {
			continue
		}
		link := health.Link{Peer: peer.ID, Path: pciePath(l.Link)}
		if l.Link >= dcgm.SingleNVLINKLink {
			link.NVLinks = int(l.Link-dcgm.SingleNVLINKLink) + 1
		}
		if link.NVLinks > 0 || link.Path != health.PathUnknown {
			d.Links = append(d.Links, link)
		}
	}
}

func pciePath(l dcgm.P2PLinkType) health.Path {
	switch l {
	case dcgm.P2PLinkCrossCPU:
		return health.PathSystem
	case dcgm.P2PLinkSameCPU:
		return health.PathNode
	case dcgm.P2PLinkHostBridge:
		return health.PathHostBridge
	case dcgm.P2PLinkMultiSwitch:
		return health.PathMultiSwitch
	case dcgm.P2PLinkSingleSwitch:
		return health.PathSingleSwitch
	case dcgm.P2PLinkSameBoard:
		return health.PathBoard
	}
	return health.PathUnknown
}
