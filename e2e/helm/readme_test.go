package helm

import (
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// TestReadme checks that the README in the chart names values and files that exist.
func TestReadme(t *testing.T) {
	text, err := helm(t, "show", "readme", chart)
	if err != nil {
		t.Fatal(err)
	}
	values := read(t, filepath.Join(chart, "values.yaml"))
	values["config"] = read(t, filepath.Join("..", "..", "config.yaml"))
	validKeys := make(map[string]bool)
	for _, path := range paths(values) {
		validKeys[strings.Join(path, ".")] = true
	}
	rows := regexp.MustCompile("(?m)^\\| (`.*?`) \\|").FindAllStringSubmatch(text, -1)
	if len(rows) == 0 {
		t.Fatalf("no values in:\n%s", text)
	}
	for _, row := range rows {
		for _, name := range regexp.MustCompile("`(.*?)`").FindAllStringSubmatch(row[1], -1) {
			if !validKeys[name[1]] {
				t.Errorf("%s is not a value of the chart", name[1])
			}
		}
	}
	for _, file := range regexp.MustCompile(`-f charts/gpu-node-agent/(\S+\.yaml)`).FindAllStringSubmatch(text, -1) {
		read(t, filepath.Join(chart, filepath.FromSlash(file[1])))
	}
}
