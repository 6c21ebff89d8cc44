// Package deviceref parses device references, the ways in which people name a GPU or a MIG device:
//
//	GPU-5a1c…      the GPU with that UUID, and its MIG devices
//	MIG-09ee…      the MIG device with that UUID
//	3              the GPU with that index, as for nvidia-smi -i, and its MIG devices
//	3:0            a MIG device of that GPU, by its number in nvidia-smi -L
//	0000:1b:00.0   the GPU at that PCI address, and its MIG devices; the domain defaults to 0
package deviceref

import (
	"fmt"
	"strconv"
	"strings"
)

// gpuPrefix starts the UUID of a GPU. Case is ignored, but not in "MIG-": mig- starts the pattern of a profile (plugin.selects).
const gpuPrefix = "GPU-"

// Names holds everything that a reference to a device can contain.
type Names struct {
	UUID   string
	Parent string // MIG device: the UUID of its GPU; empty for a GPU
	Index  int    // the driver's index of the GPU; MIG device: its GPU's
	MIG    int    // MIG device: its number on its GPU; -1 for a GPU, or if unknown
	PCI    string // bus ID of the GPU; MIG device: its GPU's
}

// Match reports whether ref identifies the device or its parent GPU. If ref has none of the forms above, valid is
// false. Every poll calls it for every device, so it does not allocate.
func (n *Names) Match(ref string) (match, valid bool) {
	switch {
	case len(ref) >= len(gpuPrefix) && strings.EqualFold(ref[:len(gpuPrefix)], gpuPrefix):
		return strings.EqualFold(n.UUID, ref) || strings.EqualFold(n.Parent, ref), true
	case strings.HasPrefix(ref, "MIG-"):
		return n.UUID == ref, true
	}
	if gpu, mig, ok := ParseIndex(ref); ok {
		return n.Index == gpu && (mig < 0 || n.Parent != "" && n.MIG == mig), true
	}
	if address, ok := ParsePCI(ref); ok {
		gpu, ok := ParsePCI(n.PCI)
		return ok && gpu == address, true
	}
	return false, false
}

// Valid reports whether ref has one of the forms above.
func Valid(ref string) bool {
	_, valid := (&Names{}).Match(ref)
	return valid && !strings.EqualFold(ref, gpuPrefix) && ref != "MIG-"
}

// ParseIndex parses a GPU index such as "3", for which mig is -1, or a MIG index such as "3:0".
func ParseIndex(s string) (gpu, mig int, ok bool) {
	g, m, hasMIG := strings.Cut(s, ":")
	gpu, ok = ParseDigits(g)
	if !ok || !hasMIG {
		return gpu, -1, ok
	}
	mig, ok = ParseDigits(m)
	return gpu, mig, ok
}

// ParseDigits parses up to nine decimal digits. Unlike strconv.Atoi it accepts no sign and allocates no error.
func ParseDigits(s string) (n int, ok bool) {
	if s == "" || len(s) > 9 {
		return 0, false
	}
	for i := range len(s) {
		digit := s[i] - '0'
		if digit > 9 {
			return 0, false
		}
		n = 10*n + int(digit)
	}
	return n, true
}

// PCIAddress is the address of a device on the PCI bus.
type PCIAddress struct{ domain, bus, device, function uint64 }

// ParsePCI parses the driver's form (00000000:1B:00.0), Linux's form (0000:1b:00.0) and the short form (1b:00.0).
func ParsePCI(s string) (a PCIAddress, ok bool) {
	rest, function, ok := strings.Cut(s, ".")
	if !ok {
		return a, false
	}
	colon := strings.LastIndexByte(rest, ':')
	if colon < 0 {
		return a, false
	}
	bus, device := rest[:colon], rest[colon+1:]
	domain := "0"
	if colon = strings.LastIndexByte(bus, ':'); colon >= 0 {
		domain, bus = bus[:colon], bus[colon+1:]
	}
	for _, part := range []struct {
		to        *uint64
		s         string
		maxDigits int
	}{{&a.domain, domain, 8}, {&a.bus, bus, 2}, {&a.device, device, 2}, {&a.function, function, 1}} {
		if *part.to, ok = parseHex(part.s, part.maxDigits); !ok {
			return a, false
		}
	}
	return a, true
}

// String formats the address as Linux does.
func (a PCIAddress) String() string {
	return fmt.Sprintf("%04x:%02x:%02x.%x", a.domain, a.bus, a.device, a.function)
}

func parseHex(s string, maxDigits int) (uint64, bool) {
	if s == "" || len(s) > maxDigits || strings.Trim(s, "0123456789abcdefABCDEF") != "" {
		return 0, false
	}
	n, err := strconv.ParseUint(s, 16, 64)
	return n, err == nil
}
