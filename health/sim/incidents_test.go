package sim

import (
	"fmt"
	"reflect"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/health/catalog"
	"github.com/gpu-node-agent/gpu-node-agent/health/judge"
	"github.com/gpu-node-agent/gpu-node-agent/internal/healthtest"
)

// TestIncidents checks that events start and end incidents, each by its name.
func TestIncidents(t *testing.T) {
	const link, memory = 14, 52 // dcgm_errors.h
	type severities map[int]health.Severity
	synctest.Test(t, func(t *testing.T) {
		cfg := scenarioConfig("h100-8", 10*time.Second,
			event(t, time.Second, `{gpu: 2, incident: DCGM_FR_NVLINK_DOWN}`),
			event(t, 2*time.Second, `{gpu: 2, incident: faulty_memory, severity: warn}`),
			event(t, 3*time.Second, `{gpu: 2, incident: NVLINK_DOWN, severity: none}`),
		)
		src, ses := openSource(t, cfg)
		expect := func(when string, want severities) {
			t.Helper()
			r := poll(t, ses)
			got := severities{}
			s := gpuSample(t, r, 2)
			for _, i := range s.Incidents {
				got[i.Code] = i.Severity
				if info := catalog.LookupIncident(i.Code); i.Message != "simulated: "+info.Name || i.System == "" {
					t.Errorf("%s: %+v of %s", when, i, info.Name)
				}
			}
			if !s.Checked || !reflect.DeepEqual(got, want) {
				t.Errorf("%s: %v (checked: %v); want %v", when, got, s.Checked, want)
			}
			if other := gpuSample(t, r, 3); len(other.Incidents) != 0 {
				t.Errorf("%s: GPU 3 has %+v", when, other.Incidents)
			}
		}
		expect("first poll", severities{})
		sleep(time.Second)
		expect("after 1 s", severities{link: health.SeverityFail})
		sleep(time.Second)
		expect("after 2 s", severities{link: health.SeverityFail, memory: health.SeverityWarn})
		sleep(time.Second)
		expect("after 3 s", severities{memory: health.SeverityWarn})
		inject(t, src, `{gpu: 2, incident: DCGM_FR_NVLINK_DOWN}`, `{gpu: 2, incident: DCGM_FR_FAULTY_MEMORY, severity: none}`)
		expect("after control events", severities{link: health.SeverityFail})
		sleep(9 * time.Second)
		expect("next loop", severities{link: health.SeverityFail})
	})
}

// TestEventsCauseFindings checks that an event causes the documented finding, and another event clears it.
func TestEventsCauseFindings(t *testing.T) {
	for _, tt := range []struct {
		profile, bad, good string
		cause              string
		state              health.State
	}{
		{"h100-8", `incident: DCGM_FR_NVLINK_DOWN`, `incident: DCGM_FR_NVLINK_DOWN, severity: none`, "dcgm-nvlink-down", health.Unhealthy},
		{
			"h100-8", `incident: DCGM_FR_NVLINK_DOWN, severity: warn`, `incident: DCGM_FR_NVLINK_DOWN, severity: none`, "dcgm-nvlink-down",
			health.Degraded,
		},
		{"l4-1", `incident: DCGM_FR_NVLINK_DOWN`, `incident: DCGM_FR_NVLINK_DOWN, severity: none`, "", health.Healthy}, // without NVLink
		{"h100-8", `rowRemapFailed: true`, `rowRemapFailed: false`, health.CauseRemapFailed, health.Unhealthy},
		{"h100-8", `doubleBitErrors: 3`, `doubleBitErrors: 0`, health.CauseDBE, health.Unhealthy},
		{"v100-16", `retiredPages: 63`, `retiredPages: 0`, health.CauseRetiredPages, health.Unhealthy},
		{"v100-16", `retiredPages: 62`, `retiredPages: 0`, "", health.Healthy},
		{"h100-8-mig", `clocksSlowed: true`, `clocksSlowed: false`, health.CauseClocks, health.Degraded},
	} {
		simulate(t, profileConfig(tt.profile), func(t *testing.T, src *Source, ses health.Session) {
			c := judge.DefaultConfig()
			var devices []health.DeviceState
			judge := func(effects string) health.Verdict {
				t.Helper()
				if effects != "" {
					inject(t, src, `{gpu: 0, `+effects+`}`)
				}
				for range c.Confirm {
					sleep(c.Interval)
					devices = healthtest.JudgeReading(c, devices, poll(t, ses), judge.ReadingContext{XIDHistory: true}, time.Now())
				}
				return devices[0].Verdict
			}
			if v := judge(""); v.State != health.Healthy {
				t.Errorf("%s: first verdict %+v", tt.profile, v)
			}
			if v := judge(tt.bad); v.State != tt.state || v.Cause() != tt.cause {
				t.Errorf("%s, %s: %v for %q; want %v for %q", tt.profile, tt.bad, v.State, v.Cause(), tt.state, tt.cause)
			}
			judge(tt.good)
			sleep(c.RecoverAfter)
			if v := judge(""); v.State != health.Healthy {
				t.Errorf("%s, %s: %+v", tt.profile, tt.good, v)
			}
		})
	}
}

func TestClocksSlowed(t *testing.T) {
	simulate(t, scenarioConfig("h100-8", 0, event(t, 0, `{gpu: 0, clocksSlowed: true}`)), func(t *testing.T, _ *Source, ses health.Session) {
		for range 300 {
			v := gpuSample(t, poll(t, ses), 0).Values
			if v[health.FieldSMClock] > h100().topSM/2 || v[health.FieldClocksEvents] != clocksSlowed {
				t.Fatalf("%v MHz, events %v", v[health.FieldSMClock], v[health.FieldClocksEvents])
			}
			sleep(time.Second)
		}
	})
}

// TestNVLinkIncidentEffect checks that a link that is down concerns only GPUs with NVLink, which partitioned ones are not.
func TestNVLinkIncidentEffect(t *testing.T) {
	for _, c := range []struct {
		profile string
		gpu     int
		want    catalog.Effect
	}{
		{"h100-8", 3, catalog.EffectUnhealthy},
		{"v100-16", 11, catalog.EffectUnhealthy},
		{"mixed-4", 1, catalog.EffectUnhealthy},
		{"h100-16-mig", 11, catalog.EffectIgnore},
		{"h100-8-mig", 3, catalog.EffectIgnore},
		{"mixed-4", 3, catalog.EffectIgnore},
		{"l4-1", 0, catalog.EffectIgnore},
	} {
		simulate(t, profileConfig(c.profile), func(t *testing.T, src *Source, ses health.Session) {
			inject(t, src, fmt.Sprintf(`{gpu: %d, incident: DCGM_FR_NVLINK_DOWN, severity: fail}`, c.gpu))
			r := poll(t, ses)
			s := gpuSample(t, r, c.gpu)
			i := slices.IndexFunc(r.Devices, func(d health.Device) bool { return d.ID == s.Device })
			if len(s.Incidents) != 1 {
				t.Fatalf("%s: incidents %v", c.profile, s.Incidents)
			}
			if got := catalog.DefaultIncidentConfig().Effect(r.Devices[i], s.Incidents[0]); got != c.want {
				t.Errorf("GPU %d of %s: effect %v, want %v", c.gpu, c.profile, got, c.want)
			}
		})
	}
}
