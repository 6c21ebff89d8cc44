package metrics

import (
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/gpu-node-agent/gpu-node-agent/health"
)

func TestFieldTable(t *testing.T) {
	names := make(map[string]bool)
	ids := make(map[health.Field]bool)
	for _, k := range fieldTable {
		for _, name := range []string{k.name, k.renamed} {
			if names[name] {
				t.Errorf("%s is there twice", name)
			}
			names[name] = name != ""
		}
		if ids[k.id] && k.id != 0 {
			t.Errorf("field %d is there twice", k.id)
		}
		ids[k.id] = true
		if k.help == "" || !slices.Contains([]string{TypeGauge, TypeCounter, TypeLabel}, k.typ) {
			t.Errorf("%+v", k)
		}
	}
}

func TestFieldsByName(t *testing.T) {
	c := DefaultConfig()
	c.Fields = []FieldSpec{
		{Name: "dcgm_fi_dev_power_usage"},
		{Name: "DCGM_FI_DEV_GPU_TEMP_CELSIUS"}, // DCGM 4.6's name
		{Name: "DCGM_FI_DEV_GPU_TEMP"},
		{Name: "DCGM_FI_DEV_SM_CLOCK", Type: "counter", Help: "mine"},
		{Name: "DCGM_FI_DEV_SM_CLOCK"},
		{Name: "DCGM_FI_DEV_NOTHING"},
		{Name: "DCGM_FI_DEV_FB_FREE", Type: "histogram"},
		{Name: "DCGM_FI_DEV_SERIAL"},
		{Name: "DCGM_FI_DRIVER_VERSION", Type: "gauge"},
		{Name: "DCGM_FI_DEV_NAME"},
		{Name: "DCGM_FI_DEV_ECC_CURRENT", Type: "label"},
		{Name: "DCGM_EXP_P2P_STATUS", Type: "label"},
	}
	c, err := c.Resolve()
	if err != nil {
		t.Fatal(err)
	}
	want := []Field{
		{health.FieldPower, "DCGM_FI_DEV_POWER_USAGE", "gauge", "Power draw (in W)."},
		{health.FieldGPUTemp, "DCGM_FI_DEV_GPU_TEMP_CELSIUS", "gauge", "GPU temperature (in C)."},
		{health.FieldGPUTemp, "DCGM_FI_DEV_GPU_TEMP", "gauge", "GPU temperature (in C)."},
		{health.FieldSMClock, "DCGM_FI_DEV_SM_CLOCK", "counter", "mine"},
	}
	if !reflect.DeepEqual(c.Chosen.Fields, want) {
		t.Errorf("%+v", c.Chosen.Fields)
	}
	if ids := c.Chosen.IDs(); !slices.Equal(ids, []health.Field{53, 100, 150, 155, 203, 300}) {
		t.Errorf("measured are %v", ids)
	}
	notes := c.Notes()
	if len(notes) != 4 {
		t.Errorf("%q", notes)
	}
	for i, name := range []string{"DCGM_FI_DEV_NOTHING", "DCGM_FI_DEV_FB_FREE", "DCGM_FI_DRIVER_VERSION", "DCGM_EXP_P2P_STATUS"} {
		if i < len(notes) && !strings.HasPrefix(notes[i], "metrics.fields: "+name+": ") {
			t.Errorf("%q is not about %s", notes[i], name)
		}
	}
	s := node()
	s.Devices[0].Sample.Values[300] = 1
	s.Devices[0].Device.Texts = map[health.Field]string{53: "1654922006530", 85: "not asked for"}
	page := exposition(t, NewGatherer(sourcesOf(s, &c)))
	if len(series(page, "DCGM_FI_DEV_POWER_USAGE", `DCGM_FI_DEV_NAME="NVIDIA H100 80GB HBM3"`, `DCGM_FI_DEV_ECC_CURRENT="1"`,
		`DCGM_FI_DEV_SERIAL="1654922006530"`)) != 1 || strings.Contains(page, "not asked for") {
		t.Errorf("the labels are not there:\n%s", page)
	}
	if !strings.Contains(page, "# HELP DCGM_FI_DEV_SM_CLOCK mine\n# TYPE DCGM_FI_DEV_SM_CLOCK counter\n") {
		t.Error("the override is not there")
	}
}

// A set that is misspelt gets the names of the sets; a field does not, nor does a file, which can name none.
func TestMisspeltSets(t *testing.T) {
	const sets = "; the sets are default, profiling, optional"
	for _, c := range []struct {
		spec FieldSpec
		sets bool
	}{
		{FieldSpec{Name: "defaults"}, true},
		{FieldSpec{Name: "Default"}, true},
		{FieldSpec{Name: "DCGM_FI_DEV_NOTHING"}, false},
		{FieldSpec{Name: "dcgm_nothing"}, false},
		{FieldSpec{Name: "defaults", Type: "gauge"}, false},
	} {
		var s Selection
		s.add(c.spec)
		if len(s.Unknown) != 1 || strings.HasSuffix(s.Unknown[0], sets) != c.sets {
			t.Errorf("%+v: %q", c.spec, s.Unknown)
		}
	}
}

func TestFieldsWithoutAName(t *testing.T) {
	c := DefaultConfig()
	c.Fields = []FieldSpec{{Name: SetDefault}, {Help: "x"}}
	if err := c.Validate(); err == nil || !strings.HasPrefix(err.Error(), "fields[1].name: is missing") {
		t.Error(err)
	}
}

func TestFieldsFile(t *testing.T) {
	c := DefaultConfig()
	c.FieldsFile = filepath.Join(t.TempDir(), "counters.csv")
	if _, err := c.Resolve(); err == nil || !strings.HasPrefix(err.Error(), "fieldsFile: ") {
		t.Errorf("no file: %v", err)
	}
	text := "# Format,,\r\n\r\nDCGM_FI_DEV_SM_CLOCK,  gauge, SM clock, in MHz.\r\nDCGM_FI_DEV_DEC_UTIL ,     gauge, Decoder utilization (in %).\n" +
		"DCGM_FI_DRIVER_VERSION,        label, Driver Version\n  # a comment\nDCGM_FI_DEV_GPU_TEMP gauge\ndefault, gauge, x\nDCGM_FI_DEV_X,gauge,x\n"
	if err := os.WriteFile(c.FieldsFile, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	c, err := c.Resolve()
	if err != nil {
		t.Fatal(err)
	}
	want := []Field{
		{health.FieldSMClock, "DCGM_FI_DEV_SM_CLOCK", "gauge", "SM clock, in MHz."},
		{health.FieldDecUtil, "DCGM_FI_DEV_DEC_UTIL", "gauge", "Decoder utilization (in %)."},
	}
	if !reflect.DeepEqual(c.Chosen.Fields, want) || len(c.Chosen.Labels) != 1 {
		t.Errorf("%+v", c.Chosen)
	}
	notes := strings.Join(c.Notes(), "\n")
	for _, part := range []string{c.FieldsFile + ": line 7: not NAME, type, help", ": line 8: ", "DCGM_FI_DEV_X: not a known field"} {
		if !strings.Contains(notes, part) {
			t.Errorf("%q is not in\n%s", part, notes)
		}
	}
}

// A line is read as CSV, and where it is none as people write it.
func TestFieldsFileQuotes(t *testing.T) {
	text := strings.Join([]string{
		`"DCGM_FI_DEV_SM_CLOCK","GAUGE","SM clock, in MHz"`,
		`DCGM_FI_DEV_MEM_CLOCK,gauge,"Memory ""clock"", in MHz"`,
		` DCGM_FI_DEV_GPU_TEMP , gauge, "Temperature, in C" `,
		`DCGM_FI_DEV_FB_FREE, gauge, Free, in "MiB"`,
		`DCGM_FI_DEV_FB_USED, gauge, "Used, and never closed`,
		`# "a comment`,
		`DCGM_FI_DEV_DEC_UTIL, gauge, Decoder`,
		`DCGM_FI_DEV_ENC_UTIL, gauge`,
		`"DCGM_FI_DEV_ENC_UTIL, gauge, Encoder"`,
	}, "\n")
	specs, unknown := parseCSV(text)
	want := []FieldSpec{
		{"DCGM_FI_DEV_SM_CLOCK", "gauge", "SM clock, in MHz"},
		{"DCGM_FI_DEV_MEM_CLOCK", "gauge", `Memory "clock", in MHz`},
		{"DCGM_FI_DEV_GPU_TEMP", "gauge", "Temperature, in C"},
		{"DCGM_FI_DEV_FB_FREE", "gauge", `Free, in "MiB"`},
		{"DCGM_FI_DEV_FB_USED", "gauge", `"Used, and never closed`},
		{"DCGM_FI_DEV_DEC_UTIL", "gauge", "Decoder"},
	}
	if got := slices.DeleteFunc(specs, func(s FieldSpec) bool { return strings.HasPrefix(s.Name, `"`) }); !slices.Equal(got, want) {
		t.Errorf("%q", got)
	}
	if !slices.Equal(unknown, []string{"line 8: not NAME, type, help"}) {
		t.Errorf("%q", unknown)
	}
}

func FuzzFieldsFile(f *testing.F) {
	f.Add("DCGM_FI_DEV_SM_CLOCK, gauge, SM clock\n# x\nDCGM_FI_DEV_GPU_TEMP,label,x")
	f.Add("a,b,c\n\xff,gauge,\xff\nDCGM_FI_DEV_FB_FREE,counter,\xff")
	f.Add("\"DCGM_FI_DEV_SM_CLOCK\",gauge,\"a, \"\"b\"\"\"\nDCGM_FI_DEV_FB_FREE,gauge,\"open\ndcgm_gpu_temp,gauge,x")
	f.Fuzz(func(t *testing.T, text string) {
		c := DefaultConfig()
		specs, unknown := parseCSV(text)
		c.Fields = specs
		c, err := c.Resolve()
		if err != nil {
			t.Fatal(err)
		}
		if n := len(c.Chosen.Fields) + len(c.Chosen.Labels) + len(c.Chosen.Unknown); n > len(specs) {
			t.Errorf("%d of %d entries", n, len(specs))
		}
		_ = unknown
		exposition(t, NewGatherer(sourcesOf(node(), &c)))
	})
}

func TestConfigValidate(t *testing.T) {
	if err := DefaultConfig().Validate(); err != nil {
		t.Error(err)
	}
	bad := Config{Listen: "nine", FieldsFile: "here.csv", Attribution: "x", IdleBelow: -1, Window: 1, Compat: CompatConfig{HostnameLabel: "host"}}
	err := bad.Validate()
	for _, key := range []string{"listen: ", "fieldsFile: ", "attribution: ", "idleBelow: ", "window: ", "compat.hostnameLabel: "} {
		if err == nil || !strings.Contains("\n"+err.Error(), "\n"+key) {
			t.Errorf("no error about %s in %v", key, err)
		}
	}
}
