package metrics

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/gpu-node-agent/gpu-node-agent/health"
)

func TestFieldList(t *testing.T) {
	r := &health.Reading{
		Devices: []health.Device{
			{ID: "GPU-0", Model: "NVIDIA L4"},
			{ID: "GPU-1", Texts: map[health.Field]string{53: "1654922006530"}},
		},
		Samples: []health.Sample{{Device: "GPU-1", Values: map[health.Field]float64{health.FieldGPUTemp: 0}}},
	}
	// By name, as the configuration has it.
	want := map[string]string{
		"DCGM_FI_DEV_GPU_TEMP": "yes", // 0 is a value
		"DCGM_FI_DEV_SM_CLOCK": "no",
		"DCGM_FI_DEV_SERIAL":   "yes",
		"DCGM_FI_DEV_BRAND":    "no",
		"DCGM_FI_DEV_NAME":     "yes", // without being asked for
		"DCGM_FI_DEV_UUID":     "yes",

		"DCGM_FI_DRIVER_VERSION":    "no", // the reading has no versions
		"DCGM_FI_DEV_XID_ERRORS":    "yes",
		"DCGM_EXP_XID_ERRORS_COUNT": "yes",
	}
	all := FieldList(HasFields(r))
	if len(all) != len(fieldTable) {
		t.Errorf("%d rows, want %d", len(all), len(fieldTable))
	}
	for name, supported := range want {
		i := slices.IndexFunc(all, func(f FieldInfo) bool { return f.Name == name })
		if i < 0 || all[i].Supported != supported {
			t.Errorf("%s: %+v, want %s", name, all[max(i, 0)], supported)
		}
	}
	for _, f := range FieldList(nil) {
		if f.Supported != SupportedUnknown {
			t.Errorf("nobody was asked, and of %s it is said: %s", f.Name, f.Supported)
		}
	}
	table := FieldTable(all)
	lines := strings.Split(strings.TrimSpace(table), "\n")
	if len(lines) != len(all)+1 || !slices.Equal(strings.Fields(lines[0])[:5], []string{"NAME", "TYPE", "UNIT", "SET", "SUPPORTED"}) {
		t.Errorf("%d lines, the first %q", len(lines), lines[0])
	}
	for _, line := range lines {
		if words := strings.Fields(line); words[0] == "DCGM_FI_DEV_SERIAL" &&
			!slices.Equal(words[1:6], []string{"label", "-", "optional", "yes", "DCGM_FI_DEV_BOARD_SERIAL"}) {
			t.Errorf("%q", line)
		}
	}
	if ids := FieldIDs(); !slices.Contains(ids, 53) || slices.Contains(ids, 0) {
		t.Errorf("%v", ids)
	}
}

// What dcgm-exporter's file has as labels can be had; a set brings none of them but the driver's version.
func TestTextsAsLabels(t *testing.T) {
	c := DefaultConfig()
	c.FieldsFile = filepath.Join(t.TempDir(), "counters.csv")
	text := "DCGM_FI_DEV_GPU_TEMP, gauge, x\n"
	want := []string{"DCGM_FI_DRIVER_VERSION"}
	var ids []health.Field
	for _, k := range fieldTable {
		if k.typ != TypeLabel {
			continue
		}
		text += k.name + ", label, " + k.help + "\n"
		if k.name != want[0] {
			want = append(want, k.name)
		}
		if !isKnownAnyway(k.id) {
			ids = append(ids, k.id)
		}
	}
	if err := os.WriteFile(c.FieldsFile, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	c, err := c.Resolve()
	if err != nil || len(c.Notes()) != 0 {
		t.Fatalf("%v, %q", err, c.Notes())
	}
	s := node()
	s.Devices[0].Device.Texts = map[health.Field]string{}
	for _, id := range ids {
		if !slices.Contains(c.Chosen.IDs(), id) {
			t.Errorf("the source is not asked for %d", id)
		}
		s.Devices[0].Device.Texts[id] = "a \"quoted\" text\n"
	}
	found := series(exposition(t, NewGatherer(sourcesOf(s, &c))), "DCGM_FI_DEV_GPU_TEMP", `gpu="0"`)
	for _, label := range want {
		if len(found) == 0 || !strings.Contains(found[0], label+`="`) {
			t.Errorf("no label %s in %q", label, found)
		}
	}
	if len(found) > 0 && !strings.Contains(found[0], `DCGM_FI_DEV_SERIAL="a \"quoted\" text\n"`) {
		t.Errorf("%q", found[0])
	}

	c = DefaultConfig()
	c.Fields = []FieldSpec{{Name: SetDefault}, {Name: SetOptional}}
	if c, err = c.Resolve(); err != nil || len(c.Chosen.Labels) != 1 || c.Chosen.Labels[0].ID != fieldDriverVersion {
		t.Errorf("%+v, %v", c.Chosen.Labels, err)
	}
}
