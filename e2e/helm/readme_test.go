package helm

import (
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// TestReadme says that helm show readme has something to show, and that its values are those of the chart.
func TestReadme(t *testing.T) {
	text, err := helm(t, "show", "readme", chart)
	if err != nil {
		t.Fatal(err)
	}
	values := read(t, filepath.Join(chart, "values.yaml"))
	values["config"] = read(t, filepath.Join("..", "..", "config.yaml"))
	known := make(map[string]bool)
	for _, path := range paths(values) {
		known[strings.Join(path, ".")] = true
	}
	rows := regexp.MustCompile("(?m)^\\| (`.*?`) \\|").FindAllStringSubmatch(text, -1)
	if len(rows) == 0 {
		t.Fatalf("it names no values:\n%s", text)
	}
	for _, row := range rows {
		for _, name := range regexp.MustCompile("`(.*?)`").FindAllStringSubmatch(row[1], -1) {
			if !known[name[1]] {
				t.Errorf("%s is no value of the chart", name[1])
			}
		}
	}
	for _, file := range regexp.MustCompile(`-f charts/gpu-node-agent/(\S+\.yaml)`).FindAllStringSubmatch(text, -1) {
		read(t, filepath.Join(chart, filepath.FromSlash(file[1])))
	}
}
