package kube

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpu-node-agent/gpu-node-agent/health"
)

func TestCondition(t *testing.T) {
	xid79, hot := finding("xid-79", health.Unhealthy), finding("temperature", health.Degraded)
	unmeasured := gpu(1, nil)
	unmeasured.Verdict.State = health.Unknown
	source := func(status health.SourceStatus, polled bool, devices ...health.DeviceState) *health.Snapshot {
		s := snapshotOf(devices...)
		s.Source = health.Source{Kind: "dcgm", Status: status, Err: "timeout", Since: time.Unix(1e9, 0)}
		if !polled {
			s.At = time.Time{}
		}
		return s
	}
	for _, c := range []struct {
		name     string
		snapshot *health.Snapshot
		want     string // status and reason; "" if the condition stays
		message  string
	}{
		{"no snapshot", nil, "", ""},
		{"starting", source(health.SourceStarting, false), "", ""},
		{"starting with saved devices", source(health.SourceStarting, false, gpu(0, nil, xid79)), "", ""},
		{
			"never up", source(health.SourceDown, false), "Unknown SourceDown",
			"the GPUs were not measured since the agent started; dcgm is down since 2001-09-09T01:46:40Z: timeout",
		},
		{
			"never up with saved devices", source(health.SourceDown, false, gpu(0, nil, xid79)), "False Xid79",
			"the GPUs were not measured since the agent started; dcgm is down since",
		},
		{"all healthy", snapshotOf(gpu(0, nil), gpu(1, nil)), "True AllHealthy", "2 GPUs are healthy"},
		{"no GPUs", snapshotOf(), "Unknown NoGPUs", "0 GPUs"},
		{"one never measured", snapshotOf(gpu(0, nil), unmeasured), "Unknown NotMeasured", "1 of 2 GPUs unknown"},
		{
			"unhealthy beats unknown", snapshotOf(gpu(0, nil, xid79), unmeasured), "False Xid79",
			"1 of 2 GPUs unhealthy, 1 unknown; GPU 0 (GPU-0) is unhealthy",
		},
		{
			"degraded is schedulable", snapshotOf(gpu(0, nil, hot), gpu(1, nil)), "True Temperature",
			"1 of 2 GPUs degraded; GPU 0 (GPU-0) is degraded (temperature): it is temperature; drain the node and reset the GPU",
		},
		{
			"worst finding is the reason", snapshotOf(gpu(0, nil, hot), gpu(1, nil, finding("recovery-action", health.Unhealthy), xid79)),
			"False RecoveryAction",
			"1 of 2 GPUs unhealthy, 1 degraded; GPU 1: recovery-action, xid-79 (drain the node and reset the GPU); GPU 0 degraded: temperature " +
				"(drain the node and reset the GPU)",
		},
		{
			"source went down", source(health.SourceDown, true, gpu(0, nil)), "True SourceDown",
			"1 GPUs are healthy; dcgm is down since 2001-09-09T01:46:40Z: timeout",
		},
		{"source stalled", source(health.SourceStalled, true, gpu(0, nil)), "True SourceStalled", ""},
		{
			"verdict outlives the source", source(health.SourceDown, true, gpu(0, nil, xid79)), "False Xid79",
			"1 of 1 GPUs unhealthy; dcgm is down",
		},
		{"reconnecting", source(health.SourceStarting, true, gpu(0, nil)), "True AllHealthy", "1 GPUs are healthy"},
		{
			"inherited finding counts once", snapshotOf(gpu(0, nil, xid79), mig(0, 1, nil, inheritedFrom("GPU-0", xid79))), "False Xid79",
			"1 of 1 GPUs unhealthy; GPU 0 (GPU-0) is unhealthy (xid-79)",
		},
		{"finding of a MIG device", snapshotOf(gpu(0, nil), mig(0, 1, nil, xid79)), "False Xid79", "MIG device 0:0 (MIG-0-1) is unhealthy"},
		{
			"all GPUs alike", snapshotOf(gpu(0, nil, xid79), gpu(1, nil, xid79), mig(1, 1, nil, inheritedFrom("GPU-1", xid79))), "False Xid79",
			"all 2 GPUs: xid-79 (drain the node and reset the GPU)",
		},
		{
			"some GPUs alike", snapshotOf(gpu(0, nil), gpu(5, nil, xid79), gpu(3, nil, xid79)), "False Xid79",
			"2 of 3 GPUs unhealthy; GPU 3, 5: xid-79 (drain the node and reset the GPU)",
		},
		{
			"MIG device with the same finding as its GPU", snapshotOf(gpu(0, nil, hot, xid79), mig(0, 1, nil, xid79), mig(0, 2, nil, xid79)),
			"False Temperature",
			"1 of 1 GPUs unhealthy; GPU 0 (GPU-0) is unhealthy (temperature, xid-79): it is temperature; drain the node and reset the GPU",
		},
		{
			"MIG device with a worse state than its GPU", snapshotOf(gpu(0, nil, finding("xid-79", health.Degraded)), mig(0, 1, nil, xid79)),
			"False Xid79",
			"1 of 1 GPUs degraded; 1 MIG device of GPU 0: xid-79 (drain the node and reset the GPU); GPU 0 degraded: xid-79 (drain the node and " +
				"reset the GPU)",
		},
		{
			"MIG devices alike", snapshotOf(gpu(0, nil), gpu(1, nil), mig(0, 1, nil, xid79), mig(1, 1, nil, xid79), mig(1, 2, nil, xid79),
				mig(1, 3, nil, hot)),
			"False Xid79", "3 MIG devices of GPU 0, 1: xid-79 (drain the node and reset the GPU); 1 MIG device of GPU 1 degraded: temperature " +
				"(drain the node and reset the GPU)",
		},
		{
			"as many MIG devices as GPUs", snapshotOf(gpu(0, nil, hot), gpu(1, nil), mig(1, 1, nil, xid79), mig(1, 2, nil, xid79)),
			"False Xid79", "1 of 2 GPUs degraded; 2 MIG devices of GPU 1: xid-79 (drain the node and reset the GPU); GPU 0 degraded: temperature " +
				"(drain the node and reset the GPU)",
		},
		{"healthy MIG devices", snapshotOf(gpu(0, nil), mig(0, 1, nil)), "True AllHealthy", "1 GPUs are healthy"},
	} {
		s, ok := conditionOf(c.snapshot)
		if got := strings.TrimSpace(string(s.status) + " " + s.reason); got != c.want || ok != (c.want != "") {
			t.Errorf("%s: %q, %v, want %q", c.name, got, ok, c.want)
		}
		if !strings.HasPrefix(s.message, c.message) {
			t.Errorf("%s: message %q, want %q", c.name, s.message, c.message)
		}
	}
}

// The device with the strongest action is the reason of the condition and first in its message.
func TestConditionOrder(t *testing.T) {
	replace := finding("row-remap-failed", health.Unhealthy)
	replace.Action = health.ActionReplaceGPU
	sum := summarize([]health.DeviceState{gpu(0, nil, finding("xid-48", health.Unhealthy)), gpu(1, nil, replace), gpu(2, nil)})
	s := snapshotOf()
	_, reason := sum.status(s)
	message, _ := sum.message(s)
	want := "2 of 3 GPUs unhealthy; GPU 1: row-remap-failed (replace the GPU); GPU 0: xid-48 (drain the node and reset the GPU)"
	if reason != "RowRemapFailed" || message != want {
		t.Errorf("%s: %q, want %q", reason, message, want)
	}
}

func TestConditionMessageIsTruncated(t *testing.T) {
	const maxMessage = 1024 // of the note of an Event in events.k8s.io/v1
	// The worst case: 16 GPUs with seven MIG devices each, all with findings of their own.
	var devices []health.DeviceState
	for i := range 16 {
		devices = append(devices, gpu(i, nil, finding(fmt.Sprint("xid-", i), health.Unhealthy)))
		for gi := range 7 {
			devices = append(devices, mig(i, gi, nil, finding(fmt.Sprintf("cause-%d-%d", i, gi), health.Unhealthy)))
		}
	}
	all, _ := conditionOf(snapshotOf(devices...))
	if len(all.message) > maxMessage || !strings.HasPrefix(all.message, "16 of 16 GPUs unhealthy; GPU 0: ") ||
		!strings.HasSuffix(all.message, " more") {
		t.Errorf("%d bytes: %s", len(all.message), all.message)
	}
	devices[len(devices)-1] = mig(15, 6, nil, finding("lost", health.Unhealthy))
	if changed, _ := conditionOf(snapshotOf(devices...)); changed.fingerprint == all.fingerprint {
		t.Error("the fingerprint lacks a device that the message has no room for")
	}

	var many []health.DeviceState
	for i := range 200 {
		many = append(many, gpu(i, nil, finding("xid-79", health.Unhealthy)))
	}
	for n, want := range map[int]string{16: "GPU 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15: xid", 17: "14, 15 and 1 more: xid"} {
		if c, _ := conditionOf(snapshotOf(append(slices.Clone(many[:n]), gpu(200, nil))...)); !strings.Contains(c.message, want) {
			t.Errorf("%d GPUs: %s", n, c.message)
		}
	}
	most, _ := conditionOf(snapshotOf(append(many, gpu(200, nil))...))
	if len(most.message) > maxMessage/3 || !strings.Contains(most.message, " and 184 more: xid-79 (") {
		t.Errorf("%d bytes: %s", len(most.message), most.message)
	}

	s := snapshotOf(gpu(0, nil))
	s.Source.Status, s.Source.Err = health.SourceDown, strings.Repeat("é", 5000)
	if c, _ := conditionOf(s); len(c.message) > maxMessage || !strings.HasSuffix(c.message, "é…") {
		t.Errorf("%d bytes: %q", len(c.message), c.message)
	}
}

// Texts that have room stay whole.
func TestConditionMessageKeepsTexts(t *testing.T) {
	long := strings.Repeat("x", 200)
	s := snapshotOf(gpu(0, nil, finding("xid-79", health.Unhealthy)))
	s.Devices[0].Verdict.Findings[0].Reason = long
	s.Source.Status, s.Source.Err = health.SourceDown, long
	c, _ := conditionOf(s)
	c.addLost(strings.Repeat("lost", 100))
	if !strings.Contains(c.message, "down since 0001-01-01T00:00:00Z: "+long+"; GPU 0 (GPU-0) is unhealthy (xid-79): "+long+
		"; drain the node") ||
		!strings.HasSuffix(c.message, "; "+strings.Repeat("lost", 100)) {
		t.Errorf("%d bytes: %s", len(c.message), c.message)
	}
	c, _ = conditionOf(s)
	c.addLost(strings.Repeat("lost", 500)) // each has half of the message then
	if rest, lost, _ := strings.Cut(c.message, "; lost"); len(rest) < 500 || len(lost) < 500 || len(c.message) > maxMessage {
		t.Errorf("%d bytes: %s", len(c.message), c.message)
	}
}

func TestCamelCase(t *testing.T) {
	for cause, want := range map[string]string{
		"xid-79": "Xid79", "lost": "Lost", "recovery-action": "RecoveryAction", "double-bit-ecc": "DoubleBitEcc",
		"dcgm-DCGM_FR_NVLINK_DOWN": "DcgmDCGMFRNVLINKDOWN", "azAZ09-zZ-9[`{@:/0": "AzAZ09ZZ90",
	} {
		if got := camelCase(cause); got != want {
			t.Errorf("%s: %s, want %s", cause, got, want)
		}
	}
}

func TestTruncate(t *testing.T) {
	for text, want := range map[string]string{"": "", "12345678": "12345678", "123456789": "12345…", "1234é6789": "1234…", "ééééé": "éé…"} {
		if got := truncate(text, 8); got != want {
			t.Errorf("%q: %q, want %q", text, got, want)
		}
	}
}

func TestConditionTransitionTime(t *testing.T) {
	at := func(s int64) metav1.Time { return metav1.Unix(s, 0) }
	want := conditionState{status: corev1.ConditionFalse, reason: "Xid79", since: at(50).Time}
	for _, c := range []struct {
		name    string
		current corev1.NodeCondition
		want    metav1.Time
	}{
		{"no condition", corev1.NodeCondition{}, at(50)},
		{"status changed", corev1.NodeCondition{Status: corev1.ConditionTrue, LastTransitionTime: at(10)}, at(50)},
		{"only the reason changed", corev1.NodeCondition{Status: corev1.ConditionFalse, Reason: "Lost", LastTransitionTime: at(10)}, at(10)},
		{"condition without a transition time", corev1.NodeCondition{Status: corev1.ConditionFalse}, at(50)},
	} {
		got := want.condition(c.current, at(60).Time)
		if !got.LastTransitionTime.Equal(&c.want) {
			t.Errorf("%s: %v, want %v", c.name, got.LastTransitionTime, c.want)
		}
		if got.Status != corev1.ConditionFalse || got.Reason != "Xid79" || !got.LastHeartbeatTime.Equal(new(at(60))) {
			t.Errorf("%s: %+v", c.name, got)
		}
	}
}

// A decision is the reason only if no GPU has a fault, and before what is only degraded.
func TestConditionOfDecisions(t *testing.T) {
	cordoned := finding(health.CauseCordoned, health.Unhealthy)
	cordoned.Action = health.ActionReplaceGPU // the strongest
	xid79, hot := finding("xid-79", health.Unhealthy), finding("temperature", health.Degraded)
	for name, c := range map[string]struct {
		devices []health.DeviceState
		reason  string
		order   []string // of what the message names
	}{
		"with a fault": {
			[]health.DeviceState{gpu(0, nil, cordoned), gpu(1, nil, hot), gpu(2, nil, xid79)},
			"Xid79",
			[]string{"GPU 2: xid-79", "GPU 0: cordoned", "GPU 1 degraded"},
		},
		"with a warning": {
			[]health.DeviceState{gpu(0, nil, hot), gpu(1, nil, cordoned)},
			"Cordoned",
			[]string{"GPU 1: cordoned", "GPU 0 degraded"},
		},
		"on the same GPU": {
			[]health.DeviceState{gpu(0, nil, cordoned), gpu(1, nil, cordoned, xid79)},
			"Cordoned",
			[]string{"GPU 0: cordoned", "GPU 1: cordoned, xid-79"},
		},
		"alone": {
			[]health.DeviceState{gpu(0, nil), gpu(1, nil, cordoned)},
			"Cordoned",
			[]string{"GPU 1 (GPU-1) is unhealthy (cordoned)"},
		},
		"of a whole machine": {[]health.DeviceState{gpu(0, nil, cordoned), gpu(1, nil, cordoned)}, "Cordoned", []string{"all 2 GPUs: cordoned"}},
	} {
		s, _ := conditionOf(snapshotOf(c.devices...))
		rest := s.message
		for _, part := range c.order {
			_, after, found := strings.Cut(rest, part)
			if rest = after; !found {
				t.Errorf("%s: message %q, want %q in this order", name, s.message, c.order)
			}
		}
		if s.reason != c.reason || s.status != corev1.ConditionFalse {
			t.Errorf("%s: %s %s, want %s", name, s.status, s.reason, c.reason)
		}
	}
}
