package metrics

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/internal/healthtest"
	"github.com/gpu-node-agent/gpu-node-agent/metrics/fields"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/podresources"
)

// step is one observation of a device.
type step struct {
	at      int // seconds
	poll    int // the second of the newest poll; 0: at
	state   health.State
	util    float64 // negative: not measured
	xids    map[int]uint64
	clocks  float64 // bits; negative: not measured
	pod     string  // the holder; "" for none, "?" if the pod resources could not be read
	down    bool    // the source
	removed bool    // the device
}

// accumulate returns the totals of one device after a sequence of observations.
func accumulate(steps ...step) deviceTotalsView {
	var a accumulator
	for _, m := range steps {
		at := now.Add(time.Duration(m.at) * time.Second)
		polled := at
		if m.poll != 0 {
			polled = now.Add(time.Duration(m.poll) * time.Second)
		}
		s := &health.Snapshot{At: polled, Source: health.Source{Status: health.SourceUp}}
		if m.down {
			s.Source.Status = health.SourceDown
		}
		values := map[health.Field]float64{}
		if m.clocks >= 0 {
			values[health.FieldClocksEvents] = m.clocks
		}
		if m.util >= 0 {
			values[health.FieldGPUUtil] = m.util
		}
		if !m.removed {
			s.Devices = []health.DeviceState{{
				Device: health.Device{ID: "GPU-a"}, Sample: health.Sample{Values: values},
				Verdict: health.Verdict{State: m.state}, XIDs: healthtest.Counted(m.xids, health.XID{}),
			}}
		}
		h := podresources.Holders{At: at}
		switch m.pod {
		case "":
			h.By = map[health.DeviceID][]podresources.Holder{}
		case "?":
			h.Err = "connection refused"
		default:
			first := podresources.Holder{Namespace: "n", Pod: m.pod, Container: "c", DeviceID: "GPU-a::0"}
			second := first
			second.DeviceID = "GPU-a::1"
			h.By = map[health.DeviceID][]podresources.Holder{"GPU-a": {first, second}}
		}
		a.update(observation{at: at, snapshot: s, holders: h, window: time.Minute, idleBelow: 5})
	}
	return a.view("GPU-a", true)
}

func TestUnhealthyTime(t *testing.T) {
	v := accumulate(
		step{at: 0, state: health.Healthy},
		step{at: 1, state: health.Unhealthy},
		step{at: 3, state: health.Unhealthy},
		step{at: 4, poll: 3, state: health.Unhealthy, down: true}, // the state lasts while the source is down
		step{at: 10, state: health.Degraded},
		step{at: 20, state: health.Unhealthy},
		step{at: 19, state: health.Unhealthy}, // a clock that is set back subtracts nothing
		step{at: 21, state: health.Healthy},
	)
	if want := [numStates]uint64{health.Unhealthy: 2, health.Healthy: 1, health.Degraded: 1}; v.unhealthy != 11*time.Second ||
		v.transitions != want {
		t.Errorf("got %+v", v)
	}
	v = accumulate(
		step{at: 0, state: health.Unhealthy}, step{at: 5, state: health.Unhealthy}, step{at: 6, removed: true},
		step{at: 9, state: health.Unhealthy},
	)
	if v.unhealthy != 0 || v.transitions != [numStates]uint64{} {
		t.Errorf("a device that was removed: got %+v", v)
	}
}

func TestEventsInWindow(t *testing.T) {
	v := accumulate(
		step{at: 0, xids: map[int]uint64{31: 5}}, // since the agent's start
		step{at: 1, xids: map[int]uint64{31: 7}, clocks: 1},
		step{at: 1, poll: 1, xids: map[int]uint64{31: 7}, clocks: 1}, // the same poll
		step{at: 2, poll: 1, xids: map[int]uint64{31: 8}, clocks: 1}, // of an event source
		step{at: 3, xids: map[int]uint64{31: 8, 79: 1}, clocks: 1 | 128},
	)
	if len(v.xidsInWindow) != 2 || v.xidsInWindow[31] != 8 || v.xidsInWindow[79] != 1 || v.clocksInWindow[0] != 2 || v.clocksInWindow[7] != 1 {
		t.Errorf("got %+v", v)
	}
	v = accumulate(
		step{at: 0},
		step{at: 1, xids: map[int]uint64{31: 2}, clocks: 1},
		step{at: 59, xids: map[int]uint64{31: 3}},
		step{at: 62, xids: map[int]uint64{31: 3}},
	)
	if len(v.xidsInWindow) != 1 || v.xidsInWindow[31] != 1 || v.clocksInWindow[0] != 0 {
		t.Errorf("after the window: got %+v", v)
	}
}

// Totals never decrease. A clock event counts when it begins: not if the first measurement contains it, nor after a poll
// that did not measure it.
func TestEventTotals(t *testing.T) {
	v := accumulate(
		step{at: 0, xids: map[int]uint64{31: 5}, clocks: 1},
		step{at: 1, xids: map[int]uint64{31: 7}, clocks: 1 | 4},
		step{at: 1, poll: 1, xids: map[int]uint64{31: 7}, clocks: 1 | 4}, // the same poll
		step{at: 2, xids: map[int]uint64{31: 7, 79: 1}, clocks: -1},
		step{at: 3, xids: map[int]uint64{31: 7, 79: 1}, clocks: 4},
		step{at: 4, xids: map[int]uint64{31: 7, 79: 1}, clocks: 0},
		step{at: 5, xids: map[int]uint64{31: 8, 79: 1}, clocks: 1 | 4},
		step{at: 100, xids: map[int]uint64{31: 8, 79: 1}, clocks: 1 | 4},
	)
	if xids := v.xids; len(v.xidsInWindow) != 0 || len(xids) != 2 || xids[31] != 8 || xids[79] != 1 {
		t.Errorf("XIDs: %v in the window, %v in total", v.xidsInWindow, xids)
	}
	if got, want := v.clocks, [len(clockEvents)]uint64{0: 1, 2: 2}; got != want {
		t.Errorf("clock events: got %v, want %v", got, want)
	}
}

func TestEventBucketsAreBounded(t *testing.T) {
	var a accumulator
	for i := range 5000 {
		s := &health.Snapshot{At: now.Add(time.Duration(i) * time.Second), Devices: []health.DeviceState{{
			Device: health.Device{ID: "GPU-a"}, Sample: health.Sample{Values: map[health.Field]float64{health.FieldClocksEvents: 511}},
		}}}
		a.update(observation{at: s.At, snapshot: s, window: time.Minute, idleBelow: 5})
	}
	recent := a.devices["GPU-a"].recent
	if len(recent) > bucketsPerWindow+1 || recent[0].clocks[8] != 1 {
		t.Errorf("%d buckets, the first is %+v", len(recent), recent[0])
	}
}

func TestPollDurations(t *testing.T) {
	var a accumulator
	for i, duration := range []time.Duration{500 * time.Microsecond, 5 * time.Millisecond, time.Minute} {
		for range 2 { // the second update is the same poll
			a.update(observation{
				at: now, snapshot: &health.Snapshot{At: now, Source: health.Source{Polls: uint64(i + 1), PollTook: duration}},
				window: time.Minute, idleBelow: 5,
			})
		}
	}
	h := a.durations
	if h.count != 3 || h.sum != 60.0055 || h.buckets[.001] != 1 || h.buckets[.005] != 2 || h.buckets[10] != 2 ||
		len(h.buckets) != len(pollBounds()) {
		t.Errorf("got %+v", h)
	}
}

// Time counts while there is no new snapshot.
func TestTotalsRun(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		configs, snapshots := new(health.Latest[Config]), new(health.Latest[health.Snapshot])
		configs.Store(testConfig(fields.SetDefault))
		totals := NewTotals(TotalsInputs{
			Config: configs, Snapshots: snapshots,
			Holders: func() podresources.Holders { return podresources.Holders{} },
		})
		ctx, cancel := context.WithCancel(t.Context())
		result := make(chan error, 1)
		go func() { result <- totals.Run(ctx) }()
		synctest.Wait()
		devices := []health.DeviceState{{Device: health.Device{ID: "GPU-a"}, Verdict: health.Verdict{State: health.Unhealthy}}}
		snapshots.Store(&health.Snapshot{At: time.Now(), Devices: devices})
		synctest.Wait()
		<-time.After(61 * time.Second)
		synctest.Wait()
		views, _ := totals.views(devices, false)
		if got := views[0].unhealthy; got < 55*time.Second || got > 61*time.Second {
			t.Errorf("unhealthy for %v", got)
		}
		cancel()
		if err := <-result; err != nil {
			t.Error(err)
		}
	})
}
