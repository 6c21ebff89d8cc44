package metrics

import (
	"context"
	"encoding/json"
	"reflect"
	"testing"
	"testing/synctest"
	"time"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/metrics/fields"
	"github.com/gpu-node-agent/gpu-node-agent/metrics/processes"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/podresources"
)

// saveIdle returns what a process that ends saves.
func saveIdle(t *testing.T, a *accumulator, at time.Time) []byte {
	t.Helper()
	totals := &Totals{now: func() time.Time { return at }, accumulator: *a}
	totals.save(true)
	if totals.Saved().Load() == nil {
		t.Fatal("nothing saved")
	}
	return *totals.Saved().Load()
}

// restoreIdle returns the accumulator of the next process.
func restoreIdle(t *testing.T, text []byte, at time.Time) accumulator {
	t.Helper()
	totals := &Totals{now: func() time.Time { return at }}
	if err := totals.Restore(text); err != nil {
		t.Fatal(err)
	}
	return totals.accumulator
}

// TestIdleTimeAfterRestart restarts the agent after a container was idle for an hour and without a process for half an hour.
func TestIdleTimeAfterRestart(t *testing.T) {
	continued := idleResult{true, 0, 3600, true, 1800}
	next := idleResult{true, 0, 0, true, 0}
	for name, c := range map[string]struct {
		down   time.Duration
		change func(*idleNode) // during the restart
		want   idleResult
	}{
		"short restart":                        {time.Minute, func(*idleNode) {}, continued},
		"long restart with the plugin":         {continueWithin, func(*idleNode) {}, continued},
		"too long":                             {continueWithin + time.Second, func(*idleNode) {}, next},
		"the clock was set back":               {-time.Minute, func(*idleNode) {}, continued},
		"the clock was set back by more":       {-continueWithin - time.Second, func(*idleNode) {}, next},
		"allocated before the restart":         {time.Minute, func(n *idleNode) { n.allocated = n.at.Add(-time.Second) }, continued},
		"allocated after the restart":          {time.Minute, func(n *idleNode) { n.allocated = n.at.Add(time.Minute + 1) }, next},
		"allocated again, the UID is the same": {time.Minute, func(n *idleNode) { n.uid, n.allocated = "1", n.at.Add(time.Minute+1) }, next},
		"another UID":                          {time.Minute, func(n *idleNode) { n.uid = "2" }, next},
		"short restart without the plugin":     {continueUnverifiedWithin, func(n *idleNode) { n.noPlugin, n.uid = true, "" }, continued},
		"longer restart without the plugin": {
			continueUnverifiedWithin + time.Second, func(n *idleNode) { n.noPlugin, n.uid = true, "" },
			next,
		},
		"the same UID without the plugin": {continueWithin, func(n *idleNode) { n.noPlugin, n.uid = true, "1" }, continued},
		"another UID without the plugin":  {time.Second, func(n *idleNode) { n.noPlugin, n.uid = true, "2" }, next},
		"the container is busy, and has a process": {time.Minute, func(n *idleNode) {
			n.util, n.processes = 100,
				measuredUsage(usage("GPU-a", "a", "c", 1))
		}, idleResult{true, 0, 0, true, 0}},
	} {
		n := &idleNode{at: now, uid: "1", processes: measuredUsage(usage("GPU-a", "a", "c", 0))}
		n.observe(0)
		n.observe(30 * time.Minute)
		n.processes = measuredUsage()
		n.observe(30 * time.Minute)
		text := saveIdle(t, &n.accumulator, n.at)
		c.change(n)
		n.accumulator = restoreIdle(t, text, n.at.Add(c.down).Round(0))
		got := n.observe(c.down)
		if got != c.want {
			t.Errorf("%s: got %+v, want %+v", name, got, c.want)
		}
		if c.want.sinceBusy == 0 {
			continue
		}
		if got := n.observe(time.Minute); got.total != 60 || got.sinceBusy != c.want.sinceBusy+60 ||
			got.withoutProcess != c.want.withoutProcess+60 {
			t.Errorf("%s, a minute later: %+v", name, got)
		}
	}
}

// TestNeverUsedAfterRestart checks that what was observed before a restart still counts, and that a use is saved at once.
func TestNeverUsedAfterRestart(t *testing.T) {
	n := &idleNode{at: now, ended: true}
	n.observe(0)
	n.ended = false
	n.observe(time.Second)
	n.observe(30 * time.Second)
	restart := func() IdleTime {
		n.accumulator = restoreIdle(t, saveIdle(t, &n.accumulator, n.at), n.at)
		n.observe(time.Minute)
		return n.devices["GPU-a"].idle[container{"n", "a", "c"}].exported()
	}
	if i := restart(); i.Used || !i.ObservedFromStart || i.Observed != 30*time.Second {
		t.Errorf("not used: %+v", i)
	}
	before := n.toSave(n.at)
	n.util = 50
	n.observe(time.Second)
	n.util = 0
	n.observe(time.Second)
	if !before.exceeds(n.toSave(n.at)) {
		t.Error("the use is not saved at once")
	}
	if i := restart(); !i.Used || !i.ObservedFromStart {
		t.Errorf("used: %+v", i)
	}
}

// TestRestoredIdleTimeWaits checks that a restored time waits for the kubelet's first answer about the device, also over another
// restart, and continues once.
func TestRestoredIdleTimeWaits(t *testing.T) {
	n := &idleNode{at: now}
	n.observe(0)
	n.observe(time.Hour)
	text := saveIdle(t, &n.accumulator, n.at)
	for range 3 { // restarts
		n.accumulator = restoreIdle(t, text, n.at)
		n.ended = true // the kubelet's answer precedes the devices
		n.observe(time.Minute)
		text = saveIdle(t, &n.accumulator, n.at)
	}
	n.accumulator, n.ended = restoreIdle(t, text, n.at), false
	if got := n.observe(time.Minute); got.sinceBusy != 3600 {
		t.Errorf("got %+v", got)
	}
	n.ended = true
	n.observe(time.Second)
	n.ended = false
	if got := n.observe(time.Second); got.sinceBusy != 0 {
		t.Errorf("the next container: %+v", got)
	}

	for _, back := range []time.Duration{0, 10 * time.Minute} { // how much the clock was set back during the restart
		n.at = n.at.Add(-back)
		n.accumulator = restoreIdle(t, text, n.at)
		n.ended = true
		n.observe(continueWithin)
		if all := n.toSave(n.at); len(all) != 0 {
			t.Errorf("expired times are saved: %+v", all)
		}
		n.at = n.at.Add(back - continueWithin)
	}
}

func savedIdleOf(t *testing.T, saved *[]byte, held heldDevice) (one savedIdleTime, ok bool) {
	t.Helper()
	all := make(savedIdleTimes)
	if saved != nil {
		if err := json.Unmarshal(*saved, &all); err != nil {
			t.Fatal(err)
		}
	}
	one, ok = all[held]
	return one, ok
}

// TestIdleTimesAreSaved checks when Totals saves: growing times seldom, a time that ended at once.
func TestIdleTimesAreSaved(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		util, used := 0.0, measuredUsage()
		held := podresources.Holders{By: map[health.DeviceID][]podresources.Holder{
			"GPU-a": {{Namespace: "n", Pod: "a", Container: "c", DeviceID: "GPU-a"}},
		}}
		configs, snapshots := new(health.Latest[Config]), new(health.Latest[health.Snapshot])
		configs.Store(testConfig(fields.SetDefault))
		totals := NewTotals(TotalsInputs{
			Config: configs, Snapshots: snapshots, Holders: func() podresources.Holders { return held },
			Processes: func() *processes.Snapshot { return used },
		})
		poll := func() {
			snapshots.Store(&health.Snapshot{At: time.Now(), Source: health.Source{Status: health.SourceUp}, Devices: []health.DeviceState{{
				Device: health.Device{ID: "GPU-a"}, Sample: health.Sample{Values: map[health.Field]float64{health.FieldGPUUtil: util}},
			}}})
			synctest.Wait()
		}
		ctx, cancel := context.WithCancel(t.Context())
		result := make(chan error, 1)
		go func() { result <- totals.Run(ctx) }()
		saved := func() (savedIdleTime, bool) {
			return savedIdleOf(t, totals.Saved().Load(), heldDevice{"GPU-a", container{"n", "a", "c"}})
		}
		writes, last := 0, totals.Saved().Load()
		run := func(d time.Duration) {
			for end := time.Now().Add(d); time.Now().Before(end); {
				<-time.After(time.Second)
				poll()
				if text := totals.Saved().Load(); text != last {
					writes, last = writes+1, text
				}
			}
		}
		poll()
		run(time.Hour)
		if one, ok := saved(); !ok || one.sinceBusy < 54*time.Minute || one.withoutProcess < 54*time.Minute || writes < 12 || writes > 13 {
			t.Errorf("after an hour: %+v, %d writes", one, writes)
		}
		util, writes = 100, 0
		run(time.Second)
		if one, ok := saved(); !ok || one.sinceBusy != 0 || one.withoutProcess < time.Hour-time.Minute || writes != 1 {
			t.Errorf("busy: %+v, %d writes", one, writes)
		}
		used, writes = measuredUsage(usage("GPU-a", "a", "c", 1)), 0
		run(time.Second)
		if one, ok := saved(); ok || writes != 1 {
			t.Errorf("with a process: %+v, %d writes", one, writes)
		}
		writes = 0
		for i := range 280 {
			util = float64(i % 2 * 100)
			run(time.Second)
		}
		if writes != 0 {
			t.Errorf("%d writes while the device is busy each other second", writes)
		}
		util = 0
		run(10 * time.Minute)
		held, writes = podresources.Holders{By: map[health.DeviceID][]podresources.Holder{}}, 0
		run(time.Second)
		if one, ok := saved(); ok || writes != 1 {
			t.Errorf("the container has ended: %+v, %d writes", one, writes)
		}
		cancel()
		if err := <-result; err != nil {
			t.Error(err)
		}
	})
}

func TestSavedIdleTimesAreLimited(t *testing.T) {
	all := make(savedIdleTimes)
	for i := range maxSavedIdleTimes + 100 {
		h := heldDevice{health.DeviceID(rune('A' + i)), container{"n", "a", "c"}}
		all[h] = savedIdleTime{sinceBusy: time.Duration(i), observed: time.Duration(i), updated: now}
	}
	text, err := json.Marshal(all)
	read := make(savedIdleTimes)
	if err != nil || json.Unmarshal(text, &read) != nil || len(read) != maxSavedIdleTimes {
		t.Fatalf("%d times, %v", len(read), err)
	}
	for h, i := range read {
		if i.sinceBusy < 100 {
			t.Errorf("%+v: %v; want the longest", h, i.sinceBusy)
		}
	}
}

func FuzzRestoreIdle(f *testing.F) {
	const held = `"device":"GPU-a","namespace":"n","pod":"a","container":"c","updated":"2026-01-02T03:04:05Z"`
	for _, text := range []string{
		`[{` + held + `,"uid":"1","measured":true,"sinceBusyNanoseconds":7200000000000,"observedNanoseconds":7200000000000}]`,
		`[{` + held + `,"sinceBusyNanoseconds":-3600000000000}]`,
		`[{` + held + `,"withoutProcessNanoseconds":-3600000000000}]`,
		`[{` + held + `,"withoutProcessNanoseconds":3600000000000}]`,
		`[{"device":"GPU-a","pod":"a","updated":"9999-01-02T03:04:05Z","withoutProcessNanoseconds":-1,"more":[]}]`, `[]`, `null`, `{}`, `[{}]`,
		``,
	} {
		f.Add([]byte(text))
	}
	f.Fuzz(func(t *testing.T, text []byte) {
		totals := &Totals{now: func() time.Time { return now }}
		if err := totals.Restore(text); err != nil {
			if len(totals.accumulator.restored) != 0 {
				t.Error("an invalid text has times")
			}
			return
		}
		n := &idleNode{at: now, accumulator: totals.accumulator}
		saved := n.toSave(now)
		if len(saved) > maxSavedIdleTimes {
			t.Errorf("%d times", len(saved))
		}
		if got := n.observe(0); got.sinceBusy < 0 || got.withoutProcess < 0 || got.total != 0 {
			t.Errorf("%q: %+v", text, got)
		}
		for _, i := range saved {
			if i.updated.After(now) || now.Sub(i.updated) > continueWithin || i.observed < max(i.sinceBusy, i.withoutProcess) {
				t.Errorf("%q: %+v", text, i)
			}
		}
		// What is saved is read again.
		again := make(savedIdleTimes)
		if line, err := json.Marshal(saved); err != nil || json.Unmarshal(line, &again) != nil || len(again) != len(saved) {
			t.Errorf("%+v was read as %+v, %v", saved, again, err)
		}
		for h, i := range saved {
			i.restored = time.Time{}
			if j := again[h]; !j.updated.Equal(i.updated) || !reflect.DeepEqual(j.sinceBusy, i.sinceBusy) || j.uid != i.uid {
				t.Errorf("%+v was read as %+v", i, j)
			}
		}
	})
}
