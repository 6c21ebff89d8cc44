package statefile

import (
	"os"
	"strings"
)

// BootID returns the identity of the node's boot, "" if it is unknown.
func BootID() string {
	text, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(text))
}
