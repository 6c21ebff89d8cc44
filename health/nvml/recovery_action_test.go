//go:build cgo && linux

package nvml

import (
	"strings"
	"testing"

	"github.com/gpu-node-agent/gpu-node-agent/health"
)

func TestRecoveryAction(t *testing.T) {
	for name, c := range map[string]struct {
		command string
		id      health.DeviceID
		want    health.RecoveryAction
		err     string // in the error; "": none
	}{
		"none":             {"action 0 0", gpu0, health.RecoveryNone, ""},
		"system reboot":    {"action 0 7", gpu0, health.RecoverySystemReboot, ""},
		"of another GPU":   {"action 1 7", gpu0, health.RecoveryNone, ""},
		"driver before it": {"fail nvmlDeviceGetFieldValues 0 3 -1", gpu0, 0, "nvmlDeviceGetFieldValues"},
		"lost GPU":         {"lost 0", gpu0, 0, string(gpu0)},
		"unknown GPU":      {"lost 1", gpu9, 0, string(gpu9)},
		"no driver":        {"unload", gpu0, 0, string(gpu0)},
		"MIG device":       {"mig 0 0 1 0", mig0, 0, errMIGDevice.Error()},
	} {
		t.Run(name, func(t *testing.T) {
			lib := newLibrary(t)
			lib.Do("%s", c.command)
			got, err := RecoveryAction(c.id)
			if got != c.want || (err == nil) != (c.err == "") || err != nil && !strings.Contains(err.Error(), c.err) {
				t.Errorf("%v, %v; want %v, %q", got, err, c.want, c.err)
			}
			lib.Do("await0 inits") // the driver's files are closed
		})
	}
}
