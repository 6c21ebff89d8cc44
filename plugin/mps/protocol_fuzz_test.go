package mps

import (
	"encoding/json"
	"reflect"
	"testing"

	"github.com/gpu-node-agent/gpu-node-agent/health"
)

// FuzzParseRequest parses any line: what is accepted is exactly one request, which is the same after a round trip.
func FuzzParseRequest(f *testing.F) {
	for _, line := range []string{
		"", "{}", "null", `{"status":{}}`, `{"reload":{}}`, `{"restart":{"device":"GPU-1"}}`, `{"status":{},"reload":{}}`,
		`{"status":{}}{"reload":{}}`,
		`{"status":{}} x`, `{"status":null}`, `{"stop":{}}`, `{"restart":{"gpu":1}}`, `{"status":{}} `, `[]`, `{"status":{"x":1}}`,
	} {
		f.Add(line)
	}
	f.Fuzz(func(t *testing.T, line string) {
		r, err := parseRequest(line)
		if err != nil {
			if r != (Request{}) {
				t.Fatalf("%q: %+v with error %v", line, r, err)
			}
			return
		}
		n := 0
		for _, v := range []any{r.Status, r.Reload, r.Restart} {
			if !reflect.ValueOf(v).IsNil() {
				n++
			}
		}
		if n != 1 {
			t.Fatalf("%q: %d requests", line, n)
		}
		text, err := json.Marshal(r)
		if err != nil {
			t.Fatal(err)
		}
		if again, err := parseRequest(string(text)); err != nil || !reflect.DeepEqual(again, r) {
			t.Fatalf("%q: %+v, after a round trip %+v, %v", line, r, again, err)
		}
	})
}

// FuzzParseComputeMode parses any record: the mode is a valid one, the default if the text is none.
func FuzzParseComputeMode(f *testing.F) {
	for _, text := range []string{"", "0\n", "3\n", "4\n", "-1\n", "0x1", "1 2", "99999999999", "\x00", "2"} {
		f.Add([]byte(text))
	}
	f.Fuzz(func(t *testing.T, text []byte) {
		mode, err := parseComputeMode(text)
		if mode < health.ComputeModeDefault || mode > health.ComputeModeExclusiveProcess || err != nil && mode != health.ComputeModeDefault {
			t.Fatalf("%q: %v, %v", text, mode, err)
		}
	})
}
