package catalog

import (
	"fmt"
	"strings"

	"github.com/gpu-node-agent/gpu-node-agent/health"
)

// Describe returns the meaning of an XID with what the kernel log adds: the process, and for some XIDs the driver's message.
func Describe(x health.XID) string {
	text := LookupXID(x.Code).Name
	if e, ok := nvlinkDetail(x); ok {
		text += ", " + e.String()
	}
	switch d := x.Detail; {
	case d.Process != "" && d.PID != 0:
		text += fmt.Sprintf(", process %s (pid %d)", d.Process, d.PID)
	case d.Process != "":
		text += ", process " + d.Process
	case d.PID != 0:
		text += fmt.Sprintf(", process %d", d.PID)
	}
	switch x.Code {
	case 94, 95: // whether the error was contained, where, and whether the driver needs a reset (RST) or a drain and a reset (D-RST)
		if x.Detail.Text != "" {
			text += ": " + x.Detail.Text
		}
	case 154: // the message repeats the meaning
		if _, change, ok := strings.Cut(x.Detail.Text, " changed "); ok {
			text += " " + change
		}
	}
	return text
}
