//go:build cgo && linux

package dcgm

import (
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"testing"
)

// matches returns the first group of every match of pattern in the files.
func matches(t *testing.T, pattern string, globs ...string) (found []string) {
	t.Helper()
	for _, glob := range globs {
		files, err := filepath.Glob(glob)
		if err != nil || len(files) == 0 {
			t.Fatalf("%s: %d files, %v", glob, len(files), err)
		}
		for _, file := range files {
			text, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			for _, m := range regexp.MustCompile(pattern).FindAllStringSubmatch(string(text), -1) {
				found = append(found, m[1])
			}
		}
	}
	return found
}

// TestObservedReferences checks that the cited anchors exist, and that the tests named in OBSERVED.md do.
func TestObservedReferences(t *testing.T) {
	anchors := matches(t, `<a id="([^"]+)">`, "OBSERVED.md")
	cited := matches(t, `OBSERVED\.md#([\w-]+)`, "*.go", "lib/*.[chg]*", "testdata/*.[ch]", "../*.go", "../judge/*.go")
	if len(anchors) < 40 || len(cited) < 20 {
		t.Errorf("%d anchors, %d citations; want more", len(anchors), len(cited))
	}
	for _, anchor := range cited {
		if !slices.Contains(anchors, anchor) {
			t.Errorf("OBSERVED.md has no anchor %s", anchor)
		}
	}
	tests := matches(t, `(?m)^func (Test\w+)\(`, "*_test.go", "lib/*_test.go")
	for _, name := range matches(t, "`(Test\\w+)`", "OBSERVED.md") {
		if !slices.Contains(tests, name) {
			t.Errorf("OBSERVED.md names %s, which does not exist", name)
		}
	}
}
