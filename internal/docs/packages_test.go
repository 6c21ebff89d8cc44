package main

import (
	"io/fs"
	"maps"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// maxFiles is the most files of one package without its tests: more do not fit a reader's head.
const maxFiles = 15

// largePackages returns the packages with more files than maxFiles, and what splits them.
func largePackages() map[string]string {
	return map[string]string{
		"agent":      "the view of what the agent knows, and the record of usage over time, become packages",
		"agent/kube": "one reconciler keeps all that the agent writes to the API server",
		"metrics":    "one table describes the agent's metrics, and what uses a device becomes a package",
		"plugin":     "the configuration, the layout by device, the kubelet's side and the handover become packages",
		"plugin/dra": "the pool, its publisher and the claims become packages",
	}
}

func TestPackagesAreSmall(t *testing.T) {
	files := make(map[string]int)
	err := filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if d.IsDir() && slices.Contains([]string{".git", "bin", "node_modules", "testdata"}, d.Name()) {
			return fs.SkipDir
		}
		if strings.HasSuffix(path, ".go") && !strings.HasSuffix(path, "_test.go") {
			dir, err := filepath.Rel(root, filepath.Dir(path))
			files[filepath.ToSlash(dir)]++
			return err
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	large := largePackages()
	for _, dir := range slices.Sorted(maps.Keys(files)) {
		switch _, listed := large[dir]; {
		case files[dir] > maxFiles && !listed:
			t.Errorf("%s has %d files, more than %d: split it", dir, files[dir], maxFiles)
		case files[dir] <= maxFiles && listed:
			t.Errorf("%s has %d files: remove it from largePackages", dir, files[dir])
		}
		delete(large, dir)
	}
	for dir := range large {
		t.Errorf("no package %s: remove it from largePackages", dir)
	}
}
