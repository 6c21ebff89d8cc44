package metrics

import (
	"testing"
	"time"

	"github.com/gpu-node-agent/gpu-node-agent/health"
)

// Each GPU has at most one series, with its own worst fault or the oldest of its MIG devices.
func TestGPUUnhealthy(t *testing.T) {
	const name = namespace + "gpu_unhealthy"
	xid := func(cause string, minutes int) health.Finding {
		return health.Finding{Cause: cause, State: health.Unhealthy, Since: now.Add(-time.Duration(minutes) * time.Minute)}
	}
	cordoned := health.Finding{Cause: health.CauseCordoned, State: health.Unhealthy}
	degraded := health.Finding{Cause: "temperature", State: health.Degraded}
	for when, c := range map[string]struct {
		gpu, first, second []health.Finding // of GPU-c, MIG-1 and MIG-2
		want               string           // cause; "": no series
	}{
		"healthy":           {},
		"degraded":          {gpu: []health.Finding{degraded}},
		"cordoned":          {gpu: []health.Finding{cordoned}},
		"two faults":        {gpu: []health.Finding{xid("lost", 1), xid("xid-79", 2), cordoned}, want: "lost"},
		"fault of the GPU":  {gpu: []health.Finding{xid("xid-79", 1)}, first: []health.Finding{xid("xid-48", 9)}, want: "xid-79"},
		"fault of a part":   {second: []health.Finding{xid("xid-48", 1)}, want: "xid-48"},
		"faults of parts":   {first: []health.Finding{xid("xid-94", 1)}, second: []health.Finding{xid("xid-48", 2)}, want: "xid-48"},
		"cordon and a part": {gpu: []health.Finding{cordoned}, first: []health.Finding{xid("xid-48", 1)}, want: "xid-48"},
		"MPS daemon":        {gpu: []health.Finding{xid(health.CauseMPSDown, 1)}, want: health.CauseMPSDown},
		"MPS daemon, then a fault of a part": {
			first: []health.Finding{xid(health.CauseMPSDown, 9)}, second: []health.Finding{xid("xid-48", 1)}, want: "xid-48",
		},
		"fault of a part, then an MPS daemon": {
			first: []health.Finding{xid("xid-48", 9)}, second: []health.Finding{xid(health.CauseMPSDown, 10)}, want: "xid-48",
		},
		"cordoned part":        {first: []health.Finding{cordoned}},
		"degraded and a fault": {gpu: []health.Finding{degraded}, first: []health.Finding{xid("xid-48", 1)}, want: "xid-48"},
	} {
		t.Run(when, func(t *testing.T) {
			s := testNode()
			for i, findings := range [][]health.Finding{c.gpu, c.first, c.second} {
				v := &s.Devices[2+i].Verdict
				*v = health.Verdict{State: health.Healthy, Findings: findings}
				if len(findings) > 0 {
					v.State = findings[0].State
				}
			}
			page := render(t, collectorOf(testSources(s)))
			expectSeries(t, page, min(1, len(c.want)), name, `gpu="2"`)
			expectSeries(t, page, min(1, len(c.want)), name, `UUID="GPU-c"`, `cause="`+c.want+`"`, "} 1")
			expectSeries(t, page, 1, name, `UUID="GPU-b"`)
		})
	}
}

func TestUnhealthyMIGDeviceWithoutGPU(t *testing.T) {
	s := testNode()
	s.Devices = s.Devices[3:4]
	s.Devices[0].Verdict = health.Verdict{State: health.Unhealthy, Findings: []health.Finding{{Cause: "xid-48", State: health.Unhealthy}}}
	expectSeries(t, render(t, collectorOf(testSources(s))), 1, namespace+"gpu_unhealthy", `UUID="MIG-1"`, `cause="xid-48"`)
}

func TestUnschedulableIsUnknown(t *testing.T) {
	src := testSources(testNode())
	expectSeries(t, render(t, collectorOf(src)), 1, namespace+"unschedulable_devices", `resource="nvidia.com/gpu"} 1`)
	src.Plugin.Resources[0].Unschedulable = nil
	expectSeries(t, render(t, collectorOf(src)), 0, namespace+"unschedulable_devices")
}
