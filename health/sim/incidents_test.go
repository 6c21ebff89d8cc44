package sim

import (
	"reflect"
	"testing"
	"testing/synctest"
	"time"

	"github.com/gpu-node-agent/gpu-node-agent/health"
)

// TestIncidents: DCGM's checks find what a person and the scenario say, of each name by itself, until it is taken back.
func TestIncidents(t *testing.T) {
	const link, memory = 14, 52 // dcgm_errors.h
	type found map[int]health.Severity
	synctest.Test(t, func(t *testing.T) {
		cfg := DefaultConfig()
		cfg.Loop = 10 * time.Second
		cfg.Scenario = []Event{
			ev(t, time.Second, `{gpu: 2, incident: DCGM_FR_NVLINK_DOWN}`),
			ev(t, 2*time.Second, `{gpu: 2, incident: faulty_memory, severity: warn}`),
			ev(t, 3*time.Second, `{gpu: 2, incident: NVLINK_DOWN, severity: none}`),
		}
		src := newSource(t, cfg)
		ses := open(t, src)
		expect := func(when string, want found) {
			t.Helper()
			r := poll(t, ses)
			got := found{}
			s := sampleOf(t, r, 2)
			for _, i := range s.Incidents {
				got[i.Code] = i.Severity
				if info := health.LookupIncident(i.Code); i.Message != "simulated: "+info.Name || i.System == "" {
					t.Errorf("%s: %+v of %s", when, i, info.Name)
				}
			}
			if !s.Checked || !reflect.DeepEqual(got, want) {
				t.Errorf("%s: %v (checked: %v); want %v", when, got, s.Checked, want)
			}
			if other := sampleOf(t, r, 3); len(other.Incidents) != 0 {
				t.Errorf("%s: GPU 3 has %+v", when, other.Incidents)
			}
		}
		expect("at first", found{})
		pass(time.Second)
		expect("after 1 s", found{link: health.SeverityFail})
		pass(time.Second)
		expect("after 2 s", found{link: health.SeverityFail, memory: health.SeverityWarn})
		pass(time.Second)
		expect("after 3 s", found{memory: health.SeverityWarn})
		for _, text := range []string{`{gpu: 2, incident: DCGM_FR_NVLINK_DOWN}`, `{gpu: 2, incident: DCGM_FR_FAULTY_MEMORY, severity: none}`} {
			if err := src.inject(ev(t, 0, text)); err != nil {
				t.Fatal(err)
			}
		}
		expect("a person's word", found{link: health.SeverityFail})
		pass(9 * time.Second)
		expect("in the next loop", found{link: health.SeverityFail})
	})
}

// TestFaultsReachTheVerdict: each of the events makes the finding that README promises, and takes it back.
func TestFaultsReachTheVerdict(t *testing.T) {
	for _, tt := range []struct {
		profile, bad, good string
		cause              string
		state              health.State
	}{
		{"h100-8", `incident: DCGM_FR_NVLINK_DOWN`, `incident: DCGM_FR_NVLINK_DOWN, severity: none`, "dcgm-nvlink-down", health.Unhealthy},
		{"h100-8", `incident: DCGM_FR_NVLINK_DOWN, severity: warn`, `incident: DCGM_FR_NVLINK_DOWN, severity: none`, "dcgm-nvlink-down", health.Degraded},
		{"l4-1", `incident: DCGM_FR_NVLINK_DOWN`, `incident: DCGM_FR_NVLINK_DOWN, severity: none`, "", health.Healthy}, // it has no NVLink
		{"h100-8", `rowRemapFailed: true`, `rowRemapFailed: false`, health.CauseRemapFailed, health.Unhealthy},
		{"h100-8", `doubleBitErrors: 3`, `doubleBitErrors: 0`, health.CauseDBE, health.Unhealthy},
		{"v100-16", `retiredPages: 63`, `retiredPages: 0`, health.CauseRetiredPages, health.Unhealthy},
		{"v100-16", `retiredPages: 62`, `retiredPages: 0`, "", health.Healthy},
		{"h100-8-mig", `clocksSlowed: true`, `clocksSlowed: false`, health.CauseClocks, health.Degraded},
	} {
		synctest.Test(t, func(t *testing.T) {
			src := newSource(t, profileConfig(tt.profile))
			ses := open(t, src)
			c := health.DefaultConfig()
			var devices []health.DeviceState
			judge := func(what string) health.Verdict {
				t.Helper()
				if what != "" {
					if err := src.inject(ev(t, 0, `{gpu: 0, `+what+`}`)); err != nil {
						t.Fatal(err)
					}
				}
				for range c.Confirm {
					pass(c.Interval)
					devices = health.Judge(c, devices, poll(t, ses), health.Basis{History: true}, time.Now())
				}
				return devices[0].Verdict
			}
			if v := judge(""); v.State != health.Healthy {
				t.Errorf("%s: at first %+v", tt.profile, v)
			}
			if v := judge(tt.bad); v.State != tt.state || v.Cause() != tt.cause {
				t.Errorf("%s, %s: %v for %q; want %v for %q", tt.profile, tt.bad, v.State, v.Cause(), tt.state, tt.cause)
			}
			judge(tt.good)
			pass(c.RecoverAfter)
			if v := judge(""); v.State != health.Healthy {
				t.Errorf("%s, %s: %+v", tt.profile, tt.good, v)
			}
		})
	}
}

func TestSlowedClocks(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		cfg := DefaultConfig()
		cfg.Scenario = []Event{ev(t, 0, `{gpu: 0, clocksSlowed: true}`)}
		ses := open(t, newSource(t, cfg))
		for range 300 {
			v := sampleOf(t, poll(t, ses), 0).Values
			if v[health.FieldSMClock] > h100().topSM/2 || v[health.FieldClocksEvents] != clocksSlowed {
				t.Fatalf("%v MHz, events %v", v[health.FieldSMClock], v[health.FieldClocksEvents])
			}
			pass(time.Second)
		}
	})
}
