package doctor

import (
	"strings"
	"testing"
)

func TestCheckPair(t *testing.T) {
	for _, c := range []struct {
		library, engine string
		want            CheckStatus
	}{
		{"4.6.0", "4.6.0", CheckOK},
		{"4.6.0", "4.6.1", CheckOK},
		{"4.7.1", "4.7.1", CheckOK},
		{"4.7.1", "4.7.1-1", CheckOK},
		{"4.7.2", "4.7.1", CheckOK},
		{"4.7.1", "4.7.0", CheckWarn},
		{"4.7.0", "4.7.1", CheckWarn},
		{"4.6.1", "4.7.1", CheckWarn},
		{"4.7.1", "4.2.3", CheckWarn},
		{"4.6.1", "4.5.2", CheckWarn},
		{"4.6.0", "3.3.9", CheckFail},
		{"4.6.0", "5.0.0", CheckFail},
		{"", "4.6.0", CheckOK},
		{"4.6.0", "", CheckOK},
		{"4.6", "devel", CheckOK},
	} {
		got := checkPair(c.library, c.engine)
		if got.Status != c.want || (got.Fix != "") != (c.want != CheckOK) || !strings.Contains(got.Found, c.library) ||
			!strings.Contains(got.Found, c.engine) {
			t.Errorf("libdcgm %q, host engine %q: %+v, want %s", c.library, c.engine, got, c.want)
		}
	}
}
