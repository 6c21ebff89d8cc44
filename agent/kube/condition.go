package kube

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/gpu-node-agent/gpu-node-agent/health"
)

// conditionType is the type of the node's condition. True is good, as with Ready.
const conditionType = "GPUHealthy"

// The statuses of a condition.
const (
	statusTrue    = "True"
	statusFalse   = "False"
	statusUnknown = "Unknown"
)

// The reasons that are not the cause of a finding.
const (
	reasonHealthy       = "AllHealthy"
	reasonNoGPUs        = "NoGPUs"
	reasonNotMeasured   = "NotMeasured"
	reasonSourceDown    = "SourceDown"
	reasonSourceStalled = "SourceStalled"
)

// maxMessage bounds a message: the API's own limit for that of an event.
const maxMessage = 1024

// state is what the condition is to say.
type state struct {
	status, reason, message string
	gist                    string    // what of it is worth a write: a message may hold a temperature
	since                   time.Time // when the status was reached
}

// conditionOf returns what a snapshot means for the node, and false if that is not known yet.
//
// It is False if a GPU is Unhealthy, thus if the kubelet is told so. Without its source the agent keeps
// what it knew, and the reason says so. Unknown is when there is nothing to keep: no GPU was ever seen, or
// one was never measured.
func conditionOf(s *health.Snapshot) (state, bool) {
	if s == nil || !s.Polled() && s.Source.Status == health.SourceStarting {
		return state{}, false // what an earlier process said stands
	}
	t := tallyOf(s.Devices)
	var c state
	c.status, c.reason = t.judge(s)
	c.message, c.gist = t.words(s)
	c.gist = c.status + " " + c.reason + " " + c.gist
	return c, true
}

// tally is what the devices amount to.
type tally struct {
	gpus  int
	count map[health.State]int  // of GPUs, and of the MIG devices that have findings of their own
	sick  []*health.DeviceState // of these the unhealthy and the degraded, the worst first
}

func tallyOf(devices []health.DeviceState) tally {
	t := tally{count: make(map[health.State]int)}
	var decided, degraded []*health.DeviceState
	for i := range devices {
		d := &devices[i]
		if d.Device.Kind == health.KindGPU {
			t.gpus++
		} else if d.Verdict.State <= health.Healthy || inherited(d.Verdict) {
			continue
		}
		t.count[d.Verdict.State]++
		switch d.Verdict.State {
		case health.Unhealthy:
			if d.Verdict.Decided() {
				decided = append(decided, d)
			} else {
				t.sick = append(t.sick, d)
			}
		case health.Degraded:
			degraded = append(degraded, d)
		case health.Unknown, health.Healthy:
		}
	}
	t.sick = slices.Concat(t.sick, decided, degraded) // a cordon is the reason only if nothing is broken
	return t
}

func (t tally) judge(s *health.Snapshot) (status, reason string) {
	switch {
	case t.count[health.Unhealthy] > 0:
		return statusFalse, camel(t.sick[0].Verdict.Cause())
	case !s.Polled():
		return statusUnknown, sourceReason(s.Source.Status)
	case t.gpus == 0:
		return statusUnknown, reasonNoGPUs
	case t.count[health.Unknown] > 0:
		return statusUnknown, reasonNotMeasured
	case away(s.Source.Status):
		return statusTrue, sourceReason(s.Source.Status)
	case len(t.sick) > 0:
		return statusTrue, camel(t.sick[0].Verdict.Cause())
	}
	return statusTrue, reasonHealthy
}

// words returns the message, and what of it is worth a write.
func (t tally) words(s *health.Snapshot) (message, gist string) {
	var text, short strings.Builder
	switch {
	case !s.Polled():
		text.WriteString("the GPUs have not been seen since the agent started")
	case len(t.sick)+t.count[health.Unknown] == 0:
		fmt.Fprintf(&text, "%d GPUs are healthy", t.gpus)
	default:
		fmt.Fprintf(&text, "of %d GPUs: %d unhealthy, %d degraded, %d unknown", t.gpus,
			t.count[health.Unhealthy], t.count[health.Degraded], t.count[health.Unknown])
	}
	fmt.Fprintf(&short, "%d/%d", t.gpus, t.count[health.Unknown])
	if away(s.Source.Status) {
		fmt.Fprintf(&text, "; %s is %s since %s: %s", s.Source.Kind, s.Source.Status, s.Source.Since.UTC().Format(time.RFC3339),
			cut(s.Source.Err, maxMessage/4))
		fmt.Fprintf(&short, " %s", s.Source.Status)
	}
	full := false
	for i, d := range t.sick {
		fmt.Fprintf(&short, " %s is %s: %s", d.Device.ID, d.Verdict.State, causes(d.Verdict))
		line, more := "; "+cut(sentence(d), maxMessage/3), fmt.Sprintf("; and %d more", len(t.sick)-i)
		switch {
		case full:
		case text.Len()+len(line)+len(more) > maxMessage:
			full = true
			text.WriteString(more)
		default:
			text.WriteString(line)
		}
	}
	return cut(text.String(), maxMessage), short.String()
}

// sentence says what is wrong with a device that has findings.
func sentence(d *health.DeviceState) string {
	worst := d.Verdict.Findings[0]
	return fmt.Sprintf("%s is %s (%s): %s; %s", deviceName(d.Device), d.Verdict.State, causes(d.Verdict), worst.Reason, worst.Action.Advice())
}

// inherited tells whether a device has nothing worse of its own than what it has from its GPU.
func inherited(v health.Verdict) bool { return len(v.Findings) > 0 && v.Findings[0].From != "" }

// away tells whether the source does not measure. One that starts is taken for one that does: a reconnect
// is no news.
func away(s health.SourceStatus) bool { return s == health.SourceDown || s == health.SourceStalled }

func sourceReason(s health.SourceStatus) string {
	if s == health.SourceStalled {
		return reasonSourceStalled
	}
	return reasonSourceDown
}

// causes lists the causes of a verdict, the worst first.
func causes(v health.Verdict) string {
	var all []string
	for _, f := range v.Findings {
		all = append(all, f.Cause)
	}
	return strings.Join(all, ", ")
}

// deviceName is how a person finds a device.
func deviceName(d health.Device) string {
	switch {
	case d.Kind == health.KindMIG && d.MIGIndex >= 0:
		return fmt.Sprintf("MIG device %d:%d (%s)", d.Index, d.MIGIndex, d.ID)
	case d.Kind == health.KindMIG: // the driver does not list it
		return fmt.Sprintf("MIG device %s of GPU %d", d.ID, d.Index)
	}
	return fmt.Sprintf("GPU %d (%s)", d.Index, d.ID)
}

// camel turns a cause into a reason: "xid-79" into "Xid79".
func camel(cause string) string {
	var b strings.Builder
	for word := range strings.FieldsFuncSeq(cause, func(r rune) bool {
		return (r < 'a' || r > 'z') && (r < 'A' || r > 'Z') && (r < '0' || r > '9')
	}) {
		b.WriteString(strings.ToUpper(word[:1]) + word[1:])
	}
	return b.String()
}

// cut returns the text, or its beginning if it is longer than n bytes.
func cut(text string, n int) string {
	const dots = "…"
	if len(text) > n {
		text = strings.ToValidUTF8(text[:n-len(dots)], "") + dots
	}
	return text
}
