//go:build cgo && linux

package dcgm

import "strings"

// attribute is what a GPU instance has besides slices and memory. DCGM leaves it out of the name in field 50, and
// NVIDIA's resource names have it.
type attribute struct {
	profile uint   // the driver's id, which DCGM's hierarchy has (nvml.h: nvmlGpuInstanceProfileInfo_t.id)
	slices  uint   // that such an instance has
	suffix  string // of the name
}

// attributes are the profiles that have one, by `nvidia-smi mig -lgip` in NVIDIA's MIG user guide and on the
// machines named. The ids are the driver's own and not the macros of nvml.h (NVML_GPU_INSTANCE_PROFILE_1_SLICE_REV1
// and so on), which only ask for them; across GPUs one id has one attribute.
//
//nolint:gochecknoglobals // a table of constants
var attributes = []attribute{
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

// attributeOf returns the end of a profile's name, empty if it has none that is known.
func attributeOf(profile, slices uint) string {
	for _, a := range attributes {
		if a.profile == profile && a.slices == slices {
			return a.suffix
		}
	}
	return ""
}

// withAttribute returns the name of a profile with its attribute, which a later DCGM may have put there itself.
func withAttribute(name, suffix string) string {
	if !strings.HasSuffix(name, "gb") {
		return name
	}
	return name + suffix
}
