package agent

import (
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/gpu-node-agent/gpu-node-agent/agent/internal/agenttest"
	"github.com/gpu-node-agent/gpu-node-agent/agent/kube"
	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/plugin"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/dra"
)

// wantReasons checks that there is one reason with each part.
func wantReasons(t *testing.T, got []string, parts ...string) {
	t.Helper()
	if len(got) != len(parts) {
		t.Fatalf("%q, want %q", got, parts)
	}
	for i, part := range parts {
		if !strings.Contains(got[i], part) {
			t.Errorf("%q, want %q", got[i], part)
		}
	}
}

func TestNotAudited(t *testing.T) {
	audited := plugin.ResourceStatus{Name: "nvidia.com/gpu", Registered: true, Audited: true, Devices: 8, Healthy: 7}
	pending := plugin.ResourceStatus{Name: "nvidia.com/mig-1g.10gb", Registered: true, Devices: 7}
	for name, c := range map[string]struct {
		status plugin.Status
		want   []string
	}{
		"nothing":    {plugin.Status{}, []string{"no device"}},
		"audited":    {plugin.Status{Resources: []plugin.ResourceStatus{audited}}, nil},
		"one is not": {plugin.Status{Resources: []plugin.ResourceStatus{audited, pending}}, []string{"nvidia.com/mig-1g.10gb"}},
		"cannot be":  {plugin.Status{AuditErr: "denied", Resources: []plugin.ResourceStatus{pending}}, []string{"denied"}},
		"without devices": {
			plugin.Status{Resources: []plugin.ResourceStatus{{Name: "nvidia.com/gpu", Registered: true, Audited: true}}},
			[]string{"no device"},
		},
		"not registered either": {plugin.Status{Resources: []plugin.ResourceStatus{{Name: "nvidia.com/gpu", Devices: 8}}}, nil}, // in notReady
	} {
		t.Run(name, func(t *testing.T) { wantReasons(t, notAudited(c.status), c.want...) })
	}
}

func TestNotPublished(t *testing.T) {
	published := dra.Status{Enabled: true, Registered: true, Published: time.Now(), Devices: 8}
	with := func(change func(*dra.Status)) dra.Status {
		s := published
		change(&s)
		return s
	}
	for name, c := range map[string]struct {
		status dra.Status
		want   []string
	}{
		"published":      {published, nil},
		"handover":       {with(func(s *dra.Status) { s.Handover = true }), []string{"handed over"}},
		"not registered": {with(func(s *dra.Status) { s.Registered = false }), []string{"kubelet"}},
		"never":          {with(func(s *dra.Status) { s.Published = time.Time{} }), []string{"not published"}},
		"behind":         {with(func(s *dra.Status) { s.Behind, s.PublishErr = true, "forbidden" }), []string{"forbidden"}},
		"no devices":     {with(func(s *dra.Status) { s.Devices = 0 }), []string{"no device"}},
		"off":            {dra.Status{}, []string{"handed over", "kubelet", "not published", "no device"}},
	} {
		t.Run(name, func(t *testing.T) { wantReasons(t, notPublished(c.status), c.want...) })
	}
}

// With plugin.enabled false a node is ready only with a GPU that the driver reaches.
func TestNotListed(t *testing.T) {
	lost := agenttest.GPU(0)
	lost.Sample.Presence = health.Lost
	for name, c := range map[string]struct {
		snapshot *health.Snapshot
		want     []string
	}{
		"no snapshot": {nil, []string{"no GPU"}},
		"no GPU":      {&health.Snapshot{}, []string{"no GPU"}},
		"lost":        {&health.Snapshot{Devices: []health.DeviceState{lost}}, []string{"no GPU"}},
		"one of two":  {&health.Snapshot{Devices: []health.DeviceState{lost, agenttest.GPU(1)}}, nil},
	} {
		t.Run(name, func(t *testing.T) { wantReasons(t, notListed(c.snapshot), c.want...) })
	}
}

func TestNodeWarnings(t *testing.T) {
	got := nodeWarnings(kube.NodeStatus{LabelsErr: "a", FeatureErr: "b", TaintsErr: "c", ConditionErr: "f"}, []string{"d", "e"})
	wantReasons(t, got, "labels: a", "NodeFeature: b", "taints: c", "condition: f", "startup taint stays: d; e")
	wantReasons(t, nodeWarnings(kube.NodeStatus{Enabled: true, Errors: 3}, nil))
}

// A startup taint that was removed is not reported as staying when the devices are not offered for a moment.
func TestStartupTaintStays(t *testing.T) {
	removed := corev1.Taint{Key: "gpu/not-ready", Effect: corev1.TaintEffectNoSchedule}
	for configured, want := range map[string]bool{
		"": false, "gpu/not-ready:NoSchedule": false, "gpu/not-ready=x:NoSchedule": false, "gpu/not-ready:NoExecute": true,
		"other:NoSchedule": true,
	} {
		if got := startupTaintMayRemain(configured, removed); got != want {
			t.Errorf("%q: %v", configured, got)
		}
		if got := startupTaintMayRemain(configured, corev1.Taint{}); got != (configured != "") {
			t.Errorf("%q before it was removed: %v", configured, got)
		}
	}
}
