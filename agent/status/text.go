package status

import (
	"cmp"
	"fmt"
	"maps"
	"math"
	"slices"
	"strconv"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/util/duration"

	"github.com/gpu-node-agent/gpu-node-agent/agent/view"
	"github.com/gpu-node-agent/gpu-node-agent/health"
)

// The texts of the page and the table. The text of an unknown value is empty; both show it as a dash.

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

const gib = 1 << 30

func gibText(v *float64) string {
	if v == nil {
		return ""
	}
	return fmt.Sprintf("%.1f GiB", *v/gib)
}

// memoryText returns a text like "61.2 / 79.6 GiB".
func memoryText(v Values) string {
	switch {
	case v.MemoryTotal == nil:
		return ""
	case v.MemoryUsed == nil:
		return fmt.Sprintf("– / %.1f GiB", *v.MemoryTotal/gib)
	default:
		return fmt.Sprintf("%.1f / %.1f GiB", *v.MemoryUsed/gib, *v.MemoryTotal/gib)
	}
}

// memoryPercent returns the used part of the memory, nil if it is unknown.
func memoryPercent(v Values) *float64 {
	if v.MemoryUsed == nil || v.MemoryTotal == nil || *v.MemoryTotal <= 0 {
		return nil
	}
	p := 100 * *v.MemoryUsed / *v.MemoryTotal
	return &p
}

// ageText returns the time since t.
func ageText(now, t time.Time) string {
	if t.IsZero() {
		return ""
	}
	return durationText(now.Sub(t))
}

// durationText returns a duration as kubectl shows ages. A negative one is 0: the clocks differ, or a clock was set back.
func durationText(d time.Duration) string { return duration.HumanDuration(max(0, d)) }

// clockText returns the time of day, with the date if that is not today's.
func clockText(now, t time.Time) string {
	if now.YearDay() == t.YearDay() && now.Year() == t.Year() {
		return t.Format("15:04:05")
	}
	return t.Format("01-02 15:04:05")
}

// xidsText returns a text like "79 ×1, 31 ×4".
func xidsText(xids []XID) string {
	parts := make([]string, len(xids))
	for i, x := range xids {
		parts[i] = fmt.Sprintf("%d ×%d", x.XID, x.Count)
	}
	return strings.Join(parts, ", ")
}

// HolderNames returns at most limit names of containers, and how many more there are. A container that holds several
// replicas of the device is named once.
func HolderNames(holders []Holder, limit int) []string {
	return limitTexts(holderTexts(holders, func([]Holder) string { return "" }), limit)
}

// heldByTexts returns HolderNames with how long each has not used the device, such as "team/train-0 (main): no process for 130m".
func heldByTexts(holders []Holder, limit int) []string {
	return limitTexts(holderTexts(holders, idleText), limit)
}

// holderTexts returns the name of each container with a suffix, which it gets for the container's entries.
func holderTexts(holders []Holder, suffix func([]Holder) string) []string {
	var names []string
	entries := make(map[string][]Holder)
	for _, h := range holders {
		name := h.Namespace + "/" + h.Pod + " (" + h.Container + ")"
		if entries[name] = append(entries[name], h); len(entries[name]) == 1 {
			names = append(names, name)
		}
	}
	for i, name := range names {
		of := entries[name]
		if len(of) > 1 {
			names[i] += fmt.Sprintf(" ×%d", len(of))
		}
		names[i] += suffix(of)
	}
	return names
}

// minIdleShown is the least idle time that is shown. An idle time that node.idle reports is shown earlier.
const minIdleShown = 5 * time.Minute

// idleText returns a text like ": no process for 130m", ": no work for 130m" or ": never used in 130m". Of several devices of a container,
// the shortest time counts. It returns "" if the container uses one of them, or if that is unknown.
func idleText(holders []Holder) string {
	shortest, text := time.Duration(math.MaxInt64), ""
	for _, h := range holders {
		if h.Idle == nil {
			return ""
		}
		idle, what := time.Duration(0), ""
		if s := h.Idle.NoWork; s != nil {
			idle, what = seconds(*s), "no work for "
		}
		if s := h.Idle.NoProcess; s != nil && *s > 0 {
			idle, what = seconds(*s), "no process for "
		}
		if h.Idle.NeverUsed {
			idle, what = seconds(h.Idle.Observed), "never used in "
		}
		if idle < minIdleShown && h.Idle.Evidence == "" {
			return ""
		}
		if idle < shortest {
			shortest, text = idle, ": "+what+durationText(idle)
		}
	}
	return text
}

func seconds(s float64) time.Duration { return time.Duration(s * float64(time.Second)) }

// claimNames returns the ResourceClaims by which containers hold a device, or can use it.
func claimNames(d Device) (names []string) {
	for _, h := range slices.Concat(d.Holders, d.AdminHolders) {
		if h.Claim == nil {
			continue
		}
		if name := h.Namespace + "/" + h.Claim.Name; !slices.Contains(names, name) {
			names = append(names, name)
		}
	}
	return limitTexts(names, maxHolders)
}

// usageTexts returns at most limit texts like "team/train-0 (main): 8 processes, 70.0 GiB, SM 88 %", and how many more there are; "none"
// if a container holds the device and there is no process. It returns nil while the processes are unknown.
func usageTexts(d Device, limit int) []string {
	switch {
	case d.Processes == nil, len(*d.Processes)+len(d.Holders) == 0:
		return nil
	case len(*d.Processes) == 0:
		return []string{"none"}
	}
	texts := make([]string, len(*d.Processes))
	for i, u := range *d.Processes {
		name := "no pod"
		switch {
		case u.Pod != "" && u.Container != "":
			name = u.Namespace + "/" + u.Pod + " (" + u.Container + ")"
		case u.Pod != "":
			name = u.Namespace + "/" + u.Pod
		case u.Container != "":
			name = "others"
		}
		parts := []string{Plural(u.Processes, "process")}
		if u.Memory != nil {
			parts = append(parts, fmt.Sprintf("%.1f GiB", *u.Memory/gib))
		}
		if u.SM != nil {
			parts = append(parts, "SM "+percentText(u.SM))
		}
		texts[i] = name + ": " + strings.Join(parts, ", ")
	}
	return limitTexts(texts, limit)
}

// notMeasuredText returns for how long the devices have not been measured, "" while their values count.
func notMeasuredText(s Node) string {
	if !s.Source.Outdated {
		return ""
	}
	return formatIf("not measured for %s", ageText(s.Time, s.Source.Measured))
}

// allocationsText returns a text like "5 allocations, 4 refused: unknown_device".
func allocationsText(r Resource) string {
	parts := []string{Plural(r.Allocations, "allocation")}
	for _, reason := range slices.Sorted(maps.Keys(r.AllocationErrors)) {
		parts = append(parts, fmt.Sprintf("%d refused: %s", r.AllocationErrors[reason], reason))
	}
	if r.AuditMismatches > 0 {
		parts = append(parts, Plural(r.AuditMismatches, "audit mismatch"))
	}
	return strings.Join(parts, ", ")
}

// pluginOffText returns why no resource is registered if the plugin is off, else "".
func pluginOffText(s Node) string {
	switch {
	case s.Kubelet.Plugin != pluginOff:
		return ""
	case s.DRA != nil:
		return "plugin.api is dra, so no resource is registered"
	}
	return "plugin.enabled is false, so nothing is registered"
}

// titleText returns the title of the page, such as "1 unhealthy, source stalled, not registered – node-1 – gpu-node-agent". A tab shows its
// beginning.
func titleText(s Node) string {
	var problems []string
	for _, c := range stateCounts(s) {
		if c.State != health.Healthy.String() {
			problems = append(problems, fmt.Sprintf("%d %s", c.Count, c.State))
		}
	}
	if s.Source.Status != health.SourceUp.String() {
		problems = append(problems, "source "+s.Source.Status)
	}
	unregistered := slices.ContainsFunc(s.Kubelet.Resources, func(r Resource) bool { return !r.Registered })
	if unregistered || s.Kubelet.Error != "" || s.DRA != nil && s.DRA.Driver != "" && !s.DRA.Registered {
		problems = append(problems, "not registered")
	}
	return strings.Join(nonEmpty(strings.Join(problems, ", "), s.Node, "gpu-node-agent"), " – ")
}

// shownProblems returns at most maxProblems problems of each part and level, and how many more there are.
func shownProblems(all []view.Problem) (shown []view.Problem) {
	type kind struct {
		part  string
		level view.Level
	}
	count, more := make(map[kind]int), make(map[kind]int)
	for _, p := range all {
		k := kind{p.Part, p.Level}
		count[k]++
		if count[k] == maxProblems+1 {
			more[k], p = len(shown), view.Problem{Part: p.Part, Level: p.Level}
		}
		if count[k] <= maxProblems+1 {
			shown = append(shown, p)
		}
	}
	for k, i := range more {
		shown[i].Text = fmt.Sprintf("and %d more", count[k]-maxProblems)
	}
	return shown
}

// limitTexts returns at most limit texts, and how many more there are.
func limitTexts(all []string, limit int) []string {
	if more := len(all) - limit; more > 0 {
		return append(slices.Clone(all[:limit]), fmt.Sprintf("and %d more", more))
	}
	return all
}

// forText returns a text like "for 5s", "" if since is unknown.
func forText(now, since time.Time) string { return formatIf("for %s", ageText(now, since)) }

// clearsText returns how a finding clears. The text for one that clears by itself names the condition, so that nobody ignores the finding.
func clearsText(f Finding) string {
	switch f.Clears {
	case health.ClearsItself.String():
		if _, ok := health.XIDOfCause(f.Cause); ok {
			return "clears when the XID has not recurred for a while"
		}
		return "clears when the fault ends"
	case health.ClearsGPUReset.String():
		return "clears by a GPU reset"
	case health.ClearsReboot.String():
		return "clears by a reboot of the node"
	case health.ClearsOperator.String():
		return "clears by an operator"
	case health.ClearsRestart.String():
		return "clears by a restart of the application"
	default: // from a newer agent
		return "clears: " + f.Clears
	}
}

// versionsText returns a text like "driver 580.95.05, CUDA 13.0, DCGM 4.6.0".
func versionsText(s Source) string {
	return strings.Join(nonEmpty(formatIf("driver %s", s.Driver), formatIf("CUDA %s", s.CUDA),
		formatIf("DCGM %s", s.DCGM), formatIf("host engine %s", s.Engine)), ", ")
}

// xidGapText returns for how long no XID could be seen.
func xidGapText(now time.Time, g *XIDGap) string {
	switch {
	case g == nil:
		return ""
	case g.Until.IsZero():
		return fmt.Sprintf("not seen for %s; some may be lost", durationText(seconds(g.Seconds)))
	}
	return fmt.Sprintf("not seen for %s until %s ago; some may be lost", durationText(seconds(g.Seconds)), ageText(now, g.Until))
}

// incidentText returns a text like "imex fail DCGM_FR_IMEX_UNHEALTHY: IMEX daemon is not ready".
func incidentText(i Incident) string {
	return fmt.Sprintf("%s %s %s: %s", i.System, i.Severity, i.Code, i.Message)
}

func nonEmpty(texts ...string) []string {
	return slices.DeleteFunc(texts, func(text string) bool { return text == "" })
}

// ownFindings returns the findings of a device. It omits what a MIG device shares with its GPU: the GPU shows it.
func ownFindings(gpu, d Device) []Finding {
	return slices.DeleteFunc(slices.Clone(d.Findings), func(f Finding) bool {
		return f.From != "" || d.UUID != gpu.UUID && slices.ContainsFunc(gpu.Findings, func(g Finding) bool { return g.Cause == f.Cause })
	})
}

// groupFindings returns findings in groups with one action.
func groupFindings(findings []Finding) [][]Finding {
	var groups [][]Finding
	for _, f := range findings {
		i := slices.IndexFunc(groups, func(g []Finding) bool { return g[0].Advice == f.Advice })
		if i < 0 {
			i = len(groups)
			groups = append(groups, nil)
		}
		groups[i] = append(groups[i], f)
	}
	return groups
}

// indexText returns the index as a device reference: "3", of a MIG device "3:0".
func indexText(d Device) string {
	text := strconv.Itoa(d.Index)
	switch {
	case d.Index < 0:
		return "–"
	case d.MIGIndex != nil:
		return text + ":" + strconv.Itoa(*d.MIGIndex)
	case d.GI != nil: // the driver does not list the MIG device
		return text + ":-"
	}
	return text
}

// eventIndexText returns the index of an event's device, or its UUID if it has none; "" if the event is not about one device.
func eventIndexText(e Event) string {
	if e.GPU == nil {
		return string(e.UUID)
	}
	return indexText(Device{Index: *e.GPU, MIGIndex: e.MIG})
}

// Anchor names a GPU on the page.
func (d Device) Anchor() string {
	if d.Index < 0 {
		return string(d.UUID)
	}
	return "gpu-" + strconv.Itoa(d.Index)
}

// Name returns a text like "GPU 3", of a MIG device "MIG device 3:0 1g.10gb"; the UUID if another GPU has the index.
func (d Device) Name() string {
	if d.Index < 0 {
		return string(d.UUID)
	}
	if d.GI == nil {
		return "GPU " + indexText(d)
	}
	return fmt.Sprintf("MIG device %s %s", indexText(d), d.Profile)
}

// faultyDevice is a device with findings of its own.
type faultyDevice struct {
	Device   Device
	Findings []Finding // the worst first, at least one
}

// faultyDevices returns the devices with findings, the worst first.
func faultyDevices(s Node) []faultyDevice {
	var all []faultyDevice
	for _, gpu := range s.GPUs {
		for _, d := range append([]Device{gpu}, gpu.MIG...) {
			if f := ownFindings(gpu, d); len(f) > 0 {
				all = append(all, faultyDevice{d, f})
			}
		}
	}
	slices.SortStableFunc(all, func(a, b faultyDevice) int {
		return cmp.Or(severity(b.Findings[0].State)-severity(a.Findings[0].State), a.Findings[0].Action.Compare(b.Findings[0].Action))
	})
	return all
}

// faultGroup is devices with findings of the same causes and one action.
type faultGroup struct {
	Findings []Finding // of the first device
	Devices  []Device  // at most maxFaultyDevices
	More     int       // devices
}

// faultGroups returns the faulty devices in groups, the group of the worst device first.
func faultGroups(s Node) []faultGroup {
	var groups []faultGroup
	for _, d := range faultyDevices(s) {
		i := slices.IndexFunc(groups, func(g faultGroup) bool {
			return slices.EqualFunc(g.Findings, d.Findings, func(a, b Finding) bool {
				return a.Cause == b.Cause && a.State == b.State && a.Advice == b.Advice
			})
		})
		if i < 0 {
			i = len(groups)
			groups = append(groups, faultGroup{Findings: d.Findings})
		}
		if g := &groups[i]; len(g.Devices) < maxFaultyDevices {
			g.Devices = append(g.Devices, d.Device)
		} else {
			g.More++
		}
	}
	return groups
}

func severity(state string) int {
	return slices.IndexFunc(health.States(), func(s health.State) bool { return s.String() == state })
}

// allDevices returns each GPU, followed by its MIG devices.
func allDevices(s Node) []Device {
	var all []Device
	for _, d := range s.GPUs {
		all = append(append(all, d), d.MIG...)
	}
	return all
}

// stateCount is the number of GPUs in a state.
type stateCount struct {
	State string
	Count int
}

// stateCounts counts the GPUs by state, the worst first, without empty states.
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

// heldMIG returns how many MIG devices of a GPU are held.
func heldMIG(d Device) int {
	n := 0
	for _, m := range d.MIG {
		n += min(1, len(m.Holders))
	}
	return n
}

// inUse returns how many allocatable devices are held, and how many there are. A partitioned GPU counts by its MIG
// devices.
func inUse(s Node) (held, all int) {
	for _, d := range allDevices(s) {
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

// gpusText returns a text like "8 × NVIDIA H100 80GB HBM3: 1 unhealthy, 7 healthy", "" without GPUs.
func gpusText(s Node) string {
	var models []string // in the order of the GPUs
	count := make(map[string]int)
	for _, d := range s.GPUs {
		model := cmp.Or(d.Model, "GPU")
		if count[model]++; count[model] == 1 {
			models = append(models, model)
		}
	}
	for i, model := range models {
		models[i] = fmt.Sprintf("%d × %s", count[model], model)
	}
	var states []string
	for _, c := range stateCounts(s) {
		states = append(states, fmt.Sprintf("%d %s", c.Count, c.State))
	}
	return strings.Join(nonEmpty(strings.Join(models, ", "), strings.Join(states, ", ")), ": ")
}

// inUseText returns a text like "2 of 8 devices held by pods", "" if the holders are unknown.
func inUseText(s Node) string {
	if held, all := inUse(s); all > 0 && !s.Kubelet.Holders.IsZero() {
		return fmt.Sprintf("%d of %s held by pods", held, Plural(all, "device"))
	}
	return ""
}

// deviceRow is a row of the table: a device, or equal MIG devices of a GPU, whose values are added.
type deviceRow struct {
	Device
	lastIndex   int // the MIG index of the last one
	count, held int
}

// deviceRows returns a row for each device. If group is set, neighbouring MIG devices with the same profile, state and
// findings share one, except those with XIDs.
func deviceRows(s Node, group bool) []deviceRow {
	var rows []deviceRow
	for _, d := range allDevices(s) {
		row := deviceRow{Device: d, count: 1, held: min(1, len(d.Holders))}
		if d.MIGIndex != nil {
			row.lastIndex = *d.MIGIndex
		}
		if last := len(rows) - 1; group && last >= 0 && rows[last].accepts(d) {
			row = rows[last].plus(row)
			rows = rows[:last]
		}
		rows = append(rows, row)
	}
	return rows
}

// accepts reports whether a device can share a row.
func (r deviceRow) accepts(d Device) bool {
	return r.MIGIndex != nil && d.MIGIndex != nil && r.Index == d.Index && r.lastIndex+1 == *d.MIGIndex &&
		r.Profile == d.Profile && r.State == d.State && len(r.XIDs)+len(d.XIDs) == 0 && sharedAlike(r.Device, d) &&
		slices.EqualFunc(r.Findings, d.Findings, func(f, g Finding) bool { return f.Cause == g.Cause })
}

// plus returns a row with the devices of both.
func (r deviceRow) plus(next deviceRow) deviceRow {
	add := func(a, b *float64) *float64 {
		if a == nil || b == nil {
			return nil
		}
		sum := *a + *b
		return &sum
	}
	r.lastIndex, r.count, r.held = next.lastIndex, r.count+next.count, r.held+next.held
	r.Holders = slices.Concat(r.Holders, next.Holders)
	r.Shares, r.MPS = addShares(r.Device, next.Device)
	r.Values = Values{
		MemoryUsed:  add(r.Values.MemoryUsed, next.Values.MemoryUsed),
		MemoryTotal: add(r.Values.MemoryTotal, next.Values.MemoryTotal),
	}
	if !r.Since.Equal(next.Since) {
		r.Since = time.Time{}
	}
	return r
}

// Plural returns a text like "1 GPU" or "2 GPUs".
func Plural[T int | uint64](n T, noun string) string {
	switch {
	case n == 1:
	case strings.HasSuffix(noun, "ch"), strings.HasSuffix(noun, "ss"):
		noun += "es"
	default:
		noun += "s"
	}
	return fmt.Sprint(n, " ", noun)
}

// apiText returns a text like "12 condition writes, 4 events, 1 dropped event, 2 failed requests".
func apiText(s APIServer) string {
	return strings.Join([]string{
		Plural(s.Writes, "condition write"), Plural(s.Events, "event"), Plural(s.Dropped, "dropped event"), Plural(s.Errors, "failed request"),
	}, ", ")
}

// nodeObjectText returns a text like "3 writes of labels and taints, 1 failed try".
func nodeObjectText(o NodeObject) string {
	tries := "tries"
	if o.Errors == 1 {
		tries = "try"
	}
	return fmt.Sprintf("%s of labels and taints, %d failed %s", Plural(o.Writes, "write"), o.Errors, tries)
}
