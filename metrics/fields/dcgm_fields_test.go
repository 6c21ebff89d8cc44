package fields

import (
	"cmp"
	"errors"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/gpu-node-agent/gpu-node-agent/health"
)

// The kinds of fields that can be selected.
var exportedKinds = []string{"number", "text", "nvswitch", "nvswitch-text", "nvlink", "cpu", "cpu-text"}

// The list is ordered by number, and its names are unique.
func TestDCGMFieldsText(t *testing.T) {
	last, names := -1, 0
	for line := range strings.Lines(dcgmFieldsText) {
		if strings.HasPrefix(line, "#") {
			continue
		}
		columns := strings.Fields(line)
		if len(columns) < 3 {
			t.Fatalf("line %q: too few columns", line)
		}
		id, err := strconv.Atoi(columns[0])
		if kind := columns[1]; err != nil || id <= last || !slices.Contains(append(exportedKinds, "binary", "mark"), kind) &&
			entityName(kind) == kind {
			t.Errorf("invalid line %q after number %d: %v", line, last, err)
		}
		last, names = id, names+len(columns)-2
	}
	if n := len(dcgmFields().names); n != names || n < 1000 {
		t.Errorf("%d names, %d distinct", names, n)
	}
}

func TestTableMatchesDCGMFields(t *testing.T) {
	all := dcgmFields().names
	for _, r := range table {
		for _, name := range []string{r.name, r.renamed} {
			if r.id == 0 || name == "" {
				continue
			}
			want := dcgmField{r.id, name, "number"}
			if r.typ == TypeLabel {
				want.kind = "text"
			}
			if all[name] != want {
				t.Errorf("dcgm_fields.txt has %+v, the table %+v", all[name], want)
			}
		}
		if newest := dcgmFields().ids[r.id]; r.id != 0 && newerField(r.id) == r.id && cmp.Or(r.renamed, r.name) != newest[0] {
			t.Errorf("%s: newest name %s in dcgm_fields.txt, %s in the table", r.name, newest[0], r.renamed)
		}
	}
}

// Every number and text can be selected under each of its names; every other field is rejected.
func TestSelectEveryDCGMField(t *testing.T) {
	all := dcgmFields().names
	var specs []Spec
	for name := range all {
		specs = append(specs, Spec{Name: name})
	}
	s := Select(specs)
	ids := s.IDs()
	for name, f := range all {
		isText := strings.HasSuffix(f.kind, "text")
		isNumber := slices.Contains(exportedKinds, f.kind) && !isText
		_, derived := health.DerivationOf(f.id) // from the older field, which is measured too
		if want := isNumber && !derived || isText && !alwaysProvided(f.id); slices.Contains(ids, f.id) != want {
			t.Errorf("%s: measured is %v, want %v", name, !want, want)
		}
		matches := func(g Field) bool { return g.Name == name && g.ID == f.id && g.Help != "" }
		if slices.ContainsFunc(s.Fields, matches) != isNumber || slices.ContainsFunc(s.Labels, matches) != isText {
			t.Errorf("%s: wrong type for kind %s", name, f.kind)
		}
		rejected := slices.ContainsFunc(s.Unknown, func(u string) bool { return strings.HasPrefix(u, name+": ") })
		if rejected != (!isNumber && !isText) {
			t.Errorf("%s of kind %s: rejected is %v", name, f.kind, rejected)
		}
	}
}

func TestLookup(t *testing.T) {
	for name, want := range map[string]row{
		"DCGM_FI_DEV_BANKS_REMAP_ROWS_AVAIL_MAX": {
			id: 385, name: "DCGM_FI_DEV_BANKS_REMAP_ROWS_AVAIL_MAX", typ: TypeGauge,
			help: "Field 385 of DCGM.",
		},
		"dcgm_fi_dev_bank_remap_avail_max": {id: 385, name: "DCGM_FI_DEV_BANK_REMAP_AVAIL_MAX", typ: TypeGauge, help: "Field 385 of DCGM."},
		"DCGM_FI_DEV_FABRIC_CLUSTER_UUID":  {id: 172, name: "DCGM_FI_DEV_FABRIC_CLUSTER_UUID", typ: TypeLabel, help: "Field 172 of DCGM."},
		// Names of dcgm-exporter 1: the metric keeps the name.
		"dcgm_power_usage": {id: 155, name: "dcgm_power_usage", typ: TypeGauge, help: "Power draw (in W)."},
		"dcgm_fi_prof_gr_engine_active": {
			id: 1001, name: "dcgm_fi_prof_gr_engine_active", typ: TypeGauge,
			help: "Ratio of time the graphics engine is active.",
		},
		// The ratio, also in lower case; 1.x's name is a percentage.
		"DCGM_FI_DEV_GPU_UTIL_RATIO": {id: 1613, name: "DCGM_FI_DEV_GPU_UTIL_RATIO", typ: TypeGauge, help: "GPU utilization (0 to 1)."},
		"dcgm_fi_dev_gpu_util_ratio": {id: 1613, name: "DCGM_FI_DEV_GPU_UTIL_RATIO", typ: TypeGauge, help: "GPU utilization (0 to 1)."},
		"dcgm_gpu_utilization":       {id: 203, name: "dcgm_gpu_utilization", typ: TypeGauge, help: "GPU utilization (in %)."},
		// Renamed by DCGM 4.6 and replaced by 4.7: the name keeps its meaning.
		"DCGM_FI_DEV_NVLINK_THROUGHPUT_TOTAL": {
			id: 449, name: "DCGM_FI_DEV_NVLINK_THROUGHPUT_TOTAL", typ: TypeCounter, help: "Total number of NVLink bandwidth counters for all lanes.",
		},
		"dcgm_fi_dev_power_usage": {id: 155, name: "DCGM_FI_DEV_POWER_USAGE", typ: TypeGauge, help: "Power draw (in W)."},
	} {
		r, err := lookup(name)
		if err != nil || r.id != want.id || r.name != want.name || r.typ != want.typ || r.help != want.help {
			t.Errorf("lookup(%q) = %+v, %v", name, r, err)
		}
	}
	for name, want := range map[string]error{
		"DCGM_FI_DEV_CONNECTX_HEALTH":    unsupportedEntityError{"connectx"},
		"DCGM_FI_DEV_VGPU_FB_USED_BYTES": unsupportedEntityError{"vgpu"},
		"DCGM_FI_DEV_VGPU_VM_NAME":       unsupportedEntityError{"vgpu"},
		"DCGM_FI_DEV_CLOCKS_SUPPORTED":   errBinaryField,
		"DCGM_FI_LAST_VGPU_FIELD_ID":     errRangeMarker,
		"DCGM_FI_UNKNOWN":                errRangeMarker,
		"DCGM_FI_DEV_NOTHING":            errUnknownField,
		"number":                         errUnknownField,
		"":                               errUnknownField,
	} {
		if r, err := lookup(name); !errors.Is(err, want) {
			t.Errorf("lookup(%q) = %+v, %v; want error %v", name, r, err, want)
		}
	}
}
