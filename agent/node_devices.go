package agent

import (
	"context"
	"os"

	"github.com/gpu-node-agent/gpu-node-agent/agent/config"
	"github.com/gpu-node-agent/gpu-node-agent/agent/pci"
	"github.com/gpu-node-agent/gpu-node-agent/agent/view"
	"github.com/gpu-node-agent/gpu-node-agent/health"
)

// followPCI lists the GPUs on the PCI bus until ctx ends.
func (a *Agent) followPCI(ctx context.Context) error {
	pci.Follow(ctx, os.DirFS("/"), &a.pciGPUs)
	return nil
}

// gpusOnBus returns the GPUs on the PCI bus, nil while they are unknown.
func (a *Agent) gpusOnBus() []string {
	if ids := a.pciGPUs.Load(); ids != nil {
		return *ids
	}
	return nil
}

// nodeDevices returns how many GPUs the bus, the driver and the kubelet have.
func (a *Agent) nodeDevices(snap *health.Snapshot) map[view.SeenBy]int {
	source := a.sourceConfig.Load().SourceConfig
	seen := make(map[view.SeenBy]int)
	if !snap.Polled() {
		return seen
	}
	gpus, reached, known := countGPUs(snap)
	if known {
		seen[view.SeenByDriver] = reached
	}
	switch onBus := a.pciGPUs.Load(); {
	case source.Resolved() == config.ModeSim:
		seen[view.SeenByPCI] = gpus // also GPUs that the simulation has lost
	case isLocal(source) && onBus != nil:
		seen[view.SeenByPCI] = len(*onBus)
	}
	if offered, counted, known := a.plugin.KubeletDevices(); known {
		seen[view.OfferedToPods], seen[view.SeenByKubelet] = gpusOf(snap, offered), gpusOf(snap, counted)
	} else if published, known := a.dra.PublishedDevices(); known {
		seen[view.SeenByKubelet] = gpusOf(snap, published)
	}
	return seen
}

// countGPUs returns the number of GPUs of a snapshot, and how many of them the driver reaches; known is false while that is unknown of a
// GPU.
func countGPUs(snap *health.Snapshot) (gpus, reached int, known bool) {
	known = snap.Source.Status == health.SourceUp
	for i := range snap.Devices {
		d := &snap.Devices[i]
		if d.Device.Kind != health.KindGPU {
			continue
		}
		gpus++
		switch d.Sample.Presence {
		case health.PresenceUnknown:
			known = false
		case health.Present:
			reached++
		case health.Lost, health.Inaccessible, health.Detached, health.Missing:
		}
	}
	return gpus, reached, known
}

// gpusOf returns the number of GPUs to which devices belong. Devices that the snapshot does not list do not count.
func gpusOf(snap *health.Snapshot, devices []health.DeviceID) int {
	of := make(map[health.DeviceID]health.DeviceID)
	for i := range snap.Devices {
		of[snap.Devices[i].Device.ID] = snap.Devices[i].Device.GPU()
	}
	gpus := make(map[health.DeviceID]bool)
	for _, id := range devices {
		if gpu, listed := of[id]; listed {
			gpus[gpu] = true
		}
	}
	return len(gpus)
}
