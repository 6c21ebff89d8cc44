//go:build cgo

package binarytest

import (
	"debug/elf"
	"testing"
)

// The dynamic linker resolves every symbol of the binary with the C library. A toolchain that links with "-z now" makes a
// program that does not start otherwise.
func TestImportedSymbols(t *testing.T) {
	file, err := elf.Open(binary)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = file.Close() }()
	symbols, err := file.DynamicSymbols()
	if err != nil {
		t.Fatal(err)
	}
	imported := 0
	for _, s := range symbols {
		if s.Section != elf.SHN_UNDEF || elf.ST_BIND(s.Info) == elf.STB_WEAK {
			continue
		}
		if imported++; s.Library == "" {
			t.Errorf("%s belongs to no library", s.Name)
		}
	}
	if imported == 0 {
		t.Error("no imported symbol")
	}
}
