package judge

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/health/catalog"
)

// checked returns a sample with the result of DCGM's health checks.
func checked(incidents ...health.Incident) health.Sample {
	s := present()
	s.Checked, s.Incidents = true, incidents
	return s
}

func TestConfirm(t *testing.T) {
	fail := health.Incident{System: "memory", Code: 4, Severity: health.SeverityFail, Message: "a double-bit error"}
	warn := health.Incident{System: "pcie", Code: 3, Severity: health.SeverityWarn, Message: "replays"}
	sticky := health.Incident{System: "memory", Code: 101, Severity: health.SeverityFail, Message: "XID 31"}
	const cause, warning = "dcgm-volatile-dbe-detected", "dcgm-pci-replay-rate"
	for name, steps := range map[string][]step{
		"two consecutive FAILs count": {
			{0, checked(fail), health.Healthy, nil},
			{1, checked(), health.Healthy, nil},
			{2, checked(fail), health.Healthy, nil},
			{3, checked(fail), health.Unhealthy, []string{cause}},
		},
		"checks less than half an interval apart count once": {
			{0, checked(fail), health.Healthy, nil},
			{0, checked(fail), health.Healthy, nil},
			{0, checked(fail), health.Healthy, nil},
			{1, checked(fail), health.Unhealthy, []string{cause}},
		},
		"a poll without a check does not interrupt": {
			{0, checked(fail), health.Healthy, nil},
			{1, present(), health.Healthy, nil},
			{2, checked(fail), health.Unhealthy, []string{cause}},
		},
		"a FAIL clears after recoverAfter": {
			{0, checked(fail), health.Healthy, nil},
			{1, checked(fail), health.Unhealthy, []string{cause}},
			{2, checked(), health.Unhealthy, []string{cause}},
			{60, present(), health.Unhealthy, []string{cause}}, // no check
			{61, checked(), health.Healthy, nil},
		},
		"a FAIL does not clear without checks": {
			{0, checked(fail), health.Healthy, nil},
			{1, checked(fail), health.Unhealthy, []string{cause}},
			{9999, present(), health.Unhealthy, []string{cause}},
		},
		"a WARN is degraded at once": {
			{0, checked(warn), health.Degraded, []string{warning}},
			{1, checked(warn), health.Degraded, []string{warning}},
			{2, checked(warn, warn), health.Degraded, []string{warning}},
		},
		"a WARN does not hide a FAIL of the same code": {
			{
				0, checked(health.Incident{Code: 4, Severity: health.SeverityWarn}, fail, health.Incident{Code: 4, Severity: health.SeverityWarn}),
				health.Healthy, nil,
			},
			{1, checked(health.Incident{Code: 4, Severity: health.SeverityWarn}, fail), health.Unhealthy, []string{cause}},
		},
		"a WARN does not clear a FAIL": {
			{0, checked(fail), health.Healthy, nil},
			{1, checked(fail), health.Unhealthy, []string{cause}},
			{2, checked(health.Incident{Code: 4, Severity: health.SeverityWarn}), health.Unhealthy, []string{cause}},
			{61, checked(), health.Healthy, nil},
		},
		"an intermittent FAIL does not clear": {
			{0, checked(fail), health.Healthy, nil},
			{1, checked(fail), health.Unhealthy, []string{cause}},
			{30, checked(), health.Unhealthy, []string{cause}},
			{59, checked(fail), health.Unhealthy, []string{cause}},
			{62, checked(), health.Unhealthy, []string{cause}},
			{119, checked(), health.Healthy, nil},
		},
		"incidents that DCGM never clears are ignored": {
			{0, checked(sticky), health.Healthy, nil},
			{1, checked(sticky), health.Healthy, nil},
			{2, checked(sticky, fail), health.Healthy, nil},
			{3, checked(sticky, fail), health.Unhealthy, []string{cause}},
		},
	} {
		t.Run(name, func(t *testing.T) { runSteps(t, DefaultConfig(), steps) })
	}

	c := DefaultConfig()
	c.Incidents.Ignore = []string{"DCGM_FR_VOLATILE_DBE_DETECTED"}
	c.Confirm = 1
	runSteps(t, c, []step{{0, checked(fail), health.Healthy, nil}})
	c.Incidents = catalog.IncidentConfig{}
	devices := runSteps(t, c, []step{{0, checked(fail), health.Unhealthy, []string{cause}}})
	if f := devices[0].Verdict.Findings[0]; f.Reason != fail.Message || f.Action == "" {
		t.Errorf("finding %+v", f)
	}
}

// An incident without a GPU counts for every GPU if the configuration names its code, and otherwise for none.
func TestIncidentWithoutGPU(t *testing.T) {
	imex := health.Incident{System: "imex", Code: 122, Severity: health.SeverityFail, Message: "IMEX daemon is not ready"}
	other := health.Incident{System: "memory", Code: 4, Severity: health.SeverityFail}
	for name, c := range map[string]struct {
		config catalog.IncidentConfig
		want   health.State
	}{
		"default":   {catalog.IncidentConfig{}, health.Healthy},
		"ignore":    {catalog.IncidentConfig{Ignore: []string{"122"}}, health.Healthy},
		"warn":      {catalog.IncidentConfig{Warn: []string{"DCGM_FR_IMEX_UNHEALTHY"}}, health.Degraded},
		"unhealthy": {catalog.IncidentConfig{Unhealthy: []string{"imex_unhealthy"}}, health.Unhealthy},
	} {
		t.Run(name, func(t *testing.T) {
			config := DefaultConfig()
			config.Incidents, config.Confirm = c.config, 1
			var devices []health.DeviceState
			for seconds := range 3 {
				r, now := reading(seconds, samples{gpu0.ID: checked(), gpu1.ID: checked()}, gpu0, gpu1)
				r.Incidents = []health.Incident{imex, other}
				if seconds == 2 { // without a check
					r, now = reading(seconds, nil, gpu0, gpu1)
				}
				devices = judgeReading(config, devices, r, ReadingContext{XIDHistory: true}, now)
				for _, d := range devices {
					if d.Verdict.State != c.want || c.want > health.Healthy && d.Verdict.Cause() != "dcgm-imex-unhealthy" {
						t.Errorf("poll %d: %s: %v by %v, want %v", seconds, d.Device.ID, d.Verdict.State, d.Verdict.Causes(), c.want)
					}
				}
			}
		})
	}
}

// DCGM keeps the incident of an XID until its engine restarts. After a first start it may be the only trace of the XID.
func TestIncidentsFromBeforeStart(t *testing.T) {
	incident := func(code int, severity health.Severity, message string) health.Sample {
		return checked(health.Incident{System: "xid", Code: code, Severity: severity, Message: message})
	}
	uncontained := incident(81, health.SeverityFail, "XID 95")
	withApplicationError := uncontained
	xids(13)(&withApplicationError)
	for name, c := range map[string]struct {
		sample health.Sample
		saved  bool
		want   string
	}{
		"a FAIL":                             {uncontained, false, "dcgm-uncontained-error"},
		"a FAIL beside an application's XID": {withApplicationError, false, "dcgm-uncontained-error"},
		"a check that an XID triggered": {
			incident(80, health.SeverityFail, "Row remap failure (triggered by XID 64: x)"), false,
			"dcgm-row-remap-failure",
		},
		"a WARN":                   {incident(101, health.SeverityWarn, "XID 31"), false, ""},
		"a finding of DCGM itself": {incident(14, health.SeverityFail, "NVLink down"), false, ""},
		"with saved state":         {uncontained, true, ""},
	} {
		t.Run(name, func(t *testing.T) {
			rc := ReadingContext{XIDHistory: c.saved}
			d := judgeGPU(nil, 0, c.sample, rc)
			for i, seconds := range []int{1, 1000} {
				if got := strings.Join(d.Verdict.Causes(), ","); got != c.want || c.want != "" && d.Verdict.State != health.Degraded {
					t.Fatalf("poll %d: %q, %v; want %q", i, got, d.Verdict.State, c.want)
				}
				d = judgeGPU([]health.DeviceState{d}, seconds, c.sample, rc)
			}
			// A reset clears it for good.
			for i, s := range []health.Sample{blank(health.Lost), blank(health.Lost), c.sample, c.sample} {
				d = judgeGPU([]health.DeviceState{d}, 1001+i, s, rc)
			}
			if d.Verdict.State != health.Healthy {
				t.Errorf("after a reset: %v", d.Verdict.Causes())
			}
		})
	}

	// An XID that the source delivered is judged instead of its incident.
	d := judgeGPU(nil, 0, present(xids(94)), ReadingContext{})
	d = judgeGPU([]health.DeviceState{d}, 1, incident(131, health.SeverityFail, "XID 94"), ReadingContext{})
	if got := d.Verdict.Causes(); !slices.Equal(got, []string{"xid-94"}) {
		t.Errorf("got %v", got)
	}
}

// DCGM's health check reports some XIDs as incidents too, for as long as its engine runs (DCGM 4.6, DcgmHealthWatch; its tests,
// TestHealthMonitor). Each XID causes one finding at most, the one of the XID table.
func TestXIDsOfHealthCheckCauseOneFinding(t *testing.T) {
	const xidError = 101 // DCGM_FR_XID_ERROR
	for _, c := range []struct {
		system   string
		severity health.Severity
		code     int // dcgm_errors.h
		xids     []int
	}{
		{"xid", health.SeverityFail, xidError, []int{48, 74, 119, 120, 140}},
		{"xid", health.SeverityFail, 120, []int{79}}, // FALLEN_OFF_BUS
		{"xid", health.SeverityWarn, 131, []int{94}}, // CONTAINED_ERROR
		{"xid", health.SeverityFail, 81, []int{95}},  // UNCONTAINED_ERROR
		{"memory", health.SeverityWarn, xidError, []int{31, 32, 43}},
		{"memory", health.SeverityWarn, 6, []int{63}},  // PENDING_PAGE_RETIREMENTS
		{"memory", health.SeverityFail, 80, []int{64}}, // ROW_REMAP_FAILURE
		{"pcie", health.SeverityWarn, xidError, []int{38, 39, 42}},
		{"thermal", health.SeverityWarn, xidError, []int{60, 61, 62}},
		{"power", health.SeverityWarn, xidError, []int{54, 56, 57, 58, 78}},
		{"nvlink", health.SeverityWarn, xidError, []int{67, 73, 121, 137}},
		{"inforom", health.SeverityWarn, 9, []int{93}}, // CORRUPT_INFOROM; on Volta only
	} {
		for _, xid := range c.xids {
			incident := health.Incident{System: c.system, Code: c.code, Severity: c.severity, Message: fmt.Sprintf("XID %d", xid)}
			if c.system != "xid" {
				incident.Message = fmt.Sprintf("errors (triggered by XID %d: %s)", xid, catalog.LookupXID(xid).Name)
			}
			var want []string
			if catalog.LookupXID(xid).Effect != catalog.EffectIgnore {
				want = []string{fmt.Sprintf("xid-%d", xid)}
			}
			rc := ReadingContext{XIDHistory: true}
			d := judgeGPU(nil, 0, checked(), rc)
			for i := range DefaultConfig().Confirm + 2 {
				s := checked(incident)
				if i == 0 {
					xids(xid)(&s)
				}
				d = judgeGPU([]health.DeviceState{d}, i+1, s, rc)
				if got := d.Verdict.Causes(); !slices.Equal(got, want) {
					t.Fatalf("XID %d, poll %d: findings %q, want %q", xid, i, got, want)
				}
			}
		}
	}
}

func TestIncidentsTriggeredByXIDs(t *testing.T) {
	c := DefaultConfig()
	c.Confirm = 1
	for _, i := range []health.Incident{{Code: 80, Severity: health.SeverityFail}, {Code: 6, Severity: health.SeverityWarn}} {
		for _, overrides := range [][]string{nil, {strconv.Itoa(i.Code)}} {
			c.Incidents.Unhealthy = overrides
			i.Message = "GPU 3 had errors (triggered by XID 64: row remapper)"
			runSteps(t, c, []step{{0, checked(i), health.Healthy, nil}})
			i.Message = "a check of DCGM itself"
			if d := judgeAll(c, nil, 0, nil, samples{gpu0.ID: checked(i)}, gpu0); d[0].Verdict.State == health.Healthy {
				t.Errorf("%d without an XID is ignored", i.Code)
			}
		}
	}
}

// DCGM's incidents of the driver's recovery actions have the same actions.
func TestIncidentsOfRecoveryActions(t *testing.T) {
	for action, name := range map[health.RecoveryAction]string{
		health.RecoveryReset: "RESET", health.RecoveryReboot: "REBOOT", health.RecoveryDrainP2P: "DRAIN_P2P",
		health.RecoveryDrainAndReset: "DRAIN_RESET",
	} {
		code, _ := catalog.IncidentCode("GPU_RECOVERY_" + name)
		if got, want := catalog.LookupIncident(code).Action, recoveryOf(action).action; got != want {
			t.Errorf("GPU_RECOVERY_%s has the action %q, recovery action %d %q", name, got, action, want)
		}
	}
}
