package metrics

import (
	"strings"
	"testing"
	"time"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/internal/healthtest"
	"github.com/gpu-node-agent/gpu-node-agent/metrics/fields"
)

// poll stores a snapshot a second after the last one.
func poll(src testSource, s *health.Snapshot) {
	s.At = src.Snapshot.At.Add(time.Second)
	src.Snapshot = s
	src.Totals.update(s)
}

func TestComputedMetrics(t *testing.T) {
	s := fullNode()
	s.Devices[0].Sample.Values = map[health.Field]float64{health.FieldClocksEvents: 1 | 8}
	src := configuredSources(s, testConfig(fields.XIDErrorsCount, fields.ClockEventsCount, fields.GPUHealthStatus, fields.P2PStatus,
		fields.XIDErrorsTotal, fields.ClockEventsTotal))
	c := collectorOf(src)
	page := render(t, c)
	for _, want := range []struct {
		n     int
		name  string
		parts []string
	}{
		{1, fields.XIDErrorsCount, []string{`UUID="GPU-a"`, `window_size_in_ms="300000"`, `xid="31"} 3`}},
		{1, fields.XIDErrorsCount, []string{`UUID="GPU-b"`, `xid=""} 0`}},
		{3, fields.XIDErrorsTotal, []string{`UUID="GPU-a"`}}, // since the agent's start
		{1, fields.XIDErrorsTotal, []string{`UUID="GPU-a"`, `xid="31"} 3`}},
		{1, fields.ClockEventsCount, []string{`clock_event="gpu_idle"`}},
		{1, fields.ClockEventsCount, []string{`clock_event="hw_slowdown"`}},
		{0, fields.ClockEventsTotal, nil}, // both events began before the agent
		{2, fields.GPUHealthStatus, []string{`UUID="GPU-a"`, `health_watch="MEM"`, `namespace="team"`}},
		{1, fields.GPUHealthStatus, []string{`health_error_code="DCGM_FR_VOLATILE_DBE_DETECTED"`, `health_watch="MEM"`, "} 20"}},
		{1, fields.GPUHealthStatus, []string{`health_error_code=""`, `health_watch="PCIE"`, "} 0"}},
		{1, fields.GPUHealthStatus, []string{`health_watch="ALL"`, "} 10"}},
		{0, fields.GPUHealthStatus, []string{`UUID="GPU-b"`}}, // its health checks have not run
		{1, fields.P2PStatus, []string{`link_status="OK"`, `peer_gpu="1"`}},
		{1, fields.P2PStatus, []string{`link_status="Unknown"`, `peer_gpu="2"`}},
	} {
		expectSeries(t, page, want.n, want.name, want.parts...)
	}

	next := fullNode()
	next.Devices[0].Sample.Values = map[health.Field]float64{health.FieldClocksEvents: 1 | 4}
	next.Source.Checks.Status = health.ChecksDown
	poll(src, next)
	page = render(t, c)
	expectSeries(t, page, 0, fields.GPUHealthStatus)
	expectSeries(t, page, 1, fields.ClockEventsTotal)
	expectSeries(t, page, 1, fields.ClockEventsTotal, `UUID="GPU-a"`, `clock_event="power_cap"`, "} 1\n")
	if strings.Contains(series(page, fields.ClockEventsTotal)[0], "window") {
		t.Error("a total has the label of the window")
	}
}

// The XIDs of a GPU instance are its compute instances'. An XID that all of them report counts once.
func TestXIDCountsOfComputeInstances(t *testing.T) {
	src := configuredSources(testNode(), testConfig(fields.XIDErrorsCount))
	next := testNode()
	first, second := &next.Devices[len(next.Devices)-2], &next.Devices[len(next.Devices)-1]
	both := health.XID{Code: 43, At: now}
	first.Sample.XIDs = []health.XID{both, {Code: 31, At: now}}
	first.XIDs = healthtest.Counted(map[int]uint64{43: 1, 31: 1}, health.XID{})
	second.Sample.XIDs = []health.XID{both, {Code: 31, At: now.Add(2)}, {Code: 13, At: now}}
	second.XIDs = healthtest.Counted(map[int]uint64{43: 1, 31: 1, 13: 1}, health.XID{})
	poll(src, next)
	page := render(t, collectorOf(src))
	for _, want := range []string{`xid="43"} 1`, `xid="31"} 2`, `xid="13"} 1`} {
		expectSeries(t, page, 1, fields.XIDErrorsCount, `GPU_I_ID="2"`, want)
	}
	expectSeries(t, page, 3, fields.XIDErrorsCount, `GPU_I_ID="2"`)
	expectSeries(t, page, 1, fields.XIDErrorsCount, `GPU_I_ID="1"`, `xid=""} 0`)

	// One event that each compute instance has, of which a witness had reported one for the second already.
	next = testNode()
	first, second = &next.Devices[len(next.Devices)-2], &next.Devices[len(next.Devices)-1]
	storm := health.XID{Code: 94, At: now, Witness: health.WitnessKernelLog, Times: 3}
	first.Sample.XIDs, first.XIDs = []health.XID{storm}, healthtest.Counted(map[int]uint64{43: 1, 31: 1, 94: 3}, health.XID{})
	storm.Times = 2
	second.Sample.XIDs, second.XIDs = []health.XID{storm}, healthtest.Counted(map[int]uint64{43: 1, 31: 1, 13: 1, 94: 2}, health.XID{})
	poll(src, next)
	expectSeries(t, render(t, collectorOf(src)), 1, fields.XIDErrorsCount, `GPU_I_ID="2"`, `xid="94"} 3`)

	// XIDs of snapshots that were skipped, and of an event source: no poll since.
	next = testNode()
	first, second = &next.Devices[len(next.Devices)-2], &next.Devices[len(next.Devices)-1]
	first.XIDs = healthtest.Counted(map[int]uint64{43: 3, 31: 1, 94: 3}, health.XID{})
	second.XIDs = healthtest.Counted(map[int]uint64{43: 4, 31: 1, 13: 2, 94: 2}, health.XID{})
	second.Sample.XIDs = []health.XID{{Code: 13, At: now.Add(time.Minute)}}
	next.At = src.Snapshot.At
	src.Snapshot = next
	src.Totals.update(next)
	page = render(t, collectorOf(src))
	for _, want := range []string{`xid="43"} 4`, `xid="31"} 2`, `xid="13"} 2`} {
		expectSeries(t, page, 1, fields.XIDErrorsCount, `GPU_I_ID="2"`, want)
	}
}
