package dra

import (
	"maps"
	"slices"

	"github.com/gpu-node-agent/gpu-node-agent/health"
)

// Same reports whether two inputs give the same pool, so that it need not be built again: most polls change nothing that is published.
// It compares configurations and properties by their addresses. What the API server had before is read once.
func (in *PoolInput) Same(other *PoolInput) bool {
	if in.Config != other.Config || in.Capabilities != other.Capabilities || in.Examined != other.Examined ||
		in.NoTaints != other.NoTaints || in.NoShares != other.NoShares || in.Snapshot.Polled() != other.Snapshot.Polled() ||
		!maps.Equal(in.Properties, other.Properties) || !maps.Equal(in.Names, other.Names) || !maps.Equal(in.PCIeRoots, other.PCIeRoots) ||
		(in.Offers == nil) != (other.Offers == nil) || !maps.Equal(in.Offers, other.Offers) || (in.Before == nil) != (other.Before == nil) {
		return false
	}
	if in.Snapshot == other.Snapshot || !in.Snapshot.Polled() {
		return true
	}
	x, y := in.Snapshot, other.Snapshot
	if x.Source.Versions != y.Source.Versions || len(x.Devices) != len(y.Devices) {
		return false
	}
	for i := range x.Devices {
		if a, b := &x.Devices[i], &y.Devices[i]; !sameDevice(&a.Device, &b.Device) || !sameVerdict(&a.Verdict, &b.Verdict) {
			return false
		}
	}
	return true
}

func sameDevice(x, y *health.Device) bool {
	return x.ID == y.ID && x.Parent == y.Parent && x.Kind == y.Kind && x.Index == y.Index && x.Minor == y.Minor &&
		x.Model == y.Model && x.PCI == y.PCI && x.Memory == y.Memory && x.Reserved == y.Reserved && x.ComputeCapability == y.ComputeCapability &&
		x.MIGMode == y.MIGMode && x.Profile == y.Profile && x.GI == y.GI && x.CI == y.CI && x.MIGIndex == y.MIGIndex &&
		x.Properties == y.Properties && x.Texts[health.FieldSerial] == y.Texts[health.FieldSerial] && slices.Equal(x.NUMA, y.NUMA) &&
		slices.Equal(x.Links, y.Links)
}

func sameVerdict(x, y *health.Verdict) bool {
	return x.State == y.State && slices.EqualFunc(x.Findings, y.Findings, func(a, b health.Finding) bool {
		return a.Cause == b.Cause && a.State == b.State && a.Since.Equal(b.Since)
	})
}
