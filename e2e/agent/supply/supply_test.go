package main

import (
	"debug/buildinfo"
	"os"
	"os/exec"
	"path/filepath"
	"runtime/debug"
	"strings"
	"testing"

	cdx "github.com/CycloneDX/cyclonedx-go"
)

const root = "../../.."

// TestListIsUpToDate does what make check-licenses does.
func TestListIsUpToDate(t *testing.T) {
	if err := licenses(root, false, ""); err != nil {
		t.Error(err)
	}
}

// moduleWith returns a module with these files.
func moduleWith(t *testing.T, files map[string]string) *Module {
	t.Helper()
	m := &Module{Path: "example.com/m", Version: "v1.0.0", Dir: t.TempDir()}
	m.packages = []string{m.Dir}
	for name, text := range files {
		path := filepath.Join(m.Dir, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o750); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		if dir := filepath.Dir(path); dir != m.Dir {
			m.packages = append(m.packages, dir)
		}
	}
	return m
}

func TestClassifyRefuses(t *testing.T) {
	apache, err := os.ReadFile(root + "/LICENSE")
	if err != nil {
		t.Fatal(err)
	}
	const gpl = "This program is free software: you can redistribute it and/or modify it under the terms of the GNU General Public License " +
		"as published by the Free Software Foundation, either version 3 of the License, or (at your option) any later version."
	for name, c := range map[string]struct {
		files map[string]string
		want  string // part of the error; "" for no error
	}{
		"allowed":            {map[string]string{"LICENSE": string(apache), "NOTICE": "anything"}, ""},
		"none":               {map[string]string{"README.md": string(apache)}, "example.com/m@v1.0.0: "},
		"unknown":            {map[string]string{"LICENSE.txt": "All rights reserved. Ask us."}, "LICENSE.txt"},
		"forbidden":          {map[string]string{"COPYING": gpl}, "GPL-3.0"},
		"forbidden in parts": {map[string]string{"LICENSE": string(apache), "third_party/x/LICENSE": gpl}, "GPL-3.0"},
	} {
		err := classify([]*Module{moduleWith(t, c.files)})
		if c.want == "" && err != nil || c.want != "" && (err == nil || !strings.Contains(err.Error(), c.want)) {
			t.Errorf("%s: %v, want %q", name, err, c.want)
		}
	}
}

func TestDifference(t *testing.T) {
	if got, want := difference("a\nb\nc", "a\nc\nd"), "- b\n+ d\n"; got != want {
		t.Errorf("got %q, want %q", got, want)
	}
	modules := []*Module{{
		Path: "a.b/c", Version: "v1", IDs: []string{"ISC", "MIT"},
		files: []file{{"LICENSE", " text\n"}, {"NOTICE", "more"}},
	}}
	if got, want := licenseList(modules), "module,version,licences,files\na.b/c,v1,ISC AND MIT,LICENSE NOTICE\n"; got != want {
		t.Errorf("got %q, want %q", got, want)
	}
	if got := licenseTexts(modules); !strings.HasPrefix(got, "a.b/c v1 LICENSE\n================\n\ntext\n") ||
		!strings.Contains(got, "more") {
		t.Errorf("got %q", got)
	}
}

// TestSBOM uses a build without cgo, which is quick.
func TestSBOM(t *testing.T) {
	dir := t.TempDir()
	binary, out := filepath.Join(dir, "agent"), filepath.Join(dir, "sbom.json")
	build := exec.CommandContext(t.Context(), "go", "build", "-trimpath", "-o", binary, ".")
	build.Dir, build.Env = root, append(os.Environ(), "CGO_ENABLED=0")
	if text, err := build.CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, text)
	}
	read := func() (text string, bom cdx.BOM) {
		t.Helper()
		if err := sbom(root, binary, "v1.2.3", out); err != nil {
			t.Fatal(err)
		}
		raw, err := os.ReadFile(out)
		if err != nil {
			t.Fatal(err)
		}
		if err := cdx.NewBOMDecoder(strings.NewReader(string(raw)), cdx.BOMFileFormatJSON).Decode(&bom); err != nil {
			t.Fatal(err)
		}
		return string(raw), bom
	}
	first, bom := read()
	if second, _ := read(); first != second {
		t.Error("two SBOMs of one binary differ")
	}
	info, err := buildinfo.ReadFile(binary)
	if err != nil {
		t.Fatal(err)
	}
	if got, want := len(*bom.Components), len(info.Deps)+1; got != want {
		t.Errorf("%d components, want %d: the linked modules and std", got, want)
	}
	if c := bom.Metadata.Component; c.Version != "v1.2.3" || c.Type != cdx.ComponentTypeApplication || len(*c.Hashes) != 1 {
		t.Errorf("the main component is %+v", c)
	}
	for _, c := range *bom.Components {
		if c.Version == "" || c.PackageURL != "pkg:golang/"+c.Name+"@"+c.Version || c.Licenses == nil || len(*c.Licenses) == 0 {
			t.Errorf("%+v", c)
		}
		if c.Name != stdlib && (c.Hashes == nil || len((*c.Hashes)[0].Value) != 64) {
			t.Errorf("%s has no hash", c.Name)
		}
	}
	// A binary of another module is refused.
	if own, err := os.Executable(); err != nil || len(readBuildInfo(t, own).Deps) > 0 && sbom(root, own, "v1", out) == nil {
		t.Errorf("no error for the SBOM of this test binary, or %v", err)
	}
}

func readBuildInfo(t *testing.T, binary string) *debug.BuildInfo {
	t.Helper()
	info, err := buildinfo.ReadFile(binary)
	if err != nil {
		t.Fatal(err)
	}
	return info
}
