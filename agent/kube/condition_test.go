package kube

import (
	"strings"
	"testing"
	"time"

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
		{"never up with saved devices", source(health.SourceDown, false, gpu(0, nil, xid79)), "False Xid79", "GPU 0 (GPU-0) is unhealthy"},
		{"all healthy", snapshotOf(gpu(0, nil), gpu(1, nil)), "True AllHealthy", "2 GPUs are healthy"},
		{"no GPUs", snapshotOf(), "Unknown NoGPUs", "0 GPUs"},
		{"one never measured", snapshotOf(gpu(0, nil), unmeasured), "Unknown NotMeasured", "1 unknown"},
		{"unhealthy beats unknown", snapshotOf(gpu(0, nil, xid79), unmeasured), "False Xid79", "1 unhealthy, 0 degraded, 1 unknown"},
		{
			"degraded is schedulable", snapshotOf(gpu(0, nil, hot), gpu(1, nil)), "True Temperature",
			"of 2 GPUs: 0 unhealthy, 1 degraded, 0 unknown; GPU 0 (GPU-0) is degraded (temperature): it is temperature; drain the node and reset the GPU",
		},
		{
			"worst finding is the reason", snapshotOf(gpu(0, nil, hot), gpu(1, nil, finding("recovery-action", health.Unhealthy), xid79)), "False RecoveryAction",
			"GPU 1 (GPU-1) is unhealthy (recovery-action, xid-79): it is recovery-action; drain the node and reset the GPU; GPU 0 (GPU-0) is degraded",
		},
		{
			"source went down", source(health.SourceDown, true, gpu(0, nil)), "True SourceDown",
			"1 GPUs are healthy; dcgm is down since 2001-09-09T01:46:40Z: timeout",
		},
		{"source stalled", source(health.SourceStalled, true, gpu(0, nil)), "True SourceStalled", ""},
		{"verdict outlives the source", source(health.SourceDown, true, gpu(0, nil, xid79)), "False Xid79", "dcgm is down"},
		{"reconnecting", source(health.SourceStarting, true, gpu(0, nil)), "True AllHealthy", "1 GPUs are healthy"},
		{"inherited finding counts once", snapshotOf(gpu(0, nil, xid79), mig(0, 1, nil, inheritedFrom("GPU-0", xid79))), "False Xid79", "of 1 GPUs: 1 unhealthy"},
		{"finding of a MIG device", snapshotOf(gpu(0, nil), mig(0, 1, nil, xid79)), "False Xid79", "MIG device 0:0 (MIG-0-1) is unhealthy"},
		{"healthy MIG devices", snapshotOf(gpu(0, nil), mig(0, 1, nil)), "True AllHealthy", "1 GPUs are healthy"},
	} {
		s, ok := conditionOf(c.snapshot)
		if got := strings.TrimSpace(string(s.status) + " " + s.reason); got != c.want || ok != (c.want != "") {
			t.Errorf("%s: %q, %v, want %q", c.name, got, ok, c.want)
		}
		if !strings.Contains(s.message, c.message) {
			t.Errorf("%s: message %q lacks %q", c.name, s.message, c.message)
		}
	}
}

func TestConditionMessageIsTruncated(t *testing.T) {
	var devices []health.DeviceState
	for i := range 200 {
		devices = append(devices, gpu(i, nil, finding("xid-79", health.Unhealthy)))
	}
	few, _ := conditionOf(snapshotOf(devices[:2]...))
	if strings.Contains(few.message, "more") || !strings.Contains(few.message, "GPU 1 ") {
		t.Errorf("two devices: %s", few.message)
	}
	all, _ := conditionOf(snapshotOf(devices...))
	if len(all.message) > maxMessage || !strings.Contains(all.message, "of 200 GPUs: 200 unhealthy") || !strings.HasSuffix(all.message, " more") {
		t.Errorf("%d bytes: %s", len(all.message), all.message)
	}
	devices[199] = gpu(199, nil, finding("lost", health.Unhealthy))
	if changed, _ := conditionOf(snapshotOf(devices...)); changed.fingerprint == all.fingerprint {
		t.Error("the fingerprint lacks a device that the message has no room for")
	}

	s := snapshotOf(gpu(0, nil))
	s.Source.Status, s.Source.Err = health.SourceDown, strings.Repeat("é", 5000)
	if c, _ := conditionOf(s); len(c.message) > maxMessage || !strings.HasSuffix(c.message, "é…") {
		t.Errorf("%d bytes: %q", len(c.message), c.message)
	}
}

func TestCamelCase(t *testing.T) {
	for cause, want := range map[string]string{
		"xid-79": "Xid79", "lost": "Lost", "recovery-action": "RecoveryAction", "double-bit-ecc": "DoubleBitEcc",
		"dcgm-DCGM_FR_NVLINK_DOWN": "DcgmDCGMFRNVLINKDOWN",
	} {
		if got := camelCase(cause); got != want {
			t.Errorf("%s: %s, want %s", cause, got, want)
		}
	}
}

func TestConditionTransitionTime(t *testing.T) {
	at := func(s int64) metav1.Time { return metav1.Unix(s, 0) }
	want := conditionState{status: metav1.ConditionFalse, reason: "Xid79", since: at(50).Time}
	for _, c := range []struct {
		name    string
		current nodeCondition
		want    metav1.Time
	}{
		{"no condition", nodeCondition{}, at(50)},
		{"status changed", nodeCondition{Status: metav1.ConditionTrue, LastTransitionTime: at(10)}, at(50)},
		{"only the reason changed", nodeCondition{Status: metav1.ConditionFalse, Reason: "Lost", LastTransitionTime: at(10)}, at(10)},
		{"condition without a transition time", nodeCondition{Status: metav1.ConditionFalse}, at(50)},
	} {
		got := want.condition(c.current, at(60).Time)
		if !got.LastTransitionTime.Equal(&c.want) {
			t.Errorf("%s: %v, want %v", c.name, got.LastTransitionTime, c.want)
		}
		if got.Status != metav1.ConditionFalse || got.Reason != "Xid79" || !got.LastHeartbeatTime.Equal(new(at(60))) {
			t.Errorf("%s: %+v", c.name, got)
		}
	}
}
