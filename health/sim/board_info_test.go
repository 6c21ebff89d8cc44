package sim

import (
	"maps"
	"regexp"
	"testing"

	"github.com/gpu-node-agent/gpu-node-agent/health"
)

func TestTexts(t *testing.T) {
	formats := map[health.Field]*regexp.Regexp{
		2:  regexp.MustCompile(`^13\.\d{3}\.\d+(\.\d+)?$`),
		51: regexp.MustCompile(`^(NVIDIA|Tesla)$`),
		53: regexp.MustCompile(`^\d{13}$`),
		56: regexp.MustCompile(`^\d\.\d$`),
		80: regexp.MustCompile(`^\d\.\d+$`),
		82: regexp.MustCompile(`^G\d{3}\.\d{4}\.\d{2}\.\d{2}$`),
		85: regexp.MustCompile(`^[0-9A-F]{2}(\.[0-9A-F]{2}){4}$`),
	}
	serials := map[string]bool{}
	for _, p := range profiles() {
		parent := map[health.DeviceID]health.Device{}
		for _, d := range p.devices(1) {
			if d.Kind == health.KindMIG {
				if !maps.Equal(d.Texts, parent[d.Parent].Texts) {
					t.Errorf("%s: %s: %v; want the texts of its parent", p.name, d.ID, d.Texts)
				}
				continue
			}
			parent[d.ID] = d
			for field, re := range formats {
				if !re.MatchString(d.Texts[field]) {
					t.Errorf("%s: %s: field %d is %q", p.name, d.ID, field, d.Texts[field])
				}
			}
			if len(d.Texts) != len(formats) {
				t.Errorf("%s: %s: %v", p.name, d.ID, d.Texts)
			}
			if serials[d.Texts[53]] {
				t.Errorf("%s: duplicate serial number %s", p.name, d.Texts[53])
			}
			serials[d.Texts[53]] = true
		}
	}
}
