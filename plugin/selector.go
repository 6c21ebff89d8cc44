package plugin

import (
	"errors"
	"fmt"
	"strconv"
	"strings"

	"github.com/gpu-node-agent/gpu-node-agent/health"
)

// A selector chooses devices, in include, exclude and sharing. It is one of
//
//	GPU-5a1c…      the GPU of that UUID and its MIG devices
//	MIG-09ee…      the MIG device of that UUID
//	3              the GPU of that index, as nvidia-smi -i has it, and its MIG devices
//	3:0            a MIG device of it
//	0000:1b:00.0   the GPU at that place on the PCI bus and its MIG devices; without a domain it is 0
//	mig-1g.*       MIG devices by profile
//	*H100*         anything else: the model, for GPUs and their MIG devices
//
// In the last two "*" stands for any run of characters, "?" for one, and capitals make no difference.
//
// selects reports whether a selector chooses a device. It is called for every device at every layout, so it
// does not allocate.
func selects(selector string, c *candidate) bool {
	d := &c.state.Device
	switch {
	case strings.HasPrefix(selector, "GPU-"):
		return string(d.ID) == selector || string(d.Parent) == selector
	case strings.HasPrefix(selector, "MIG-"):
		return string(d.ID) == selector
	case strings.HasPrefix(selector, migPrefix):
		return d.Kind == health.KindMIG && glob(selector[len(migPrefix):], c.profile)
	}
	if gpu, mig, ok := parseIndex(selector); ok {
		return d.Index == gpu && (mig < 0 || d.Kind == health.KindMIG && c.mig == mig)
	}
	if want, ok := parsePCI(selector); ok {
		have, known := parsePCI(d.PCI)
		return known && have == want
	}
	return glob(selector, d.Model)
}

// selectsAny reports whether one of the selectors chooses the device.
func selectsAny(selectors []string, c *candidate) bool {
	for _, s := range selectors {
		if selects(s, c) {
			return true
		}
	}
	return false
}

// validateSelectors refuses what can choose nothing. A UUID, an index or a model that no GPU of this node
// has is no error: one file may serve many nodes.
func validateSelectors(key string, selectors []string) error {
	var errs []error
	for i, s := range selectors {
		_, _, isIndex := parseIndex(s)
		_, isPCI := parsePCI(s)
		bad := ""
		switch {
		case strings.TrimSpace(s) == "":
			bad = "is empty"
		case strings.Contains(s, ":") && !isIndex && !isPCI:
			bad = "is neither a PCI bus id nor the index of a MIG device"
		case strings.HasPrefix(s, "-"):
			bad = "is not an index"
		}
		if bad != "" {
			errs = append(errs, fmt.Errorf("%s[%d]: %q %s; use a UUID, an index such as 0 or 0:1, a PCI bus id such as 0000:1b:00.0, "+
				"a model such as *H100* or a MIG profile such as mig-1g.*", key, i, s, bad))
		}
	}
	return errors.Join(errs...)
}

// parseIndex reads "3" and "3:0"; mig is -1 for the first.
func parseIndex(s string) (gpu, mig int, ok bool) {
	g, m, hasMIG := strings.Cut(s, ":")
	gpu, ok = digits(g)
	if !ok || !hasMIG {
		return gpu, -1, ok
	}
	mig, ok = digits(m)
	return gpu, mig, ok
}

// digits is strconv.Atoi for what is only digits, and without an error to allocate for what is not.
func digits(s string) (int, bool) {
	if s == "" || len(s) > 9 || strings.Trim(s, "0123456789") != "" {
		return 0, false
	}
	n, err := strconv.Atoi(s)
	return n, err == nil
}

// pciAddress is a place on the PCI bus.
type pciAddress struct{ domain, bus, device, function uint64 }

// parsePCI reads 00000000:1B:00.0, as the driver writes it, 0000:1b:00.0, as Linux does, and 1b:00.0.
func parsePCI(s string) (a pciAddress, ok bool) {
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

func (a pciAddress) String() string {
	return fmt.Sprintf("%04x:%02x:%02x.%x", a.domain, a.bus, a.device, a.function)
}

func hex(s string, maxDigits int) (uint64, bool) {
	if s == "" || len(s) > maxDigits || strings.Trim(s, "0123456789abcdefABCDEF") != "" {
		return 0, false
	}
	n, err := strconv.ParseUint(s, 16, 64)
	return n, err == nil
}

// glob reports whether the whole of s is like the pattern. It goes back to the last * only, which is enough:
// an earlier one could match no more than the last.
func glob(pattern, s string) bool {
	p, i := 0, 0
	star, from := -1, 0
	for i < len(s) {
		switch {
		case p < len(pattern) && pattern[p] == '*':
			star, from = p, i
			p++
		case p < len(pattern) && (pattern[p] == '?' || lower(pattern[p]) == lower(s[i])):
			p++
			i++
		case star >= 0:
			from++
			p, i = star+1, from
		default:
			return false
		}
	}
	return strings.Trim(pattern[p:], "*") == ""
}

func lower(c byte) byte {
	if 'A' <= c && c <= 'Z' {
		return c + 'a' - 'A'
	}
	return c
}
