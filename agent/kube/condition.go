package kube

import (
	"fmt"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/gpu-node-agent/gpu-node-agent/health"
)

// conditionType is the type of the node's condition. True is good, as with Ready.
const conditionType = "GPUHealthy"

// The reasons that are not the cause of a finding.
const (
	reasonHealthy       = "AllHealthy"
	reasonNoGPUs        = "NoGPUs"
	reasonNotMeasured   = "NotMeasured"
	reasonSourceDown    = "SourceDown"
	reasonSourceStalled = "SourceStalled"
)

// maxMessage limits a message, in bytes. It is the API's limit for the message of an event.
const maxMessage = 1024

// conditionState is what the node's condition shows.
type conditionState struct {
	status          corev1.ConditionStatus
	reason, message string
	fingerprint     string    // a change of it is written at once; it leaves out measured values in the message
	lost            string    // the end of the message: free devices that cannot be scheduled; a change may wait, see lostInterval
	since           time.Time // when the status was reached
}

// conditionOf returns the node's condition for a snapshot, and false while the first poll is outstanding: the condition
// of an earlier process then stays.
//
// The status is False if a GPU is Unhealthy, that is, if the kubelet counts it as unhealthy. If the source is down, the
// verdicts stay as they are, and the reason is the source. The status is Unknown if no device was ever measured.
func conditionOf(s *health.Snapshot) (conditionState, bool) {
	if s == nil || !s.Polled() && s.Source.Status == health.SourceStarting {
		return conditionState{}, false
	}
	sum := summarize(s.Devices)
	var c conditionState
	c.status, c.reason = sum.status(s)
	c.message, c.fingerprint = sum.message(s)
	c.fingerprint = string(c.status) + " " + c.reason + " " + c.fingerprint
	return c, true
}

// addLost appends a text about lost capacity to the message, at the expense of the rest.
func (c *conditionState) addLost(text string) {
	c.lost = "; " + truncate(text, maxMessage/2)
	c.message = truncate(c.message, maxMessage-len(c.lost)) + c.lost
}

// summary counts the devices by their state. MIG devices that only share the findings of their GPU do not count.
type summary struct {
	gpus     int
	count    map[health.State]int  // of GPUs
	affected []*health.DeviceState // unhealthy and degraded GPUs and MIG devices, the worst first
}

func summarize(devices []health.DeviceState) summary {
	s := summary{count: make(map[health.State]int)}
	gpus := make(map[health.DeviceID]health.Verdict)
	var decided, degraded []*health.DeviceState
	for i := range devices { // GPUs come before their MIG devices
		d := &devices[i]
		if d.Device.Kind == health.KindGPU {
			s.gpus++
			s.count[d.Verdict.State]++
			gpus[d.Device.ID] = d.Verdict
		} else if inherited(d.Verdict) || len(d.Verdict.FindingsBeyond(gpus[d.Device.Parent])) == 0 {
			continue
		}
		switch d.Verdict.State {
		case health.Unhealthy:
			if d.Verdict.Decided() {
				decided = append(decided, d)
			} else {
				s.affected = append(s.affected, d)
			}
		case health.Degraded:
			degraded = append(degraded, d)
		case health.Unknown, health.Healthy:
		}
	}
	strongest := func(a, b *health.DeviceState) int {
		return a.Verdict.Findings[0].Action.Compare(b.Verdict.Findings[0].Action)
	}
	slices.SortStableFunc(s.affected, strongest)
	slices.SortStableFunc(degraded, strongest)
	s.affected = slices.Concat(s.affected, decided, degraded) // a cordon is the reason only if no GPU has a fault
	return s
}

func (sum summary) status(s *health.Snapshot) (status corev1.ConditionStatus, reason string) {
	switch {
	case len(sum.affected) > 0 && sum.affected[0].Verdict.State == health.Unhealthy:
		return corev1.ConditionFalse, camelCase(sum.affected[0].Verdict.Cause())
	case !s.Polled():
		return corev1.ConditionUnknown, sourceReason(s.Source.Status)
	case sum.gpus == 0:
		return corev1.ConditionUnknown, reasonNoGPUs
	case sum.count[health.Unknown] > 0:
		return corev1.ConditionUnknown, reasonNotMeasured
	case unavailable(s.Source.Status):
		return corev1.ConditionTrue, sourceReason(s.Source.Status)
	case len(sum.affected) > 0:
		return corev1.ConditionTrue, camelCase(sum.affected[0].Verdict.Cause())
	}
	return corev1.ConditionTrue, reasonHealthy
}

// message returns the condition's message, and the part of it that the fingerprint covers. The message is short, because
// people read it in a table: devices with the same findings are one entry, without their reasons, which the events have.
func (sum summary) message(s *health.Snapshot) (message, fingerprint string) {
	var text, stable strings.Builder
	groups := groupByFindings(sum.affected)
	switch {
	case !s.Polled():
		text.WriteString("the GPUs were not measured since the agent started")
	case len(sum.affected)+sum.count[health.Unknown] == 0:
		fmt.Fprintf(&text, "%d GPUs are healthy", sum.gpus)
	case len(groups) != 1 || !sum.isAll(groups[0]):
		text.WriteString(sum.counts())
	}
	fmt.Fprintf(&stable, "%d/%d", sum.gpus, sum.count[health.Unknown])
	if unavailable(s.Source.Status) {
		fmt.Fprintf(&text, "; %s is %s since %s: %s", s.Source.Kind, s.Source.Status, s.Source.Since.UTC().Format(time.RFC3339),
			truncate(s.Source.Err, maxMessage/4))
		fmt.Fprintf(&stable, " %s", s.Source.Status)
	}
	for _, d := range sum.affected {
		fmt.Fprintf(&stable, " %s is %s: %s", d.Device.ID, d.Verdict.State, causes(d.Verdict))
	}
	left := len(sum.affected)
	for _, group := range groups {
		entry := sum.describeGroup(group)
		if len(sum.affected) == 1 {
			entry = describe(group[0], &group[0].Verdict.Findings[0])
		}
		entry, more := "; "+truncate(entry, maxMessage/3), fmt.Sprintf("; and %d more", left)
		if text.Len()+len(entry)+len(more) > maxMessage {
			text.WriteString(more)
			break
		}
		text.WriteString(entry)
		left -= len(group)
	}
	return truncate(strings.TrimPrefix(text.String(), "; "), maxMessage), stable.String()
}

// counts describes how many GPUs are in each state but healthy: "1 of 8 GPUs unhealthy, 2 degraded". It is empty if none is.
func (sum summary) counts() string {
	var parts []string
	for _, state := range []health.State{health.Unhealthy, health.Degraded, health.Unknown} {
		switch n := sum.count[state]; {
		case n > 0 && parts == nil:
			parts = append(parts, fmt.Sprintf("%d of %d GPUs %s", n, sum.gpus, state))
		case n > 0:
			parts = append(parts, fmt.Sprintf("%d %s", n, state))
		}
	}
	return strings.Join(parts, ", ")
}

// isAll reports whether a group has all GPUs of a node with several.
func (sum summary) isAll(group []*health.DeviceState) bool {
	return sum.gpus > 1 && len(group) == sum.gpus && group[0].Device.Kind == health.KindGPU
}

// groupByFindings groups devices by kind, state, causes and action, in the order of their first devices.
func groupByFindings(affected []*health.DeviceState) (groups [][]*health.DeviceState) {
	index := make(map[string]int)
	for _, d := range affected {
		key := fmt.Sprintf("%d %d %s %s", d.Device.Kind, d.Verdict.State, d.Verdict.Findings[0].Action, causes(d.Verdict))
		i, exists := index[key]
		if !exists {
			i = len(groups)
			index[key] = i
			groups = append(groups, nil)
		}
		groups[i] = append(groups[i], d)
	}
	return groups
}

// describeGroup returns a text such as "GPU 3, 5: xid-79 (drain the node and reset the GPU)".
func (sum summary) describeGroup(group []*health.DeviceState) string {
	first := group[0]
	name := "GPU " + indices(group)
	switch {
	case first.Device.Kind == health.KindMIG && len(group) == 1:
		name = "1 MIG device of " + name
	case first.Device.Kind == health.KindMIG:
		name = fmt.Sprintf("%d MIG devices of %s", len(group), name)
	case sum.isAll(group):
		name = fmt.Sprintf("all %d GPUs", sum.gpus)
	}
	if first.Verdict.State == health.Degraded {
		name += " degraded"
	}
	return fmt.Sprintf("%s: %s (%s)", name, causes(first.Verdict), first.Verdict.Findings[0].Advice())
}

// maxIndices limits the GPUs that an entry lists. The largest machines have 16.
const maxIndices = 16

// indices lists the GPUs of devices, each once: by index, those without one by UUID.
func indices(group []*health.DeviceState) string {
	gpus := slices.SortedFunc(slices.Values(group), func(a, b *health.DeviceState) int { return health.CompareIndex(&a.Device, &b.Device) })
	var all []string
	for _, d := range gpus {
		if name := strings.TrimPrefix(d.Device.GPUName(), "GPU "); !slices.Contains(all, name) {
			all = append(all, name)
		}
	}
	var text strings.Builder
	text.WriteString(strings.Join(all[:min(len(all), maxIndices)], ", "))
	if n := len(all) - maxIndices; n > 0 {
		fmt.Fprintf(&text, " and %d more", n)
	}
	return text.String()
}

// describe returns a device's state, its causes, the reason of a finding, and the strongest action.
func describe(d *health.DeviceState, f *health.Finding) string {
	return fmt.Sprintf("%s is %s (%s): %s; %s", d.Device.Name(), d.Verdict.State, causes(d.Verdict), f.Reason, d.Verdict.Findings[0].Advice())
}

// inherited reports whether the worst finding of a MIG device is its GPU's.
func inherited(v health.Verdict) bool { return len(v.Findings) > 0 && v.Findings[0].From != "" }

// unavailable reports whether the source does not measure. A starting source counts as available: a reconnect changes
// no condition.
func unavailable(s health.SourceStatus) bool {
	return s == health.SourceDown || s == health.SourceStalled
}

func sourceReason(s health.SourceStatus) string {
	if s == health.SourceStalled {
		return reasonSourceStalled
	}
	return reasonSourceDown
}

// causes lists the causes of a verdict, the worst first.
func causes(v health.Verdict) string { return strings.Join(v.Causes(), ", ") }

// camelCase turns a cause into the reason of a condition: "xid-79" into "Xid79".
func camelCase(cause string) string {
	var b strings.Builder
	for word := range strings.FieldsFuncSeq(cause, func(r rune) bool {
		return (r < 'a' || r > 'z') && (r < 'A' || r > 'Z') && (r < '0' || r > '9')
	}) {
		b.WriteString(strings.ToUpper(word[:1]) + word[1:])
	}
	return b.String()
}

// truncate cuts a text to n bytes.
func truncate(text string, n int) string {
	const ellipsis = "…"
	if len(text) > n {
		text = strings.ToValidUTF8(text[:n-len(ellipsis)], "") + ellipsis
	}
	return text
}
