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
