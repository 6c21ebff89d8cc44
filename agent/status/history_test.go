package status

import (
	"context"
	"math"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/gpu-node-agent/gpu-node-agent/agent/internal/agenttest"
	"github.com/gpu-node-agent/gpu-node-agent/health"
)

// power returns a snapshot of a GPU with a power in W. NaN is unknown.
func power(id health.DeviceID, at time.Time, watts float64) *health.Snapshot {
	d := agenttest.GPU(0)
	d.Device.ID, d.Sample.Values = id, map[health.Field]float64{health.FieldPower: watts}
	return &health.Snapshot{At: at, Devices: []health.DeviceState{d}}
}

// followed runs a test with a history that follows snapshots, polled once in each interval.
func followed(t *testing.T, interval time.Duration, test func(t *testing.T, h *History, store func(*health.Snapshot))) {
	synctest.Test(t, func(t *testing.T) {
		h, snapshots := new(History), new(health.Latest[health.Snapshot])
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error, 1)
		go func() { done <- h.Follow(ctx, snapshots, func() time.Duration { return interval }) }()
		test(t, h, func(s *health.Snapshot) {
			snapshots.Store(s)
			synctest.Wait()
		})
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
}

// means returns the powers of a GPU as text, oldest first, a dash for unknown, without the unknown ones at the start.
func means(h *History, id health.DeviceID) string {
	all, found := h.tracks()[id]
	if !found {
		return "no GPU"
	}
	var b strings.Builder
	for _, v := range all[3].means {
		if math.IsNaN(v) {
			b.WriteString(" -")
		} else {
			b.WriteString(" " + strings.TrimSuffix(wattsText(&v), " W"))
		}
	}
	return strings.TrimLeft(b.String(), " -")
}

func TestHistory(t *testing.T) {
	type step struct {
		wait  time.Duration
		watts float64 // of a new poll; NaN: unknown; negative: a snapshot of the previous poll
	}
	nan := math.NaN()
	second, slot := time.Second, slotWidth
	for name, c := range map[string]struct {
		interval time.Duration
		steps    []step
		want     string
	}{
		"one":                  {second, []step{{0, 100}}, "100"},
		"mean of a slot":       {second, []step{{0, 100}, {second, 200}, {second, 600}}, "300"},
		"a slot after another": {second, []step{{0, 100}, {slot, 200}, {slot, 300}}, "100 200 300"},
		"unknown":              {second, []step{{0, 100}, {slot, nan}, {slot, 300}}, "100 - 300"},
		"unknown for a moment": {second, []step{{0, 100}, {second, nan}}, "100"},
		"infinite":             {second, []step{{0, 100}, {slot, math.Inf(1)}, {slot, 1e300}, {slot, 7}}, "100 - - 7"},
		"no new poll":          {second, []step{{0, 100}, {3 * slot, -1}}, "100 100 - -"},
		"same poll again":      {second, []step{{0, 100}, {second, -1}, {second, 300}}, "200"},
		"next poll may come":   {second, []step{{0, 100}, {0, 100}, {slot, -1}}, "100 100"},
		"slow polls":           {3 * slot, []step{{0, 100}, {3 * slot, 200}, {3 * slot, 300}}, "100 100 100 200 200 200 300"},
		"slow polls stop":      {2 * slot, []step{{0, 100}, {2 * slot, 200}, {6 * slot, -1}}, "100 100 200 200 200 200 - - -"},
		"oldest slots are replaced": {
			second,
			[]step{{0, 1}, {slot, 2}, {(historySlots - 2) * slot, 3}, {slot, 4}},
			"2 2" + strings.Repeat(" -", historySlots-4) + " 3 4",
		},
		"long gap": {second, []step{{0, 1}, {10 * historySlots * slot, 2}}, "2"},
	} {
		t.Run(name, func(t *testing.T) {
			followed(t, c.interval, func(t *testing.T, h *History, store func(*health.Snapshot)) {
				at := time.Now()
				for _, s := range c.steps {
					time.Sleep(s.wait) //nolint:forbidigo // the bubble's clock
					watts := s.watts
					if watts >= 0 || math.IsNaN(watts) {
						at = at.Add(-time.Hour) // the wall clock is set back
					}
					store(power("GPU-0", at, watts))
				}
				if got := means(h, "GPU-0"); got != c.want {
					t.Errorf("got  %s\nwant %s", got, c.want)
				}
			})
		})
	}
}

// A reload that shortens the interval leaves no gaps between the polls before it.
func TestHistoryAfterChangedInterval(t *testing.T) {
	h, start := new(History), time.Now()
	h.record(power("GPU-0", start, 100).Devices, start.Add(-6*slotWidth), 3*slotWidth)
	h.record(power("GPU-0", start, 200).Devices, start.Add(-3*slotWidth), 3*slotWidth)
	h.record(power("GPU-0", start, 300).Devices, start, time.Second)
	if got, want := means(h, "GPU-0"), "100 100 100 200 200 200 300"; got != want {
		t.Errorf("got  %s\nwant %s", got, want)
	}
}

func TestHistoryDropsRemovedGPUs(t *testing.T) {
	followed(t, time.Second, func(t *testing.T, h *History, store func(*health.Snapshot)) {
		for i := range 2 * historySlots { // each slot has a new GPU, as if UUIDs changed
			store(power(health.DeviceID(rune('a'+i)), time.Now(), 1))
			time.Sleep(slotWidth) //nolint:forbidigo // the bubble's clock
		}
		if n := len(h.rings); n != historySlots {
			t.Errorf("%d GPUs, want %d", n, historySlots)
		}
	})
}

func TestHistoryIgnoresMIGDevices(t *testing.T) {
	h := new(History)
	h.record([]health.DeviceState{agenttest.GPU(0), agenttest.MIG(0, 1)}, time.Now(), time.Second)
	if len(h.rings) != 1 {
		t.Errorf("%d rings", len(h.rings))
	}
}

func TestPath(t *testing.T) {
	nan := math.NaN()
	for name, c := range map[string]struct {
		points []float64
		want   string
	}{
		"none":          {[]float64{nan, nan}, ""},
		"one":           {[]float64{nan, 100, nan}, "M1 0h1"},
		"level":         {[]float64{50, 50, 50}, "M0 20h3"},
		"slopes":        {[]float64{nan, 0, 0, 100, 50, 50, nan}, "M1 40h1l1 -40l1 20h2"},
		"gap":           {[]float64{100, nan, 0, 0}, "M0 0h1M2 40h2"}, // neither side of a gap falls to the axis
		"outside of it": {[]float64{-5, 1000}, "M0 40l1 -40h1"},
		"one at an end": {[]float64{nan, 100}, "M1 0h1"},
	} {
		if got := path(c.points, 100); got != c.want {
			t.Errorf("%s: %q, want %q", name, got, c.want)
		}
	}
}

// A chart ends at the right side with the newest value: the widths of a path's parts add up.
func TestPageShowsCharts(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		k := testInputs()
		history := new(History)
		k.Snapshot.Devices[2].Sample.Values[health.FieldPowerLimit] = 500
		for range historySlots {
			history.record(k.Snapshot.Devices, time.Now(), time.Second)
			time.Sleep(slotWidth) //nolint:forbidigo // the bubble's clock
		}
		s := newNode(k)
		history.draw(&s)
		title := func(gpu, chart int) string { return s.GPUs[gpu].Charts[chart].Title }
		for _, c := range []struct {
			got, want string
		}{
			{title(0, 0), "87 % to 87 %"},
			{title(0, 0), "at 100 %"},
			{title(0, 1), "40.0 GiB to 40.0 GiB"},
			{title(0, 1), "at 80.0 GiB"},
			{title(0, 2), "51 °C to 51 °C"},
			{title(0, 2), "at 100 °C"},
			{title(0, 3), "312 W to 312 W"},
			{title(0, 3), "at 400 W"},
			{title(2, 3), "at 500 W"},
			{title(1, 3), "power: unknown"},
		} {
			agenttest.MustContain(t, c.got, c.want)
		}
		if c := s.GPUs[0].Charts[0]; c.Path != "M0 5h90" || c.Value != "87 %" {
			t.Errorf("%+v", c)
		}
		page := pageWith(t, k, history)
		agenttest.MustContain(t, section(t, page, 0), `d="M0 5h90"`, "<title>utilization: 87 % to 87 %")
		if lost := section(t, page, 1); strings.Contains(lost, "<path") || strings.Count(lost, "<title>") != quantities {
			t.Errorf("charts of a GPU without values:\n%s", lost)
		}
	})
}

// An axis has a length, also if the driver reports a limit that is none.
func TestChartOfInvalidLimit(t *testing.T) {
	k, h := testInputs(), new(History)
	k.Snapshot.Devices[0].Sample.Values = map[health.Field]float64{health.FieldPower: 0, health.FieldPowerLimit: -1}
	h.record(k.Snapshot.Devices[:1], time.Now(), time.Second)
	s := newNode(k)
	h.draw(&s)
	if c := s.GPUs[0].Charts[3]; c.Path != "M89 40h1" || !strings.HasSuffix(c.Title, " at 100 W") {
		t.Errorf("%+v", c)
	}
}

// maxHistory returns 15 minutes of values that change in each slot.
func maxHistory(devices []health.DeviceState) *History {
	h, start := new(History), time.Now().Add(-historySlots*slotWidth)
	for i := range historySlots + 1 {
		for j := range devices {
			devices[j].Sample.Values = map[health.Field]float64{
				health.FieldGPUUtil: float64(37 * i % 100), health.FieldFBUsed: float64(3700 * i % 80000), health.FieldPower: float64(370 * i % 700),
				health.FieldGPUTemp: float64(17 * i % 90),
			}
		}
		h.record(devices, start.Add(time.Duration(i)*slotWidth), time.Second)
	}
	return h
}

func BenchmarkHistoryRecord(b *testing.B) {
	k := maxInputs()
	h := maxHistory(k.Snapshot.Devices)
	b.ReportAllocs()
	for b.Loop() {
		h.record(k.Snapshot.Devices, time.Now(), time.Second)
	}
}

func BenchmarkHistoryDraw(b *testing.B) {
	k := maxInputs()
	h, s := maxHistory(k.Snapshot.Devices), newNode(k)
	b.ReportAllocs()
	for b.Loop() {
		h.draw(&s)
	}
}
