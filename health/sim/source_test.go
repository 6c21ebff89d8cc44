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

// timedXID is an XID with its time since the start.
type timedXID struct {
	code int
	at   time.Duration
}

func timedXIDs(start time.Time, xids []health.XID) []timedXID {
	var out []timedXID
	for _, x := range xids {
		out = append(out, timedXID{x.Code, x.At.Sub(start)})
	}
	return out
}

func TestLastXIDPersists(t *testing.T) {
	cfg := scenarioConfig("h100-8", 0,
		event(t, time.Second, `{gpu: 0, xid: 31}`),
		event(t, 2*time.Second, `{gpu: 0, xid: 79, lost: true}`),
		event(t, 3*time.Second, `{gpu: 0, lost: false}`),
	)
	simulate(t, cfg, func(t *testing.T, _ *Source, ses health.Session) {
		if v, ok := gpuSample(t, poll(t, ses), 0).Values[health.FieldXID]; !ok || v != 0 {
			t.Errorf("the last XID is %v, %v; want 0", v, ok)
		}
		sleep(time.Second)
		if v := gpuSample(t, poll(t, ses), 0).Values[health.FieldXID]; v != 31 {
			t.Errorf("the last XID is %v; want 31", v)
		}
		sleep(time.Second)
		// The driver reports XIDs of a lost GPU.
		if s := gpuSample(t, poll(t, ses), 0); s.Presence != health.Lost || len(s.XIDs) != 1 || s.XIDs[0].Code != 79 || s.Values != nil {
			t.Errorf("lost GPU: %+v; want XID 79 and no values", s)
		}
		sleep(time.Second)
		if s := gpuSample(t, poll(t, ses), 0); s.Values[health.FieldXID] != 79 || len(s.XIDs) != 0 {
			t.Errorf("GPU back: last XID %v, new XIDs %v; want 79 and none", s.Values[health.FieldXID], s.XIDs)
		}
	})
}

func TestConditions(t *testing.T) {
	healthy := readings(t, DefaultConfig(), 3*time.Second)[0]
	synctest.Test(t, func(t *testing.T) {
		cfg := DefaultConfig()
		for i, action := range []string{"none", "reset", "reboot", "drainP2P", "drainAndReset", "recoverIMEX", "pcieBusReset", "systemReboot"} {
			cfg.Scenario = append(cfg.Scenario, event(t, time.Duration(i+1)*time.Second, `{gpu: 1, recoveryAction: `+action+`}`))
		}
		cfg.Scenario = append(cfg.Scenario,
			event(t, time.Second, `{gpu: 2, rowRemapPending: true, temperature: 97}`),
			event(t, 2*time.Second, `{gpu: 2, rowRemapPending: false}`),
			event(t, 3*time.Second, `{gpu: 2, temperature: 0}`),
		)
		ses := open(t, newSource(t, cfg))
		for i := range 8 {
			sleep(time.Second)
			r := poll(t, ses)
			if got := gpuSample(t, r, 1).Values[health.FieldRecoveryAction]; got != float64(i) {
				t.Errorf("after %d s the recovery action is %v; want %d", i+1, got, i)
			}
			if got := gpuSample(t, r, 0).Values[health.FieldRecoveryAction]; got != 0 {
				t.Errorf("the recovery action of GPU 0 is %v", got)
			}
			v := gpuSample(t, r, 2).Values
			if want := boolValue(i == 0); v[health.FieldRemapPending] != want {
				t.Errorf("after %d s remap pending is %v; want %v", i+1, v[health.FieldRemapPending], want)
			}
			if i < 2 && (v[health.FieldGPUTemp] != 97 || v[health.FieldMemoryTemp] <= 97 || v[health.FieldMemoryTemp] > 110) {
				t.Errorf("after %d s GPU %v °C, memory %v °C; want 97 and up to 110", i+1, v[health.FieldGPUTemp], v[health.FieldMemoryTemp])
			}
			if want := gpuSample(t, healthy, 2).Values[health.FieldGPUTemp]; i == 2 && v[health.FieldGPUTemp] != want {
				t.Errorf("temperature reset: %v; want the simulated %v", v[health.FieldGPUTemp], want)
			}
		}
	})
}

func TestLostIncludesMIGDevices(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		cfg := scenarioConfig("h100-8-mig", 0, event(t, 0, `{gpu: 6, lost: true, xid: 79}`))
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
			// Only the GPU reports the XID; judging applies it to the MIG devices.
			if whole := d.Index == 6 && d.Kind == health.KindGPU; (len(s.XIDs) == 1) != whole {
				t.Errorf("%s of GPU %d has XIDs %v", d.ID, d.Index, s.XIDs)
			}
		}
		if lost != 5 {
			t.Errorf("%d devices are lost; want the GPU and its 4 MIG devices", lost)
		}
	})
}

// TestXIDsAreDeliveredOnce polls at irregular times, reconnects, and pauses without a session.
func TestXIDsAreDeliveredOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		cfg := scenarioConfig("h100-8", 10*time.Second,
			event(t, 0, `{gpu: 0, xid: 13}`),
			event(t, 3*time.Second, `{gpu: 0, xid: 48}`),
			event(t, 3*time.Second, `{gpu: 0, xid: 79}`),
		)
		src := newSource(t, cfg)
		var (
			got   []timedXID
			start = time.Now()
		)
		for _, pause := range []time.Duration{0, time.Millisecond, 2999 * time.Millisecond, time.Second, 27 * time.Second, 10 * time.Second} {
			ses, err := src.Open(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			sleep(pause)
			got = append(got, timedXIDs(start, gpuSample(t, poll(t, ses), 0).XIDs)...)
			got = append(got, timedXIDs(start, gpuSample(t, poll(t, ses), 0).XIDs)...)
			if err := ses.Close(); err != nil {
				t.Error(err)
			}
			sleep(pause)
		}
		got = append(got, timedXIDs(start, gpuSample(t, poll(t, open(t, src)), 0).XIDs)...)
		var want []timedXID
		for at := time.Duration(0); at <= time.Since(start); at += cfg.Loop {
			want = append(want, timedXID{13, at})
			if at+3*time.Second <= time.Since(start) {
				want = append(want, timedXID{48, at + 3*time.Second}, timedXID{79, at + 3*time.Second})
			}
		}
		if !reflect.DeepEqual(got, want) {
			t.Errorf("in %v got\n%v\nwant\n%v", time.Since(start), got, want)
		}
	})
}

func TestEventLogFields(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		core, logs := observer.New(zap.InfoLevel)
		cfg := scenarioConfig("h100-8", 0, event(t, time.Second, `{gpu: 3, xid: 79, lost: true}`))
		src, err := New(cfg, zap.New(core))
		if err != nil {
			t.Fatal(err)
		}
		ses := open(t, src)
		for range 10 {
			sleep(time.Second)
			poll(t, ses) // logs nothing
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
