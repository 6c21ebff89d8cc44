package doctor

import (
	"encoding/json"
	"reflect"
	"slices"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/gpu-node-agent/gpu-node-agent/agent/config"
	"github.com/gpu-node-agent/gpu-node-agent/agent/internal/agenttest"
	"github.com/gpu-node-agent/gpu-node-agent/agent/terminal"
	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/metrics/fields"
)

func TestFieldsReportsSupport(t *testing.T) {
	for name, c := range map[string]struct {
		config          string
		source, unknown string
		supported       map[health.Field]string
	}{
		"simulation": {
			config: "source: {mode: sim, sim: {profile: h100-8}}", source: "sim",
			supported: map[health.Field]string{
				health.FieldGPUTemp: "yes", health.FieldXID: "yes", 53: "yes", 81: "no", health.FieldVGPULicense: "yes", 1001: "yes", 1006: "no",
				0:    "yes",
				1613: "derived", 1617: "no", 1648: "no", // 240, which 1617 replaces, is not simulated
			},
		},
		"another profile": {
			config: "source: {mode: sim, sim: {profile: l4-1}}", source: "sim",
			supported: map[health.Field]string{health.FieldMemoryTemp: "no", health.FieldNVLinkBandwidth: "no", health.FieldPower: "yes"},
		},
		"no GPU": {
			config: "source: {mode: sim, sim: {profile: none}}", source: "sim", unknown: "sim",
			supported: map[health.Field]string{health.FieldGPUTemp: "unknown", 0: "unknown"},
		},
		"no source": {
			config: "source: {mode: sim, sim: {profile: h100-8, scenario: [{at: 0s, source: down}]}}", source: "sim", unknown: "down",
			supported: map[health.Field]string{health.FieldGPUTemp: "unknown"},
		},
		"invalid configuration": {
			config: "source: {intervall: 1s}", unknown: "source.intervall",
			supported: map[health.Field]string{health.FieldGPUTemp: "unknown"},
		},
	} {
		t.Run(name, func(t *testing.T) {
			r := Fields(t.Context(), config.Loader{File: agenttest.WriteFile(t, t.TempDir(), "config.yaml", c.config)})
			if r.Source != c.source || (r.Unknown == "") != (c.unknown == "") || !strings.Contains(r.Unknown, c.unknown) {
				t.Errorf("source %q, unknown %q", r.Source, r.Unknown)
			}
			for _, f := range r.Fields {
				if want, ok := c.supported[f.ID]; ok && f.Supported != want {
					t.Errorf("%s: %s, want %s", f.Name, f.Supported, want)
				}
			}
			if text := r.String(); !strings.HasPrefix(text, "NAME ") || !strings.Contains(text, r.Unknown) {
				t.Errorf("%s", text)
			}
			text, err := json.Marshal(r)
			var again FieldReport
			if err == nil {
				err = json.Unmarshal(text, &again)
			}
			if err != nil || len(again.Fields) != len(fields.List(nil)) || !reflect.DeepEqual(again, r) {
				t.Errorf("%v: %s", err, text)
			}
		})
	}
}

func TestFieldTable(t *testing.T) {
	has := map[health.Field]bool{25: true, health.FieldGPUTemp: true}
	r := FieldReport{Fields: fields.List(has), Unknown: "no DCGM\n" + strings.Repeat("the second error ", 15)}
	lines := strings.Split(strings.TrimSpace(r.String()), "\n")
	if len(lines) != len(r.Fields)+4 || !slices.Equal(strings.Fields(lines[0])[:5], []string{"NAME", "TYPE", "UNIT", "SET", "SUPPORTED"}) {
		t.Errorf("got %d lines, the first is %q", len(lines), lines[0])
	}
	for _, line := range lines {
		if cells := strings.Fields(line); len(cells) > 0 && cells[0] == "DCGM_FI_DEV_SERIAL" &&
			!slices.Equal(cells[1:7], []string{"label", "-", "optional", "no", "-", "DCGM_FI_DEV_BOARD_SERIAL"}) {
			t.Errorf("wrong row %q", line)
		}
	}
	for _, width := range []int{80, 100, 120, 200} {
		text := r.Table(terminal.Output{Width: width})
		for line := range strings.Lines(text) {
			if n := utf8.RuneCountInString(strings.TrimSuffix(line, "\n")); n > width {
				t.Errorf("%d columns: %d in %q", width, n, line)
			}
		}
		agenttest.MustContain(t, text, "NAME", "SUPPORTED", "HELP", "-o json", ": no DCGM\nthe second error")
	}
}
