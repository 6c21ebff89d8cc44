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

	"github.com/gpu-node-agent/gpu-node-agent/health"
)

// gpuUtilRatio is the name with another meaning in go-dcgm's DCGM 4.6.1: there it is the percentage 203, since DCGM 4.7 the ratio
// 1613. The list has the ratio.
const gpuUtilRatio = "DCGM_FI_DEV_GPU_UTIL_RATIO"

// The list of field names in metrics has the names and numbers of go-dcgm, and so of dcgm-exporter. It has no others, except for fields of
// a newer DCGM. It is a file because metrics must not import go-dcgm.
func TestFieldNames(t *testing.T) {
	text, err := os.ReadFile("../../metrics/fields/dcgm_fields.txt")
	if err != nil {
		t.Fatal(err)
	}
	listed := map[string]bool{}
	for line := range strings.Lines(string(text)) {
		if strings.HasPrefix(line, "#") {
			continue
		}
		columns := strings.Fields(line)
		for _, name := range columns[min(2, len(columns)):] {
			listed[name] = true
			number, err := strconv.Atoi(columns[0])
			id, ok := dcgm.GetFieldID(name)
			newer := !ok && health.AddedIn(health.Field(number)) == "4.7"
			isRatio := name == gpuUtilRatio && number == 1613
			if same := ok && int(id) == number && name != gpuUtilRatio; err != nil || !same && !newer && !isRatio {
				t.Errorf("%s is %s in the list, %d (%v) in go-dcgm", name, columns[0], id, ok)
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
		t.Errorf("%d names in go-dcgm; has const_fields.go changed?", len(keys))
	}
	for _, key := range keys {
		if id, _ := dcgm.GetFieldID(key[1]); !listed[key[1]] {
			t.Errorf("the list lacks %s, field %d", key[1], id)
		}
	}
}
