package sim

import (
	"math"
	"testing"
	"time"

	"github.com/gpu-node-agent/gpu-node-agent/health"
)

const mebi = 1 << 20

// TestBaseUnits checks that the fields in base units measure what the older fields measure: those are equal or rounded, and
// the same with either DCGM, except for the rounding of the framebuffer.
func TestBaseUnits(t *testing.T) {
	for _, profile := range []string{"h100-8", "h100-8-mig", "l4-1"} {
		cfg := profileConfig(profile)
		polls := every(10*time.Second, 10*time.Minute)
		older := readings(t, cfg, polls...)
		cfg.DCGM = "4.7"
		finer := map[health.Field]bool{}
		for n, r := range readings(t, cfg, polls...) {
			if r.Versions.DCGM != "4.7.0 (simulated)" {
				t.Fatalf("version %q", r.Versions.DCGM)
			}
			for i, s := range r.Samples {
				v := s.Values
				checkNewValues(t, profile, v)
				checkSameValues(t, profile, older[n].Samples[i].Values, v)
				for f, x := range v {
					finer[f] = isFiner(t, profile, f, x, v) || finer[f]
				}
			}
		}
		for _, f := range []health.Field{1613, 1614, 1626, 1627} {
			measured := profile != "h100-8-mig" || f > 1616 // in MIG mode DCGM measures no utilization
			if measured && !finer[f] {
				t.Errorf("%s: field %d is never more precise than the older field", profile, f)
			}
		}
	}
}

// checkSameValues checks that the older fields have the same values with DCGM 4.7 as with 4.6, except for the rounding of the framebuffer.
func checkSameValues(t *testing.T, profile string, with46, with47 map[health.Field]float64) {
	t.Helper()
	for f, x := range with47 {
		if old, ok := with46[f]; ok && math.Abs(old-x) > 1 || ok && old != x && (f < 250 || f > 253) {
			t.Fatalf("%s: field %d is %v with 4.7, %v with 4.6", profile, f, x, old)
		}
	}
}

// checkNewValues checks the fields that only DCGM 4.7 has.
func checkNewValues(t *testing.T, profile string, v map[health.Field]float64) {
	t.Helper()
	if v[1626]+v[1627]+v[1628] != v[1625] || v[1625] != mebi*v[health.FieldFBTotal] || v[1626] < 0 {
		t.Fatalf("%s: framebuffer %v %v %v %v", profile, v[1625], v[1626], v[1627], v[1628])
	}
	if rate := v[fieldNVLinkRate]; rate < 0 || rate > 1024*h100().nvlinkRate {
		t.Fatalf("%s: NVLinks transfer %v B/s", profile, rate)
	}
}

// isFiner checks that a field in base units has the value of the older field that it replaces, but for rounding, and reports whether it is
// more precise.
func isFiner(t *testing.T, profile string, f health.Field, x float64, values map[health.Field]float64) bool {
	t.Helper()
	d, ok := health.DerivationOf(f)
	if !ok {
		return false
	}
	old, ok := values[d.From]
	tolerance := 0.0
	switch f {
	case 1613, 1614, 1615, 1616:
		tolerance = 0.0050001 // half a percent
	case 1626, 1627:
		tolerance = mebi - 1
	}
	if math.Abs(d.Apply(old)-x) > tolerance || !ok {
		t.Fatalf("%s: field %d is %v, field %d is %v (%v)", profile, f, x, d.From, old, ok)
	}
	return x != d.Apply(old)
}
