package catalog

import (
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/gpu-node-agent/gpu-node-agent/health"
)

func TestIncidentTable(t *testing.T) {
	checkTable(t, incidentTable, map[string][]string{
		"effect": effectNames[:], "action": actionNames(), "only": {"", "nvlink", "fabric"}, "repeats": {"", "xid"},
		"system":   {"", "pcie", "nvlink", "memory", "inforom", "thermal", "power", "driver", "imex", "xid"},
		"severity": {"", "FAIL", "WARN"}, "advice": {"", "MONITOR", "ISOLATE"},
	})
	for code, cells := range tableRows(incidentTable) {
		info := LookupIncident(code)
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
	want := IncidentInfo{Code: 500, Name: "DCGM code 500", Effect: EffectWarn, Action: health.ActionWatch}
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
	pcie := health.Device{ID: "GPU-0", Model: "NVIDIA L40S"}
	peer := health.Device{ID: "GPU-0", Links: []health.Link{{Peer: "GPU-1", Path: health.PathNode}}}
	nvlink := health.Device{ID: "GPU-0", Links: []health.Link{{Peer: "GPU-1", Path: health.PathNode}, {Peer: "GPU-2", NVLinks: 18}}}
	for _, c := range []struct {
		name       string
		device     health.Device
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
		for severity, want := range map[health.Severity]Effect{health.SeverityFail: c.fail, health.SeverityWarn: c.warn} {
			in := health.Incident{Code: c.code, Severity: severity, Message: c.message}
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
				if severity == health.SeverityWarn {
					want = min(want, w) // a WARN is never Unhealthy
				}
				if got := override.config.Effect(c.device, in); got != want {
					t.Errorf("%s, severity %d, %+v: %v, want %v", c.name, severity, override.config, got, want)
				}
			}
		}
	}
}

// Of the incidents without a device, those that the configuration names count.
func TestIncidentsOfEveryGPU(t *testing.T) {
	all := []health.Incident{{Code: 1}, {Code: 2}, {Code: 3}}
	got := IncidentConfig{Warn: []string{"2"}}.OfEveryGPU(all)
	if len(got) != 1 || got[0].Code != 2 {
		t.Errorf("%+v", got)
	}
}

func TestEffectState(t *testing.T) {
	for effect, want := range map[Effect]health.State{
		EffectIgnore: health.Healthy, EffectWarn: health.Degraded, EffectUnhealthy: health.Unhealthy,
	} {
		if got := effect.State(); got != want {
			t.Errorf("%v: %v, want %v", effect, got, want)
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
