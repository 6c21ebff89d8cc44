//go:build cgo && linux

package nvml

import (
	"regexp"
	"strings"
	"testing"

	"github.com/gpu-node-agent/gpu-node-agent/health/internal/trampoline"
	"github.com/gpu-node-agent/gpu-node-agent/internal/golden"
)

//go:generate go test -run TestSymbolList -update .

// binding is go-nvml.
var binding = trampoline.Binding{
	Module: "github.com/NVIDIA/go-nvml", Package: "pkg/nvml", Macros: regexp.MustCompile(`DECLDIR|DEPRECATED\([\d.]+\)`),
	IsFunction: func(name string) bool { return strings.HasPrefix(name, "nvml") && !strings.HasSuffix(name, "_t") },
	Kind: func(result string) string {
		switch result {
		case "nvmlReturn_t":
			return "INT"
		case "const char*":
			return "TEXT"
		}
		return ""
	},
}

// TestSymbolList checks that symbol_list.h lists the functions of NVML that go-nvml calls, by what they return. With -update it
// writes the file.
func TestSymbolList(t *testing.T) {
	text, count := binding.SymbolList(t)
	if count["INT"] < 400 || count["TEXT"] != 1 || len(count) != 2 {
		t.Fatalf("found %v; has go-nvml changed its layout?", count)
	}
	golden.Check(t, "symbol_list.h", text)
}

// TestNoUndefinedSymbols checks that symbols.c defines all NVML functions.
func TestNoUndefinedSymbols(t *testing.T) { binding.CheckSymbols(t) }
