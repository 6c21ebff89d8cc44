package sim

import (
	"reflect"
	"testing"
	"testing/synctest"
	"time"

	"github.com/gpu-node-agent/gpu-node-agent/health"
)

// pastXID returns an XID from before the start.
func pastXID(ago time.Duration, gpu, xid int) PastXID { return PastXID{Ago: ago, GPU: &gpu, XID: &xid} }

// TestPastXIDsAreDeliveredOnce checks that past XIDs are in Past of a GPU's first sample, oldest first.
func TestPastXIDsAreDeliveredOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		cfg := profileConfig("h100-8-mig")
		cfg.Past = []PastXID{pastXID(10*time.Second, 5, 95), pastXID(time.Hour, 5, 31), pastXID(time.Minute, 6, 13)}
		cfg.Scenario = []Event{event(t, 0, `{gpu: 5, xid: 43}`), event(t, 0, `{gpu: 6, lost: true}`)}
		src := newSource(t, cfg)
		sleep(time.Minute) // before the clock starts
		ses := open(t, src)
		start := time.Now()
		r := poll(t, ses)
		want := map[int][]timedXID{5: {{31, -time.Hour}, {95, -10 * time.Second}}, 6: {{13, -time.Minute}}}
		for i, d := range r.Devices {
			s := r.Samples[i]
			switch got := timedXIDs(start, s.Past); {
			case d.Kind == health.KindMIG && got != nil:
				t.Errorf("past XIDs of %s of GPU %d: %v; want none", d.ID, d.Index, got)
			case d.Kind == health.KindGPU && !reflect.DeepEqual(got, want[d.Index]):
				t.Errorf("past XIDs of GPU %d: %v; want %v", d.Index, got, want[d.Index])
			}
		}
		if s := gpuSample(t, r, 5); s.Values[health.FieldXID] != 43 || len(s.XIDs) != 1 || s.XIDs[0].Code != 43 {
			t.Errorf("last XID %v, new XIDs %v; want 43", s.Values[health.FieldXID], s.XIDs)
		}
		for _, again := range []health.Session{ses, open(t, src)} {
			for _, s := range poll(t, again).Samples {
				if s.Past != nil {
					t.Errorf("past XIDs of %s again: %v", s.Device, s.Past)
				}
			}
		}
	})
}

// TestPastXIDsWaitForASample checks that a source without values keeps the past XIDs, also while a GPU is repartitioned.
func TestPastXIDsWaitForASample(t *testing.T) {
	for _, state := range []string{sourceBlind, sourceEmpty} {
		synctest.Test(t, func(t *testing.T) {
			cfg := DefaultConfig()
			cfg.Past = []PastXID{pastXID(10*time.Second, 5, 95)}
			src, ses := openSource(t, cfg)
			inject(t, src, `{source: `+state+`}`, `{gpu: 5, mig: balanced}`)
			for _, s := range poll(t, ses).Samples {
				if s.Past != nil {
					t.Errorf("%s: %+v", state, s)
				}
			}
			inject(t, src, `{source: up}`)
			if s := gpuSample(t, poll(t, ses), 5); len(s.Past) != 1 || s.Past[0].Code != 95 || s.Values[health.FieldXID] != 95 {
				t.Errorf("after %s: %+v", state, s)
			}
		})
	}
}

// TestXIDIncidents checks that the health check reports an incident for some XIDs, past or new, once each and for good.
func TestXIDIncidents(t *testing.T) {
	const (
		all, memory = "xid", "memory"
		fail, warn  = health.SeverityFail, health.SeverityWarn
	)
	type incident struct {
		system   string
		severity health.Severity
		code     int
	}
	for _, tt := range []struct {
		profile string
		xid     int
		want    []incident // codes of dcgm_errors.h
	}{
		{"h100-8", 79, []incident{{all, fail, 120}}},
		{"h100-8", 48, []incident{{all, fail, 101}}},
		{"h100-8", 74, []incident{{all, fail, 101}}},
		{"h100-8", 94, []incident{{all, warn, 131}}},
		{"h100-8", 95, []incident{{all, fail, 81}}},
		{"h100-8", 31, []incident{{memory, warn, 101}}},
		{"h100-8", 43, []incident{{memory, warn, 101}}},
		{"h100-8", 63, []incident{{memory, warn, 6}}},
		{"h100-8", 64, []incident{{memory, fail, 80}}},
		{"h100-8", 13, nil},
		{"h100-8", 93, nil},
		{"v100-16", 93, []incident{{"inforom", warn, 9}}},
	} {
		for _, past := range []bool{true, false} {
			synctest.Test(t, func(t *testing.T) {
				cfg := profileConfig(tt.profile)
				if past {
					cfg.Past = []PastXID{pastXID(time.Minute, 3, tt.xid), pastXID(time.Second, 3, tt.xid)}
				} else {
					cfg.Scenario = []Event{{GPU: new(3), XID: &tt.xid, Times: new(2)}}
				}
				src, ses := openSource(t, cfg)
				expect := func(when string) {
					t.Helper()
					r := poll(t, ses)
					var got []incident
					for _, i := range gpuSample(t, r, 3).Incidents {
						got = append(got, incident{i.System, i.Severity, i.Code})
						if i.Message == "" {
							t.Errorf("XID %d: no message", tt.xid)
						}
					}
					if !reflect.DeepEqual(got, tt.want) {
						t.Errorf("XID %d, past %t, %s: %v; want %v", tt.xid, past, when, got, tt.want)
					}
					if other := gpuSample(t, r, 2).Incidents; other != nil {
						t.Errorf("XID %d: GPU 2 has %+v", tt.xid, other)
					}
				}
				expect("first poll")
				inject(t, src, `{gpu: 3, lost: true, recoveryAction: reset}`, `{gpu: 3, lost: false, recoveryAction: none}`, `{source: down}`,
					`{source: up}`)
				ses = open(t, src)
				sleep(time.Hour)
				expect("after a reset and an hour")
			})
		}
	}
}

// TestXIDIncidentMessage checks that the message of an XID's incident contains the XID.
func TestXIDIncidentMessage(t *testing.T) {
	simulate(t, DefaultConfig(), func(t *testing.T, src *Source, ses health.Session) {
		inject(t, src, `{gpu: 3, xid: 64}`, `{gpu: 3, xid: 48}`, `{gpu: 3, incident: DCGM_FR_ROW_REMAP_FAILURE}`)
		var got []string
		for _, i := range gpuSample(t, poll(t, ses), 3).Incidents {
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
