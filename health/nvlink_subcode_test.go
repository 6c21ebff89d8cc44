package health

import (
	"fmt"
	"testing"
)

// nvlinkXID returns an XID with the kernel log's line of an NVLink error.
func nvlinkXID(code int, grade string, info, status uint32) XID {
	return XID{Code: code, Detail: XIDDetail{Text: fmt.Sprintf("UNIT %s XC0 i0 Link 08 (0x%08x 0x%08x 0x00000000 0x00000000 0x00000000 0x00000000)", grade, info, status)}}
}

func TestNVLinkDetail(t *testing.T) {
	line := "NETIR_LINK_EVT Fatal XC0 i0 Link 08 (0x004505c6 0x00000000 0x00000000 0x00000000 0x00000000 0x00000000)"
	for name, c := range map[string]struct {
		code  int
		text  string
		want  nvlinkError
		valid bool
	}{
		"a line":            {149, line, nvlinkError{149, "NETIR_LINK_EVT", true, false, 8, 0x4505c6, 0}, true},
		"an alias":          {149, "NETIR_LINK_EVT/NETIR_LINK_DOWN Fatal XC0 i0 Link 08 (0x004505c6 0x1 0x0)", nvlinkError{149, "NETIR_LINK_EVT/NETIR_LINK_DOWN", true, false, 8, 0x4505c6, 1}, true},
		"no link, injected": {145, "RLW_REMAP Nonfatal XC1 i1 Link -1 (0x00000082 0x00000040)", nvlinkError{145, "RLW_REMAP", false, true, -1, 0x82, 0x40}, true},
		"cut":               {149, "NETIR_LINK_EVT Fatal XC0 i0 Link 08 (0x004505c6", nvlinkError{}, false},
		"another XID":       {74, line, nvlinkError{}, false},
		"another grade":     {149, "NETIR_LINK_EVT Severe XC0 i0 Link 08 (0x004505c6 0x0)", nvlinkError{}, false},
		"another word":      {149, "NETIR_LINK_EVT Fatal XC0 i0 Port 08 (0x004505c6 0x0)", nvlinkError{}, false},
		"no number":         {149, "NETIR_LINK_EVT Fatal XC0 i0 Link 08 (0x 0x0)", nvlinkError{}, false},
		"too large":         {149, "NETIR_LINK_EVT Fatal XC0 i0 Link 08 (0x1004505c6 0x0)", nvlinkError{}, false},
		"no text":           {149, "", nvlinkError{}, false},
	} {
		got, ok := XID{Code: c.code, Detail: XIDDetail{Text: c.text}}.nvlinkDetail()
		if ok != c.valid || ok && got != c.want {
			t.Errorf("%s: %+v, %v; want %+v, %v", name, got, ok, c.want, c.valid)
		}
	}
}

func TestNVLinkResolutions(t *testing.T) {
	linkEvent := func(subcode uint32) uint32 { return subcode<<20 | netirLinkEvent }
	for name, c := range map[string]struct {
		x     XID
		want  nvlinkResolution
		reset bool
	}{
		"SAW_MVB, ignored":                      {nvlinkXID(144, "Nonfatal", 0x21, 0x1), nvlinkIgnore, false},
		"SAW_MVB, reset":                        {nvlinkXID(144, "Fatal", 0x21, 0x10), nvlinkReset, true},
		"two bits, graded by the driver":        {nvlinkXID(144, "Fatal", 0x21, 0x3), nvlinkUnlisted, true},
		"two bits, non-fatal":                   {nvlinkXID(144, "Nonfatal", 0x21, 0x3), nvlinkUnlisted, false},
		"RLW_REMAP follows":                     {nvlinkXID(145, "Nonfatal", 0x82, 0x20), nvlinkFollow, false},
		"RLW_REMAP, reset":                      {nvlinkXID(145, "Fatal", 0x82, 0x80), nvlinkReset, true},
		"RLW_REMAP, 32 bits":                    {nvlinkXID(145, "Nonfatal", 0x82, 0x80000000), nvlinkIgnore, false},
		"TLW_TX":                                {nvlinkXID(146, "Fatal", 0x163, 0x4), nvlinkReset, true},
		"TREX":                                  {nvlinkXID(147, "Nonfatal", 0x184, 0x1), nvlinkIgnore, false},
		"NVLPW_CTRL":                            {nvlinkXID(148, "Nonfatal", 0x5, 0x80000000), nvlinkIgnore, false},
		"NETIR_INT, any status":                 {nvlinkXID(149, "Fatal", 0x6, 0x1234), nvlinkReset, true},
		"bit errors":                            {nvlinkXID(149, "Nonfatal", 0x226, 2), nvlinkIgnore, false},
		"link event":                            {nvlinkXID(149, "Fatal", linkEvent(4), 0), nvlinkReset, true},
		"link event, bits beside unit and code": {nvlinkXID(149, "Fatal", linkEvent(4)|0xfc00_0000|1<<15, 0), nvlinkReset, true},
		"link event of a user":                  {nvlinkXID(149, "Fatal", linkEvent(38), 0), nvlinkIgnore, false},
		"link event of the host":                {nvlinkXID(149, "Fatal", linkEvent(40), 0), nvlinkIgnore, false},
		"link event with a status":              {nvlinkXID(149, "Fatal", linkEvent(38), 1), nvlinkUnlisted, true},
		"unlisted link event":                   {nvlinkXID(149, "Nonfatal", linkEvent(5), 0), nvlinkUnlisted, false},
		"watchdog":                              {nvlinkXID(150, "Fatal", 0, 7), nvlinkReset, true},
		"a new unit":                            {nvlinkXID(149, "Fatal", 0x3e6, 0), nvlinkUnlisted, true},
		"the unit of another XID":               {nvlinkXID(145, "Nonfatal", 0x21, 0x2), nvlinkUnlisted, false},
	} {
		e, ok := c.x.nvlinkDetail()
		got, _ := e.resolution()
		if !ok || got != c.want || e.needsReset() != c.reset {
			t.Errorf("%s: %v, %v, needs a reset %v; want %v, %v", name, ok, got, e.needsReset(), c.want, c.reset)
		}
	}
}

// The low five bits of a unit are the XID less 143, except that they are 0 for 150. No status has two resolutions.
func TestNVLinkRules(t *testing.T) {
	units := make(map[uint32]bool)
	for _, r := range nvlinkRules {
		if low := int(r.unit & 0x1f); low != r.xid-143 && (low != 0 || r.xid != 150) || r.unit > 0x3ff || units[r.unit] {
			t.Errorf("XID %d, unit 0x%03x: not a unit of the XID, or listed twice", r.xid, r.unit)
		}
		units[r.unit] = true
		statuses := make(map[uint32]bool)
		for _, list := range [][]uint32{r.ignore, r.follow, r.reset} {
			for _, status := range list {
				if statuses[status] {
					t.Errorf("XID %d, unit 0x%03x: status 0x%x is listed twice", r.xid, r.unit, status)
				}
				statuses[status] = true
			}
		}
		if r.always != nvlinkUnlisted && len(statuses) > 0 || r.always == nvlinkUnlisted && len(statuses) == 0 {
			t.Errorf("XID %d, unit 0x%03x: expected either statuses or a resolution for all", r.xid, r.unit)
		}
	}
	for code, e := range netirLinkEvents {
		if code > 0x3f || e.resolution == nvlinkUnlisted {
			t.Errorf("subcode %d: expected 0 to 63 and a resolution, got %v", code, e.resolution)
		}
	}
}
