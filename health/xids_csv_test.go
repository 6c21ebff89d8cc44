package health

import (
	"bytes"
	"encoding/csv"
	"flag"
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"
)

//nolint:gochecknoglobals // a flag
var updateTables = flag.Bool("update-tables", false, "write xids.csv and incidents.csv")

// xidNotes are the comments of the rows.
var xidNotes = map[int]string{
	54: "cables are only connected while the node is off, so a reboot is the evidence",
	63: "the row works again after a reset; until then field 396, row remap pending, has a finding of its own",
	79: "the GPU's return to the bus counts as a reset, so it also clears the finding",

	121: "173 is the fatal one",
	154: "it reports every change of field 1523, also the end of the recovery action; the field has a finding of its own",
	162: "the end of XID 163",
	174: noteUncatalogued, 175: noteUncatalogued, 176: noteUncatalogued,
}

const noteUncatalogued = "no catalogue lists it yet; its name is all that is public"

// TestXIDTableAsCSV compares the table with xids.csv.
func TestXIDTableAsCSV(t *testing.T) {
	presets := []string{XIDPresetDefault, XIDPresetNVIDIA, XIDPresetGKE, XIDPresetAWS}
	unlisted := len(xidTable)
	rows := [][]string{slices.Concat(
		[]string{"code", "symbol", "name"}, presets,
		[]string{"action", "clears", "scope", "follows", "catalogue", "sources", "differs", "reason", "note"},
	)}
	for code := range len(xidTable) {
		x := LookupXID(code)
		row := []string{strconv.Itoa(code), x.Symbol, x.Name}
		if code == 0 {
			row[2] = "any other XID"
		}
		for _, preset := range presets {
			c := XIDConfig{Preset: preset}
			cell := c.Effect(code).String()
			if code > 0 && preset != XIDPresetDefault && c.Effect(code) == c.Effect(unlisted) {
				cell = ""
			}
			row = append(row, cell)
		}
		scope, follows := "instance", ""
		if x.WholeGPU {
			scope = "gpu"
		}
		if x.FollowsRecoveryAction {
			follows = "yes"
		}
		first, sources, _ := strings.Cut(x.Source, "; ")
		resolution := strings.TrimPrefix(first, "NVIDIA XID catalogue: ")
		if resolution == "no resolution" || code == 0 {
			resolution = ""
		}
		rows = append(rows, append(row, string(x.Action), x.Clears.String(), scope, follows, resolution, sources, x.DiffersFrom, x.Deviation,
			xidNotes[code]))
	}
	compareCSV(t, "xids.csv", rows)
}

func compareCSV(t *testing.T, file string, rows [][]string) {
	t.Helper()
	var b bytes.Buffer
	if err := csv.NewWriter(&b).WriteAll(rows); err != nil {
		t.Fatal(err)
	}
	if *updateTables {
		if err := os.WriteFile(file, b.Bytes(), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	if got, err := os.ReadFile(file); err != nil || string(got) != b.String() {
		t.Errorf("%s differs from the table: %v", file, err)
	}
}

// incidentNotes are the comments of the rows.
var incidentNotes = map[string]string{
	"POWER_UNREADABLE": "on every GPU at once it is the only sign that DCGM measures nothing: after an XID 119 in the kernel log the engine " +
		"no longer calls the driver",
	"UNCONTAINED_ERROR": "XID 95", "FALLEN_OFF_BUS": "XID 79", "CONTAINED_ERROR": "XID 94",
	"XID_ERROR": "any other XID, application errors too",
}

// TestIncidentTableAsCSV compares the table with incidents.csv.
func TestIncidentTableAsCSV(t *testing.T) {
	rows := [][]string{{"code", "name", "effect", "action", "only", "repeats", "severity", "advice", "differs", "reason", "note"}}
	for code, name := range incidentNames {
		r := ruleOf(code)
		only, repeats, severity, advice := "", "", "", ""
		if r.limit != nil {
			only = map[string]string{"NVLINK_DOWN": "nvlink", "FABRIC_PROBE_STATE": "fabric"}[name]
		}
		if r.deviation == incidentSticky {
			repeats = "xid"
		}
		if source, ok := strings.CutPrefix(r.source, "DCGM 4.6 health: "); ok {
			severity, advice, _ = strings.Cut(source, ", ")
			if severity == "never more than WARN" {
				severity = "WARN"
			}
		}
		rows = append(rows, []string{
			strconv.Itoa(code), name, r.effect.String(), string(r.action), only, repeats, severity, advice, r.differsFrom, r.deviation,
			incidentNotes[name],
		})
	}
	compareCSV(t, "incidents.csv", rows)
}
