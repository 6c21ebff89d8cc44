package kube

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/health/catalog"
	"github.com/gpu-node-agent/gpu-node-agent/internal/healthtest"
)

func TestEventsBetween(t *testing.T) {
	xid79, lost, hot := finding("xid-79", health.Unhealthy), finding("lost", health.Unhealthy), finding("temperature", health.Degraded)
	pods := map[health.DeviceID][]Pod{
		"GPU-0": {{"team", "train"}, {"team", "train"}, {"other", "infer"}}, "MIG-0-1": {{"team", "slice"}},
	}
	unmeasured := gpu(1, nil)
	unmeasured.Verdict.State = health.Unknown
	type list = []health.DeviceState
	for _, c := range []struct {
		name          string
		before, after list
		want          []string
	}{
		{"no change", list{gpu(0, nil)}, list{gpu(0, nil)}, nil},
		{"healthy device added", nil, list{gpu(0, nil)}, nil},
		{"measured for the first time", list{unmeasured}, list{gpu(1, nil)}, nil},
		{"not measured any more", list{gpu(1, nil)}, list{unmeasured}, nil},
		{"device removed", list{gpu(0, nil)}, nil, nil},
		{
			"unhealthy",
			list{gpu(0, nil)},
			list{gpu(0, nil, xid79)},
			[]string{"node Warning GPUUnhealthy", "team/train Warning GPUUnhealthy", "other/infer Warning GPUUnhealthy"},
		},
		{"device without a holder", list{gpu(1, nil)}, list{gpu(1, nil, xid79)}, []string{"node Warning GPUUnhealthy"}},
		{"unhealthy device added", nil, list{gpu(1, nil, xid79)}, []string{"node Warning GPUUnhealthy"}},
		{"still unhealthy", list{gpu(1, nil, xid79)}, list{gpu(1, nil, xid79)}, nil},
		{"worse cause added", list{gpu(1, nil, xid79)}, list{gpu(1, nil, lost, xid79)}, []string{"node Warning GPUUnhealthy"}},
		{"worse of two causes cleared", list{gpu(1, nil, lost, xid79)}, list{gpu(1, nil, xid79)}, nil},
		{"degraded", list{gpu(1, nil)}, list{gpu(1, nil, hot)}, []string{"node Warning GPUDegraded"}},
		{"unhealthy to degraded", list{gpu(1, nil, lost, hot)}, list{gpu(1, nil, hot)}, []string{"node Warning GPUDegraded"}},
		{"recovered", list{gpu(1, nil, lost)}, list{gpu(1, nil)}, []string{"node Normal GPURecovered"}},
		{
			"XIDs",
			list{gpu(1, map[int]uint64{31: 4})},
			list{gpu(1, map[int]uint64{31: 6, 79: 1})},
			[]string{"node Warning XID ×2", "node Warning XID"},
		},
		{
			"XID of a GPU goes to holders of its MIG devices",
			list{gpu(0, nil), mig(0, 1, nil)},
			list{gpu(0, map[int]uint64{79: 1}), mig(0, 1, nil)},
			[]string{"node Warning XID", "team/train Warning XID", "other/infer Warning XID", "team/slice Warning XID"},
		},
		{
			"inherited finding goes to holders, not to the node",
			list{gpu(0, nil), mig(0, 1, nil)},
			list{gpu(0, nil, lost), mig(0, 1, nil, inheritedFrom("GPU-0", lost))},
			[]string{
				"node Warning GPUUnhealthy", "team/train Warning GPUUnhealthy", "other/infer Warning GPUUnhealthy",
				"team/slice Warning GPUUnhealthy",
			},
		},
		{
			"inherited finding of a MIG device with one of its own",
			list{gpu(1, nil), mig(1, 1, nil, hot)},
			list{gpu(1, nil, lost), mig(1, 1, nil, inheritedFrom("GPU-1", lost), hot)},
			[]string{"node Warning GPUUnhealthy"},
		},
		{
			"MIG device becomes worse with the same cause",
			list{gpu(1, nil), mig(1, 1, nil, finding("xid-79", health.Degraded))},
			list{gpu(1, nil), mig(1, 1, nil, xid79)},
			[]string{"node Warning GPUUnhealthy"},
		},
		{
			"MIG device recovers with its GPU",
			list{mig(0, 1, nil, inheritedFrom("GPU-0", lost))},
			list{mig(0, 1, nil)},
			[]string{"team/slice Normal GPURecovered"},
		},
		{
			"finding of several MIG devices goes to the node once",
			list{mig(0, 1, nil), mig(0, 2, nil), mig(0, 3, nil)},
			list{mig(0, 1, nil, xid79), mig(0, 2, nil, xid79), mig(0, 3, nil, lost)},
			[]string{"node Warning GPUUnhealthy", "team/slice Warning GPUUnhealthy", "node Warning GPUUnhealthy"},
		},
		{
			"XID of several MIG devices goes to the node once",
			list{mig(0, 1, nil), mig(0, 2, nil)},
			list{mig(0, 1, map[int]uint64{31: 1}), mig(0, 2, map[int]uint64{31: 2})},
			[]string{"node Warning XID ×3", "team/slice Warning XID"},
		},
		{
			"finding of a MIG device",
			list{mig(0, 1, nil)},
			list{mig(0, 1, nil, xid79)},
			[]string{"node Warning GPUUnhealthy", "team/slice Warning GPUUnhealthy"},
		},
	} {
		var got []string
		for _, e := range eventsBetween(c.before, c.after, "n", func(id health.DeviceID) []Pod { return pods[id] }, time.Now()) {
			s := strings.TrimPrefix(e.key.object.namespace+"/"+e.key.object.name, "/")
			if s == "n" {
				s = "node"
			}
			s += " " + e.typ + " " + e.key.reason
			if e.count != 1 {
				s += fmt.Sprintf(" ×%d", e.count)
			}
			got = append(got, s)
		}
		if !slices.Equal(got, c.want) {
			t.Errorf("%s: %q, want %q", c.name, got, c.want)
		}
	}
}

func TestEventMessages(t *testing.T) {
	holders := func(health.DeviceID) []Pod { return nil }
	before := []health.DeviceState{gpu(3, nil)}
	broken := []health.DeviceState{gpu(3, map[int]uint64{79: 1}, finding("xid-79", health.Unhealthy))}
	hot := []health.DeviceState{gpu(3, nil, finding("temperature", health.Degraded))}
	var got, keys []string
	for _, e := range slices.Concat(eventsBetween(before, broken, "n", holders, time.Now()),
		eventsBetween(broken, before, "n", holders, time.Now()),
		eventsBetween(before, hot, "n", holders, time.Now())) {
		got, keys = append(got, e.message), append(keys, e.key.reason+" "+string(e.key.device)+" "+e.key.cause)
	}
	x := catalog.LookupXID(79)
	want := []string{
		"XID 79 of GPU 3 (GPU-3): " + x.Name + "; " + x.Advice(),
		"GPU 3 (GPU-3) is unhealthy (xid-79): it is xid-79; drain the node and reset the GPU",
		"GPU 3 (GPU-3) is healthy again; cleared: xid-79",
		"GPU 3 (GPU-3) is degraded (temperature): it is temperature; drain the node and reset the GPU",
	}
	if want := []string{
		"XID GPU-3 79", "GPUUnhealthy GPU-3 xid-79", "GPURecovered GPU-3 xid-79",
		"GPUDegraded GPU-3 temperature",
	}; !slices.Equal(keys, want) {
		t.Errorf("%q, want %q: events of different causes are no repetitions", keys, want)
	}
	if !slices.Equal(got, want) {
		t.Errorf("%q, want %q", got, want)
	}
}

// The node's event of several MIG devices names one and says how many more, also if the text is cut.
func TestEventOfSeveralMIGDevices(t *testing.T) {
	for n, want := range map[int]string{1: "reset the GPU", 2: " (and 1 more MIG devices of GPU 0)", 3: " (and 2 more MIG devices of GPU 0)"} {
		for _, length := range []int{10, 2 * maxMessage} {
			f := finding("xid-79", health.Unhealthy)
			f.Reason = strings.Repeat("r", length)
			var before, after []health.DeviceState
			for i := range n {
				before, after = append(before, mig(0, i+1, nil)), append(after, mig(0, i+1, nil, f))
			}
			for _, e := range eventsBetween(before, after, "n", func(health.DeviceID) []Pod { return nil }, time.Now()) {
				if cut := length > maxMessage; len(e.message) > maxMessage || !strings.HasSuffix(e.message, want) && (n > 1 || !cut) ||
					strings.Contains(e.message, "…") != cut {
					t.Errorf("%d devices: %d bytes: %s", n, len(e.message), e.message)
				}
			}
		}
	}
}

// An event names the finding that is new, and the strongest action of all.
func TestEventNamesNewFinding(t *testing.T) {
	reset, replace := finding("xid-48", health.Unhealthy), finding("row-remap-failed", health.Unhealthy)
	replace.Action = health.ActionReplaceGPU
	hot := finding("temperature", health.Degraded)
	for name, c := range map[string]struct {
		before, after []health.Finding
		cause         string // "" if there is no event
		advice        string
	}{
		"a stronger one":          {[]health.Finding{reset}, []health.Finding{replace, reset}, "row-remap-failed", "replace the GPU"},
		"a weaker one":            {[]health.Finding{replace}, []health.Finding{replace, reset}, "xid-48", "replace the GPU"},
		"one of another severity": {[]health.Finding{reset}, []health.Finding{reset, hot}, "", ""},
		"one has cleared":         {[]health.Finding{replace, reset}, []health.Finding{reset}, "", ""},
		"the worst has cleared":   {[]health.Finding{reset, hot}, []health.Finding{hot}, "temperature", "drain the node and reset the GPU"},
	} {
		before, after := []health.DeviceState{gpu(3, nil, c.before...)}, []health.DeviceState{gpu(3, nil, c.after...)}
		events := eventsBetween(before, after, "n", func(health.DeviceID) []Pod { return nil }, time.Now())
		if len(events) != min(1, len(c.cause)) {
			t.Errorf("%s: %d events", name, len(events))
		} else if len(events) == 1 && !strings.HasSuffix(events[0].message, ": it is "+c.cause+"; "+c.advice) {
			t.Errorf("%s: %q", name, events[0].message)
		}
	}
}

// The process of an XID is in the message of its event, also if the kernel log names it after the XID was reported.
func TestEventNamesProcessOfXID(t *testing.T) {
	healthy, reported := gpu(1, nil), gpu(1, map[int]uint64{31: 2})
	detailed := reported
	detailed.XIDs = healthtest.WithDetail(detailed.XIDs, 31, health.XIDDetail{Process: "python3", PID: 7194})
	for name, c := range map[string]struct {
		before health.DeviceState
		count  uint64 // of the event to add
	}{
		"at once": {healthy, 2}, "late": {reported, 0},
	} {
		events := eventsBetween([]health.DeviceState{c.before}, []health.DeviceState{detailed}, "n", func(health.DeviceID) []Pod { return nil },
			time.Now())
		if len(events) != 1 || events[0].count != c.count || !strings.Contains(events[0].message, "process python3 (pid 7194)") {
			t.Errorf("%s: %+v, want the process and count %d", name, events, c.count)
		}
	}
	if events := eventsBetween([]health.DeviceState{detailed}, []health.DeviceState{detailed}, "n", nil, time.Now()); len(events) != 0 {
		t.Errorf("again: %+v, want no event", events)
	}
}
