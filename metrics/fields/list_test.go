package fields

import (
	"slices"
	"testing"

	"github.com/gpu-node-agent/gpu-node-agent/health"
)

func TestListSupported(t *testing.T) {
	r := &health.Reading{
		Devices: []health.Device{
			{ID: "GPU-0", Model: "NVIDIA L4"},
			{ID: "GPU-1", Texts: map[health.Field]string{53: "1654922006530"}},
		},
		Samples: []health.Sample{{Device: "GPU-1", Values: map[health.Field]float64{health.FieldGPUTemp: 0}}},
	}
	list := List(Supported(r))
	if len(list) != len(table) {
		t.Errorf("got %d fields, want %d", len(list), len(table))
	}
	for name, want := range map[string]string{
		"DCGM_FI_DEV_GPU_TEMP":      SupportedYes, // the value 0 counts
		"DCGM_FI_DEV_SM_CLOCK":      SupportedNo,
		"DCGM_FI_DEV_SERIAL":        SupportedYes,
		"DCGM_FI_DEV_BRAND":         SupportedNo,
		"DCGM_FI_DEV_NAME":          SupportedYes, // from the inventory
		"DCGM_FI_DEV_UUID":          SupportedYes,
		"DCGM_FI_DRIVER_VERSION":    SupportedNo, // the reading has no versions
		"DCGM_FI_DEV_XID_ERRORS":    SupportedYes,
		"DCGM_EXP_XID_ERRORS_COUNT": SupportedYes,
	} {
		i := slices.IndexFunc(list, func(f Info) bool { return f.Name == name })
		if i < 0 || list[i].Supported != want {
			t.Errorf("%s: got %+v, want supported %s", name, list[max(i, 0)], want)
		}
	}
	for _, f := range List(nil) {
		if f.Supported != SupportedUnknown {
			t.Errorf("%s: supported is %s although the source is unknown", f.Name, f.Supported)
		}
	}
	if ids := IDs(); !slices.Contains(ids, 53) || slices.Contains(ids, 0) {
		t.Errorf("IDs() = %v", ids)
	}
}
