package catalog

import (
	"cmp"
	"encoding/csv"
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/gpu-node-agent/gpu-node-agent/health"
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

// checkTable checks the order of a table's rows, and that each column with a set of values has only those. Names are unique.
func checkTable(t *testing.T, table string, columns map[string][]string) {
	t.Helper()
	names := make(map[string]int)
	for code, cells := range tableRows(table) {
		if cells["code"] != strconv.Itoa(code) {
			t.Errorf("row %d has the code %s: a code is missing, there twice or out of order", code, cells["code"])
		}
		if other, taken := names[cells["name"]]; taken || cells["name"] == "" {
			t.Errorf("%d needs a name of its own, it has that of %d: %q", code, other, cells["name"])
		}
		names[cells["name"]] = code
		for column, values := range columns {
			if cell, ok := cells[column]; !ok || !slices.Contains(values, cell) {
				t.Errorf("%d has %s %q, it can be one of %q", code, column, cell, values)
			}
		}
	}
}

func TestXIDTable(t *testing.T) {
	checkTable(t, xidTable, map[string][]string{
		XIDPresetDefault: effectNames[:], XIDPresetNVIDIA: {"", "ignore", "unhealthy"},
		XIDPresetGKE: {"", "ignore", "warn", "unhealthy"}, XIDPresetAWS: {"", "warn", "unhealthy"},
		"action": actionNames(), "clears": {"self", "gpu-reset", "reboot", "operator", "app-restart"}, "scope": {"gpu", "instance"},
		"follows": {"", "yes"},
	})
}

func actionNames() (names []string) {
	for _, a := range health.Actions() {
		names = append(names, string(a))
	}
	return names
}

// xidCures are the action, what clears the XID and its scope, by the catalogue's resolution. XID 94 also asks for a reset at the next
// drain, and XID 109 is an application error for NVIDIA's device plugin.
var xidCures = map[string]string{
	"CONTACT_SUPPORT":      "contact-support self instance",
	"RESTART_APP":          "restart-app app-restart instance",
	"RESET_GPU":            "reset-gpu gpu-reset gpu",
	"WORKFLOW_NVLINK5_ERR": "watch-recovery-action self gpu",
}

// TestXIDRules compares the table with NVIDIA's catalogue, and with the rules of its comment.
func TestXIDRules(t *testing.T) {
	rows, catalogue := tableRows(xidTable), readCatalogue(t)
	for code, facts := range catalogue {
		if code >= len(rows) {
			t.Errorf("the table lacks XID %d (%s)", code, facts.symbol)
		}
	}
	for code, cells := range rows[1:] {
		code++
		x, facts := LookupXID(code), catalogue[code]
		fail := func(format string, args ...any) {
			t.Helper()
			t.Errorf("XID %d (%s, catalogue %q): "+format, append([]any{code, x.Name, facts.immediate}, args...)...)
		}
		if symbol := cmp.Or(facts.symbol, driverNames[code]); cells["symbol"] != symbol || cells["catalogue"] != facts.immediate {
			fail("has the resolution %q and the symbol %q, NVIDIA's is %q", cells["catalogue"], cells["symbol"], symbol)
		}
		harmless := facts.immediate == "IGNORE" && facts.investigate == "IGNORE" && cells["reason"] == ""
		report := code == 162 || facts.immediate == "XID_154"
		if ignore := cells[XIDPresetNVIDIA] == "ignore" || report || harmless; ignore != (x.Effect == EffectIgnore) {
			fail("is %v, but the rules of the table say ignored: %v", x.Effect, ignore)
		}
		cure := strings.Join([]string{cells["action"], cells["clears"], cells["scope"]}, " ")
		if want := xidCures[facts.immediate]; want != "" && cure != want && code != 94 && code != 109 {
			fail("has %q, other XIDs with the resolution %q", cure, want)
		}
		if undecided := x.Effect == EffectWarn && x.Action == health.ActionWatchRecoveryAction; x.FollowsRecoveryAction != (undecided ||
			code == 109) {
			fail("is %v with the action %q, follows the recovery action: %v", x.Effect, x.Action, x.FollowsRecoveryAction)
		}
		if ofMemory := []int{48, 171, 172}; x.Effect == EffectUnhealthy && x.WholeGPU == slices.Contains(ofMemory, code) {
			fail("has the scope %q, but only memory is an instance's own", cells["scope"])
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
		return x.Effect != EffectUnhealthy || x.Clears != health.ClearsReboot
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
	rows, catalogue := tableRows(xidTable), readCatalogue(t)
	effects := func(preset string, effects ...string) (codes []int) {
		for code, cells := range rows {
			if slices.Contains(effects, cells[preset]) {
				codes = append(codes, code)
			}
		}
		return codes
	}
	verdicts := append(readVerdicts(t),
		xidVerdict{"AWS", "unhealthy", effects(XIDPresetAWS, "unhealthy")},
		xidVerdict{"GKE", "unhealthy", effects(XIDPresetGKE, "unhealthy", "warn")}, // of a node condition
		xidVerdict{"NVIDIA's device plugin", "not-unhealthy", effects(XIDPresetNVIDIA, "ignore")},
	)
	for code, cells := range rows {
		x := LookupXID(code)
		var sources []string
		if catalogue[code].contradicts(x) {
			sources = append(sources, "NVIDIA's catalogue")
		}
		for _, v := range verdicts {
			if v.contradicts(t, x) {
				sources = append(sources, v.source)
			}
		}
		if want := strings.Join(sources, ", "); cells["differs"] != want || (cells["reason"] == "") != (want == "") {
			t.Errorf("XID %d (%s) is %v: it differs from %q, the row says %q, reason %q", code, x.Name, x.Effect, want, cells["differs"],
				cells["reason"])
		}
	}
}

func TestLookupXIDOutsideTable(t *testing.T) {
	for _, code := range []int{-1, 0, len(xidRows()), 999} {
		want := XIDInfo{
			Code: code, Name: "XID " + strconv.Itoa(code), Effect: EffectWarn, Action: health.ActionWatch, Clears: health.ClearsItself,
		}
		if got := LookupXID(code); got != want {
			t.Errorf("got %+v, want %+v", got, want)
		}
	}
}
