package health

import "testing"

// The examples of dcgm-exporter's renamed default fields. A ratio is the nearest float64 of percent ÷ 100.
func TestDerivationOf(t *testing.T) {
	for _, c := range []struct {
		id, from    Field
		value, want float64
	}{
		{1603, FieldSMClock, 1980, 1.98e9},
		{1604, FieldMemClock, 2619, 2.619e9},
		{1610, 115, 1, 1e6},
		{1611, FieldEnergy, 1999, 1},
		{1612, 191, 35, 0.35},
		{1613, FieldGPUUtil, 7, 0.07},
		{1616, FieldDecUtil, 29, 0.29},
		{1617, 240, 1_500_000_000, 1.5},
		{1624, 247, 1, 1e-9},
		{1625, FieldFBTotal, 81559, 81559 << 20},
		{1628, FieldFBReserved, 1, 1 << 20},
	} {
		d, ok := DerivationOf(c.id)
		if !ok || d.From != c.from {
			t.Errorf("field %d is derived from %d (%t), want %d", c.id, d.From, ok, c.from)
			continue
		}
		if got := d.Apply(c.value); got != c.want {
			t.Errorf("field %d of %v = %v, want %v", c.id, c.value, got, c.want)
		}
	}
	for _, id := range []Field{0, 1599, 1629, 1630, 1648, 1649, 1650, FieldGPUUtil} {
		if d, ok := DerivationOf(id); ok {
			t.Errorf("field %d is derived from %d, want no derivation", id, d.From)
		}
	}
}

// Every field that follows from an older one was added by some version, and the older ones by none.
func TestAddedIn(t *testing.T) {
	for id, want := range map[Field]string{
		1599: "", 1600: "4.6.1", 1612: "4.6.1", 1613: "4.7", 1648: "4.7", LastBaseUnitField: "4.7", LastBaseUnitField + 1: "", FieldGPUUtil: "",
	} {
		if got := AddedIn(id); got != want {
			t.Errorf("field %d was added in %q, want %q", id, got, want)
		}
	}
	for id, d := range derivations {
		if AddedIn(id) == "" || AddedIn(d.From) != "" {
			t.Errorf("field %d was added in %q, field %d in %q", id, AddedIn(id), d.From, AddedIn(d.From))
		}
	}
}
