//go:build cgo && linux

package dcgm

import (
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"

	"github.com/NVIDIA/go-dcgm/pkg/dcgm"
)

// The list that metrics finds fields by has every name that go-dcgm knows, and so dcgm-exporter, with its number, and
// no other. It is a file because metrics does not know go-dcgm.
func TestNamesOfFields(t *testing.T) {
	text, err := os.ReadFile("../../metrics/fields/dcgm_fields.txt")
	if err != nil {
		t.Fatal(err)
	}
	listed := map[string]bool{}
	for line := range strings.Lines(string(text)) {
		if strings.HasPrefix(line, "#") {
			continue
		}
		words := strings.Fields(line)
		for _, name := range words[min(2, len(words)):] {
			listed[name] = true
			if id, known := dcgm.GetFieldID(name); !known || strconv.Itoa(int(id)) != words[0] {
				t.Errorf("%s is %s in the list, and %d (known: %v) to go-dcgm", name, words[0], id, known)
			}
		}
	}
	module, err := exec.Command("go", "list", "-m", "-f", "{{.Dir}}", "github.com/NVIDIA/go-dcgm").Output()
	if err != nil {
		t.Fatal(err)
	}
	source, err := os.ReadFile(filepath.Join(strings.TrimSpace(string(module)), "pkg", "dcgm", "const_fields.go"))
	if err != nil {
		t.Fatal(err)
	}
	keys := regexp.MustCompile(`(?m)^\t"(\w+)":`).FindAllStringSubmatch(string(source), -1)
	if len(keys) < 1000 {
		t.Errorf("%d names in go-dcgm: its maps are not what they were", len(keys))
	}
	for _, key := range keys {
		if id, _ := dcgm.GetFieldID(key[1]); !listed[key[1]] {
			t.Errorf("the list lacks %s, field %d", key[1], id)
		}
	}
}
