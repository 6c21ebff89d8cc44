package main

import (
	"go/ast"
	"go/importer"
	"go/parser"
	"go/token"
	"go/types"
	"os"
	"path/filepath"
	"slices"
	"testing"
)

const code = `package p

type T struct{ n int; s string }

func set(t *T) error { return nil }

func f(t *T, names []string) (int, error) {
	if t.n > 2 && t.s != "x" {
		t.n = 0
	}
	for _, name := range names {
		_ = set(&T{n: 1, s: name})
	}
	t.s = string(rune(t.n))
	clear(names)
	err := set(t)
	return t.n, err
}
`

func parse(t *testing.T, text string) []mutant {
	t.Helper()
	fset := token.NewFileSet()
	tree, err := parser.ParseFile(fset, "p.go", text, parser.SkipObjectResolution)
	if err != nil {
		t.Fatal(err)
	}
	info := &types.Info{Types: map[ast.Expr]types.TypeAndValue{}, Uses: map[*ast.Ident]types.Object{}, Defs: map[*ast.Ident]types.Object{}}
	config := types.Config{Importer: importer.Default()}
	if _, err := config.Check("p", fset, []*ast.File{tree}, info); err != nil {
		t.Fatal(err)
	}
	return find(fset, info, "p.go", []byte(text), tree)
}

func TestFind(t *testing.T) {
	var got []string
	for _, m := range parse(t, code) {
		old, text := m.text()
		got = append(got, m.kind.String()+": "+old+" -> "+text)
		if mutated := code[:m.start] + m.new + code[m.end:]; mutated == code {
			t.Errorf("%s: %q changes nothing", m.kind, old)
		} else if _, err := parser.ParseFile(token.NewFileSet(), "p.go", mutated, 0); err != nil {
			t.Errorf("%s: %q -> %q: %v", m.kind, old, text, err)
		}
	}
	want := []string{
		`condition: t.n > 2 && t.s != "x" -> !(t.n > 2 && t.s != "x")`, `condition: && -> ||`, `condition: > -> >=`, `constant: 2 -> 4`,
		`condition: != -> ==`, `constant: "x" -> ""`, `assignment: t.n = 0 -> `, `constant: 0 -> 1`, `assignment: n: 1, -> `,
		`assignment: s: name -> `, `constant: 1 -> 2`, `assignment: t.s -> _`, `call: clear(names) -> `, `return: t.n -> (t.n)+1`,
		`return: err -> nil`,
	}
	if !slices.Equal(got, want) {
		t.Errorf("got\n%q, want\n%q", got, want)
	}
}

// Equal seeds draw equal mutants, each once, and the kinds take turns.
func TestDraw(t *testing.T) {
	s := &source{path: "p", mutants: parse(t, code)}
	drawn := s.draw(1)
	if !slices.Equal(drawn, s.draw(1)) {
		t.Error("equal seeds draw different mutants")
	}
	if slices.Equal(drawn, s.draw(2)) {
		t.Error("different seeds draw equal mutants")
	}
	if len(drawn) != len(s.mutants) {
		t.Errorf("%d of %d drawn", len(drawn), len(s.mutants))
	}
	for i, m := range drawn[:kinds] {
		if m.kind != kind(i) {
			t.Errorf("mutant %d is a %s, want a %s", i, m.kind, kind(i))
		}
	}
}

func TestResultsKeepReasons(t *testing.T) {
	dir := t.TempDir()
	r, err := readResults(dir, "a/b", 3)
	if err != nil {
		t.Fatal(err)
	}
	r.hash = "abc"
	r.rows = []row{
		{noticed: true, kind: call, place: "x.go:7", function: "f", old: "g()", by: "TestG"},
		{kind: constant, place: "x.go:9", function: "f", old: "1", new: "2", reason: "Equivalent: nobody reads it."},
	}
	if err := r.write(); err != nil {
		t.Fatal(err)
	}
	again, err := readResults(dir, "a/b", 3)
	if err != nil {
		t.Fatal(err)
	}
	if again.hash != r.hash || !slices.Equal(again.rows, r.rows) {
		t.Errorf("read %+v, want %+v", again, r)
	}
	if err := os.WriteFile(filepath.Join(dir, "a_b.3.txt"), []byte("noticed\tcall\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := readResults(dir, "a/b", 3); err == nil {
		t.Error("a line without its columns is accepted")
	}
}
