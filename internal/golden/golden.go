// Package golden compares what tests produce with files in testdata.
package golden

import (
	"encoding/json"
	"flag"
	"os"
	"testing"
)

var update = flag.Bool("update", false, "rewrite the golden files") //nolint:gochecknoglobals // a flag of tests

// Check compares a text with a file. With the flag -update it writes the file first.
func Check(t *testing.T, file, got string) {
	t.Helper()
	if *update {
		if err := os.WriteFile(file, []byte(got), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(file) //nolint:gosec // the test names the file
	if err != nil {
		t.Fatal(err)
	}
	if got != string(want) {
		t.Errorf("%s differs (go test -update writes it): got\n%s\nwant\n%s", file, got, want)
	}
}

// CheckJSON is Check of a value as indented JSON.
func CheckJSON(t *testing.T, file string, v any) {
	t.Helper()
	text, err := json.MarshalIndent(v, "", "  ")
	if err != nil {
		t.Fatal(err)
	}
	Check(t, file, string(text)+"\n")
}
