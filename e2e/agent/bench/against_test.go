package main

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func TestCopyBinary(t *testing.T) {
	from, to := filepath.Join(t.TempDir(), "from"), filepath.Join(t.TempDir(), "to")
	want := bytes.Repeat([]byte("#!/bin/sh\n"), 10_000)
	if err := os.WriteFile(from, want, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := copyBinary(from, to); err != nil {
		t.Fatal(err)
	}
	info, err := os.Stat(to)
	if err != nil || info.Mode() != 0o700 {
		t.Errorf("the copy is %v, %v; want it executable", info, err)
	}
	if got, err := os.ReadFile(to); err != nil || !bytes.Equal(got, want) {
		t.Errorf("the copy has %d bytes, %v; want the %d of the binary", len(got), err, len(want))
	}
}

func TestComparison(t *testing.T) {
	other := []float64{100, 90, 1000, 100, 80, 100, 120}
	for _, c := range []struct {
		name  string
		agent []float64
		limit float64
		worse bool
		want  string
	}{
		{"equal", other, limitOfMedians, false, "cpu -agent 100 s 1.000 <= 1.05 100 90.0 1000 100 80.0 100 120 -against 100 100 90.0"},
		{"one bad round", []float64{100, 100, 9000, 100, 100, 100, 100}, limitOfMedians, false, "1.000"},
		{"at the limit", []float64{105, 105, 105, 105, 1, 1, 1}, limitOfMedians, false, "1.050 <= 1.05 105"},
		{"above the limit", []float64{106, 106, 106, 106, 1, 1, 1}, limitOfMedians, true, "1.060 <= 1.05 missed 106"},
		{"p99", []float64{125, 125, 125, 125, 125, 125, 125}, limitOfP99, false, "1.250 <= 1.25 125"},
		{"p99 above the limit", []float64{126, 126, 126, 126, 126, 126, 126}, limitOfP99, true, "missed"},
		{"better", []float64{10, 10, 10, 10, 10, 10, 10}, limitOfMedians, false, "0.100"},
	} {
		t.Run(c.name, func(t *testing.T) {
			compared := comparison{What: "cpu", Unit: "s", Limit: c.limit, Agent: c.agent, Other: other}
			if got := compared.worse(); got != c.worse {
				t.Errorf("worse: %v, want %v", got, c.worse)
			}
			text := table{Compared: []comparison{compared}}
			if got := strings.Join(strings.Fields(text.String()), " "); !strings.Contains(got, c.want) {
				t.Errorf("%q is not in %q", c.want, got)
			}
		})
	}
}
