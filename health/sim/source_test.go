package sim

import (
	"reflect"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"

	"github.com/gpu-node-agent/gpu-node-agent/health"
)

// stamp is an XID with the time since the start.
type stamp struct {
	code int
	at   time.Duration
}

func stamps(start time.Time, xids []health.XID) []stamp {
	var out []stamp
	for _, x := range xids {
		out = append(out, stamp{x.Code, x.At.Sub(start)})
	}
	return out
}

func TestEventsHappenAtTheirTimeAndWake(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		cfg := DefaultConfig()
		cfg.Scenario = []Event{ // not in the order of time
			ev(t, 10*time.Second, `{gpu: 3, lost: true}`),
			ev(t, 5*time.Second, `{gpu: 3, xid: 79}`),
			ev(t, 20*time.Second, `{gpu: 3, lost: false}`),
		}
		ses := open(t, newSource(t, cfg))
		start := time.Now()
		if poll(t, ses); woken(ses) {
			t.Error("woken before anything has happened")
		}
		for _, step := range []struct {
			at       time.Duration
			presence health.Presence
			xids     []stamp
		}{
			{5 * time.Second, health.Present, []stamp{{79, 5 * time.Second}}},
			{10 * time.Second, health.Lost, nil},
			{20 * time.Second, health.Present, nil},
		} {
			// The wake comes at that moment, not a little before or after.
			pass(step.at - time.Since(start) - time.Nanosecond)
			if woken(ses) {
				t.Fatalf("woken before %v", step.at)
			}
			<-ses.Wake()
			if now := time.Since(start); now != step.at {
				t.Errorf("woken after %v; want %v", now, step.at)
			}
			r := poll(t, ses)
			s := sampleOf(t, r, 3)
			if got := stamps(start, s.XIDs); s.Presence != step.presence || !reflect.DeepEqual(got, step.xids) {
				t.Errorf("at %v GPU 3 is %v with XIDs %v; want %v and %v", step.at, s.Presence, got, step.presence, step.xids)
			}
			if (len(s.Values) == 0) != (step.presence == health.Lost) {
				t.Errorf("at %v GPU 3 is %v and has %d values", step.at, s.Presence, len(s.Values))
			}
			if len(r.Devices) != 8 || len(r.Samples) != 8 {
				t.Errorf("at %v there are %d devices and %d samples; want 8", step.at, len(r.Devices), len(r.Samples))
			}
			if other := sampleOf(t, r, 2); other.Presence != health.Present || len(other.XIDs) != 0 {
				t.Errorf("at %v GPU 2 is %v with XIDs %v", step.at, other.Presence, other.XIDs)
			}
		}
		// Once only: nothing more comes.
		pass(time.Hour)
		if woken(ses) {
			t.Error("woken after the end of the scenario")
		}
	})
}

func TestLastXIDStays(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		cfg := DefaultConfig()
		cfg.Scenario = []Event{ev(t, time.Second, `{gpu: 0, xid: 31}`), ev(t, 2*time.Second, `{gpu: 0, xid: 79, lost: true}`), ev(t, 3*time.Second, `{gpu: 0, lost: false}`)}
		ses := open(t, newSource(t, cfg))
		if v, ok := sampleOf(t, poll(t, ses), 0).Values[health.FieldXID]; ok {
			t.Errorf("the XID is %v before there was one; want none", v)
		}
		pass(time.Second)
		if v := sampleOf(t, poll(t, ses), 0).Values[health.FieldXID]; v != 31 {
			t.Errorf("the last XID is %v; want 31", v)
		}
		pass(time.Second)
		// The driver reports the loss of a GPU that it has lost.
		if s := sampleOf(t, poll(t, ses), 0); s.Presence != health.Lost || len(s.XIDs) != 1 || s.XIDs[0].Code != 79 || s.Values != nil {
			t.Errorf("the lost GPU's sample is %+v; want XID 79 and no values", s)
		}
		pass(time.Second)
		if s := sampleOf(t, poll(t, ses), 0); s.Values[health.FieldXID] != 79 || len(s.XIDs) != 0 {
			t.Errorf("the last XID of the GPU that came back is %v, new ones %v; want 79 and none", s.Values[health.FieldXID], s.XIDs)
		}
	})
}

func TestConditions(t *testing.T) {
	healthy := readings(t, DefaultConfig(), 3*time.Second)[0]
	synctest.Test(t, func(t *testing.T) {
		cfg := DefaultConfig()
		for i, word := range []string{"none", "reset", "reboot", "drainP2P", "drainAndReset", "recoverIMEX", "pcieBusReset", "systemReboot"} {
			cfg.Scenario = append(cfg.Scenario, ev(t, time.Duration(i+1)*time.Second, `{gpu: 1, recoveryAction: `+word+`}`))
		}
		cfg.Scenario = append(cfg.Scenario,
			ev(t, time.Second, `{gpu: 2, rowRemapPending: true, temperature: 97}`),
			ev(t, 2*time.Second, `{gpu: 2, rowRemapPending: false}`),
			ev(t, 3*time.Second, `{gpu: 2, temperature: 0}`),
		)
		ses := open(t, newSource(t, cfg))
		for i := range 8 {
			pass(time.Second)
			r := poll(t, ses)
			if got := sampleOf(t, r, 1).Values[health.FieldRecoveryAction]; got != float64(i) {
				t.Errorf("after %d s the recovery action is %v; want %d", i+1, got, i)
			}
			if got := sampleOf(t, r, 0).Values[health.FieldRecoveryAction]; got != 0 {
				t.Errorf("the recovery action of GPU 0 is %v", got)
			}
			v := sampleOf(t, r, 2).Values
			if want := number(i == 0); v[health.FieldRemapPending] != want {
				t.Errorf("after %d s remap pending is %v; want %v", i+1, v[health.FieldRemapPending], want)
			}
			if i < 2 && (v[health.FieldGPUTemp] != 97 || v[health.FieldMemoryTemp] <= 97 || v[health.FieldMemoryTemp] > 110) {
				t.Errorf("after %d s it has %v °C, memory %v; want 97 and a bit more", i+1, v[health.FieldGPUTemp], v[health.FieldMemoryTemp])
			}
			if want := sampleOf(t, healthy, 2).Values[health.FieldGPUTemp]; i == 2 && v[health.FieldGPUTemp] != want {
				t.Errorf("given back, the temperature is %v; want the simulated %v", v[health.FieldGPUTemp], want)
			}
		}
	})
}

func TestLostTakesTheMIGDevicesAlong(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		cfg := profileConfig("h100-8-mig")
		cfg.Scenario = []Event{ev(t, 0, `{gpu: 6, lost: true, xid: 79}`)}
		r := poll(t, open(t, newSource(t, cfg)))
		var lost int
		for i, d := range r.Devices {
			s := r.Samples[i]
			want := health.Present
			if d.Index == 6 {
				want = health.Lost
				lost++
			}
			if s.Device != d.ID || s.Presence != want || (want == health.Lost) != (s.Values == nil) {
				t.Errorf("%s of GPU %d: %+v; want %v", d.ID, d.Index, s, want)
			}
			// The XID is the GPU's; handing it on is the judge's work.
			if whole := d.Index == 6 && d.Kind == health.KindGPU; (len(s.XIDs) == 1) != whole {
				t.Errorf("%s of GPU %d has XIDs %v", d.ID, d.Index, s.XIDs)
			}
		}
		if lost != 5 {
			t.Errorf("%d devices are lost; want the GPU and its 4 parts", lost)
		}
	})
}

func TestLoopUndoesAndRepeats(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		cfg := DefaultConfig()
		cfg.Loop = 60 * time.Second
		cfg.Scenario = []Event{
			ev(t, 5*time.Second, `{gpu: 3, xid: 79}`),
			ev(t, 10*time.Second, `{gpu: 3, lost: true, temperature: 97, rowRemapPending: true, recoveryAction: reset}`),
		}
		ses := open(t, newSource(t, cfg))
		start := time.Now()
		var got []stamp
		for lap := range 3 {
			pass(time.Duration(lap)*cfg.Loop + 5*time.Second - time.Since(start))
			got = append(got, stamps(start, sampleOf(t, poll(t, ses), 3).XIDs)...)
			pass(54 * time.Second)
			if s := sampleOf(t, poll(t, ses), 3); s.Presence != health.Lost {
				t.Errorf("lap %d: at its end GPU 3 is %v; want lost", lap, s.Presence)
			}
			woken(ses)
			pass(time.Second)
			if !woken(ses) {
				t.Errorf("lap %d: its end did not wake", lap)
			}
			s := sampleOf(t, poll(t, ses), 3)
			if s.Presence != health.Present || s.Values[health.FieldGPUTemp] == 97 || s.Values[health.FieldRemapPending] != 0 || s.Values[health.FieldRecoveryAction] != 0 {
				t.Errorf("lap %d: the next begins with GPU 3 %v and %v", lap, s.Presence, s.Values)
			}
		}
		if want := []stamp{{79, 5 * time.Second}, {79, 65 * time.Second}, {79, 125 * time.Second}}; !reflect.DeepEqual(got, want) {
			t.Errorf("XIDs %v; want %v", got, want)
		}
	})
}

func TestWithoutLoopTheEndStays(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		cfg := DefaultConfig()
		cfg.Scenario = []Event{ev(t, time.Second, `{gpu: 0, lost: true}`)}
		ses := open(t, newSource(t, cfg))
		pass(1000 * time.Hour)
		if s := sampleOf(t, poll(t, ses), 0); s.Presence != health.Lost {
			t.Errorf("GPU 0 is %v; want lost for good", s.Presence)
		}
	})
}

// TestXIDsExactlyOnce polls at odd times, reconnects, and leaves pauses without any session.
func TestXIDsExactlyOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		cfg := DefaultConfig()
		cfg.Loop = 10 * time.Second
		cfg.Scenario = []Event{
			ev(t, 0, `{gpu: 0, xid: 13}`),
			ev(t, 3*time.Second, `{gpu: 0, xid: 48}`),
			ev(t, 3*time.Second, `{gpu: 0, xid: 79}`),
		}
		src := newSource(t, cfg)
		var (
			got   []stamp
			start = time.Now()
		)
		for _, pause := range []time.Duration{0, time.Millisecond, 2999 * time.Millisecond, time.Second, 27 * time.Second, 10 * time.Second} {
			ses, err := src.Open(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			pass(pause)
			got = append(got, stamps(start, sampleOf(t, poll(t, ses), 0).XIDs)...)
			got = append(got, stamps(start, sampleOf(t, poll(t, ses), 0).XIDs)...)
			if err := ses.Close(); err != nil {
				t.Error(err)
			}
			pass(pause)
		}
		got = append(got, stamps(start, sampleOf(t, poll(t, open(t, src)), 0).XIDs)...)
		var want []stamp
		for at := time.Duration(0); at <= time.Since(start); at += cfg.Loop {
			want = append(want, stamp{13, at})
			if at+3*time.Second <= time.Since(start) {
				want = append(want, stamp{48, at + 3*time.Second}, stamp{79, at + 3*time.Second})
			}
		}
		if !reflect.DeepEqual(got, want) {
			t.Errorf("in %v got\n%v\nwant\n%v", time.Since(start), got, want)
		}
	})
}

func TestEventsAreLoggedWithTheirFields(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		core, logs := observer.New(zap.InfoLevel)
		cfg := DefaultConfig()
		cfg.Scenario = []Event{ev(t, time.Second, `{gpu: 3, xid: 79, lost: true}`)}
		src, err := New(cfg, zap.New(core))
		if err != nil {
			t.Fatal(err)
		}
		ses := open(t, src)
		for range 10 {
			pass(time.Second)
			poll(t, ses) // is not logged
		}
		all := logs.All()
		if len(all) != 1 {
			t.Fatalf("%d lines; want one", len(all))
		}
		want := map[string]any{"from": "scenario", "gpu": int64(3), "device": string(src.devices[3].ID), "xid": int64(79), "lost": true}
		if got := all[0].ContextMap(); !reflect.DeepEqual(got, want) {
			t.Errorf("fields %v; want %v", got, want)
		}
	})
}
