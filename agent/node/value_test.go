package node

import (
	"strings"
	"testing"

	"k8s.io/apimachinery/pkg/api/validate/content"
)

func TestLabelValue(t *testing.T) {
	long := strings.Repeat("x", 62)
	for text, want := range map[string]string{
		"": "", "azAZ09": "azAZ09", "a_b.c-d": "a_b.c-d", " a  b\t": "a-b", "A (R) B": "A-R-B", "a{|}~[@]`^/:b": "ab", "Ünï": "n", "._-x-_.": "x",
		"-._":       "",
		long + "yz": long + "y", long + ".z": long, ".." + long + "yz": long + "y", long + "-": long, "a": "a", "0": "0", "Z": "Z",
	} {
		got := labelValue(text)
		if reasons := content.IsLabelValue(got); got != want || len(reasons) > 0 {
			t.Errorf("%q: %q, want %q: %q", text, got, want, reasons)
		}
	}
}
