package health

import (
	"fmt"
	"regexp"
	"testing"
)

// The names are codes for labels and JSON, each of one value. An unknown value, as from another release, has a text, too.
func TestNames(t *testing.T) {
	code := regexp.MustCompile(`^[a-z0-9]+(-[a-z0-9]+)*$`)
	for kind, value := range map[string]func(i uint8) fmt.Stringer{
		"state": func(i uint8) fmt.Stringer { return State(i) }, "clears": func(i uint8) fmt.Stringer { return Clears(i) },
		"witness": func(i uint8) fmt.Stringer { return Witness(i) }, "event": func(i uint8) fmt.Stringer { return EventKind(i) },
		"event source": func(i uint8) fmt.Stringer { return EventSourceStatus(i) }, "effect": func(i uint8) fmt.Stringer { return Effect(i) },
		"checks": func(i uint8) fmt.Stringer { return ChecksStatus(i) }, "process": func(i uint8) fmt.Stringer { return ProcessKind(i) },
		"presence": func(i uint8) fmt.Stringer { return Presence(i) }, "severity": func(i uint8) fmt.Stringer { return Severity(i) },
		"source": func(i uint8) fmt.Stringer { return SourceStatus(i) },
	} {
		names := make(map[string]bool)
		n := uint8(0)
		for ; code.MatchString(value(n).String()); n++ {
			names[value(n).String()] = true
		}
		if n < 2 || len(names) != int(n) {
			t.Errorf("%s: %d values have the names %v", kind, n, names)
		}
		for _, i := range []uint8{n, 255} {
			if got, want := value(i).String(), fmt.Sprintf("%%!(%d)", i); got != want {
				t.Errorf("%s %d: %q, want %q", kind, i, got, want)
			}
		}
	}
	for i, s := range States() {
		if parsed, ok := ParseState(s.String()); !ok || parsed != s || int(s) != i {
			t.Errorf("state %d: %v, %v", i, parsed, ok)
		}
	}
	if len(States()) != len(stateNames) {
		t.Errorf("states %v", States())
	}
	if s, ok := ParseState("ill"); ok || s != Unknown {
		t.Errorf("a word is the state %v", s)
	}
	modes := make(map[string]bool)
	for m := range ComputeMode(4) {
		modes[m.String()] = true
	}
	if unknown := ComputeMode(4).String(); len(modes) != 4 || unknown != "ComputeMode(4)" || modes[unknown] || modes[""] {
		t.Errorf("compute modes %v, %s", modes, unknown)
	}
}
