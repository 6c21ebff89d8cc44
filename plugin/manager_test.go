package plugin

import (
	"slices"
	"testing"
)

func TestDiff(t *testing.T) {
	a, b, moved := target{"a/x", "/k"}, target{"b/x", "/k"}, target{"a/x", "/l"}
	for _, c := range []struct{ have, want, stop, start []target }{
		{nil, nil, nil, nil},
		{nil, []target{a}, nil, []target{a}},
		{[]target{a, b}, []target{b, a}, nil, nil},
		{[]target{a}, []target{b}, []target{a}, []target{b}},
		{[]target{a, b}, []target{moved, b}, []target{a}, []target{moved}},
		{[]target{a, b}, nil, []target{a, b}, nil},
	} {
		stop, start := diff(c.have, c.want)
		if !slices.Equal(stop, c.stop) || !slices.Equal(start, c.start) {
			t.Errorf("%v to %v: stop %v, start %v", c.have, c.want, stop, start)
		}
	}
}
