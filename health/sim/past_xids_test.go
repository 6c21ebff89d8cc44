package sim

import (
	"reflect"
	"testing"
	"testing/synctest"
	"time"

	"github.com/gpu-node-agent/gpu-node-agent/health"
)

// past is an XID of before the start.
func past(ago time.Duration, gpu, xid int) PastXID { return PastXID{Ago: ago, GPU: &gpu, XID: &xid} }

// TestPastIsDeliveredOnce: XIDs of before the start are in a GPU's first sample, apart from the new ones, oldest first.
func TestPastIsDeliveredOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		cfg := profileConfig("h100-8-mig")
		cfg.Past = []PastXID{past(10*time.Second, 5, 95), past(time.Hour, 5, 31), past(time.Minute, 6, 13)}
		cfg.Scenario = []Event{ev(t, 0, `{gpu: 5, xid: 43}`), ev(t, 0, `{gpu: 6, lost: true}`)}
		src := newSource(t, cfg)
		pass(time.Minute) // the clock has not started
		ses := open(t, src)
		start := time.Now()
		r := poll(t, ses)
		want := map[int][]stamp{5: {{31, -time.Hour}, {95, -10 * time.Second}}, 6: {{13, -time.Minute}}}
		for i, d := range r.Devices {
			s := r.Samples[i]
			switch got := stamps(start, s.Past); {
			case d.Kind == health.KindMIG && got != nil:
				t.Errorf("%s of GPU %d has a past: %v", d.ID, d.Index, got)
			case d.Kind == health.KindGPU && !reflect.DeepEqual(got, want[d.Index]):
				t.Errorf("the past of GPU %d is %v; want %v", d.Index, got, want[d.Index])
			}
		}
		if s := sampleOf(t, r, 5); s.Values[health.FieldXID] != 43 || len(s.XIDs) != 1 || s.XIDs[0].Code != 43 {
			t.Errorf("the last XID is %v, the new ones are %v; want 43, after the start", s.Values[health.FieldXID], s.XIDs)
		}
		for _, again := range []health.Session{ses, open(t, src)} {
			for _, s := range poll(t, again).Samples {
				if s.Past != nil {
					t.Errorf("%s has a past a second time: %v", s.Device, s.Past)
				}
			}
		}
	})
}

// TestPastWaitsUntilTheGPUIsSeen: a source that tells nothing at first keeps the history, also across a new partition.
func TestPastWaitsUntilTheGPUIsSeen(t *testing.T) {
	for _, hidden := range []string{sourceBlind, sourceEmpty} {
		synctest.Test(t, func(t *testing.T) {
			cfg := DefaultConfig()
			cfg.Past = []PastXID{past(10*time.Second, 5, 95)}
			src := newSource(t, cfg)
			ses := open(t, src)
			for _, text := range []string{`{source: ` + hidden + `}`, `{gpu: 5, mig: balanced}`} {
				if err := src.inject(ev(t, 0, text)); err != nil {
					t.Fatal(err)
				}
			}
			for _, s := range poll(t, ses).Samples {
				if s.Past != nil {
					t.Errorf("%s: %+v", hidden, s)
				}
			}
			if err := src.inject(ev(t, 0, `{source: up}`)); err != nil {
				t.Fatal(err)
			}
			if s := sampleOf(t, poll(t, ses), 5); len(s.Past) != 1 || s.Past[0].Code != 95 || s.Values[health.FieldXID] != 95 {
				t.Errorf("after %s: %+v", hidden, s)
			}
		})
	}
}

// TestXIDIncidents: DCGM's health check files the XIDs that it knows, of before the start and since, once each, and
// takes none back.
func TestXIDIncidents(t *testing.T) {
	const (
		all, memory = "xid", "memory"
		fail, warn  = health.SeverityFail, health.SeverityWarn
	)
	type found struct {
		system   string
		severity health.Severity
		code     int
	}
	for _, tt := range []struct {
		profile string
		xid     int
		want    []found // of dcgm_errors.h
	}{
		{"h100-8", 79, []found{{all, fail, 120}}},
		{"h100-8", 48, []found{{all, fail, 101}}},
		{"h100-8", 74, []found{{all, fail, 101}}},
		{"h100-8", 94, []found{{all, warn, 131}}},
		{"h100-8", 95, []found{{all, fail, 81}}},
		{"h100-8", 31, []found{{memory, warn, 101}}},
		{"h100-8", 43, []found{{memory, warn, 101}}},
		{"h100-8", 63, []found{{memory, warn, 6}}},
		{"h100-8", 64, []found{{memory, fail, 80}}},
		{"h100-8", 13, nil},
		{"h100-8", 93, nil},
		{"v100-16", 93, []found{{"inforom", warn, 9}}},
	} {
		for _, before := range []bool{true, false} {
			synctest.Test(t, func(t *testing.T) {
				cfg := profileConfig(tt.profile)
				if before {
					cfg.Past = []PastXID{past(time.Minute, 3, tt.xid), past(time.Second, 3, tt.xid)}
				} else {
					cfg.Scenario = []Event{{GPU: new(3), XID: &tt.xid, Times: new(2)}}
				}
				src := newSource(t, cfg)
				ses := open(t, src)
				expect := func(when string) {
					t.Helper()
					r := poll(t, ses)
					var got []found
					for _, i := range sampleOf(t, r, 3).Incidents {
						got = append(got, found{i.System, i.Severity, i.Code})
						if i.Message == "" {
							t.Errorf("XID %d: no message", tt.xid)
						}
					}
					if !reflect.DeepEqual(got, tt.want) {
						t.Errorf("XID %d, before the start %t, %s: %v; want %v", tt.xid, before, when, got, tt.want)
					}
					if other := sampleOf(t, r, 2).Incidents; other != nil {
						t.Errorf("XID %d: GPU 2 has %+v", tt.xid, other)
					}
				}
				expect("at first")
				for _, text := range []string{`{gpu: 3, lost: true, recoveryAction: reset}`, `{gpu: 3, lost: false, recoveryAction: none}`, `{source: down}`, `{source: up}`} {
					if err := src.inject(ev(t, 0, text)); err != nil {
						t.Fatal(err)
					}
				}
				ses = open(t, src)
				pass(time.Hour)
				expect("an hour and a reset later")
			})
		}
	}
}

// TestXIDIncidentNamesItsXID: the message tells an incident of an XID from one that DCGM has measured.
func TestXIDIncidentNamesItsXID(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		src := newSource(t, DefaultConfig())
		ses := open(t, src)
		for _, text := range []string{`{gpu: 3, xid: 64}`, `{gpu: 3, xid: 48}`, `{gpu: 3, incident: DCGM_FR_ROW_REMAP_FAILURE}`} {
			if err := src.inject(ev(t, 0, text)); err != nil {
				t.Fatal(err)
			}
		}
		var got []string
		for _, i := range sampleOf(t, poll(t, ses), 3).Incidents {
			got = append(got, i.Message)
		}
		want := []string{
			"simulated: DCGM_FR_ROW_REMAP_FAILURE",
			"simulated: DCGM_FR_XID_ERROR, XID 48",
			"simulated: DCGM_FR_ROW_REMAP_FAILURE (triggered by XID 64: " + health.LookupXID(64).Name + ")",
		}
		if !reflect.DeepEqual(got, want) {
			t.Errorf("got %q; want %q", got, want)
		}
	})
}
