package sim

import (
	"math"
	"testing"
	"time"

	"github.com/gpu-node-agent/gpu-node-agent/health"
)

// TestBaseUnits checks that the fields in base units measure what the older fields measure: those are equal or rounded, and
// the same with either DCGM, except for the rounding of the framebuffer.
func TestBaseUnits(t *testing.T) {
	const mebi = 1 << 20
	for _, profile := range []string{"h100-8", "h100-8-mig", "l4-1"} {
		cfg := profileConfig(profile)
		polls := every(10*time.Second, 10*time.Minute)
		older := readings(t, cfg, polls...)
		cfg.DCGM = "4.7"
		finer := map[health.Field]int{}
		for n, r := range readings(t, cfg, polls...) {
			if r.Versions.DCGM != "4.7.0 (simulated)" {
				t.Fatalf("version %q", r.Versions.DCGM)
			}
			for i, s := range r.Samples {
				v, before := s.Values, older[n].Samples[i].Values
				for f, x := range v {
					if old, ok := before[f]; ok && math.Abs(old-x) > 1 || ok && old != x && (f < 250 || f > 253) {
						t.Fatalf("%s: field %d is %v with 4.7, %v with 4.6", profile, f, x, old)
					}
					d, ok := health.DerivationOf(f)
					if !ok {
						continue
					}
					old, ok := v[d.From]
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
					if x != d.Apply(old) {
						finer[f]++
					}
				}
				if v[1626]+v[1627]+v[1628] != v[1625] || v[1625] != mebi*v[health.FieldFBTotal] || v[1626] < 0 {
					t.Fatalf("%s: framebuffer %v %v %v %v", profile, v[1625], v[1626], v[1627], v[1628])
				}
				if rate := v[fieldNVLinkRate]; rate < 0 || rate > 1024*h100().nvlinkRate {
					t.Fatalf("%s: NVLinks transfer %v B/s", profile, rate)
				}
			}
		}
		for _, f := range []health.Field{1613, 1614, 1626, 1627} {
			measured := profile != "h100-8-mig" || f > 1616 // in MIG mode DCGM measures no utilization
			if measured && finer[f] == 0 {
				t.Errorf("%s: field %d is never more precise than the older field", profile, f)
			}
		}
	}
}
