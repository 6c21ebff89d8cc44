package health

import (
	"slices"
	"testing"
)

func TestXIDTable(t *testing.T) {
	if !slices.IsSortedFunc(xidTable, func(a, b XIDInfo) int { return a.Code - b.Code }) {
		t.Fatal("the table is not in order: it is searched by halves")
	}
	for _, x := range xidTable {
		if x.Name == "" || x.Action == "" || x.Source == "" {
			t.Errorf("XID %d: a row needs a name, an action and a source", x.Code)
		}
	}
}

func TestLookupXID(t *testing.T) {
	want := map[Effect][]int{
		EffectUnhealthy: {48, 62, 64, 74, 79, 95, 119, 120, 140},
		EffectIgnore:    {13, 31, 43, 45, 68, 109},
		EffectWarn:      {0, 1, 32, 63, 92, 94, 154, 172, 173, 999, -1},
	}
	for effect, codes := range want {
		for _, code := range codes {
			if got := LookupXID(code); got.Effect != effect || got.Code != code {
				t.Errorf("XID %d: got %+v, want effect %d", code, got, effect)
			}
		}
	}
}
