package plugin

import (
	"fmt"
	"slices"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/health/grouped"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/memlimits"
)

// SelectedDevice is a device that include and exclude select, for an API that has no resources.
type SelectedDevice struct {
	State   *health.DeviceState // part of the snapshot
	Profile string              // of a MIG device, as NVIDIA names it
	Memory  *SharedMemory       // nil if the device is not shared by memory
}

// SharedMemory is the memory of a device that containers share.
type SharedMemory struct {
	Unit, Offered uint64                // bytes; Offered is a multiple of Unit
	Enforcement   memlimits.Enforcement // of the limit of the next container
	Reason        string                // why Enforcement is not the configured one; empty if it is
	Blocked       string                // why no container may get a share for now; empty if one may
}

// SelectDevices returns the selected devices of a snapshot by index, each GPU followed by its MIG devices, and why others are left out.
// It leaves out what no API offers: MIG devices that have only a part of their GPU instance, and shared devices without memory to
// offer. A GPU in MIG mode is not shared. caps is nil before the node is examined; examined is false if nothing examines it.
func (c *Config) SelectDevices(snap *health.Snapshot, caps *memlimits.Capabilities, examined bool) (selected []SelectedDevice,
	warnings []string,
) {
	if !snap.Polled() {
		return nil, nil
	}
	devices, n := c.selectCandidates(snap)
	if len(devices) == 0 && n > 0 {
		return nil, []string{selectsNone(n)}
	}
	var memory *shareEntry
	if entries := c.Sharing.entries(); c.Sharing.Memory.Resource != "" {
		memory = &entries[slices.IndexFunc(entries, func(e shareEntry) bool { return e.kind == SharingMemory })]
	}
	var left grouped.Texts
	selected = make([]SelectedDevice, 0, len(devices))
	for i := range devices {
		candidate := &devices[i]
		d := candidate.device()
		s := SelectedDevice{State: candidate.state, Profile: candidate.profile}
		if d.Kind == health.KindGPU && d.MIGMode && candidate.migCount == 0 {
			warnings = append(warnings, fmt.Sprintf("%s cannot be allocated: it is in MIG mode and has no MIG devices", d.GPUName()))
		}
		if d.Kind == health.KindMIG {
			if reason := migMisfit(candidate); reason != "" {
				if !slices.Contains(warnings, reason) {
					warnings = append(warnings, reason)
				}
				continue
			}
		}
		if memory != nil && !d.MIGMode && memory.matches(candidate) {
			units := memory.units(d, &left)
			if units == 0 {
				continue
			}
			e := c.Sharing.Memory.enforce(d, caps, examined)
			s.Memory = &SharedMemory{
				Unit: memory.unit, Offered: uint64(units) * memory.unit, //nolint:gosec // positive
				Enforcement: e.by, Reason: e.reason, Blocked: e.blocked,
			}
		}
		selected = append(selected, s)
	}
	return selected, append(warnings, left.Strings()...)
}
