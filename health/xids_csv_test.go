package health

import (
	"bytes"
	"encoding/csv"
	"flag"
	"os"
	"strconv"
	"strings"
	"testing"
)

var updateTables = flag.Bool("update-tables", false, "write xids.csv and incidents.csv")

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
