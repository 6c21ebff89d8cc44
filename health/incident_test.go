package health

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
)

func TestIncidentTable(t *testing.T) {
	checkTable(t, incidentTable, map[string][]string{
		"effect": effectNames[:], "action": actionNames(), "only": {"", "nvlink", "fabric"}, "repeats": {"", "xid"},
		"system":   {"", "pcie", "nvlink", "memory", "inforom", "thermal", "power", "driver", "imex", "xid"},
		"severity": {"", "FAIL", "WARN"}, "advice": {"", "MONITOR", "ISOLATE"},
	})
	actions := make(map[string]Action)
	for code, cells := range tableRows(incidentTable) {
		info := LookupIncident(code)
		actions[cells["name"]] = info.Action
		if info.Code != code || info.Name != "DCGM_FR_"+cells["name"] {
			t.Errorf("code %d is %+v", code, info)
		}
		if (info.System == "") != (cells["severity"] == "") {
			t.Errorf("%s is found by system %q with severity %q", info.Name, info.System, cells["severity"])
		}
		if cells["severity"] != "FAIL" && info.Effect == EffectUnhealthy {
			t.Errorf("%s is unhealthy, but DCGM never reports it as FAIL", info.Name)
		}
		if cells["repeats"] == "xid" && info.Effect != EffectIgnore {
			t.Errorf("%s repeats an XID and is not ignored", info.Name)
		}
	}
	for action, name := range map[RecoveryAction]string{
		RecoveryReset: "RESET", RecoveryReboot: "REBOOT", RecoveryDrainP2P: "DRAIN_P2P", RecoveryDrainAndReset: "DRAIN_RESET",
	} {
		if got, want := actions["GPU_RECOVERY_"+name], recoveryOf(action).action; got != want {
			t.Errorf("GPU_RECOVERY_%s has the action %q, recovery action %d %q", name, got, action, want)
		}
	}
	want := IncidentInfo{Code: 500, Name: "DCGM code 500", Effect: EffectWarn, Action: ActionWatch}
	if got := LookupIncident(500); got != want {
		t.Errorf("unknown: %+v, want %+v", got, want)
	}
}

// TestIncidentDeviations compares the table with DCGM and NVSentinel. Each difference needs a reason, and each reason a
// difference. A rule that lowers the effect for some devices differs from DCGM.
func TestIncidentDeviations(t *testing.T) {
	verdicts := readCSV(t, "incident_verdicts.csv", 5)
	table := make(map[string]bool)
	for _, cells := range tableRows(incidentTable) {
		name := cells["name"]
		table[name] = true
		var sources []string
		severity := ""
		for _, row := range verdicts {
			source, effect, action := row[0], row[2], row[3]
			if !slices.Contains(strings.Fields(row[4]), name) {
				continue
			}
			if source == "DCGM" {
				severity = map[string]string{"unhealthy": "FAIL", "warn": "WARN"}[effect]
			}
			differs := effect != "" && effect != cells["effect"] || action != "" && action != cells["action"]
			if differs || source == "DCGM" && cells["only"] != "" {
				sources = append(sources, source)
			}
		}
		if cells["severity"] != severity {
			t.Errorf("%s has the severity %q, DCGM's is %q", name, cells["severity"], severity)
		}
		if want := strings.Join(sources, ", "); cells["differs"] != want || (cells["reason"] == "") != (want == "") {
			t.Errorf("%s differs from %q, the row says %q, reason %q", name, want, cells["differs"], cells["reason"])
		}
	}
	for _, row := range verdicts {
		for name := range strings.FieldsSeq(row[4]) {
			if !table[name] {
				t.Errorf("%s of %s is not in the table", name, row[0])
			}
		}
	}
}

// TestIncidentNames compares the names with the header in the bindings.
func TestIncidentNames(t *testing.T) {
	dir, err := exec.CommandContext(t.Context(), "go", "list", "-m", "-f", "{{.Dir}}", "github.com/NVIDIA/go-dcgm").Output()
	if err != nil {
		t.Skipf("cannot find the header: %v", err)
	}
	header, err := os.ReadFile(filepath.Join(strings.TrimSpace(string(dir)), "pkg", "dcgm", "dcgm_errors.h"))
	if err != nil {
		t.Skipf("cannot read the header: %v", err)
	}
	enum, _, found := strings.Cut(string(header), "DCGM_FR_ERROR_SENTINEL")
	if !found {
		t.Fatal("the header has no DCGM_FR_ERROR_SENTINEL")
	}
	codes := regexp.MustCompile(`(DCGM_FR_\w+)\s*=\s*(\d+)\s*,`).FindAllStringSubmatch(enum, -1)
	if len(codes) != len(incidentRows()) {
		t.Errorf("the header has %d codes, the table %d", len(codes), len(incidentRows()))
	}
	for _, c := range codes {
		code, err := strconv.Atoi(c[2])
		if err != nil {
			t.Fatal(err)
		}
		if got := LookupIncident(code).Name; got != c[1] {
			t.Errorf("code %d is %s, the header says %s", code, got, c[1])
		}
	}
}

func TestIncidentEffect(t *testing.T) {
	const (
		i = EffectIgnore
		w = EffectWarn
		u = EffectUnhealthy
	)
	pcie := Device{ID: "GPU-0", Model: "NVIDIA L40S"}
	peer := Device{ID: "GPU-0", Links: []Link{{Peer: "GPU-1", Path: PathNode}}}
	nvlink := Device{ID: "GPU-0", Links: []Link{{Peer: "GPU-1", Path: PathNode}, {Peer: "GPU-2", NVLinks: 18}}}
	for _, c := range []struct {
		name       string
		device     Device
		code       int
		message    string
		fail, warn Effect
	}{
		{"double-bit error", pcie, 4, "", u, w},
		{"row remap failed", pcie, 80, "", u, w},
		{"faulty memory", pcie, 52, "", u, w},
		{"retired pages", pcie, 7, "", u, w},
		{"retired pages, double-bit", pcie, 8, "", u, w},
		{"PCIe replays", pcie, 3, "", w, w},
		{"pending page retirement", pcie, 6, "", w, w},
		{"InfoROM", pcie, 9, "", w, w},
		{"row remap limit", pcie, 132, "", w, w},
		{"power unreadable", pcie, 11, "", w, w},

		{"full load, thermal", pcie, 10, "", i, i},
		{"full load, power", pcie, 12, "", i, i},
		{"IMEX on a single node", nvlink, 122, "", i, i},
		{"NVLink down without NVLink", pcie, 14, "", i, i},
		{"NVLink down, peers over PCIe only", peer, 14, "", i, i},
		{"NVLink down", nvlink, 14, "", u, w},
		{"fabric, no NVLink", pcie, 123, "GPU 0: Fabric State is Failed (4).", i, i},
		{"fabric, old driver", nvlink, 123, "GPU 0: Fabric State is NvmlTooOld (6).", i, i},
		{"fabric failed", nvlink, 123, "GPU 0: Fabric State is Failed (4).", w, w},
		{
			"NVLink replay or recovery", nvlink, 71, "Detected 3 nvlink_recovery_error_count_total NvLink errors on GPU 0's NVLink (should be 0)", w,
			w,
		},
		{"many CRC errors", nvlink, 70, "", u, w},
		{"few CRC errors", nvlink, 13, "", w, w},
		{"bit error rate", nvlink, 119, "", w, w},

		{"sticky XID", pcie, 101, "", i, i},
		{"sticky XID 79", pcie, 120, "", i, i},
		{"sticky XID 94", pcie, 131, "", i, i},
		{"sticky XID 95", pcie, 81, "", i, i},
		{"recovery action: reset", pcie, 125, "", i, i},
		{"recovery action: reboot", pcie, 126, "", i, i},
		{"recovery action: drain", pcie, 127, "", i, i},
		{"recovery action: drain and reset", pcie, 128, "", i, i},
		{"code of dcgmi diag", pcie, 30, "", w, w},
		{"unknown", pcie, 500, "", w, w},
	} {
		for severity, want := range map[Severity]Effect{SeverityFail: c.fail, SeverityWarn: c.warn} {
			in := Incident{Code: c.code, Severity: severity, Message: c.message}
			if got := DefaultIncidentConfig().Effect(c.device, in); got != want {
				t.Errorf("%s, severity %d: %v, want %v", c.name, severity, got, want)
			}
			name := LookupIncident(c.code).Name
			if c.code == 500 {
				name = "500"
			}
			for _, override := range []struct {
				config IncidentConfig
				want   Effect
			}{
				{IncidentConfig{Unhealthy: []string{"DCGM_FR_HIGH_LATENCY", strings.ToLower(name)}}, u},
				{IncidentConfig{Warn: []string{strings.TrimPrefix(name, incidentNamePrefix)}}, w},
				{IncidentConfig{Ignore: []string{" " + strconv.Itoa(c.code)}}, i},
				{IncidentConfig{Unhealthy: []string{"DCGM_FR_HIGH_LATENCY"}}, want},
			} {
				want := override.want
				if severity == SeverityWarn {
					want = min(want, w) // a WARN is never Unhealthy
				}
				if got := override.config.Effect(c.device, in); got != want {
					t.Errorf("%s, severity %d, %+v: %v, want %v", c.name, severity, override.config, got, want)
				}
			}
		}
	}
}

func TestIncidentConfigValidate(t *testing.T) {
	for _, c := range []struct {
		config IncidentConfig
		want   string // the keys of the errors
	}{
		{DefaultIncidentConfig(), ""},
		{IncidentConfig{Unhealthy: []string{"DCGM_FR_PCI_REPLAY_RATE", "500"}, Warn: []string{"nvlink_down"}, Ignore: []string{"3000"}}, ""},
		{IncidentConfig{Warn: []string{"DCGM_FR_NVLINK"}}, "warn[0]"},
		{IncidentConfig{Ignore: []string{"0", "DCGM_FR_OK", "-3", ""}}, "ignore[0] ignore[1] ignore[2] ignore[3]"},
		{IncidentConfig{Unhealthy: []string{"14"}, Ignore: []string{"DCGM_FR_NVLINK_DOWN"}}, "unhealthy"},
	} {
		if got := keys(c.config.Validate()); got != c.want {
			t.Errorf("%+v: errors for %q, want %q: %v", c.config, got, c.want, c.config.Validate())
		}
	}
	err := IncidentConfig{Unhealthy: []string{"14"}, Ignore: []string{"DCGM_FR_NVLINK_DOWN"}}.Validate()
	if text := err.Error(); !strings.Contains(text, "DCGM_FR_NVLINK_DOWN") || !strings.Contains(text, "ignore") {
		t.Errorf("the error must name the code and both lists: %v", err)
	}
}

// checked returns a sample with the result of DCGM's health checks.
func checked(incidents ...Incident) Sample {
	s := present()
	s.Checked, s.Incidents = true, incidents
	return s
}

func TestConfirm(t *testing.T) {
	fail := Incident{System: "memory", Code: 4, Severity: SeverityFail, Message: "a double-bit error"}
	warn := Incident{System: "pcie", Code: 3, Severity: SeverityWarn, Message: "replays"}
	sticky := Incident{System: "memory", Code: 101, Severity: SeverityFail, Message: "XID 31"}
	const cause, warning = "dcgm-volatile-dbe-detected", "dcgm-pci-replay-rate"
	for name, steps := range map[string][]step{
		"two consecutive FAILs count": {
			{0, checked(fail), Healthy, nil},
			{1, checked(), Healthy, nil},
			{2, checked(fail), Healthy, nil},
			{3, checked(fail), Unhealthy, []string{cause}},
		},
		"checks less than half an interval apart count once": {
			{0, checked(fail), Healthy, nil},
			{0, checked(fail), Healthy, nil},
			{0, checked(fail), Healthy, nil},
			{1, checked(fail), Unhealthy, []string{cause}},
		},
		"a poll without a check does not interrupt": {
			{0, checked(fail), Healthy, nil},
			{1, present(), Healthy, nil},
			{2, checked(fail), Unhealthy, []string{cause}},
		},
		"a FAIL clears after recoverAfter": {
			{0, checked(fail), Healthy, nil},
			{1, checked(fail), Unhealthy, []string{cause}},
			{2, checked(), Unhealthy, []string{cause}},
			{60, present(), Unhealthy, []string{cause}}, // no check
			{61, checked(), Healthy, nil},
		},
		"a FAIL does not clear without checks": {
			{0, checked(fail), Healthy, nil},
			{1, checked(fail), Unhealthy, []string{cause}},
			{9999, present(), Unhealthy, []string{cause}},
		},
		"a WARN is degraded at once": {
			{0, checked(warn), Degraded, []string{warning}},
			{1, checked(warn), Degraded, []string{warning}},
			{2, checked(warn, warn), Degraded, []string{warning}},
		},
		"a WARN does not hide a FAIL of the same code": {
			{0, checked(Incident{Code: 4, Severity: SeverityWarn}, fail, Incident{Code: 4, Severity: SeverityWarn}), Healthy, nil},
			{1, checked(Incident{Code: 4, Severity: SeverityWarn}, fail), Unhealthy, []string{cause}},
		},
		"a WARN does not clear a FAIL": {
			{0, checked(fail), Healthy, nil},
			{1, checked(fail), Unhealthy, []string{cause}},
			{2, checked(Incident{Code: 4, Severity: SeverityWarn}), Unhealthy, []string{cause}},
			{61, checked(), Healthy, nil},
		},
		"an intermittent FAIL does not clear": {
			{0, checked(fail), Healthy, nil},
			{1, checked(fail), Unhealthy, []string{cause}},
			{30, checked(), Unhealthy, []string{cause}},
			{59, checked(fail), Unhealthy, []string{cause}},
			{62, checked(), Unhealthy, []string{cause}},
			{119, checked(), Healthy, nil},
		},
		"incidents that DCGM never clears are ignored": {
			{0, checked(sticky), Healthy, nil},
			{1, checked(sticky), Healthy, nil},
			{2, checked(sticky, fail), Healthy, nil},
			{3, checked(sticky, fail), Unhealthy, []string{cause}},
		},
	} {
		t.Run(name, func(t *testing.T) { runSteps(t, DefaultConfig(), steps) })
	}

	c := DefaultConfig()
	c.Incidents.Ignore = []string{"DCGM_FR_VOLATILE_DBE_DETECTED"}
	c.Confirm = 1
	runSteps(t, c, []step{{0, checked(fail), Healthy, nil}})
	c.Incidents = IncidentConfig{}
	devices := runSteps(t, c, []step{{0, checked(fail), Unhealthy, []string{cause}}})
	if f := devices[0].Verdict.Findings[0]; f.Reason != fail.Message || f.Action == "" {
		t.Errorf("finding %+v", f)
	}
}

// An incident without a GPU counts for every GPU if the configuration names its code, and otherwise for none.
func TestIncidentWithoutGPU(t *testing.T) {
	imex := Incident{System: "imex", Code: 122, Severity: SeverityFail, Message: "IMEX daemon is not ready"}
	other := Incident{System: "memory", Code: 4, Severity: SeverityFail}
	for name, c := range map[string]struct {
		config IncidentConfig
		want   State
	}{
		"default":   {IncidentConfig{}, Healthy},
		"ignore":    {IncidentConfig{Ignore: []string{"122"}}, Healthy},
		"warn":      {IncidentConfig{Warn: []string{"DCGM_FR_IMEX_UNHEALTHY"}}, Degraded},
		"unhealthy": {IncidentConfig{Unhealthy: []string{"imex_unhealthy"}}, Unhealthy},
	} {
		t.Run(name, func(t *testing.T) {
			config := DefaultConfig()
			config.Incidents, config.Confirm = c.config, 1
			var devices []DeviceState
			for seconds := range 3 {
				r, now := reading(seconds, samples{gpu0.ID: checked(), gpu1.ID: checked()}, gpu0, gpu1)
				r.Incidents = []Incident{imex, other}
				if seconds == 2 { // without a check
					r, now = reading(seconds, nil, gpu0, gpu1)
				}
				devices = judgeReading(config, devices, r, ReadingContext{XIDHistory: true}, now)
				for _, d := range devices {
					if d.Verdict.State != c.want || c.want > Healthy && d.Verdict.Cause() != "dcgm-imex-unhealthy" {
						t.Errorf("poll %d: %s: %v by %v, want %v", seconds, d.Device.ID, d.Verdict.State, d.Verdict.Causes(), c.want)
					}
				}
			}
		})
	}
}

// DCGM keeps the incident of an XID until its engine restarts. After a first start it may be the only trace of the XID.
func TestIncidentsFromBeforeStart(t *testing.T) {
	incident := func(code int, severity Severity, message string) Sample {
		return checked(Incident{System: "xid", Code: code, Severity: severity, Message: message})
	}
	uncontained := incident(81, SeverityFail, "XID 95")
	withApplicationError := uncontained
	xids(13)(&withApplicationError)
	for name, c := range map[string]struct {
		sample Sample
		saved  bool
		want   string
	}{
		"a FAIL":                             {uncontained, false, "dcgm-uncontained-error"},
		"a FAIL beside an application's XID": {withApplicationError, false, "dcgm-uncontained-error"},
		"a check that an XID triggered": {
			incident(80, SeverityFail, "Row remap failure (triggered by XID 64: x)"), false,
			"dcgm-row-remap-failure",
		},
		"a WARN":                   {incident(101, SeverityWarn, "XID 31"), false, ""},
		"a finding of DCGM itself": {incident(14, SeverityFail, "NVLink down"), false, ""},
		"with saved state":         {uncontained, true, ""},
	} {
		t.Run(name, func(t *testing.T) {
			rc := ReadingContext{XIDHistory: c.saved}
			d := judgeGPU(nil, 0, c.sample, rc)
			for i, seconds := range []int{1, 1000} {
				if got := strings.Join(d.Verdict.Causes(), ","); got != c.want || c.want != "" && d.Verdict.State != Degraded {
					t.Fatalf("poll %d: %q, %v; want %q", i, got, d.Verdict.State, c.want)
				}
				d = judgeGPU([]DeviceState{d}, seconds, c.sample, rc)
			}
			// A reset clears it for good.
			for i, s := range []Sample{blank(Lost), blank(Lost), c.sample, c.sample} {
				d = judgeGPU([]DeviceState{d}, 1001+i, s, rc)
			}
			if d.Verdict.State != Healthy {
				t.Errorf("after a reset: %v", d.Verdict.Causes())
			}
		})
	}

	// An XID that the source delivered is judged instead of its incident.
	d := judgeGPU(nil, 0, present(xids(94)), ReadingContext{})
	d = judgeGPU([]DeviceState{d}, 1, incident(131, SeverityFail, "XID 94"), ReadingContext{})
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
		severity Severity
		code     int // dcgm_errors.h
		xids     []int
	}{
		{"xid", SeverityFail, xidError, []int{48, 74, 119, 120, 140}},
		{"xid", SeverityFail, 120, []int{79}}, // FALLEN_OFF_BUS
		{"xid", SeverityWarn, 131, []int{94}}, // CONTAINED_ERROR
		{"xid", SeverityFail, 81, []int{95}},  // UNCONTAINED_ERROR
		{"memory", SeverityWarn, xidError, []int{31, 32, 43}},
		{"memory", SeverityWarn, 6, []int{63}},  // PENDING_PAGE_RETIREMENTS
		{"memory", SeverityFail, 80, []int{64}}, // ROW_REMAP_FAILURE
		{"pcie", SeverityWarn, xidError, []int{38, 39, 42}},
		{"thermal", SeverityWarn, xidError, []int{60, 61, 62}},
		{"power", SeverityWarn, xidError, []int{54, 56, 57, 58, 78}},
		{"nvlink", SeverityWarn, xidError, []int{67, 73, 121, 137}},
		{"inforom", SeverityWarn, 9, []int{93}}, // CORRUPT_INFOROM; on Volta only
	} {
		for _, xid := range c.xids {
			incident := Incident{System: c.system, Code: c.code, Severity: c.severity, Message: fmt.Sprintf("XID %d", xid)}
			if c.system != "xid" {
				incident.Message = fmt.Sprintf("errors (triggered by XID %d: %s)", xid, LookupXID(xid).Name)
			}
			var want []string
			if LookupXID(xid).Effect != EffectIgnore {
				want = []string{fmt.Sprintf("xid-%d", xid)}
			}
			rc := ReadingContext{XIDHistory: true}
			d := judgeGPU(nil, 0, checked(), rc)
			for i := range DefaultConfig().Confirm + 2 {
				s := checked(incident)
				if i == 0 {
					xids(xid)(&s)
				}
				d = judgeGPU([]DeviceState{d}, i+1, s, rc)
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
	for _, i := range []Incident{{Code: 80, Severity: SeverityFail}, {Code: 6, Severity: SeverityWarn}} {
		for _, overrides := range [][]string{nil, {strconv.Itoa(i.Code)}} {
			c.Incidents.Unhealthy = overrides
			i.Message = "GPU 3 had errors (triggered by XID 64: row remapper)"
			runSteps(t, c, []step{{0, checked(i), Healthy, nil}})
			i.Message = "a check of DCGM itself"
			if d := judgeAll(c, nil, 0, nil, samples{gpu0.ID: checked(i)}, gpu0); d[0].Verdict.State == Healthy {
				t.Errorf("%d without an XID is ignored", i.Code)
			}
		}
	}
}
