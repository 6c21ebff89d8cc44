package health

import (
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
	for name, r := range incidentRules {
		code := slices.Index(incidentNames[:], name)
		info := LookupIncident(code)
		if code < 1 || r.action == "" || r.source == "" || info.Name != "DCGM_FR_"+name || info.Code != code || info.Effect != r.effect {
			t.Errorf("%s: a row needs a name of DCGM's, an action and a source: %+v", name, info)
		}
		// What DCGM only ever warns of cannot be meant to take a GPU away.
		if strings.HasPrefix(r.source, incidentWarn) && r.effect == EffectUnhealthy {
			t.Errorf("%s is unhealthy, and DCGM never reports a FAIL of it", name)
		}
	}
	unknown := LookupIncident(500)
	if unknown.Name != "DCGM code 500" || unknown.Effect != EffectWarn || unknown.Action == "" || unknown.Source == "" {
		t.Errorf("unknown: %+v", unknown)
	}
}

// TestIncidentNames holds the names against the header that comes with the bindings.
func TestIncidentNames(t *testing.T) {
	dir, err := exec.CommandContext(t.Context(), "go", "list", "-m", "-f", "{{.Dir}}", "github.com/NVIDIA/go-dcgm").Output()
	if err != nil {
		t.Skipf("the header cannot be found: %v", err)
	}
	header, err := os.ReadFile(filepath.Join(strings.TrimSpace(string(dir)), "pkg", "dcgm", "dcgm_errors.h"))
	if err != nil {
		t.Skipf("the header cannot be read: %v", err)
	}
	enum, _, found := strings.Cut(string(header), "DCGM_FR_ERROR_SENTINEL")
	if !found {
		t.Fatal("the header has no end of codes")
	}
	codes := regexp.MustCompile(`(DCGM_FR_\w+)\s*=\s*(\d+)\s*,`).FindAllStringSubmatch(enum, -1)
	if len(codes) != len(incidentNames) {
		t.Errorf("the header has %d codes, the table %d names", len(codes), len(incidentNames))
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
		{"DCGM is blind", pcie, 11, "", w, w},

		{"full load, thermal", pcie, 10, "", i, i},
		{"full load, power", pcie, 12, "", i, i},
		{"IMEX on a single node", nvlink, 122, "", i, i},
		{"NVLink down without NVLink", pcie, 14, "", i, i},
		{"NVLink down, peers over PCIe only", peer, 14, "", i, i},
		{"NVLink down", nvlink, 14, "", u, w},
		{"fabric, no NVLink", pcie, 123, "GPU 0: Fabric State is Failed (4).", i, i},
		{"fabric, old driver", nvlink, 123, "GPU 0: Fabric State is NvmlTooOld (6).", i, i},
		{"fabric failed", nvlink, 123, "GPU 0: Fabric State is Failed (4).", w, w},
		{"NVLink error now", nvlink, 71, "Detected 3 nvlink_recovery_error_count_total NvLink errors on GPU 0's NVLink (should be 0)", u, w},
		{"NVLink error long ago", nvlink, 71, "Detected 1 datalink layer replay error counter NvLink errors on GPU 0's NVLink (should be 0)", w, w},
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
		{"of a diagnosis", pcie, 30, "", w, w},
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
		want   string
	}{
		{DefaultIncidentConfig(), ""},
		{IncidentConfig{Unhealthy: []string{"DCGM_FR_PCI_REPLAY_RATE", "500"}, Warn: []string{"nvlink_down"}, Ignore: []string{"3000"}}, ""},
		{
			IncidentConfig{Warn: []string{"DCGM_FR_NVLINK"}},
			`warn: "DCGM_FR_NVLINK" is no incident of DCGM's; use a name such as DCGM_FR_NVLINK_DOWN or its number`,
		},
		{
			IncidentConfig{Ignore: []string{"0", "DCGM_FR_OK", "-3", ""}},
			`ignore: "0" is no incident of DCGM's; use a name such as DCGM_FR_NVLINK_DOWN or its number` + "\n" +
				`ignore: "DCGM_FR_OK" is no incident of DCGM's; use a name such as DCGM_FR_NVLINK_DOWN or its number` + "\n" +
				`ignore: "-3" is no incident of DCGM's; use a name such as DCGM_FR_NVLINK_DOWN or its number` + "\n" +
				`ignore: "" is no incident of DCGM's; use a name such as DCGM_FR_NVLINK_DOWN or its number`,
		},
		{
			IncidentConfig{Unhealthy: []string{"14"}, Ignore: []string{"DCGM_FR_NVLINK_DOWN"}},
			"unhealthy: DCGM_FR_NVLINK_DOWN is in ignore too; an incident has one effect",
		},
	} {
		got := ""
		if err := c.config.Validate(); err != nil {
			got = err.Error()
		}
		if got != c.want {
			t.Errorf("%+v\ngot  %s\nwant %s", c.config, got, c.want)
		}
	}
}
