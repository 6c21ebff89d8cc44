package fields

import (
	"cmp"
	"fmt"
	"os"
	"reflect"
	"slices"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/gpu-node-agent/gpu-node-agent/health"
)

func specs(names ...string) []Spec {
	var list []Spec
	for _, name := range names {
		list = append(list, Spec{Name: name})
	}
	return list
}

func TestTable(t *testing.T) {
	names := make(map[string]bool)
	ids := make(map[health.Field]bool)
	for _, r := range table {
		for _, name := range []string{r.name, r.renamed} {
			if names[name] {
				t.Errorf("duplicate name %s", name)
			}
			names[name] = name != ""
		}
		if ids[r.id] && r.id != 0 {
			t.Errorf("duplicate field %d", r.id)
		}
		ids[r.id] = true
		if r.help == "" || !slices.Contains([]string{TypeGauge, TypeCounter, TypeLabel}, r.typ) {
			t.Errorf("incomplete row %+v", r)
		}
	}
}

// exporterRow is a line of testdata/dcgm-exporter*.csv.
type exporterRow struct{ set, name, typ, help string }

func readExporterRows(t *testing.T, file string) (rows []exporterRow) {
	t.Helper()
	text, err := os.ReadFile("testdata/" + file)
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(text)) {
		if strings.HasPrefix(line, "#") {
			continue
		}
		c := strings.SplitN(strings.TrimSpace(line), ",", 4)
		if len(c) != 4 {
			t.Fatalf("%s: line %q: too few columns", file, line)
		}
		rows = append(rows, exporterRow{c[0], c[1], c[2], c[3]})
	}
	return rows
}

// The sets are dcgm-exporter's, in either generation, with its names, types and help.
func TestSetsMatchDCGMExporter(t *testing.T) {
	for generation, file := range map[string]string{Names48: "dcgm-exporter.csv", Names49: "dcgm-exporter-4.9.csv"} {
		var want []exporterRow
		want = append(want, readExporterRows(t, file)...)
		var got []exporterRow
		for _, r := range table {
			if name := r.nameIn(generation); name != "" && r.set != setNone {
				got = append(got, exporterRow{r.set, name, r.typ, r.help})
			}
		}
		for _, row := range want {
			if !slices.Contains(got, row) {
				t.Errorf("%s: the table lacks %q", generation, row)
			}
		}
		if len(got) != len(want) {
			t.Errorf("%s: the table has %d fields in sets, dcgm-exporter %d", generation, len(got), len(want))
		}
	}
}

// A CSV file of either generation selects its names, whatever metrics.names is, and nothing in it is rejected.
func TestSelectCSVOfEitherGeneration(t *testing.T) {
	for file, generation := range map[string]string{"dcgm-exporter.csv": Names49, "dcgm-exporter-4.9.csv": Names48} {
		var csv strings.Builder
		var want []string
		for _, r := range readExporterRows(t, file) {
			csv.WriteString(r.name + ", " + r.typ + ", " + r.help + "\n")
			want = append(want, r.name+" "+r.typ+" "+r.help)
		}
		s := SelectCSV(csv.String(), generation)
		var got []string
		for _, f := range slices.Concat(s.Fields, s.Labels) {
			got = append(got, f.Name+" "+f.Type+" "+f.Help)
		}
		slices.Sort(got)
		slices.Sort(want)
		if len(s.Unknown) > 0 || !slices.Equal(got, want) {
			t.Errorf("%s: rejected %q, selected %q", file, s.Unknown, got)
		}
	}
}

func TestSelect(t *testing.T) {
	s := Select([]Spec{
		{Name: "dcgm_fi_dev_power_usage"},
		{Name: "DCGM_FI_DEV_GPU_TEMP_CELSIUS"}, // the name since DCGM 4.6
		{Name: "DCGM_FI_DEV_GPU_TEMP"},
		{Name: "DCGM_FI_DEV_SM_CLOCK", Type: "counter", Help: "custom"},
		{Name: "DCGM_FI_DEV_SM_CLOCK"},
		{Name: "DCGM_FI_DEV_NOTHING"},
		{Name: "DCGM_FI_DEV_FB_FREE", Type: "histogram"},
		{Name: "DCGM_FI_DEV_SERIAL"},
		{Name: "DCGM_FI_DRIVER_VERSION", Type: "gauge"},
		{Name: "DCGM_FI_DEV_NAME"},
		{Name: "DCGM_FI_DEV_ECC_CURRENT", Type: "label"},
		{Name: "DCGM_EXP_P2P_STATUS", Type: "label"},
	})
	want := []Field{
		{ID: health.FieldPower, Name: "DCGM_FI_DEV_POWER_USAGE", Type: "gauge", Help: "Power draw (in W)."},
		{ID: health.FieldGPUTemp, Name: "DCGM_FI_DEV_GPU_TEMP_CELSIUS", Type: "gauge", Help: "GPU temperature (in C)."},
		{ID: health.FieldGPUTemp, Name: "DCGM_FI_DEV_GPU_TEMP", Type: "gauge", Help: "GPU temperature (in C)."},
		{ID: health.FieldSMClock, Name: "DCGM_FI_DEV_SM_CLOCK", Type: "counter", Help: "custom"},
	}
	if !reflect.DeepEqual(s.Fields, want) {
		t.Errorf("got fields %+v", s.Fields)
	}
	var labels []string
	for _, f := range s.Labels {
		labels = append(labels, f.Name)
	}
	if !slices.Equal(labels, []string{"DCGM_FI_DEV_SERIAL", "DCGM_FI_DEV_NAME", "DCGM_FI_DEV_ECC_CURRENT"}) {
		t.Errorf("got labels %q", labels)
	}
	if ids := s.IDs(); !slices.Equal(ids, []health.Field{53, 100, 150, 155, 203, 206, 207, 300}) {
		t.Errorf("IDs() = %v", ids)
	}
	rejected := []string{"DCGM_FI_DEV_NOTHING", "DCGM_FI_DEV_FB_FREE", "DCGM_FI_DRIVER_VERSION", "DCGM_EXP_P2P_STATUS"}
	if !slices.EqualFunc(s.Unknown, rejected, func(u, name string) bool { return strings.HasPrefix(u, name+": ") }) {
		t.Errorf("rejected %q, want %q", s.Unknown, rejected)
	}
}

// The profiling module occupies the GPU's counters, so its fields must be selected explicitly; the same holds for labels
// of the sets other than the driver version.
func TestSelectSets(t *testing.T) {
	profiling := func(ids []health.Field) bool {
		return slices.ContainsFunc(ids, func(id health.Field) bool { return id >= 1001 && id <= 1099 })
	}
	if ids := Select(specs(SetDefault), Names48).IDs(); profiling(ids) {
		t.Errorf("the default set measures profiling fields: %v", ids)
	}
	if ids := Select(specs(SetDefault, SetProfiling), Names48).IDs(); !profiling(ids) {
		t.Errorf("the profiling set measures no profiling fields: %v", ids)
	}
	if ids := Select(specs("DCGM_FI_DEV_SM_CLOCK")).IDs(); !slices.Equal(ids,
		[]health.Field{health.FieldSMClock, health.FieldGPUUtil, health.FieldEncUtil, health.FieldDecUtil}) {
		t.Errorf("one field measures %v", ids)
	}
	if s := Select(specs(SetDefault, SetOptional), Names48); len(s.Labels) != 1 || s.Labels[0].ID != fieldDriverVersion {
		t.Errorf("the sets have labels %+v", s.Labels)
	}
}

func TestSpecValidate(t *testing.T) {
	const expected = "name: expected a field such as DCGM_FI_DEV_GPU_TEMP, or one of the sets default, profiling and optional, got "
	for _, c := range []struct {
		spec Spec
		want string // parts of the errors
	}{
		{Spec{Name: SetDefault}, ""},
		{Spec{Name: "DCGM_FI_DEV_GPU_TEMP", Type: TypeLabel, Help: "x"}, ""},
		{Spec{Name: "dcgm_gpu_temp"}, ""},         // of dcgm-exporter 1
		{Spec{Name: "DCGM_FI_DEV_NEWER"}, ""},     // a newer DCGM may have it
		{Spec{Name: "DCGM_FI_DEV_VGPU_TYPE"}, ""}, // not measured
		{Spec{Name: "dcgm_fi_newer", Type: "x"}, `type: expected one of gauge, counter, label, got "x"; like gauge?`},
		{Spec{Name: "Default"}, expected + `"Default"; like default?`},
		{Spec{Name: "5"}, expected + `"5"; like default?`},
		{Spec{Name: SetOptional, Help: "x"}, "name: optional is a set, whose fields have types and helps; remove type and help"},
	} {
		err := c.spec.Validate(func(_ string, names []string) string { return "; like " + names[0] + "?" })
		if got := fmt.Sprint(err); got != cmp.Or(c.want, "<nil>") {
			t.Errorf("%+v: %s, want %s", c.spec, got, c.want)
		}
	}
	if names := Names(); !slices.Contains(names, "DCGM_FI_DEV_GPU_TEMP") || !slices.Contains(names, "DCGM_FI_DEV_FB_RESERVED") ||
		!slices.Contains(names, SetProfiling) {
		t.Errorf("names %q", names)
	}
}

func TestSelectCSV(t *testing.T) {
	text := "# Format,,\r\n\r\nDCGM_FI_DEV_SM_CLOCK,  gauge, SM clock, in MHz.\r\nDCGM_FI_DEV_DEC_UTIL ,     gauge, Decoder utilization (in " +
		"%).\n" +
		"DCGM_FI_DRIVER_VERSION,        label, Driver Version\n  # a comment\nDCGM_FI_DEV_GPU_TEMP gauge\ndefault, gauge, " +
		"x\nDCGM_FI_DEV_X,gauge,x\n"
	s := SelectCSV(text)
	want := []Field{
		{ID: health.FieldSMClock, Name: "DCGM_FI_DEV_SM_CLOCK", Type: "gauge", Help: "SM clock, in MHz."},
		{ID: health.FieldDecUtil, Name: "DCGM_FI_DEV_DEC_UTIL", Type: "gauge", Help: "Decoder utilization (in %)."},
	}
	if !reflect.DeepEqual(s.Fields, want) || len(s.Labels) != 1 {
		t.Errorf("got %+v", s)
	}
	rejected := []string{"line 7", "line 8", "DCGM_FI_DEV_X"}
	if !slices.EqualFunc(s.Unknown, rejected, func(u, entry string) bool { return strings.HasPrefix(u, entry+": ") }) {
		t.Errorf("rejected %q, want %q", s.Unknown, rejected)
	}
}

// A line that is not a CSV record of three parts is split at its first two commas.
func TestParseCSVQuotes(t *testing.T) {
	got, malformed := parseCSV(strings.Join([]string{
		`"DCGM_FI_DEV_SM_CLOCK","GAUGE","SM clock, in MHz"`,
		`DCGM_FI_DEV_MEM_CLOCK,gauge,"Memory ""clock"", in MHz"`,
		` DCGM_FI_DEV_GPU_TEMP , gauge, "Temperature, in C" `,
		`DCGM_FI_DEV_FB_FREE, gauge, Free, in "MiB"`,
		`DCGM_FI_DEV_FB_USED, gauge, "Used, and never closed`,
		`# "a comment`,
		`DCGM_FI_DEV_DEC_UTIL, gauge, Decoder`,
		`DCGM_FI_DEV_ENC_UTIL, gauge`,
		`"DCGM_FI_DEV_ENC_UTIL, gauge, Encoder"`,
	}, "\n"))
	want := []Spec{
		{"DCGM_FI_DEV_SM_CLOCK", "gauge", "SM clock, in MHz"},
		{"DCGM_FI_DEV_MEM_CLOCK", "gauge", `Memory "clock", in MHz`},
		{"DCGM_FI_DEV_GPU_TEMP", "gauge", "Temperature, in C"},
		{"DCGM_FI_DEV_FB_FREE", "gauge", `Free, in "MiB"`},
		{"DCGM_FI_DEV_FB_USED", "gauge", `"Used, and never closed`},
		{"DCGM_FI_DEV_DEC_UTIL", "gauge", "Decoder"},
	}
	got = slices.DeleteFunc(got, func(s Spec) bool { return strings.HasPrefix(s.Name, `"`) })
	if !slices.Equal(got, want) {
		t.Errorf("got %q", got)
	}
	if len(malformed) != 1 || !strings.HasPrefix(malformed[0], "line 8: ") {
		t.Errorf("malformed lines: %q", malformed)
	}
}

// Any text yields at most one result per entry and generation, distinct names and valid UTF-8.
func FuzzParseCSV(f *testing.F) {
	f.Add("DCGM_FI_DEV_SM_CLOCK, gauge, SM clock\n# x\nDCGM_FI_DEV_GPU_TEMP,label,x")
	f.Add("a,b,c\n\xff,gauge,\xff\nDCGM_FI_DEV_FB_FREE,counter,\xff")
	f.Add("\"DCGM_FI_DEV_SM_CLOCK\",gauge,\"a, \"\"b\"\"\"\nDCGM_FI_DEV_FB_FREE,gauge,\"open\ndcgm_gpu_temp,gauge,x")
	f.Fuzz(func(t *testing.T, text string) {
		specs, malformed := parseCSV(text)
		if lines := strings.Count(text, "\n") + 1; len(specs)+len(malformed) > lines {
			t.Errorf("%d entries and %d malformed lines of %d lines", len(specs), len(malformed), lines)
		}
		for maximum, generations := range map[int][]string{1: {Names48}, 3: both} { // a third name may be dcgm-exporter 1's
			s := Select(specs, generations...)
			if n := len(s.Fields) + len(s.Labels) + len(s.Unknown); n > maximum*len(specs) {
				t.Errorf("%d results of %d entries with %q", n, len(specs), generations)
			}
			names := make(map[string]bool)
			for _, f := range s.Fields {
				if names[f.Name] || !utf8.ValidString(f.Help) || f.Type != TypeGauge && f.Type != TypeCounter {
					t.Errorf("invalid or duplicate field %+v", f)
				}
				names[f.Name] = true
			}
		}
	})
}
