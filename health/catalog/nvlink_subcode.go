package catalog

import (
	"slices"
	"strconv"
	"strings"

	"github.com/gpu-node-agent/gpu-node-agent/health"
)

// nvlinkError is an error of NVLink 5, one of the XIDs 144 to 150, as the kernel log describes it.
type nvlinkError struct {
	xid      int
	unit     string // name of the unit, such as NETIR_LINK_EVT, with an alias after a slash
	fatal    bool   // the driver's own grade
	injected bool   // a test injected the error
	link     int    // -1 if the error concerns no single link
	info     uint32 // the unit in its low 10 bits, the subcode in the bits from 20
	status   uint32 // the unit's error status
}

func (e nvlinkError) unitNumber() uint32 { return e.info & 0x3ff }
func (e nvlinkError) subcode() uint32    { return e.info >> 20 & 0x3f }

// nvlinkDetail returns the NVLink error of an XID. It returns false if the XID is another one, or if the driver's message has
// another form than
//
//	NETIR_LINK_EVT Fatal XC0 i0 Link 08 (0x004505c6 0x00000000 0x00000000 0x00000000 0x00000000 0x00000000)
func nvlinkDetail(x health.XID) (e nvlinkError, ok bool) {
	words := strings.Fields(x.Detail.Text)
	if x.Code < 144 || x.Code > 150 || len(words) < 8 || words[4] != "Link" || !strings.HasPrefix(words[6], "(") {
		return e, false
	}
	link, err := strconv.Atoi(words[5])
	info, infoErr := strconv.ParseUint(words[6][1:], 0, 32)
	status, statusErr := strconv.ParseUint(strings.TrimSuffix(words[7], ")"), 0, 32)
	graded := words[1] == "Fatal" || words[1] == "Nonfatal"
	return nvlinkError{
		xid: x.Code, unit: words[0], fatal: words[1] == "Fatal", injected: words[3] == "i1", link: link,
		info: uint32(info), status: uint32(status),
	}, graded && err == nil && infoErr == nil && statusErr == nil
}

// nvlinkResolution is what NVIDIA's catalogue requires after an NVLink error.
type nvlinkResolution uint8

// The resolutions, in the catalogue's words IGNORE, XID_154_EVAL and RESET_GPU.
const (
	nvlinkUnlisted nvlinkResolution = iota
	nvlinkIgnore
	nvlinkFollow // do what the driver's recovery action asks for
	nvlinkReset
)

// nvlinkRule is the part of NVIDIA's catalogue for one unit: the resolution by the unit's error status.
type nvlinkRule struct {
	xid                   int
	unit                  uint32
	ignore, follow, reset []uint32
	always                nvlinkResolution // the same for every status
}

// nvlinkRules are the rules of NVIDIA's catalogue for the XIDs 144 to 150 (docs.nvidia.com/deploy/xid-errors,
// NVLink 5 XIDs, 2025-10-29; gpud generates its rules from it too). NETIR_LINK_EVT is in netirLinkEvents.
//
//nolint:gochecknoglobals // a table of constants
var nvlinkRules = []nvlinkRule{
	{xid: 144, unit: 0x021, ignore: []uint32{0x1, 0x4, 0x8, 0x20}, reset: []uint32{0x2, 0x10}}, // SAW_MVB
	{xid: 145, unit: 0x062, ignore: []uint32{0x80000000}},                                      // RLW_CTRL
	{
		xid: 145, unit: 0x082, ignore: []uint32{0x100, 0x200, 0x80000000}, // RLW_REMAP
		follow: []uint32{0x1, 0x2, 0x4, 0x8, 0x10, 0x20}, reset: []uint32{0x40, 0x80},
	},
	{xid: 145, unit: 0x0a2, ignore: []uint32{0x1, 0x80000000}, reset: []uint32{0x2}},                                       // RLW_RSPCOL
	{xid: 145, unit: 0x0c2, ignore: []uint32{0x1, 0x2, 0x4, 0x8, 0x80000000}},                                              // RLW_RXPIPE
	{xid: 145, unit: 0x0e2, ignore: []uint32{0x2, 0x80000000}, follow: []uint32{0x4, 0x8}, reset: []uint32{1, 0x10, 0x20}}, // RLW_SRC_TRACK
	{xid: 145, unit: 0x102, ignore: []uint32{0x1, 0x10000, 0x80000000}, reset: []uint32{0x2, 0x20000, 0x100000}},           // RLW_TAGSTATE
	{xid: 146, unit: 0x123, ignore: []uint32{0x1, 0x2, 0x80000000}, reset: []uint32{0x4}},                                  // TLW_CTRL
	{xid: 146, unit: 0x143, ignore: []uint32{0x1, 0x2, 0x80000000}, reset: []uint32{0x4}},                                  // TLW_RX
	{xid: 146, unit: 0x163, ignore: []uint32{0x1, 0x2, 0x80000000}, reset: []uint32{0x4}},                                  // TLW_TX
	{xid: 147, unit: 0x184, ignore: []uint32{0x1, 0x80000000}},                                                             // TREX
	{xid: 148, unit: 0x005, ignore: []uint32{0x80000000}},                                                                  // NVLPW_CTRL
	{xid: 149, unit: 0x006, always: nvlinkReset},                                                                           // NETIR_INT
	{xid: 149, unit: 0x226, ignore: []uint32{0, 1, 2, 3}},                                                                  // NETIR_BER_EVENT
	{xid: 149, unit: 0x246, ignore: []uint32{0x3}, reset: []uint32{0x1, 0x4, 0x5, 0x7}},                                    // NETIR_MFDE_EVENT
	{xid: 150, unit: 0x000, always: nvlinkReset},                                                                           // MSE_WATCHDOG
}

// netirLinkEvent is the unit of XID 149 whose resolution depends on the subcode, with an error status of 0.
const netirLinkEvent = 0x1c6

// netirLinkEvents are the subcodes of NETIR_LINK_EVT in the catalogue, with its hint at the cause.
//
//nolint:gochecknoglobals // a table of constants
var netirLinkEvents = map[uint32]struct {
	resolution nvlinkResolution
	hint       string
}{
	0:  {nvlinkReset, ""},
	1:  {nvlinkReset, ""},
	2:  {nvlinkReset, hintSignal},
	4:  {nvlinkReset, hintSignal},
	10: {nvlinkReset, hintSignal},
	15: {nvlinkReset, hintSoftware},
	16: {nvlinkReset, hintEither},
	17: {nvlinkReset, hintSoftware},
	18: {nvlinkReset, hintEither},
	21: {nvlinkReset, hintPeer},
	22: {nvlinkReset, hintSoftware},
	32: {nvlinkReset, hintPeer},
	33: {nvlinkReset, hintPeer},
	34: {nvlinkReset, hintPeer},
	35: {nvlinkReset, hintPeer},
	36: {nvlinkReset, hintPeer},
	37: {nvlinkReset, hintPeer},
	38: {nvlinkIgnore, hintSoftware},
	40: {nvlinkIgnore, "check the host"},
	42: {nvlinkReset, hintSignal},
	43: {nvlinkReset, hintSignal},
}

// The hints of the catalogue that several subcodes share.
const (
	hintSignal   = "check signal integrity and cables"
	hintSoftware = "caused by software or by a user"
	hintEither   = "caused by software, by a user or by signal integrity"
	hintPeer     = "check the peer of the link"
)

// resolution returns the catalogue's resolution, and its hint at the cause.
func (e nvlinkError) resolution() (r nvlinkResolution, hint string) {
	if e.xid == 149 && e.unitNumber() == netirLinkEvent {
		if e.status != 0 {
			return nvlinkUnlisted, ""
		}
		event := netirLinkEvents[e.subcode()]
		return event.resolution, event.hint
	}
	for _, rule := range nvlinkRules {
		switch {
		case rule.xid != e.xid || rule.unit != e.unitNumber():
			continue
		case slices.Contains(rule.ignore, e.status):
			return nvlinkIgnore, ""
		case slices.Contains(rule.follow, e.status):
			return nvlinkFollow, ""
		case slices.Contains(rule.reset, e.status):
			return nvlinkReset, ""
		}
		return rule.always, ""
	}
	return nvlinkUnlisted, ""
}

// needsReset reports whether the GPU needs a reset: by the catalogue, or by the driver's grade if the catalogue does not list
// the error.
func (e nvlinkError) needsReset() bool {
	r, _ := e.resolution()
	return r == nvlinkReset || r == nvlinkUnlisted && e.fatal
}

// String describes the error in the driver's words, with the catalogue's hint.
func (e nvlinkError) String() string {
	text := "non-fatal " + e.unit
	if e.fatal {
		text = "fatal " + e.unit
	}
	if e.link >= 0 {
		text += " on link " + strconv.Itoa(e.link)
	}
	if e.xid == 149 && e.unitNumber() == netirLinkEvent {
		text += ", subcode " + strconv.Itoa(int(e.subcode()))
	} else {
		text += ", error status 0x" + strconv.FormatUint(uint64(e.status), 16)
	}
	if _, hint := e.resolution(); hint != "" {
		text += ", " + hint
	}
	if e.injected {
		text += ", injected by a test"
	}
	return text
}
