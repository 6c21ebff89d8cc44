package health

import (
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
	f, err := os.Open("testdata/xid_catalogue.csv")
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close() //nolint:errcheck // opened for reading
	r := csv.NewReader(f)
	r.Comment = '#'
	r.FieldsPerRecord = 4
	rows, err := r.ReadAll()
	if err != nil {
		t.Fatal(err)
	}
	catalogue := make(map[int]catalogueRow)
	for _, row := range rows {
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

// TestXIDTable compares the table with NVIDIA's catalogue.
func TestXIDTable(t *testing.T) {
	rows := readCatalogue(t)
	if len(rows) != 172 || len(xidTable) != 174 {
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

		switch row.immediate {
		case "RESET_GPU", "RESTART_BM", "RESTART_VM":
			if x.Effect != EffectUnhealthy && x.Deviation == "" {
				fail("is %v without a Deviation", x.Effect)
			}
		case "WORKFLOW_XID_48", "WORKFLOW_NVLINK_ERR", "WORKFLOW_NVLINK5_ERR", "WORKFLOW_XID_45", "XID_154":
			// The catalogue does not decide.
		default:
			if x.Effect == EffectUnhealthy && x.Deviation == "" {
				fail("is unhealthy without a Deviation")
			}
		}
		if row.immediate == "IGNORE" && row.investigate == "IGNORE" && x.Effect != EffectIgnore && x.Deviation == "" {
			fail("is %v without a Deviation", x.Effect)
		}
		plugin, recovery := slices.Contains(xidsNVIDIAIgnores, code), code == 162
		if ignore := plugin || recovery || row.immediate == "IGNORE" && row.investigate == "IGNORE" && x.Deviation == ""; ignore != (x.Effect == EffectIgnore) {
			fail("is %v, but the rule above the table says ignored: %v", x.Effect, ignore)
		}

		if x.Symbol != row.symbol {
			fail("has the symbol %q, the catalogue %q", x.Symbol, row.symbol)
		}
		self := x.Clears == ClearsItself || x.Clears == ClearsRestart
		if x.Effect != EffectUnhealthy && !self {
			fail("is %v and clears by %v", x.Effect, x.Clears)
		}
		if x.Effect == EffectUnhealthy && self {
			fail("is unhealthy and clears by %v, which is not evidence", x.Clears)
		}
		if row.immediate == "RESTART_APP" && (x.Clears != ClearsRestart || x.Action != ActionRestartApp && x.Action != ActionRestartAppReset) {
			fail("clears by %v with the action %q", x.Clears, x.Action)
		}
		restart := row.immediate == "RESTART_BM" || row.immediate == "RESTART_VM"
		if restart && x.Clears != ClearsReboot && x.Deviation == "" {
			fail("clears by %v without a Deviation", x.Clears)
		}
		if x.FollowsRecoveryAction && x.Effect == EffectUnhealthy {
			fail("is unhealthy and follows the recovery action")
		}
	}
}

func TestLookupXID(t *testing.T) {
	unhealthy := []int{
		46, 48, 54, 62, 64, 74, 79, 95, 110, 119, 120, 136, 140, 143, 151, 155, 156, 158, 167, 169, 171, 172, 173,
	}
	ignored := []int{13, 31, 43, 45, 68, 106, 107, 109, 162}
	follows := []int{109, 144, 145, 146, 147, 148, 149, 150}
	for code := -1; code < 1000; code++ {
		want := EffectWarn
		switch {
		case slices.Contains(unhealthy, code):
			want = EffectUnhealthy
		case slices.Contains(ignored, code):
			want = EffectIgnore
		}
		got := LookupXID(code)
		if got.Effect != want || got.Code != code || got.FollowsRecoveryAction != slices.Contains(follows, code) {
			t.Errorf("XID %d: got %+v, want %v", code, got, want)
		}
	}
	if x := LookupXID(79); x.Action != ActionRebootNode || x.Clears != ClearsGPUReset {
		t.Errorf("79: %+v", x)
	}
	if x := LookupXID(48); x.Symbol != "GPU_ECC_DBE" {
		t.Errorf("48: %+v", x)
	}
	if x := LookupXID(999); x.Symbol != "" || x.Name != "XID 999" || x.Clears != ClearsItself || !x.Action.Valid() || x.Source == "" {
		t.Errorf("999: %+v", x)
	}
}
