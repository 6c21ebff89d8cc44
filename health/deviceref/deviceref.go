// Package deviceref reads how people say which GPU they mean: by UUID, by index, or by its place on the PCI bus.
//
//	GPU-5a1c…      the GPU of that UUID and its MIG devices
//	MIG-09ee…      the MIG device of that UUID
//	3              the GPU of that index, as nvidia-smi -i has it, and its MIG devices
//	3:0            a MIG device of it, as nvidia-smi -L counts them
//	0000:1b:00.0   the GPU at that place on the PCI bus and its MIG devices; without a domain it is 0
package deviceref

import (
	"fmt"
	"strconv"
	"strings"
)

// Names is what names a device.
type Names struct {
	UUID   string
	Parent string // MIG: the UUID of its GPU; empty for a GPU
	Index  int    // the driver's index of the GPU; MIG: its GPU's
	MIG    int    // MIG: its number on its GPU; -1 for a GPU, and if it has none
	PCI    string // bus id of the GPU; MIG: its GPU's
}

// Match reports whether a word means the device, or the GPU that it is a part of. If the word is of none of the
// kinds above, named is false. It is called for every device at every look, so it does not allocate.
func (d *Names) Match(word string) (is, named bool) {
	switch {
	case strings.HasPrefix(word, "GPU-"):
		return d.UUID == word || d.Parent == word, true
	case strings.HasPrefix(word, "MIG-"):
		return d.UUID == word, true
	}
	if gpu, mig, ok := ParseIndex(word); ok {
		return d.Index == gpu && (mig < 0 || d.Parent != "" && d.MIG == mig), true
	}
	if want, ok := ParsePCI(word); ok {
		have, known := ParsePCI(d.PCI)
		return known && have == want, true
	}
	return false, false
}

// Valid reports whether a word is of one of the kinds above.
func Valid(word string) bool {
	_, named := (&Names{}).Match(word)
	return named && word != "GPU-" && word != "MIG-"
}

// ParseIndex reads "3" and "3:0"; mig is -1 for the first.
func ParseIndex(s string) (gpu, mig int, ok bool) {
	g, m, hasMIG := strings.Cut(s, ":")
	gpu, ok = ParseDigits(g)
	if !ok || !hasMIG {
		return gpu, -1, ok
	}
	mig, ok = ParseDigits(m)
	return gpu, mig, ok
}

// ParseDigits is strconv.Atoi for what is only digits, and without an error to allocate for what is not.
func ParseDigits(s string) (int, bool) {
	if s == "" || len(s) > 9 || strings.Trim(s, "0123456789") != "" {
		return 0, false
	}
	n, err := strconv.Atoi(s)
	return n, err == nil
}

// PCIAddress is a place on the PCIAddress bus.
type PCIAddress struct{ domain, bus, device, function uint64 }

// ParsePCI reads 00000000:1B:00.0, as the driver writes it, 0000:1b:00.0, as Linux does, and 1b:00.0.
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
	var okDomain, okBus, okDevice, okFunction bool
	a.domain, okDomain = hex(domain, 8)
	a.bus, okBus = hex(bus, 2)
	a.device, okDevice = hex(device, 2)
	a.function, okFunction = hex(function, 1)
	return a, okDomain && okBus && okDevice && okFunction
}

// String is as Linux writes it.
func (a PCIAddress) String() string {
	return fmt.Sprintf("%04x:%02x:%02x.%x", a.domain, a.bus, a.device, a.function)
}

func hex(s string, maxDigits int) (uint64, bool) {
	if s == "" || len(s) > maxDigits || strings.Trim(s, "0123456789abcdefABCDEF") != "" {
		return 0, false
	}
	n, err := strconv.ParseUint(s, 16, 64)
	return n, err == nil
}
