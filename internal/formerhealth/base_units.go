package formerhealth

import "math"

// Derivation derives a field in base units from the older field of DCGM that measures the same: value × Mul ÷ Div.
type Derivation struct {
	From     Field
	Mul, Div float64 // one of them is 1, so that the result is the nearest float64
	Floor    bool    // the field is an integer, but the quotient need not be
}

// Apply returns the value in base units of a value of From.
func (d Derivation) Apply(v float64) float64 {
	v = v * d.Mul / d.Div
	if d.Floor {
		return math.Floor(v)
	}
	return v
}

// DerivationOf returns how a field in base units follows from an older field, false if there is no exact way: the rates of
// NVLink are KiB x 1024 and KiB / 1000, for example.
func DerivationOf(id Field) (Derivation, bool) {
	d, ok := derivations[id]
	return d, ok
}

// LastBaseUnitField is the last of the fields in base units, which begin with 1600, of DCGM 4.7.
const LastBaseUnitField Field = 1650

// AddedIn returns the version of DCGM that added a field in base units, and "" for other fields: 1600 to 1612 are in the
// dcgm_fields.h of 4.6.1; the others, of 4.7, are second hand from NVIDIA's field reference.
func AddedIn(id Field) string {
	switch {
	case id >= 1600 && id <= 1612:
		return "4.6.1"
	case id >= 1613 && id <= LastBaseUnitField:
		return "4.7"
	}
	return ""
}

// derivations lists the fields in base units that follow from older ones, which DCGM keeps measuring.
//
//nolint:gochecknoglobals // a table of constants
var derivations = func() map[Field]Derivation {
	all := make(map[Field]Derivation)
	add := func(first Field, mul, div float64, from ...Field) {
		for i, f := range from {
			all[first+Field(i)] = Derivation{From: f, Mul: mul, Div: div}
		}
	}
	const mebi = 1 << 20
	add(1600, mebi, 1, 90, 92, 93)                                               // BAR1: MiB to bytes
	add(1603, 1e6, 1, FieldSMClock, FieldMemClock, 102, 110, 111, 113, 114, 115) // clocks: MHz to Hz
	all[1611] = Derivation{From: FieldEnergy, Mul: 1, Div: 1e3, Floor: true}     // mJ to J
	add(1612, 1, 100, 191)                                                       // fan speed: percent to ratio
	add(1613, 1, 100, FieldGPUUtil, FieldMemCopyUtil, FieldEncUtil, FieldDecUtil)
	add(1617, 1, 1e9, 240, 241, 242, 243, 244, 245, 246, 247) // throttling: ns to s
	add(1625, mebi, 1, FieldFBTotal, FieldFBFree, FieldFBUsed, FieldFBReserved)
	return all
}()
