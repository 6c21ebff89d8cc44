//go:build cgo && linux

package dcgm

import "strings"

// profileAttribute is a property of a GPU instance besides slices and memory. NVIDIA's resource names contain it; the name
// in field 50 does not (OBSERVED.md#mig-profiles).
type profileAttribute struct {
	profile uint   // the driver's ID, from DCGM's hierarchy (nvml.h: nvmlGpuInstanceProfileInfo_t.id)
	slices  uint   // of such an instance
	suffix  string // of the profile's name
}

// profileAttributes lists the profiles that have an attribute, from `nvidia-smi mig -lgip` in NVIDIA's MIG user guide and
// on the machines named. The IDs are the driver's, not the macros of nvml.h (NVML_GPU_INSTANCE_PROFILE_1_SLICE_REV1 and
// so on), which only request them; on all GPUs one ID has the same attribute.
//
//nolint:gochecknoglobals // a table of constants
var profileAttributes = []profileAttribute{
	{20, 1, "+me"},     // A100, H100, H200, B200: 1g.10gb+me; media extensions, NVML's 1_SLICE_REV1
	{21, 1, "+me"},     // A30, RTX PRO 6000: 1g.24gb+me
	{6, 2, "+me"},      // A30: 2g.12gb+me, NVML's 2_SLICE_REV1
	{47, 1, "+gfx"},    // RTX PRO 6000: 1g.24gb+gfx; graphics, NVML's 1_SLICE_GFX
	{35, 2, "+gfx"},    // RTX PRO 6000: 2g.48gb+gfx, NVML's 2_SLICE_GFX
	{32, 4, "+gfx"},    // RTX PRO 6000: 4g.96gb+gfx, NVML's 4_SLICE_GFX
	{65, 1, "+me.all"}, // RTX PRO 6000: 1g.24gb+me.all; all media engines
	{64, 2, "+me.all"}, // RTX PRO 6000: 2g.48gb+me.all
	{67, 1, "-me"},     // RTX PRO 6000: 1g.24gb-me; no media engine
	{66, 2, "-me"},     // RTX PRO 6000: 2g.48gb-me
}

// profileSuffix returns the suffix of a profile's name, or "" if it has no known attribute.
func profileSuffix(profile, slices uint) string {
	for _, a := range profileAttributes {
		if a.profile == profile && a.slices == slices {
			return a.suffix
		}
	}
	return ""
}

// withSuffix appends the suffix to a profile's name, unless a newer DCGM has done so already.
func withSuffix(name, suffix string) string {
	if !strings.HasSuffix(name, "gb") {
		return name
	}
	return name + suffix
}
