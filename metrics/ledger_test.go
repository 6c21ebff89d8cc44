package metrics

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/plugin"
)

// moment is one fold of a sequence: what is so at this second.
type moment struct {
	at     int
	poll   int // the second of the newest poll; 0: the same as at
	state  health.State
	util   float64 // under 0: not measured
	xids   map[int]uint64
	clocks float64 // bits; under 0: not measured
	holder string  // pod; "" for none, "?" if the kubelet does not say
	down   bool
	gone   bool
}

// play folds a sequence of one device and returns its totals.
func play(sequence ...moment) deviceView {
	t := &Totals{}
	for _, m := range sequence {
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
		if !m.gone {
			s.Devices = []health.DeviceState{{
				Device: health.Device{ID: "GPU-a"}, Sample: health.Sample{Values: values},
				Verdict: health.Verdict{State: m.state}, XIDCounts: m.xids,
			}}
		}
		h := plugin.Holders{At: at}
		switch m.holder {
		case "":
			h.By = map[health.DeviceID][]plugin.Holder{}
		case "?":
			h.Err = "away"
		default:
			by := plugin.Holder{Namespace: "n", Pod: m.holder, Container: "c", DeviceID: "GPU-a::0"}
			again := by
			again.DeviceID = "GPU-a::1"
			h.By = map[health.DeviceID][]plugin.Holder{"GPU-a": {by, again}}
		}
		t.ledger.fold(observation{at, s, h, time.Minute, 5})
	}
	return t.ledger.view("GPU-a", true)
}

func TestUnhealthySeconds(t *testing.T) {
	v := play(
		moment{at: 0, state: health.Healthy},
		moment{at: 1, state: health.Unhealthy},
		moment{at: 3, state: health.Unhealthy},
		moment{at: 4, poll: 3, state: health.Unhealthy, down: true}, // the verdict stands while the source is away
		moment{at: 10, state: health.Degraded},
		moment{at: 20, state: health.Unhealthy},
		moment{at: 19, state: health.Unhealthy}, // a clock that goes back takes nothing
		moment{at: 21, state: health.Healthy},
	)
	if v.unhealthy != 9+2 || v.transitions[health.Unhealthy] != 2 || v.transitions[health.Healthy] != 1 || v.transitions[health.Degraded] != 1 {
		t.Errorf("%+v", v)
	}
	v = play(
		moment{at: 0, state: health.Unhealthy}, moment{at: 5, state: health.Unhealthy}, moment{at: 6, gone: true}, moment{at: 9, state: health.Unhealthy},
	)
	if v.unhealthy != 0 || v.transitions != [states]uint64{} {
		t.Errorf("a device that was gone: %+v", v)
	}
}

func TestIdleSeconds(t *testing.T) {
	a, b := user{"n", "a", "c"}, user{"n", "b", "c"}
	for name, c := range map[string]struct {
		sequence []moment
		of       user
		want     idleness
	}{
		"since it has the device": {[]moment{{at: 0}, {at: 5, holder: "a"}, {at: 8, holder: "a"}}, a, idleness{true, 3 * time.Second, 3 * time.Second}},
		"busy meanwhile": {
			[]moment{{at: 0, holder: "a"}, {at: 4, holder: "a"}, {at: 6, util: 5, holder: "a"}, {at: 7, util: 4.9, holder: "a"}, {at: 8, util: 0, holder: "a"}},
			a,
			idleness{true, 6 * time.Second, 2 * time.Second},
		},
		"another one": {[]moment{{at: 0, holder: "a"}, {at: 9, holder: "a"}, {at: 10, holder: "b"}, {at: 12, holder: "b"}}, b, idleness{true, 2 * time.Second, 2 * time.Second}},
		"forgotten":   {[]moment{{at: 0, holder: "a"}, {at: 9, holder: "a"}, {at: 10}, {at: 11}}, a, idleness{}},
		"source away": {
			[]moment{{at: 0, holder: "a"}, {at: 2, holder: "a"}, {at: 50, poll: 2, holder: "a", down: true}, {at: 51, holder: "a"}},
			a,
			idleness{true, 3 * time.Second, 3 * time.Second},
		},
		"kubelet away":     {[]moment{{at: 0, holder: "a"}, {at: 2, holder: "a"}, {at: 50, holder: "?"}, {at: 51, holder: "a"}}, a, idleness{true, 3 * time.Second, 3 * time.Second}},
		"never measurable": {[]moment{{at: 0, util: -1, holder: "a"}, {at: 2, util: -1, holder: "a"}}, a, idleness{}},
	} {
		if got := play(c.sequence...).idle[c.of]; got != c.want {
			t.Errorf("%s: %+v, want %+v", name, got, c.want)
		}
	}
}

func TestEventsInWindow(t *testing.T) {
	v := play(
		moment{at: 0, xids: map[int]uint64{31: 5}}, // from before: not news
		moment{at: 1, xids: map[int]uint64{31: 7}, clocks: 1},
		moment{at: 1, poll: 1, xids: map[int]uint64{31: 7}, clocks: 1}, // the same poll
		moment{at: 3, xids: map[int]uint64{31: 7, 79: 1}, clocks: 1 | 128},
	)
	if len(v.xids) != 2 || v.xids[31] != 2 || v.xids[79] != 1 || v.clocks[0] != 2 || v.clocks[7] != 1 {
		t.Errorf("%+v", v)
	}
	v = play(
		moment{at: 0},
		moment{at: 1, xids: map[int]uint64{31: 2}, clocks: 1},
		moment{at: 59, xids: map[int]uint64{31: 3}},
		moment{at: 62, xids: map[int]uint64{31: 3}},
	)
	if len(v.xids) != 1 || v.xids[31] != 1 || v.clocks[0] != 0 {
		t.Errorf("after the window: %+v", v)
	}
}

// What the totals have is never taken back. A clock event counts when it begins; one that a device is first seen with
// did so before, and one that is not measured goes on.
func TestEventsSinceTheStart(t *testing.T) {
	v := play(
		moment{at: 0, xids: map[int]uint64{31: 5}, clocks: 1},
		moment{at: 1, xids: map[int]uint64{31: 7}, clocks: 1 | 4},
		moment{at: 1, poll: 1, xids: map[int]uint64{31: 7}, clocks: 1 | 4}, // the same poll
		moment{at: 2, xids: map[int]uint64{31: 7, 79: 1}, clocks: -1},
		moment{at: 3, xids: map[int]uint64{31: 7, 79: 1}, clocks: 4},
		moment{at: 4, xids: map[int]uint64{31: 7, 79: 1}, clocks: 0},
		moment{at: 5, xids: map[int]uint64{31: 8, 79: 1}, clocks: 1 | 4},
		moment{at: 100, xids: map[int]uint64{31: 8, 79: 1}, clocks: 1 | 4},
	)
	if all := v.all.byXID(); len(v.xids) != 0 || len(all) != 2 || all[31] != 3 || all[79] != 1 {
		t.Errorf("XIDs: %v in the window, %v in all", v.xids, all)
	}
	if want := [len(clockEvents)]uint64{0: 1, 2: 2}; v.all.begun() != want {
		t.Errorf("clock events began %v, want %v", v.all.begun(), want)
	}
}

// A year of polls takes no more memory than a window of them.
func TestLedgerIsBounded(t *testing.T) {
	var l ledger
	for i := range 5000 {
		s := &health.Snapshot{At: now.Add(time.Duration(i) * time.Second), Devices: []health.DeviceState{{
			Device: health.Device{ID: "GPU-a"}, Sample: health.Sample{Values: map[health.Field]float64{health.FieldClocksEvents: 511}},
		}}}
		l.fold(observation{s.At, s, plugin.Holders{}, time.Minute, 5})
	}
	if n := len(l.devices["GPU-a"].recent); n > bucketsPerWindow+1 {
		t.Errorf("%d buckets", n)
	}
	if n := l.devices["GPU-a"].recent[0].clocks[8]; n != 1 {
		t.Errorf("%d clock events in a second", n)
	}
}

func TestPollDurations(t *testing.T) {
	var l ledger
	for i, took := range []time.Duration{500 * time.Microsecond, 5 * time.Millisecond, time.Minute} {
		for range 2 { // seen twice, counted once
			l.fold(observation{now, &health.Snapshot{At: now, Source: health.Source{Polls: uint64(i + 1), PollTook: took}}, plugin.Holders{}, time.Minute, 5})
		}
	}
	p := l.poll
	if p.count != 3 || p.sum != 60.0055 || p.buckets[.001] != 1 || p.buckets[.005] != 2 || p.buckets[10] != 2 || len(p.buckets) != len(pollBounds()) {
		t.Errorf("%+v", p)
	}
}

// Totals follow the snapshots, and time passes without them too.
func TestTotalsRun(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		configs, snapshots := new(health.Latest[Config]), new(health.Latest[health.Snapshot])
		configs.Store(config(SetDefault))
		totals := NewTotals(configs, snapshots, func() plugin.Holders { return plugin.Holders{} })
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan error, 1)
		go func() { ended <- totals.Run(ctx) }()
		synctest.Wait()
		bad := []health.DeviceState{{Device: health.Device{ID: "GPU-a"}, Verdict: health.Verdict{State: health.Unhealthy}}}
		snapshots.Store(&health.Snapshot{At: time.Now(), Devices: bad})
		synctest.Wait()
		<-time.After(61 * time.Second)
		synctest.Wait()
		if got := unhealthySeconds(totals); got < 55 || got > 61 {
			t.Errorf("unhealthy for %v s", got)
		}
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
}

func unhealthySeconds(totals *Totals) float64 {
	views, _ := totals.views([]health.DeviceState{{Device: health.Device{ID: "GPU-a"}}}, false)
	return views[0].unhealthy
}
