package sim

import (
	"reflect"
	"testing"
	"testing/synctest"
	"time"

	"github.com/gpu-node-agent/gpu-node-agent/health"
)

func TestClockStartsWithTheFirstOpen(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		src := newSource(t, scenarioConfig("h100-8", 0, event(t, time.Minute, `{gpu: 0, lost: true}`)))
		sleep(time.Hour) // before Open
		first := open(t, src)
		sleep(30 * time.Second)
		_ = first.Close()
		sleep(29 * time.Second)
		second := open(t, src)
		expectPresence(t, second, 0, health.Present)
		sleep(time.Second)
		if !woken(second) {
			t.Error("no wake after 60 s")
		}
		expectPresence(t, second, 0, health.Lost)
	})
}

func TestLoopEndsAStall(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		cfg := scenarioConfig("h100-8", 10*time.Second, event(t, 8*time.Second, `{source: stalled}`))
		ses := open(t, newSource(t, cfg))
		start := time.Now()
		for loop := 1; loop < 4; loop++ {
			sleep(8 * time.Second)
			poll(t, ses)
			if got, want := time.Since(start), time.Duration(loop)*cfg.Loop; got != want {
				t.Errorf("Poll ended after %v; want the end of the loop, %v", got, want)
			}
		}
	})
}

func TestControlOverridesScenario(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		cfg := scenarioConfig("h100-8", 10*time.Second,
			event(t, 2*time.Second, `{gpu: 0, lost: true, temperature: 90}`),
			event(t, 4*time.Second, `{gpu: 0, lost: false}`),
			event(t, 6*time.Second, `{source: down}`),
		)
		src := newSource(t, cfg)
		inject(t, src, `{source: up}`) // overrides the scenario's down
		ses := open(t, src)
		inject(t, src, `{gpu: 0, lost: false, xid: 13}`)
		inject(t, src, `{gpu: 1, lost: true}`)
		if !woken(ses) {
			t.Error("no wake")
		}
		for at := range 35 {
			r := poll(t, ses)
			if s := gpuSample(t, r, 0); s.Presence != health.Present || (len(s.XIDs) == 1) != (at == 0) {
				t.Errorf("after %d s GPU 0 is %v with XIDs %v; want the values of the control socket", at, s.Presence, s.XIDs)
			}
			if s := gpuSample(t, r, 1); s.Presence != health.Lost {
				t.Errorf("after %d s GPU 1 is %v; want lost in every loop", at, s.Presence)
			}
			// The scenario still sets the other values.
			if got := gpuSample(t, r, 0).Values[health.FieldGPUTemp]; (got == 90) != (at%10 >= 2) {
				t.Errorf("after %d s GPU 0 has %v °C", at, got)
			}
			sleep(time.Second)
		}
		inject(t, src, `{gpu: 1, lost: false}`)
		expectPresence(t, ses, 1, health.Present)
		inject(t, src, `{source: down}`)
		sleep(time.Minute)
		expectPollFails(t, ses, errDown)
	})
}

func TestScenarioAppliesEventsOnTime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		cfg := scenarioConfig("h100-8", 0, // not sorted
			event(t, 10*time.Second, `{gpu: 3, lost: true}`),
			event(t, 5*time.Second, `{gpu: 3, xid: 79}`),
			event(t, 20*time.Second, `{gpu: 3, lost: false}`),
		)
		ses := open(t, newSource(t, cfg))
		start := time.Now()
		if poll(t, ses); woken(ses) {
			t.Error("wake before the first event")
		}
		for _, step := range []struct {
			at       time.Duration
			presence health.Presence
			xids     []timedXID
		}{
			{5 * time.Second, health.Present, []timedXID{{79, 5 * time.Second}}},
			{10 * time.Second, health.Lost, nil},
			{20 * time.Second, health.Present, nil},
		} {
			// Wake fires at that moment.
			sleep(step.at - time.Since(start) - time.Nanosecond)
			if woken(ses) {
				t.Fatalf("woken before %v", step.at)
			}
			<-ses.Wake()
			if now := time.Since(start); now != step.at {
				t.Errorf("woken after %v; want %v", now, step.at)
			}
			r := poll(t, ses)
			s := gpuSample(t, r, 3)
			if got := timedXIDs(start, s.XIDs); s.Presence != step.presence || !reflect.DeepEqual(got, step.xids) {
				t.Errorf("at %v GPU 3 is %v with XIDs %v; want %v and %v", step.at, s.Presence, got, step.presence, step.xids)
			}
			if (len(s.Values) == 0) != (step.presence == health.Lost) {
				t.Errorf("at %v GPU 3 is %v and has %d values", step.at, s.Presence, len(s.Values))
			}
			if len(r.Devices) != 8 || len(r.Samples) != 8 {
				t.Errorf("at %v there are %d devices and %d samples; want 8", step.at, len(r.Devices), len(r.Samples))
			}
			if other := gpuSample(t, r, 2); other.Presence != health.Present || len(other.XIDs) != 0 {
				t.Errorf("at %v GPU 2 is %v with XIDs %v", step.at, other.Presence, other.XIDs)
			}
		}
		sleep(time.Hour)
		if woken(ses) {
			t.Error("wake after the end of the scenario")
		}
	})
}

func TestLoopResetsTheScenario(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		cfg := scenarioConfig("h100-8", 60*time.Second,
			event(t, 5*time.Second, `{gpu: 3, xid: 79}`),
			event(t, 10*time.Second, `{gpu: 3, lost: true, temperature: 97, rowRemapPending: true, recoveryAction: reset}`),
		)
		ses := open(t, newSource(t, cfg))
		start := time.Now()
		var got []timedXID
		for loop := range 3 {
			sleep(time.Duration(loop)*cfg.Loop + 5*time.Second - time.Since(start))
			got = append(got, timedXIDs(start, gpuSample(t, poll(t, ses), 3).XIDs)...)
			sleep(54 * time.Second)
			expectPresence(t, ses, 3, health.Lost)
			woken(ses)
			sleep(time.Second)
			if !woken(ses) {
				t.Errorf("end of loop %d: no wake", loop)
			}
			s := gpuSample(t, poll(t, ses), 3)
			if s.Presence != health.Present || s.Values[health.FieldGPUTemp] == 97 || s.Values[health.FieldRemapPending] != 0 ||
				s.Values[health.FieldRecoveryAction] != 0 {
				t.Errorf("after loop %d: GPU 3 is %v with %v", loop, s.Presence, s.Values)
			}
		}
		if want := []timedXID{{79, 5 * time.Second}, {79, 65 * time.Second}, {79, 125 * time.Second}}; !reflect.DeepEqual(got, want) {
			t.Errorf("XIDs %v; want %v", got, want)
		}
	})
}

func TestScenarioWithoutLoopStays(t *testing.T) {
	simulate(t, scenarioConfig("h100-8", 0, event(t, time.Second, `{gpu: 0, lost: true}`)), func(t *testing.T, _ *Source, ses health.Session) {
		sleep(1000 * time.Hour)
		expectPresence(t, ses, 0, health.Lost)
	})
}
