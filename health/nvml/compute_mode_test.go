//go:build cgo && linux

package nvml

import (
	"strings"
	"testing"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/health/driver"
)

func TestComputeMode(t *testing.T) {
	const normal, prohibited, exclusive = driver.ComputeModeDefault, driver.ComputeModeProhibited, driver.ComputeModeExclusiveProcess
	for name, tt := range map[string]struct {
		before  driver.ComputeMode
		command string
		id      health.DeviceID
		set     driver.ComputeMode
		after   driver.ComputeMode
		getErr  string // in the error of ComputeMode; "": none
		setErr  string
	}{
		"set":             {normal, "", gpu0, exclusive, exclusive, "", ""},
		"set back":        {exclusive, "", gpu0, normal, normal, "", ""},
		"prohibited":      {prohibited, "", gpu0, normal, normal, "", ""},
		"prohibit":        {normal, "", gpu0, prohibited, prohibited, "", ""},
		"obsolete":        {normal, "", gpu0, driver.ComputeModeExclusiveThread, normal, "", "nvmlDeviceSetComputeMode"},
		"no permission":   {normal, "fail nvmlDeviceSetComputeMode 0 4 -1", gpu0, exclusive, normal, "", "CAP_SYS_ADMIN"},
		"not readable":    {exclusive, "fail nvmlDeviceGetComputeMode 0 999 -1", gpu0, normal, normal, "nvmlDeviceGetComputeMode", ""},
		"lost GPU":        {normal, "lost 0", gpu0, exclusive, normal, string(gpu0), string(gpu0)},
		"unknown GPU":     {normal, "", gpu9, exclusive, normal, string(gpu9), string(gpu9)},
		"no driver":       {normal, "unload", gpu0, exclusive, normal, string(gpu0), string(gpu0)},
		"GPU in MIG mode": {normal, "mig 0 0 1 0", gpu0, exclusive, normal, "", "MIG mode"},
		"MIG device":      {normal, "mig 0 0 1 0", mig0, exclusive, normal, errMIGDevice.Error(), errMIGDevice.Error()},
	} {
		t.Run(name, func(t *testing.T) {
			lib := newLibrary(t)
			lib.Do("mode 0 %d", tt.before)
			if tt.command != "" {
				lib.Do("%s", tt.command)
			}
			check := func(call string, err error, want string) {
				t.Helper()
				if (err != nil) != (want != "") || err != nil && (!strings.Contains(err.Error(), want) ||
					!strings.Contains(err.Error(), string(tt.id))) {
					t.Errorf("%s: %v; want an error that names %s and %q", call, err, tt.id, want)
				}
			}
			mode, err := ComputeMode(tt.id)
			if check("get", err, tt.getErr); err == nil && mode != tt.before {
				t.Errorf("mode before: %v, want %v", mode, tt.before)
			}
			check("set", SetComputeMode(tt.id, tt.set), tt.setErr)
			if got := driver.ComputeMode(lib.Number("mode 0")); got != tt.after {
				t.Errorf("mode %v, want %v", got, tt.after)
			}
		})
	}
}
