package fields

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/gpu-node-agent/gpu-node-agent/health"
)

var both = []string{Names48, Names49}

func namesOf(fields []Field) (names []string) {
	for _, f := range fields {
		names = append(names, f.Name)
	}
	return names
}

// Each field in base units replaces an older one; that it is converted agrees with the units of the two.
func TestBaseUnitFields(t *testing.T) {
	const v = 1e12
	converted := map[string]float64{"MHz Hz": 1e18, "mJ J": 1e9, "% 0 to 1": 1e10, "MiB B": v * (1 << 20), "ns s": 1e3, "MB/s B/s": 0} // of v
	for id := range dcgmFields().ids {
		if id < 1600 || id == 1649 { // of vGPUs
			continue
		}
		older := olderField(id)
		if older == id || newerField(older) != id || health.AddedIn(id) == "" || len(dcgmFields().ids[older]) == 0 {
			t.Errorf("field %d replaces %d, which %d replaces", id, older, newerField(older))
		}
		newerRow, ok := rowOf(id)
		olderRow, hasOlder := rowOf(older)
		if ok != hasOlder {
			t.Errorf("the table has only one of %d and %d", id, older)
		}
		if !ok {
			continue
		}
		d, derived := health.DerivationOf(id)
		units := olderRow.unit + " " + newerRow.unit
		if want, ok := converted[units]; !ok || derived != (want != 0) || derived && d.Apply(v) != want {
			t.Errorf("field %d from %d, %s: derivation %+v", id, older, units, d)
		}
		if derived && olderRow.typ != newerRow.typ {
			t.Errorf("field %d is a %s, field %d a %s", id, newerRow.typ, older, olderRow.typ)
		}
	}
	for n := range 18 {
		id := 1630 + health.Field(n)
		if name, want := nameIn(id, Names48), fmt.Sprintf("DCGM_FI_DEV_NVLINK_BANDWIDTH_L%d", n); name != want ||
			nameIn(olderField(id), Names49) != dcgmFields().ids[id][0] {
			t.Errorf("field %d replaces %s, want %s", id, name, want)
		}
	}
}

// No name has two units: what ends in _RATIO is never a percentage, and so on.
func TestNamesSayUnits(t *testing.T) {
	units := map[string]string{
		"_RATIO": "0 to 1", "_HERTZ": "Hz", "_BYTES_PER_SECOND": "B/s", "_WATTS": "W", "_CELSIUS": "°C", "_SECONDS_TOTAL": "s",
		"_JOULES_TOTAL": "J",
	}
	for name, f := range dcgmFields().names {
		r, ok := rowOf(f.id)
		for suffix, unit := range units {
			if ok && strings.HasSuffix(name, suffix) && r.unit != unit {
				t.Errorf("%s is field %d in %s", name, f.id, r.unit)
			}
		}
		if replaced := newerField(f.id) != f.id; replaced && strings.HasSuffix(name, "_RATIO") {
			t.Errorf("%s is field %d, which a field in base units replaces", name, f.id)
		}
	}
}

// The default set of 4.9 is 4.8's under other names, with the capacity of the framebuffer.
func TestDefaultSetOfEachGeneration(t *testing.T) {
	s48, s49, s := Select(specs(SetDefault), Names48), Select(specs(SetDefault), Names49), Select(specs(SetDefault), both...)
	if len(s49.Fields) != len(s48.Fields)+1 || !slices.Contains(namesOf(s49.Fields), "DCGM_FI_DEV_FB_CAPACITY_BYTES") {
		t.Errorf("4.9 has %q, 4.8 has %q", namesOf(s49.Fields), namesOf(s48.Fields))
	}
	// DCGM_FI_DEV_VGPU_LICENSE_STATUS has one name.
	if len(s.Fields) != len(s48.Fields)+len(s49.Fields)-1 {
		t.Errorf("both have %q", namesOf(s.Fields))
	}
	for _, list := range [][]Field{s48.Fields, s49.Fields} {
		for _, name := range namesOf(list) {
			if !slices.Contains(namesOf(s.Fields), name) {
				t.Errorf("both lack %s", name)
			}
		}
	}
	for want, got := range map[string][]Field{
		"DCGM_FI_DRIVER_VERSION": s48.Labels, "DCGM_FI_SYSTEM_DRIVER_VERSION": s49.Labels,
		"DCGM_FI_DRIVER_VERSION DCGM_FI_SYSTEM_DRIVER_VERSION": s.Labels,
	} {
		if names := strings.Join(namesOf(got), " "); names != want {
			t.Errorf("labels %s, want %s", names, want)
		}
	}
}

// An entry has the name that it is written with. With both generations, it has the other generation's name too, whose type and help
// are the agent's.
func TestSelectNames(t *testing.T) {
	field := func(name, typ, help string) string { return name + " " + typ + " " + help }
	for name, c := range map[string]struct {
		specs       []Spec
		generations []string
		want        []string
	}{
		"older name": {
			specs("DCGM_FI_DEV_SM_CLOCK"),
			[]string{Names49},
			[]string{field("DCGM_FI_DEV_SM_CLOCK", "gauge", "SM clock frequency (in MHz).")},
		},
		"newer name": {
			specs("DCGM_FI_DEV_SM_CLOCK_HERTZ"),
			[]string{Names48},
			[]string{field("DCGM_FI_DEV_SM_CLOCK_HERTZ", "gauge", "SM clock frequency (in Hz).")},
		},
		"older name, both": {
			[]Spec{{Name: "DCGM_FI_DEV_SM_CLOCK", Type: "counter", Help: "custom"}},
			both,
			[]string{
				field("DCGM_FI_DEV_SM_CLOCK", "counter", "custom"),
				field("DCGM_FI_DEV_SM_CLOCK_HERTZ", "gauge", "SM clock frequency (in Hz)."),
			},
		},
		"newer name, both": {
			[]Spec{{Name: "DCGM_FI_DEV_GPU_TEMP_CELSIUS", Help: "custom"}},
			both,
			[]string{field("DCGM_FI_DEV_GPU_TEMP_CELSIUS", "gauge", "custom"), field("DCGM_FI_DEV_GPU_TEMP", "gauge", "GPU temperature (in C).")},
		},
		"a written name wins": {
			[]Spec{{Name: "DCGM_FI_DEV_FB_USED"}, {Name: "DCGM_FI_DEV_FB_USED_BYTES", Help: "custom"}},
			both,
			[]string{
				field("DCGM_FI_DEV_FB_USED", "gauge", "Framebuffer memory used (in MiB)."),
				field("DCGM_FI_DEV_FB_USED_BYTES", "gauge", "custom"),
			},
		},
		"dcgm-exporter 1's name": {
			specs("dcgm_gpu_utilization"), both,
			[]string{
				field("dcgm_gpu_utilization", "gauge", "GPU utilization (in %)."),
				field("DCGM_FI_DEV_GPU_UTIL", "gauge", "GPU utilization (in %)."),
				field("DCGM_FI_DEV_GPU_UTIL_RATIO", "gauge", "GPU utilization (0 to 1)."),
			},
		},
		"not in the table": {
			[]Spec{{Name: "DCGM_FI_DEV_NVLINK_COUNT_TX_DISCARDS", Type: "counter", Help: "custom"}},
			both,
			[]string{
				field("DCGM_FI_DEV_NVLINK_COUNT_TX_DISCARDS", "counter", "custom"),
				field("DCGM_FI_DEV_NVLINK_TX_DISCARD_TOTAL", "counter", "custom"),
			},
		},
		"not in the table, another unit": {
			[]Spec{{Name: "DCGM_FI_DEV_NVLINK_BANDWIDTH_L17", Type: "counter", Help: "custom"}},
			both,
			[]string{
				field("DCGM_FI_DEV_NVLINK_BANDWIDTH_L17", "counter", "custom"),
				field("DCGM_FI_DEV_NVLINK_THROUGHPUT_L17_BYTES_PER_SECOND", "gauge", "Field 1647 of DCGM."),
			},
		},
		"one name": {specs("DCGM_FI_DEV_MIG_MODE", "DCGM_EXP_P2P_STATUS"), both, []string{
			field("DCGM_FI_DEV_MIG_MODE", "gauge", "MIG mode."), field("DCGM_EXP_P2P_STATUS", "gauge", "Current NVLink P2P status per peer link."),
		}},
		"labels": {
			[]Spec{{Name: "DCGM_FI_DEV_SERIAL"}, {Name: "DCGM_FI_DEV_MAX_SM_CLOCK", Type: "label"}},
			both,
			[]string{
				field("DCGM_FI_DEV_SERIAL", "label", "Device Serial Number"), field("DCGM_FI_DEV_MAX_SM_CLOCK", "label", "Maximum SM clock (in MHz)."),
				field("DCGM_FI_DEV_BOARD_SERIAL", "label", "Device Serial Number"),
				field("DCGM_FI_DEV_SM_MAX_CLOCK_HERTZ", "label", "Maximum SM clock (in Hz)."),
			},
		},
		"selected and rejected": {
			[]Spec{
				{Name: "DCGM_FI_DEV_C2C_LINK_ERROR_INTR", Type: "counter", Help: "custom"},
				{Name: "DCGM_FI_DEV_C2C_LINK_ERROR_INTR", Type: "histogram"},
			},
			both,
			[]string{
				field("DCGM_FI_DEV_C2C_LINK_ERROR_INTR", "counter", "custom"), field("DCGM_FI_DEV_C2C_LINK_ERROR_TOTAL", "counter", "custom"),
				"rejected DCGM_FI_DEV_C2C_LINK_ERROR_INTR",
			},
		},
		"rejected": {
			[]Spec{{Name: "DCGM_FI_DEV_SM_CLOCK", Type: "histogram"}, {Name: "DCGM_FI_DEV_NOTHING"}},
			both,
			[]string{"rejected DCGM_FI_DEV_SM_CLOCK", "rejected DCGM_FI_DEV_NOTHING"},
		},
	} {
		s := Select(c.specs, c.generations...)
		var got []string
		for _, f := range slices.Concat(s.Fields, s.Labels) {
			got = append(got, field(f.Name, f.Type, f.Help))
		}
		for _, entry := range s.Unknown {
			rejected, _, _ := strings.Cut(entry, ":")
			got = append(got, "rejected "+rejected)
		}
		if !slices.Equal(got, c.want) {
			t.Errorf("%s: got %q, want %q", name, got, c.want)
		}
	}
}

// Every field of the table has a name in each generation, and selecting it by that name with both gives both, once.
func TestNamesOfEveryField(t *testing.T) {
	for _, r := range table {
		if r.id == 0 {
			continue
		}
		older, newer := nameIn(r.id, Names48), nameIn(r.id, Names49)
		want := slices.Compact([]string{older, newer})
		slices.Sort(want)
		for _, name := range []string{older, newer} {
			s := Select(specs(name), both...)
			got := namesOf(slices.Concat(s.Fields, s.Labels))
			slices.Sort(got)
			if !slices.Equal(got, want) || len(s.Unknown) > 0 {
				t.Errorf("%s selects %q, want %q", name, got, want)
			}
		}
	}
}

func TestFieldValue(t *testing.T) {
	for name, c := range map[string]struct {
		selected []string
		measured map[health.Field]float64
		field    string
		want     float64
		ok       bool
		ids      []health.Field
	}{
		"measured": {
			[]string{"DCGM_FI_DEV_FB_USED_BYTES"},
			map[health.Field]float64{1627: 1<<20 + 1, 252: 1},
			"DCGM_FI_DEV_FB_USED_BYTES", 1<<20 + 1, true,
			[]health.Field{203, 206, 207, 1627},
		},
		"derived, because DCGM is older": {
			[]string{"DCGM_FI_DEV_FB_USED_BYTES"},
			map[health.Field]float64{252: 3},
			"DCGM_FI_DEV_FB_USED_BYTES", 3 << 20, true,
			[]health.Field{203, 206, 207, 1627},
		},
		"derived, because the older field is measured": {
			[]string{"DCGM_FI_DEV_FB_USED_BYTES", "DCGM_FI_DEV_FB_USED"},
			map[health.Field]float64{1627: 1<<20 + 1, 252: 1},
			"DCGM_FI_DEV_FB_USED_BYTES", 1 << 20, true,
			[]health.Field{203, 206, 207, 252},
		},
		"the older field is a label": {
			[]string{"DCGM_FI_DEV_SM_CLOCK_HERTZ", "DCGM_FI_DEV_SM_CLOCK=label"},
			map[health.Field]float64{1603: 1, 100: 1980},
			"DCGM_FI_DEV_SM_CLOCK_HERTZ", 1980e6, true,
			[]health.Field{100, 203, 206, 207},
		},
		"the older field is measured for the idle time only": {
			[]string{"DCGM_FI_DEV_GPU_UTIL_RATIO"},
			map[health.Field]float64{1613: 0.875, 203: 87},
			"DCGM_FI_DEV_GPU_UTIL_RATIO", 0.875, true,
			[]health.Field{203, 206, 207, 1613},
		},
		"the older field is selected, but has no value": {
			[]string{"DCGM_FI_DEV_GPU_UTIL_RATIO", "DCGM_FI_DEV_GPU_UTIL"},
			map[health.Field]float64{1613: 0.5},
			"DCGM_FI_DEV_GPU_UTIL_RATIO", 0.5,
			true,
			[]health.Field{203, 206, 207},
		},
		"neither": {
			[]string{"DCGM_FI_DEV_GPU_ENERGY_JOULES_TOTAL"},
			map[health.Field]float64{203: 0},
			"DCGM_FI_DEV_GPU_ENERGY_JOULES_TOTAL", 0, false,
			[]health.Field{203, 206, 207, 1611},
		},
		"energy is whole joules": {
			[]string{"DCGM_FI_DEV_GPU_ENERGY_JOULES_TOTAL"},
			map[health.Field]float64{156: 1999},
			"DCGM_FI_DEV_GPU_ENERGY_JOULES_TOTAL", 1, true,
			[]health.Field{203, 206, 207, 1611},
		},
		"not convertible": {
			[]string{"DCGM_FI_DEV_NVLINK_THROUGHPUT_BYTES_PER_SECOND", "DCGM_FI_DEV_NVLINK_BANDWIDTH_TOTAL"},
			map[health.Field]float64{449: 7},
			"DCGM_FI_DEV_NVLINK_THROUGHPUT_BYTES_PER_SECOND", 0, false,
			[]health.Field{203, 206, 207, 449, 1648},
		},
		"an older field of no use": {
			[]string{"DCGM_FI_DEV_FB_USED"},
			map[health.Field]float64{1627: 1 << 20},
			"DCGM_FI_DEV_FB_USED", 0, false,
			[]health.Field{203, 206, 207, 252},
		},
	} {
		var specs []Spec
		for _, entry := range c.selected {
			name, typ, _ := strings.Cut(entry, "=")
			specs = append(specs, Spec{Name: name, Type: typ})
		}
		s := Select(specs, Names48)
		i := slices.IndexFunc(s.Fields, func(f Field) bool { return f.Name == c.field })
		if v, ok := s.Fields[i].Value(c.measured); v != c.want || ok != c.ok {
			t.Errorf("%s: value %v, %v; want %v, %v", name, v, ok, c.want, c.ok)
		}
		if ids := s.IDs(); !slices.Equal(ids, c.ids) {
			t.Errorf("%s: measures %v, want %v", name, ids, c.ids)
		}
	}
}

// Only a field that an older DCGM cannot provide in any way has a requirement.
func TestRequirements(t *testing.T) {
	for name, c := range map[string]struct {
		specs       []Spec
		generations []string
		want        []string
	}{
		"4.8":  {specs(SetDefault, SetProfiling, SetOptional), []string{Names48}, nil},
		"4.9":  {specs(SetDefault), []string{Names49}, []string{"DCGM_FI_DEV_NVLINK_THROUGHPUT_BYTES_PER_SECOND"}},
		"both": {specs(SetDefault), both, []string{"DCGM_FI_DEV_NVLINK_THROUGHPUT_BYTES_PER_SECOND"}},
		"a name": {
			specs("DCGM_FI_DEV_C2C_MAX_BANDWIDTH_BYTES_PER_SECOND"),
			[]string{Names48},
			[]string{"DCGM_FI_DEV_C2C_MAX_BANDWIDTH_BYTES_PER_SECOND"},
		},
		"a label": {
			[]Spec{{Name: "DCGM_FI_DEV_NVLINK_THROUGHPUT_L3_BYTES_PER_SECOND", Type: "label"}, {Name: "DCGM_FI_DEV_SM_CLOCK_HERTZ", Type: "label"}},
			[]string{Names49},
			[]string{"DCGM_FI_DEV_NVLINK_THROUGHPUT_L3_BYTES_PER_SECOND"},
		},
	} {
		got := Select(c.specs, c.generations...).Requirements()
		if !slices.EqualFunc(got, c.want, func(r, name string) bool { return strings.HasPrefix(r, name+": ") && strings.Contains(r, "4.7") }) {
			t.Errorf("%s: got %q, want %q", name, got, c.want)
		}
	}
}
