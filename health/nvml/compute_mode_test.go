//go:build cgo && linux

package nvml

import (
	"strings"
	"testing"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/gpu-node-agent/gpu-node-agent/health"
)

func TestSetComputeMode(t *testing.T) {
	const normal, prohibited, exclusive = int(nvml.COMPUTEMODE_DEFAULT), int(nvml.COMPUTEMODE_PROHIBITED), int(nvml.COMPUTEMODE_EXCLUSIVE_PROCESS)
	for name, tt := range map[string]struct {
		before    int
		command   string
		id        health.DeviceID
		exclusive bool
		after     int
		was       bool
		sets      int
		fails     string // in the error; "": none
	}{
		"set":                         {normal, "", gpu0, true, exclusive, false, 1, ""},
		"set already":                 {exclusive, "", gpu0, true, exclusive, true, 0, ""},
		"set back":                    {exclusive, "", gpu0, false, normal, true, 1, ""},
		"set back already":            {normal, "", gpu0, false, normal, false, 0, ""},
		"prohibited":                  {prohibited, "", gpu0, true, prohibited, false, 0, "nvidia-smi -i " + string(gpu0) + " -c DEFAULT"},
		"set back prohibited":         {prohibited, "", gpu0, false, prohibited, false, 0, ""},
		"no permission":               {normal, "fail nvmlDeviceSetComputeMode 0 4 -1", gpu0, true, normal, false, 1, "CAP_SYS_ADMIN"},
		"set back without permission": {exclusive, "fail nvmlDeviceSetComputeMode 0 4 -1", gpu0, false, exclusive, true, 1, "CAP_SYS_ADMIN"},
		"not readable":                {normal, "fail nvmlDeviceGetComputeMode 0 999 -1", gpu0, true, normal, false, 0, "nvmlDeviceGetComputeMode"},
		"lost GPU":                    {normal, "lost 0", gpu0, true, normal, false, 0, string(gpu0)},
		"unknown GPU":                 {normal, "", gpu9, true, normal, false, 0, string(gpu9)},
		"no driver":                   {normal, "unload", gpu0, true, normal, false, 0, string(gpu0)},
		"GPU in MIG mode":             {normal, "mig 0 0 1 0", gpu0, true, normal, false, 0, string(gpu0)},
		"set back in MIG mode":        {normal, "mig 0 0 1 0", gpu0, false, normal, false, 0, ""},
		"MIG device":                  {normal, "mig 0 0 1 0", mig0, true, normal, false, 0, string(mig0)},
	} {
		t.Run(name, func(t *testing.T) {
			lib := newLibrary(t)
			lib.Do("mode 0 %d", tt.before)
			if tt.command != "" {
				lib.Do("%s", tt.command)
			}
			was, err := SetComputeMode(tt.id, tt.exclusive)
			switch {
			case tt.fails == "" && err != nil:
				t.Error(err)
			case tt.fails != "" && (err == nil || !strings.Contains(err.Error(), tt.fails) || !strings.Contains(err.Error(), string(tt.id))):
				t.Errorf("%v; want an error that names %s and %s", err, tt.id, tt.fails)
			}
			if was != tt.was {
				t.Errorf("was exclusive: %v, want %v", was, tt.was)
			}
			if got := lib.Number("mode 0"); got != tt.after {
				t.Errorf("mode %d, want %d", got, tt.after)
			}
			if n := lib.Number("calls nvmlDeviceSetComputeMode"); n != tt.sets {
				t.Errorf("%d calls of nvmlDeviceSetComputeMode, want %d", n, tt.sets)
			}
		})
	}
}
