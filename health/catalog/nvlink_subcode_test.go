package catalog

import (
	"fmt"
	"strconv"
	"strings"
	"testing"

	"github.com/gpu-node-agent/gpu-node-agent/health"
)

// nvlinkXID returns an XID with the kernel log's line of an NVLink error.
func nvlinkXID(code int, grade string, info, status uint32) health.XID {
	return health.XID{Code: code, Detail: health.XIDDetail{Text: fmt.Sprintf(
		"UNIT %s XC0 i0 Link 08 (0x%08x 0x%08x 0x00000000 0x00000000 0x00000000 0x00000000)", grade, info, status)}}
}

func TestNVLinkDetail(t *testing.T) {
	line := "NETIR_LINK_EVT Fatal XC0 i0 Link 08 (0x004505c6 0x00000000 0x00000000 0x00000000 0x00000000 0x00000000)"
	for name, c := range map[string]struct {
		code  int
		text  string
		want  nvlinkError
		valid bool
	}{
		"a line": {149, line, nvlinkError{149, "NETIR_LINK_EVT", true, false, 8, 0x4505c6, 0}, true},
		"an alias": {
			149, "NETIR_LINK_EVT/NETIR_LINK_DOWN Fatal XC0 i0 Link 08 (0x004505c6 0x1 0x0)",
			nvlinkError{149, "NETIR_LINK_EVT/NETIR_LINK_DOWN", true, false, 8, 0x4505c6, 1},
			true,
		},
		"no link, injected": {
			145, "RLW_REMAP Nonfatal XC1 i1 Link -1 (0x00000082 0x00000040)",
			nvlinkError{145, "RLW_REMAP", false, true, -1, 0x82, 0x40},
			true,
		},
		"cut":              {149, "NETIR_LINK_EVT Fatal XC0 i0 Link 08 (0x004505c6", nvlinkError{}, false},
		"another XID":      {74, line, nvlinkError{}, false},
		"another grade":    {149, "NETIR_LINK_EVT Severe XC0 i0 Link 08 (0x004505c6 0x0)", nvlinkError{}, false},
		"another word":     {149, "NETIR_LINK_EVT Fatal XC0 i0 Port 08 (0x004505c6 0x0)", nvlinkError{}, false},
		"no number":        {149, "NETIR_LINK_EVT Fatal XC0 i0 Link 08 (0x 0x0)", nvlinkError{}, false},
		"too large":        {149, "NETIR_LINK_EVT Fatal XC0 i0 Link 08 (0x1004505c6 0x0)", nvlinkError{}, false},
		"status too large": {149, "NETIR_LINK_EVT Fatal XC0 i0 Link 08 (0x004505c6 0x100000000)", nvlinkError{}, false},
		"the first XID":    {144, "SAW_MVB Fatal XC0 i0 Link 08 (0x21 0x1)", nvlinkError{144, "SAW_MVB", true, false, 8, 0x21, 1}, true},
		"the last XID":     {150, "MSE Fatal XC0 i0 Link 08 (0x0 0x1)", nvlinkError{150, "MSE", true, false, 8, 0, 1}, true},
		"the XID before":   {143, line, nvlinkError{}, false},
		"the XID after":    {151, line, nvlinkError{}, false},
		"no text":          {149, "", nvlinkError{}, false},
	} {
		got, ok := nvlinkDetail(health.XID{Code: c.code, Detail: health.XIDDetail{Text: c.text}})
		if ok != c.valid || ok && got != c.want {
			t.Errorf("%s: %+v, %v; want %+v, %v", name, got, ok, c.want, c.valid)
		}
	}
}

func TestNVLinkResolutions(t *testing.T) {
	linkEvent := func(subcode uint32) uint32 { return subcode<<20 | netirLinkEvent }
	for name, c := range map[string]struct {
		x     health.XID
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
		e, ok := nvlinkDetail(c.x)
		got, _ := e.resolution()
		if !ok || got != c.want || e.needsReset() != c.reset {
			t.Errorf("%s: %v, %v, needs a reset %v; want %v, %v", name, ok, got, e.needsReset(), c.want, c.reset)
		}
	}
}

// The rules are exactly the rules of NVIDIA's catalogue. A unit whose only status in the catalogue is 0 has its resolution with every
// status.
func TestNVLinkCatalogue(t *testing.T) {
	resolutions := map[string]nvlinkResolution{"IGNORE": nvlinkIgnore, "XID_154_EVAL": nvlinkFollow, "RESET_GPU": nvlinkReset}
	hints := map[string]string{
		"": "", "INVESTIGATE_LINK_SI": "signal integrity", "INVESTIGATE_SW_USER": "user", "INVESTIGATE_SW_USER_LINK_SI": "signal integrity",
		"INVESTIGATE_PEER_DEVICE": "peer", "INVESTIGATE_HOST": "host",
	}
	number := func(text string, base int) uint32 {
		n, err := strconv.ParseUint(text, base, 32)
		if err != nil {
			t.Fatal(err)
		}
		return uint32(n)
	}
	type key struct {
		xid          int
		info, status uint32
	}
	want := make(map[key]nvlinkResolution)
	anyStatus := make(map[key]nvlinkResolution)
	for _, row := range readCSV(t, "nvlink_catalogue.csv", 7) {
		xid, err := strconv.Atoi(row[0])
		resolution, known := resolutions[row[5]]
		hint, hinted := hints[row[6]]
		if err != nil || !known || !hinted {
			t.Fatalf("%q: %v", row, err)
		}
		info := number(row[2], 2)<<20 | number(row[3], 2)
		for text := range strings.FieldsSeq(row[4]) {
			status := number(text, 0)
			want[key{xid, info, status}] = resolution
			if _, got := (nvlinkError{xid: xid, info: info, status: status}).resolution(); (hint == "") != (got == "") ||
				!strings.Contains(got, hint) {
				t.Errorf("%q: hint %q", row, got)
			}
		}
		if row[4] == "0x0" && row[1] != "NETIR_LINK_EVT" {
			anyStatus[key{xid: xid, info: info}] = resolution
		}
	}
	statuses := []uint32{0}
	for low := range uint32(64) {
		statuses = append(statuses, low)
	}
	for bit := range 32 {
		statuses = append(statuses, 1<<bit)
	}
	check := func(xid int, info uint32) {
		for _, status := range statuses {
			w, listed := want[key{xid, info, status}]
			if !listed {
				w = anyStatus[key{xid: xid, info: info}]
			}
			if got, _ := (nvlinkError{xid: xid, info: info, status: status}).resolution(); got != w {
				t.Fatalf("XID %d, %#x, status %#x: %v, want %v", xid, info, status, got, w)
			}
		}
	}
	for xid := 144; xid <= 150; xid++ {
		for unit := range uint32(1 << 10) {
			check(xid, unit)
		}
		for subcode := range uint32(1 << 6) { // part of the resolution for that unit only
			check(xid, subcode<<20|netirLinkEvent)
		}
	}
}

// The description has the driver's words, the link, the subcode or status, and the catalogue's hint.
func TestNVLinkDescription(t *testing.T) {
	for text, want := range map[string]string{
		"NETIR_LINK_EVT Fatal XC0 i0 Link 08 (0x004001c6 0x0)":    "fatal NETIR_LINK_EVT on link 8, subcode 4, check signal integrity and cables",
		"NETIR_LINK_EVT Nonfatal XC0 i1 Link 00 (0x005001c6 0x0)": "non-fatal NETIR_LINK_EVT on link 0, subcode 5, injected by a test",
		"NETIR_INT Fatal XC0 i0 Link -1 (0x00000006 0x1f)":        "fatal NETIR_INT, error status 0x1f",
	} {
		e, ok := nvlinkDetail(health.XID{Code: 149, Detail: health.XIDDetail{Text: text}})
		if got := e.String(); !ok || got != want {
			t.Errorf("%s: %q, %v; want %q", text, got, ok, want)
		}
	}
	// Only of XID 149 the unit's number means a link event.
	e, ok := nvlinkDetail(health.XID{Code: 150, Detail: health.XIDDetail{Text: "MSE Fatal XC0 i0 Link 01 (0x000001c6 0x2)"}})
	if want := "fatal MSE on link 1, error status 0x2"; !ok || e.String() != want {
		t.Errorf("%q, want %q", e, want)
	}
}
