package health_test

import (
	"fmt"
	"regexp"
	"testing"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/health/catalog"
	"github.com/gpu-node-agent/gpu-node-agent/health/driver"
)

// The names are codes for labels and JSON, each of one value. An unknown value, as from another release, has a text, too.
func TestNames(t *testing.T) {
	code := regexp.MustCompile(`^[a-z0-9]+(-[a-z0-9]+)*$`)
	for kind, value := range map[string]func(i uint8) fmt.Stringer{
		"state": func(i uint8) fmt.Stringer { return health.State(i) }, "clears": func(i uint8) fmt.Stringer { return health.Clears(i) },
		"witness": func(i uint8) fmt.Stringer { return health.Witness(i) }, "event": func(i uint8) fmt.Stringer { return health.EventKind(i) },
		"event source": func(i uint8) fmt.Stringer { return health.EventSourceStatus(i) },
		"effect":       func(i uint8) fmt.Stringer { return catalog.Effect(i) },
		"checks":       func(i uint8) fmt.Stringer { return health.ChecksStatus(i) },
		"process":      func(i uint8) fmt.Stringer { return driver.ProcessKind(i) },
		"presence":     func(i uint8) fmt.Stringer { return health.Presence(i) },
		"severity":     func(i uint8) fmt.Stringer { return health.Severity(i) },
		"source":       func(i uint8) fmt.Stringer { return health.SourceStatus(i) },
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
	for i, s := range health.States() {
		if parsed, ok := health.ParseState(s.String()); !ok || parsed != s || int(s) != i {
			t.Errorf("state %d: %v, %v", i, parsed, ok)
		}
	}
	if code.MatchString(health.State(len(health.States())).String()) {
		t.Errorf("states %v", health.States())
	}
	if s, ok := health.ParseState("ill"); ok || s != health.Unknown {
		t.Errorf("a word is the state %v", s)
	}
	modes := make(map[string]bool)
	for m := range driver.ComputeMode(4) {
		modes[m.String()] = true
	}
	if unknown := driver.ComputeMode(4).String(); len(modes) != 4 || unknown != "ComputeMode(4)" || modes[unknown] || modes[""] {
		t.Errorf("compute modes %v, %s", modes, unknown)
	}
}
