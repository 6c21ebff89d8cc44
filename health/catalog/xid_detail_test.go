package catalog

import (
	"strings"
	"testing"

	"github.com/gpu-node-agent/gpu-node-agent/health"
)

func TestXIDDescription(t *testing.T) {
	for name, c := range map[string]struct {
		x          health.XID
		has, hasNo []string
	}{
		"without a detail": {health.XID{Code: 31}, nil, []string{"process"}},
		"with a process": {
			health.XID{Code: 31, Detail: health.XIDDetail{Process: "python3", PID: 7194, Text: "Ch 00000008"}},
			[]string{"process python3 (pid 7194)"},
			[]string{"Ch 0"},
		},
		"with a name only": {health.XID{Code: 31, Detail: health.XIDDetail{Process: "python3"}}, []string{"process python3"}, []string{"pid"}},
		"with a pid only":  {health.XID{Code: 31, Detail: health.XIDDetail{PID: 7194}}, []string{"process 7194"}, []string{"pid"}},
		"contained error": {
			health.XID{Code: 94, Detail: health.XIDDetail{Text: "Contained: CE User Channel (0x9). RST: No, D-RST: No"}},
			[]string{"Contained: CE User Channel (0x9). RST: No, D-RST: No"},
			nil,
		},
		"uncontained error": {
			health.XID{Code: 95, Detail: health.XIDDetail{Process: "a", PID: 1, Text: "Uncontained: LTC TAG. RST: Yes, D-RST: No"}},
			[]string{"process a (pid 1)", "Uncontained: LTC TAG. RST: Yes"},
			nil,
		},
		"recovery action": {
			health.XID{Code: 154, Detail: health.XIDDetail{Text: "GPU recovery action changed from 0x0 (None) to 0x1 (GPU Reset Required)"}},
			[]string{"GPU recovery action changed from 0x0 (None) to 0x1 (GPU Reset Required)"},
			nil,
		},
		"recovery action, another text": {health.XID{Code: 154, Detail: health.XIDDetail{Text: "other"}}, nil, []string{"other"}},
		"NVLink": {
			health.XID{Code: 149, Detail: health.XIDDetail{Text: "NETIR_LINK_EVT Fatal XC0 i1 Link 08 (0x004505c6 0x00000000)"}},
			[]string{"fatal NETIR_LINK_EVT on link 8", "subcode 4", hintSignal, "injected"},
			[]string{"non-fatal", "status"},
		},
		"NVLink of no link": {
			health.XID{Code: 145, Detail: health.XIDDetail{Text: "RLW_REMAP Nonfatal XC0 i0 Link -1 (0x82 0x20)"}},
			[]string{"non-fatal RLW_REMAP", "status 0x20"},
			[]string{"link -1", "injected", "subcode"},
		},
	} {
		text := Describe(c.x)
		if name := LookupXID(c.x.Code).Name; !strings.HasPrefix(text, name) || strings.Count(text, name) != 1 {
			t.Errorf("%s: %q, want it to begin with %q", name, text, name)
		}
		for _, s := range c.has {
			if !strings.Contains(text, s) {
				t.Errorf("%s: %q has no %q", name, text, s)
			}
		}
		for _, s := range c.hasNo {
			if strings.Contains(text, s) {
				t.Errorf("%s: %q has %q", name, text, s)
			}
		}
	}
}
