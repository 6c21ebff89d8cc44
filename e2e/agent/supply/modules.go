package main

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
)

// Module is a module that is linked into the agent.
type Module struct {
	Path, Version string
	Dir           string   // root directory
	packages      []string // directories of the linked packages

	files []file   // licences and notices, sorted by name
	IDs   []string // SPDX identifiers of the licences
}

type file struct{ name, text string }

// stdlib is the list's name for the standard library.
const stdlib = "std"

// linkedModules returns the modules that the agent is linked from on any of its platforms, sorted by path.
func linkedModules(dir string) ([]*Module, error) {
	all := make(map[string]*Module)
	for _, arch := range []string{"amd64", "arm64"} {
		for _, cgo := range []string{"1", "0"} {
			if err := addModules(all, dir, "GOOS=linux", "GOARCH="+arch, "CGO_ENABLED="+cgo); err != nil {
				return nil, err
			}
		}
	}
	modules := make([]*Module, 0, len(all))
	for _, m := range all {
		modules = append(modules, m)
	}
	slices.SortFunc(modules, func(a, b *Module) int { return cmp.Compare(a.Path, b.Path) })
	return modules, nil
}

func addModules(all map[string]*Module, dir string, env ...string) error {
	cmd := exec.CommandContext(context.Background(), "go", "list", "-deps", "-json=ImportPath,Dir,Standard,Root,Module", ".")
	cmd.Dir, cmd.Env, cmd.Stderr = dir, append(os.Environ(), env...), os.Stderr
	out, err := cmd.Output()
	if err != nil {
		return fmt.Errorf("go list: %w", err)
	}
	for dec := json.NewDecoder(strings.NewReader(string(out))); ; {
		var p struct {
			ImportPath, Dir, Root string
			Standard              bool
			Module                *struct {
				Path, Version, Dir string
				Main               bool
				Replace            *struct{ Path, Version, Dir string }
			}
		}
		err := dec.Decode(&p)
		switch {
		case errors.Is(err, io.EOF):
			return nil
		case err != nil:
			return err
		case p.Standard:
			// The root's licence covers the standard library: its vendored packages have the same authors, and
			// crypto/internal/boring has the licence of a library that is not linked.
			if !strings.HasPrefix(p.ImportPath, "vendor/") {
				add(all, stdlib, "", p.Root, p.Root)
			}
		case p.Module == nil || p.Module.Dir == "":
			return fmt.Errorf("%s belongs to no downloaded module", p.Dir)
		case p.Module.Replace != nil:
			return fmt.Errorf("%s is replaced by %s; a released module must have a version", p.Module.Path, p.Module.Replace.Path)
		case !p.Module.Main:
			add(all, p.Module.Path, p.Module.Version, p.Module.Dir, p.Dir)
		}
	}
}

func add(all map[string]*Module, path, version, root, pkg string) {
	m := all[path]
	if m == nil {
		m = &Module{Path: path, Version: version, Dir: root}
		all[path] = m
	}
	if !slices.Contains(m.packages, pkg) {
		m.packages = append(m.packages, pkg)
	}
}

var (
	licenceName = regexp.MustCompile(`(?i)^(licen[sc]es?|copying|unlicense)([-_.].*)?$`)
	noticeName  = regexp.MustCompile(`(?i)^(notice|patents|authors|copyright)([-_.].*)?$`)
)

// read finds the licences and notices at the module's root and in the directories from there to each package.
func (m *Module) read() error {
	seen := make(map[string]bool)
	for _, pkg := range m.packages {
		for dir := pkg; !seen[dir]; dir = filepath.Dir(dir) {
			seen[dir] = true
			entries, err := os.ReadDir(dir)
			if err != nil {
				return err
			}
			for _, e := range entries {
				if e.IsDir() || !licenceName.MatchString(e.Name()) && !noticeName.MatchString(e.Name()) || strings.HasSuffix(e.Name(), ".go") {
					continue
				}
				text, err := os.ReadFile(filepath.Join(dir, e.Name()))
				if err != nil {
					return err
				}
				name, err := filepath.Rel(m.Dir, filepath.Join(dir, e.Name()))
				if err != nil {
					return err
				}
				m.files = append(m.files, file{name, string(text)})
			}
			if dir == m.Dir {
				break
			}
		}
	}
	slices.SortFunc(m.files, func(a, b file) int { return cmp.Compare(a.name, b.name) })
	return nil
}
