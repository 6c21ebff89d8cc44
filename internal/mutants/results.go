package main

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/gpu-node-agent/gpu-node-agent/health/durable"
)

// Results are the mutants that were tried for one package and seed. The file has one line per mutant, with tabs between
// the columns; the line after a survivor says, indented, why no test notices it.
type results struct {
	file string
	path string
	seed uint64
	hash string // of the sources
	rows []row
}

type row struct {
	noticed  bool
	kind     kind
	place    string // file:line
	function string
	old, new string
	by       string // the test that noticed it
	reason   string // why none does
}

// newRow returns the row of a mutant before its trial.
func newRow(m mutant) row {
	r := row{kind: m.kind, place: m.file + ":" + strconv.Itoa(m.line), function: m.function}
	r.old, r.new = m.text()
	return r
}

// same reports whether two rows are the same mutant, at whatever line.
func (r row) same(o row) bool {
	file, _, _ := strings.Cut(r.place, ":")
	other, _, _ := strings.Cut(o.place, ":")
	return file == other && r.kind == o.kind && r.function == o.function && r.old == o.old && r.new == o.new
}

// readResults reads the results of an earlier run; without one they are empty.
func readResults(dir, path string, seed uint64) (*results, error) {
	r := &results{file: filepath.Join(dir, fmt.Sprintf("%s.%d.txt", strings.ReplaceAll(path, "/", "_"), seed)), path: path, seed: seed}
	text, err := os.ReadFile(r.file)
	if errors.Is(err, fs.ErrNotExist) {
		return r, nil
	}
	if err != nil {
		return nil, err
	}
	lines := bufio.NewScanner(bytes.NewReader(text))
	for n := 1; lines.Scan(); n++ {
		if err := r.parse(lines.Text()); err != nil {
			return nil, fmt.Errorf("%s:%d: %w", r.file, n, err)
		}
	}
	return r, lines.Err()
}

func (r *results) parse(line string) error {
	if after, ok := strings.CutPrefix(line, "# sources "); ok {
		r.hash = after
		return nil
	}
	if line == "" || line[0] == '#' {
		return nil
	}
	if reason, ok := strings.CutPrefix(line, "\t"); ok {
		if len(r.rows) == 0 || r.rows[len(r.rows)-1].noticed {
			return errors.New("a reason belongs below a survivor")
		}
		r.rows[len(r.rows)-1].reason = reason
		return nil
	}
	cols := strings.Split(line, "\t")
	if len(cols) != 7 || cols[0] != "noticed" && cols[0] != "survived" {
		return fmt.Errorf("want noticed or survived, kind, place, function, old, new and test, with tabs between them: %q", line)
	}
	row := row{noticed: cols[0] == "noticed", place: cols[2], function: cols[3], old: cols[4], new: cols[5], by: cols[6]}
	for row.kind.String() != cols[1] {
		if row.kind++; row.kind == kinds {
			return fmt.Errorf("unknown kind %q", cols[1])
		}
	}
	r.rows = append(r.rows, row)
	return nil
}

func (r *results) write() error {
	var b strings.Builder
	noticed, total := r.score()
	fmt.Fprintf(&b, "# %s, seed %d: the unit tests notice %d of %d mutants (%d %%)\n# sources %s\n", r.path, r.seed, noticed, total,
		100*noticed/max(total, 1), r.hash)
	for _, row := range r.rows {
		verb := "survived"
		if row.noticed {
			verb = "noticed"
		}
		fmt.Fprintln(&b, strings.Join([]string{verb, row.kind.String(), row.place, row.function, row.old, row.new, row.by}, "\t"))
		if row.reason != "" {
			fmt.Fprintf(&b, "\t%s\n", row.reason)
		}
	}
	_, err := durable.Options{Mode: 0o644, DirMode: 0o755}.Replace(r.file, []byte(b.String()))
	return err
}

func (r *results) score() (noticed, total int) {
	for _, row := range r.rows {
		if row.noticed {
			noticed++
		}
	}
	return noticed, len(r.rows)
}
