package metrics

import (
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/gpu-node-agent/gpu-node-agent/health"
)

// everyName returns the list of DCGM's fields by name.
func everyName(t *testing.T) map[string]namedField {
	t.Helper()
	all := make(map[string]namedField)
	last := -1
	for line := range strings.Lines(allFields) {
		if strings.HasPrefix(line, "#") {
			continue
		}
		words := strings.Fields(line)
		if len(words) < 3 {
			t.Fatalf("%q", line)
		}
		id, err := strconv.Atoi(words[0])
		if err != nil || id <= last || !slices.Contains([]string{"number", "text", "binary", "mark"}, words[1]) && owners(words[1]) == words[1] {
			t.Errorf("%q after %d: %v", line, last, err)
		}
		last = id
		for _, name := range words[2:] {
			if _, twice := all[name]; twice {
				t.Errorf("%s is there twice", name)
			}
			all[name] = namedField{health.Field(id), name, words[1]}
		}
	}
	return all
}

// The table and the list agree.
func TestAllFields(t *testing.T) {
	all := everyName(t)
	if len(all) < 1000 {
		t.Errorf("%d names", len(all))
	}
	for _, k := range fieldTable {
		for _, name := range []string{k.name, k.renamed} {
			if k.id == 0 || name == "" {
				continue
			}
			want := namedField{k.id, name, "number"}
			if k.typ == TypeLabel {
				want.kind = "text"
			}
			if all[name] != want {
				t.Errorf("the list has %+v, the table %+v", all[name], want)
			}
		}
	}
}

// Every number and every text of a GPU can be shown, under each of its names and as these are written; of all others
// it is said what they are.
func TestEveryNameOfDCGM(t *testing.T) {
	c, all := DefaultConfig(), everyName(t)
	c.Fields = nil
	for name := range all {
		c.Fields = append(c.Fields, FieldSpec{Name: name})
	}
	c, err := c.Resolve()
	if err != nil {
		t.Fatal(err)
	}
	s := node()
	s.Devices = s.Devices[:1]
	values := make(map[health.Field]float64)
	for _, n := range all {
		if n.kind == "number" {
			values[n.id] = float64(n.id)
		}
	}
	s.Devices[0].Sample.Values = values
	page := exposition(t, NewGatherer(sourcesOf(s, &c)))
	ids := c.Chosen.IDs()
	for name, n := range all {
		wants := n.kind == "number" || n.kind == "text" && !isKnownAnyway(n.id)
		if slices.Contains(ids, n.id) != wants {
			t.Errorf("%s: that it is measured is %v", name, !wants)
		}
		is := func(f Field) bool { return f.Name == name && f.ID == n.id && f.Help != "" }
		if slices.ContainsFunc(c.Chosen.Fields, is) != (n.kind == "number") || slices.ContainsFunc(c.Chosen.Labels, is) != (n.kind == "text") {
			t.Errorf("%s, a %s, is not what it is", name, n.kind)
		}
		found := series(page, name)
		if n.kind == "number" && (len(found) != 1 || !strings.HasSuffix(found[0], " "+strconv.Itoa(int(n.id)))) {
			t.Errorf("%s: %q", name, found)
		}
		if told := slices.ContainsFunc(c.Chosen.Unknown, func(u string) bool { return strings.HasPrefix(u, name+": is ") }); told == (n.kind == "number" || n.kind == "text") {
			t.Errorf("%s, a %s, is among the unknown: %v", name, n.kind, told)
		}
	}
}

func TestLookupField(t *testing.T) {
	for name, want := range map[string]knownField{
		"DCGM_FI_DEV_BANKS_REMAP_ROWS_AVAIL_MAX": {id: 385, name: "DCGM_FI_DEV_BANKS_REMAP_ROWS_AVAIL_MAX", typ: TypeGauge, help: "Field 385 of DCGM."},
		"dcgm_fi_dev_bank_remap_avail_max":       {id: 385, name: "DCGM_FI_DEV_BANK_REMAP_AVAIL_MAX", typ: TypeGauge, help: "Field 385 of DCGM."},
		"DCGM_FI_DEV_FABRIC_CLUSTER_UUID":        {id: 172, name: "DCGM_FI_DEV_FABRIC_CLUSTER_UUID", typ: TypeLabel, help: "Field 172 of DCGM."},
		// dcgm-exporter 1's names: the series is called as it was.
		"dcgm_power_usage":              {id: 155, name: "dcgm_power_usage", typ: TypeGauge, help: "Power draw (in W)."},
		"dcgm_fi_prof_gr_engine_active": {id: 1001, name: "dcgm_fi_prof_gr_engine_active", typ: TypeGauge, help: "Ratio of time the graphics engine is active."},
		"dcgm_fi_dev_power_usage":       {id: 155, name: "DCGM_FI_DEV_POWER_USAGE", typ: TypeGauge, help: "Power draw (in W)."},
	} {
		k, err := lookupField(name)
		if err != nil || k.id != want.id || k.name != want.name || k.typ != want.typ || k.help != want.help {
			t.Errorf("%s: %+v, %v", name, k, err)
		}
	}
	for name, want := range map[string]string{
		"DCGM_FI_DEV_NVSWITCH_TEMPERATURE_CURRENT": "is a field of NVSwitches, which this agent does not watch",
		"DCGM_FI_DEV_CPU_UTIL_TOTAL":               "is a field of CPUs, which",
		"DCGM_FI_DEV_CONNECTX_HEALTH":              "is a field of network cards, which",
		"DCGM_FI_DEV_VGPU_VM_NAME":                 "is a field of vGPUs, which",
		"DCGM_FI_PROF_NVLINK_TX_BYTES_PER_LINK":    "is a field of single NVLinks, which",
		"DCGM_FI_DEV_CLOCKS_SUPPORTED":             "is neither a number nor a text",
		"DCGM_FI_LAST_VGPU_FIELD_ID":               "is no field but the end of a range",
		"DCGM_FI_UNKNOWN":                          "is no field but the end of a range",
		"DCGM_FI_DEV_NOTHING":                      "not a known field; gpu-node-agent fields lists the usual ones",
		"number":                                   "not a known field",
		"":                                         "not a known field",
	} {
		if k, err := lookupField(name); err == nil || !strings.HasPrefix(err.Error(), want) {
			t.Errorf("%s: %+v, %v", name, k, err)
		}
	}
}
