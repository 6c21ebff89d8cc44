package main

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"go/ast"
	"go/importer"
	"go/parser"
	"go/token"
	"go/types"
	"hash/fnv"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
)

// Source is the code of a package without its tests.
type source struct {
	path    string // such as health/monitor
	dir     string
	hash    string // of the files
	mutants []mutant
}

// load reads the package in a directory below the current one and finds its mutants.
func load(ctx context.Context, path string) (*source, error) {
	listed, exports, err := list(ctx, path)
	if err != nil {
		return nil, err
	}
	s := &source{path: path, dir: listed.Dir}
	fset, hash := token.NewFileSet(), sha256.New()
	var trees []*ast.File
	texts := map[*ast.File][]byte{}
	for _, name := range append(listed.GoFiles, listed.CgoFiles...) {
		text, err := os.ReadFile(filepath.Join(s.dir, name))
		if err != nil {
			return nil, err
		}
		tree, err := parser.ParseFile(fset, name, text, parser.SkipObjectResolution)
		if err != nil {
			return nil, err
		}
		fmt.Fprintf(hash, "%s %d\n%s", name, len(text), text)
		trees, texts[tree] = append(trees, tree), text
	}
	s.hash = fmt.Sprintf("%x", hash.Sum(nil)[:6])
	info := &types.Info{Types: map[ast.Expr]types.TypeAndValue{}, Uses: map[*ast.Ident]types.Object{}, Defs: map[*ast.Ident]types.Object{}}
	config := types.Config{
		FakeImportC: true,
		Error:       func(error) {}, // what cgo provides has no type
		Importer: importer.ForCompiler(fset, "gc", func(path string) (io.ReadCloser, error) {
			return os.Open(exports[path])
		}),
	}
	_, _ = config.Check(path, fset, trees, info)
	for _, tree := range trees {
		s.mutants = append(s.mutants, find(fset, info, fset.Position(tree.Pos()).Filename, texts[tree], tree)...)
	}
	return s, nil
}

// goPackage is a package as go list prints it.
type goPackage struct {
	Dir, ImportPath   string
	GoFiles, CgoFiles []string
	Export            string // the file with its types
}

// list returns a package, and the files with the types of what it imports, by import path.
func list(ctx context.Context, path string) (p goPackage, exports map[string]string, err error) {
	cmd := exec.CommandContext(ctx, "go", "list", "-deps", "-export", "-json=Dir,ImportPath,GoFiles,CgoFiles,Export", "./"+path)
	cmd.Stderr = os.Stderr
	out, err := cmd.Output()
	if err != nil {
		return p, nil, fmt.Errorf("go list: %w", err)
	}
	exports = make(map[string]string)
	for d := json.NewDecoder(bytes.NewReader(out)); d.More(); exports[p.ImportPath] = p.Export { // the package is the last
		p = goPackage{}
		if err := d.Decode(&p); err != nil {
			return p, nil, err
		}
	}
	return p, exports, nil
}

// draw returns all mutants in a random order that the seed and the package determine. The kinds take turns, because a
// table of constants would push the rest out.
func (s *source) draw(seed uint64) []mutant {
	h := fnv.New64a()
	_, _ = io.WriteString(h, s.path)
	random := rand.New(rand.NewPCG(seed, h.Sum64()))
	var byKind [kinds][]mutant
	for _, i := range random.Perm(len(s.mutants)) {
		m := s.mutants[i]
		byKind[m.kind] = append(byKind[m.kind], m)
	}
	var drawn []mutant
	for len(drawn) < len(s.mutants) {
		for k := range byKind {
			if len(byKind[k]) > 0 {
				drawn, byKind[k] = append(drawn, byKind[k][0]), byKind[k][1:]
			}
		}
	}
	return drawn
}
