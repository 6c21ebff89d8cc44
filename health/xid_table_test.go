package health

import (
	"cmp"
	"encoding/csv"
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"
)

// catalogueRow is a row of NVIDIA's catalogue: the symbol and the actions.
type catalogueRow struct {
	symbol, immediate, investigate string
}

func readCatalogue(t *testing.T) map[int]catalogueRow {
	t.Helper()
	catalogue := make(map[int]catalogueRow)
	for _, row := range readCSV(t, "xid_catalogue.csv", 4) {
		code, err := strconv.Atoi(row[0])
		if err != nil {
			t.Fatal(err)
		}
		if _, twice := catalogue[code]; twice {
			t.Fatalf("the catalogue lists XID %d twice", code)
		}
		catalogue[code] = catalogueRow{row[1], row[2], row[3]}
	}
	return catalogue
}

// readCSV returns the rows of a table in testdata.
func readCSV(t *testing.T, file string, columns int) [][]string {
	t.Helper()
	f, err := os.Open("testdata/" + file)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close() //nolint:errcheck // opened for reading
	r := csv.NewReader(f)
	r.Comment = '#'
	r.FieldsPerRecord = columns
	rows, err := r.ReadAll()
	if err != nil {
		t.Fatal(err)
	}
	return rows
}

// driverNames are the names in the driver's header nverror.h (open-gpu-kernel-modules 595.45.04) of the XIDs that the catalogue
// does not list.
var driverNames = map[int]string{
	174: "RESETCHANNEL_KILL_PROCESS_SILENT", 175: "MEMORY_SUBSYSTEM_ERROR", 176: "PCIE_CORRECTABLE_ERROR_FAULT",
}

// TestXIDTable compares the table with NVIDIA's catalogue.
func TestXIDTable(t *testing.T) {
	rows := readCatalogue(t)
	if len(rows) != 172 || len(xidTable) != 177 {
		t.Fatalf("%d rows in the catalogue, %d in the table", len(rows), len(xidTable))
	}
	names := make(map[string]int)
	for code := 1; code < len(xidTable); code++ {
		x, row := LookupXID(code), rows[code]
		fail := func(format string, args ...any) {
			t.Helper()
			t.Errorf("XID %d (%s, catalogue %q): "+format, append([]any{code, x.Name, row.immediate}, args...)...)
		}
		if x.Code != code || x.Name == "" || !x.Action.Valid() || x.Source == "" {
			fail("a row needs a name, an action and a source: %+v", x)
		}
		if other, taken := names[x.Name]; taken {
			fail("has the same name as XID %d", other)
		}
		names[x.Name] = code
		if first, _, _ := strings.Cut(x.Source, ";"); first != catalogue(row.immediate) {
			fail("has the source %q", x.Source)
		}

		harmless := row.immediate == "IGNORE" && row.investigate == "IGNORE" && x.Deviation == ""
		report := code == 162 || row.immediate == "XID_154"
		if ignore := slices.Contains(xidsNVIDIAIgnores, code) || report || harmless; ignore != (x.Effect == EffectIgnore) {
			fail("is %v, but the rule above the table says ignored: %v", x.Effect, ignore)
		}
		if symbol := cmp.Or(row.symbol, driverNames[code]); x.Symbol != symbol {
			fail("has the symbol %q, NVIDIA's is %q", x.Symbol, symbol)
		}
		if row.immediate == "RESTART_APP" && (x.Clears != ClearsRestart || x.Action != ActionRestartApp && x.Action != ActionRestartAppReset) {
			fail("clears by %v with the action %q", x.Clears, x.Action)
		}
		if x.FollowsRecoveryAction && x.Effect == EffectUnhealthy {
			fail("is unhealthy and follows the recovery action")
		}
	}
}

// readVerdicts returns what other sources do with a GPU after an XID: source, verdict, XIDs.
func readVerdicts(t *testing.T) (verdicts []xidVerdict) {
	t.Helper()
	for _, row := range readCSV(t, "xid_verdicts.csv", 4) {
		v := xidVerdict{source: row[0], verdict: row[2]}
		for item := range strings.FieldsSeq(row[3]) {
			first, last, isRange := strings.Cut(item, "-")
			from, err := strconv.Atoi(first)
			to := from
			if isRange && err == nil {
				to, err = strconv.Atoi(last)
			}
			if err != nil || from < 1 || to < from {
				t.Fatalf("%s: %q", v.source, item)
			}
			for code := from; code <= to; code++ {
				v.codes = append(v.codes, code)
			}
		}
		verdicts = append(verdicts, v)
	}
	return verdicts
}

type xidVerdict struct {
	source, verdict string
	codes           []int
}

// contradicts reports whether the source judges an XID otherwise than the table.
func (v xidVerdict) contradicts(t *testing.T, x XIDInfo) bool {
	t.Helper()
	if !slices.Contains(v.codes, x.Code) {
		return false
	}
	switch v.verdict {
	case "unhealthy":
		return x.Effect != EffectUnhealthy
	case "not-unhealthy":
		return x.Effect == EffectUnhealthy
	case "ignore":
		return x.Effect != EffectIgnore
	}
	t.Fatalf("%s: verdict %q", v.source, v.verdict)
	return false
}

// contradicts reports whether the catalogue requires another effect, or another evidence of a cure, than the table has. A
// workflow decides nothing. Where the catalogue has no resolution, only an unhealthy row differs from it.
func (r catalogueRow) contradicts(x XIDInfo) bool {
	switch r.immediate {
	case "RESET_GPU":
		return x.Effect != EffectUnhealthy
	case "RESTART_BM", "RESTART_VM":
		return x.Effect != EffectUnhealthy || x.Clears != ClearsReboot
	case "WORKFLOW_XID_48", "WORKFLOW_NVLINK_ERR", "WORKFLOW_NVLINK5_ERR", "WORKFLOW_XID_45":
		return false
	case "IGNORE":
		if r.investigate == "IGNORE" {
			return x.Effect != EffectIgnore
		}
	}
	return x.Effect == EffectUnhealthy
}

// TestXIDDeviations compares the table with NVIDIA's catalogue and with what other programs do. Each difference needs a reason,
// and each reason a difference.
func TestXIDDeviations(t *testing.T) {
	rows := readCatalogue(t)
	verdicts := append(readVerdicts(t),
		xidVerdict{"AWS", "unhealthy", xidsAWSFatal},
		xidVerdict{"GKE", "unhealthy", slices.Concat(xidsGKEUnhealthy, xidsGKEWarn)}, // of a node condition
		xidVerdict{"NVIDIA's device plugin", "not-unhealthy", xidsNVIDIAIgnores},
	)
	for code := 1; code < len(xidTable); code++ {
		x := LookupXID(code)
		var sources []string
		if rows[code].contradicts(x) {
			sources = append(sources, "NVIDIA's catalogue")
		}
		for _, v := range verdicts {
			if v.contradicts(t, x) {
				sources = append(sources, v.source)
			}
		}
		if want := strings.Join(sources, ", "); x.DiffersFrom != want || (x.Deviation == "") != (want == "") {
			t.Errorf("XID %d (%s) is %v: it differs from %q, the row says %q, reason %q", code, x.Name, x.Effect, want, x.DiffersFrom, x.Deviation)
		}
	}
}

func TestLookupXIDOutsideTable(t *testing.T) {
	for _, code := range []int{-1, 0, len(xidTable), 999} {
		want := XIDInfo{
			Code: code, Name: "XID " + strconv.Itoa(code), Effect: EffectWarn, Action: ActionWatch, Clears: ClearsItself, Source: "not in the table",
		}
		if got := LookupXID(code); got != want {
			t.Errorf("got %+v, want %+v", got, want)
		}
	}
}
