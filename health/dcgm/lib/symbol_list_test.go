//go:build cgo && linux

package lib

import (
	"regexp"
	"strings"
	"testing"

	"github.com/gpu-node-agent/gpu-node-agent/health/internal/trampoline"
	"github.com/gpu-node-agent/gpu-node-agent/internal/golden"
)

//go:generate go test -run TestSymbolList -update .

// binding is go-dcgm.
var binding = trampoline.Binding{
	Module: "github.com/NVIDIA/go-dcgm", Package: "pkg/dcgm", Macros: regexp.MustCompile("DCGM_PUBLIC_API"),
	IsFunction: func(name string) bool {
		isDCGM := strings.HasPrefix(strings.ToLower(name), "dcgm") || name == "errorString"
		return isDCGM && !strings.HasSuffix(name, "_t") && !strings.HasSuffix(name, "_f")
	},
	Kind: func(result string) string {
		switch {
		case result == "int", result == "dcgmReturn_t":
			return "INT"
		case result == "const char *":
			return "TEXT"
		case strings.HasSuffix(result, "*"), strings.HasSuffix(result, "_p"):
			return "POINTER"
		}
		return ""
	},
}

// TestSymbolList checks that symbol_list.h lists the functions of DCGM that go-dcgm calls, by what they return. With -update
// it writes the file.
func TestSymbolList(t *testing.T) {
	text, count := binding.SymbolList(t)
	if count["INT"] < 40 || count["POINTER"] == 0 || count["TEXT"] == 0 {
		t.Fatalf("found %v; has go-dcgm changed its layout?", count)
	}
	golden.Check(t, "symbol_list.h", text)
}

// TestNoUndefinedSymbols checks that symbols.c defines all DCGM functions.
func TestNoUndefinedSymbols(t *testing.T) { binding.CheckSymbols(t) }
