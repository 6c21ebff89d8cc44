package status

import (
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/gpu-node-agent/gpu-node-agent/health"
)

// How the page and the table say things. What is not known is an empty text, and shown as a dash.

func percentText(v *float64) string { return valueText(v, "%.0f %%") }
func celsiusText(v *float64) string { return valueText(v, "%.0f °C") }
func wattsText(v *float64) string   { return valueText(v, "%.0f W") }
func mhzText(v *float64) string     { return valueText(v, "%.0f MHz") }

func valueText(v *float64, format string) string {
	if v == nil {
		return ""
	}
	return fmt.Sprintf(format, *v)
}

// memoryText is "61.2 / 79.6 GiB".
func memoryText(v Values) string {
	const gib = 1 << 30
	switch {
	case v.MemoryTotal == nil:
		return ""
	case v.MemoryUsed == nil:
		return fmt.Sprintf("– / %.1f GiB", *v.MemoryTotal/gib)
	default:
		return fmt.Sprintf("%.1f / %.1f GiB", *v.MemoryUsed/gib, *v.MemoryTotal/gib)
	}
}

// memoryPercent is how full the memory is, nil if that is not known.
func memoryPercent(v Values) *float64 {
	if v.MemoryUsed == nil || v.MemoryTotal == nil || *v.MemoryTotal <= 0 {
		return nil
	}
	p := 100 * *v.MemoryUsed / *v.MemoryTotal
	return &p
}

// ageText is how long ago something was, as kubectl says it.
func ageText(now, t time.Time) string {
	if t.IsZero() {
		return ""
	}
	d := max(0, now.Sub(t))
	day, hours, minutes := int(d.Hours())/24, int(d.Hours())%24, int(d.Minutes())%60
	switch {
	case d < time.Minute:
		return fmt.Sprintf("%ds", int(d.Seconds()))
	case d < 10*time.Minute && int(d.Seconds())%60 > 0:
		return fmt.Sprintf("%dm%ds", minutes, int(d.Seconds())%60)
	case d < time.Hour:
		return fmt.Sprintf("%dm", minutes)
	case day == 0 && hours < 10 && minutes > 0:
		return fmt.Sprintf("%dh%dm", hours, minutes)
	case day == 0:
		return fmt.Sprintf("%dh", hours)
	case day < 10 && hours > 0:
		return fmt.Sprintf("%dd%dh", day, hours)
	default:
		return fmt.Sprintf("%dd", day)
	}
}

// clockText is a moment as a person reads it; the day is left out if it is today.
func clockText(now, t time.Time) string {
	if now.YearDay() == t.YearDay() && now.Year() == t.Year() {
		return t.Format("15:04:05")
	}
	return t.Format("01-02 15:04:05")
}

// xidsText is "79 ×1, 31 ×4".
func xidsText(xids []XID) string {
	parts := make([]string, len(xids))
	for i, x := range xids {
		parts[i] = fmt.Sprintf("%d ×%d", x.XID, x.Count)
	}
	return strings.Join(parts, ", ")
}

// HolderNames names the containers that have a device, one that has several replicas of it once, and no more
// than most.
func HolderNames(holders []Holder, most int) []string {
	var names []string
	times := make(map[string]int)
	for _, h := range holders {
		name := h.Namespace + "/" + h.Pod + " (" + h.Container + ")"
		if times[name]++; times[name] == 1 {
			names = append(names, name)
		}
	}
	for i, name := range names {
		if times[name] > 1 {
			names[i] += fmt.Sprintf(" ×%d", times[name])
		}
	}
	return firstOf(names, most)
}

func allocationsText(r Resource) string {
	parts := []string{counted(r.Allocations, "allocation", "allocations")}
	for _, reason := range slices.Sorted(maps.Keys(r.AllocationErrors)) {
		parts = append(parts, fmt.Sprintf("%d refused: %s", r.AllocationErrors[reason], reason))
	}
	return strings.Join(parts, ", ")
}

// offText is why a kubelet has nothing of us, "" unless that is wanted.
func offText(k Kubelet) string {
	if k.Plugin != pluginOff {
		return ""
	}
	return "plugin.enabled is false, so nothing is registered"
}

// firstOf returns the first of many texts, and how many more there are.
func firstOf(all []string, most int) []string {
	if more := len(all) - most; more > 0 {
		return append(slices.Clone(all[:most]), fmt.Sprintf("and %d more", more))
	}
	return all
}

func mismatchesText(r Resource) string {
	return counted(r.AuditMismatches, "audit mismatch", "audit mismatches")
}

func counted(n uint64, one, many string) string {
	if n == 1 {
		many = one
	}
	return fmt.Sprint(n, " ", many)
}

// forText is "for 5s": how long something has been so, nothing if that is not known.
func forText(now, since time.Time) string { return orNot("for %s", ageText(now, since)) }

// clearsText is "clears with a GPU reset": when a finding goes. One that goes with what it reports is no reason to do
// nothing about it.
func clearsText(f Finding) string {
	switch f.Clears {
	case health.ClearsItself.String():
		if strings.HasPrefix(f.Cause, "xid-") {
			return "clears a while after the last one"
		}
		return "clears when it is gone"
	case health.ClearsGPUReset.String():
		return "clears with a GPU reset"
	case health.ClearsReboot.String():
		return "clears with a reboot of the node"
	case health.ClearsOperator.String():
		return "clears when an operator says so"
	case health.ClearsRestart.String():
		return "clears with a restart of the application"
	default: // a newer agent's
		return "clears: " + f.Clears
	}
}

// versionsText is "driver 580.95.05, CUDA 13.0, DCGM 4.6.0".
func versionsText(s Source) string {
	var parts []string
	for _, v := range [][2]string{{"driver", s.Driver}, {"CUDA", s.CUDA}, {"DCGM", s.DCGM}, {"host engine", s.Engine}} {
		if v[1] != "" {
			parts = append(parts, v[0]+" "+v[1])
		}
	}
	return strings.Join(parts, ", ")
}

// own is what is wrong with a device itself: what a MIG device shares with its GPU is said there.
func own(gpu, d Device) []Finding {
	return slices.DeleteFunc(slices.Clone(d.Findings), func(f Finding) bool {
		return f.From != "" || d.UUID != gpu.UUID && slices.ContainsFunc(gpu.Findings, func(g Finding) bool { return g.Cause == f.Cause })
	})
}

// indexText is "3", of a MIG device "3:0": what cordon, include and clear take.
func indexText(d Device) string {
	text := strconv.Itoa(d.Index)
	switch {
	case d.MIGIndex != nil:
		return text + ":" + strconv.Itoa(*d.MIGIndex)
	case d.GI != nil: // the driver does not list it
		return text + ":-"
	}
	return text
}

// eventIndexText is the same of an event, "" if it is of no one device.
func eventIndexText(e Event) string {
	if e.GPU == nil {
		return ""
	}
	return indexText(Device{Index: *e.GPU, MIGIndex: e.MIG})
}

// Name is "GPU 3", of a MIG device "MIG device 3:0 1g.10gb".
func (d Device) Name() string {
	if d.GI == nil {
		return "GPU " + indexText(d)
	}
	return fmt.Sprintf("MIG device %s %s", indexText(d), d.Profile)
}

// trouble is a device with something wrong of its own.
type trouble struct {
	Device   Device
	Findings []Finding // the worst first, at least one
}

// troubles are the devices with findings, the worst first.
func troubles(s Node) []trouble {
	var all []trouble
	for _, gpu := range s.GPUs {
		for _, d := range append([]Device{gpu}, gpu.MIG...) {
			if f := own(gpu, d); len(f) > 0 {
				all = append(all, trouble{d, f})
			}
		}
	}
	slices.SortStableFunc(all, func(a, b trouble) int { return severity(b.Findings[0].State) - severity(a.Findings[0].State) })
	return all
}

func severity(state string) int {
	return slices.IndexFunc(health.States(), func(s health.State) bool { return s.String() == state })
}

// everyDevice returns each GPU, followed by its MIG devices.
func everyDevice(s Node) []Device {
	var all []Device
	for _, d := range s.GPUs {
		all = append(append(all, d), d.MIG...)
	}
	return all
}

// stateCount is how many devices are in a state.
type stateCount struct {
	State string
	Count int
}

// stateCounts counts the GPUs by state, the worst first, without states that none is in.
func stateCounts(s Node) []stateCount {
	var all []stateCount
	for _, state := range slices.Backward(health.States()) {
		c := stateCount{State: state.String()}
		for _, d := range s.GPUs {
			if d.State == c.State {
				c.Count++
			}
		}
		if c.Count > 0 {
			all = append(all, c)
		}
	}
	return all
}

// heldMIG is how many of a GPU's MIG devices are held by pods.
func heldMIG(d Device) int {
	n := 0
	for _, m := range d.MIG {
		n += min(1, len(m.Holders))
	}
	return n
}

// inUse is how many devices that pods can ask for are held, and how many there are: MIG devices count
// instead of the GPU that they are a part of.
func inUse(s Node) (held, all int) {
	for _, d := range everyDevice(s) {
		if len(d.MIG) > 0 && len(d.Holders) == 0 {
			continue
		}
		all++
		if len(d.Holders) > 0 {
			held++
		}
	}
	return held, all
}

// plural is "1 GPU", "2 GPUs".
func plural(n int, what string) string {
	if n != 1 {
		what += "s"
	}
	return fmt.Sprint(n, " ", what)
}
