package mps

import (
	"testing"

	"github.com/gpu-node-agent/gpu-node-agent/health/driver"
)

// FuzzParseComputeMode parses any record: the mode is a valid one, the default if the text is none.
func FuzzParseComputeMode(f *testing.F) {
	for _, text := range []string{"", "0\n", "3\n", "4\n", "-1\n", "0x1", "1 2", "99999999999", "\x00", "2"} {
		f.Add([]byte(text))
	}
	f.Fuzz(func(t *testing.T, text []byte) {
		mode, err := parseComputeMode(text)
		if mode < driver.ComputeModeDefault || mode > driver.ComputeModeExclusiveProcess || err != nil && mode != driver.ComputeModeDefault {
			t.Fatalf("%q: %v, %v", text, mode, err)
		}
	})
}
