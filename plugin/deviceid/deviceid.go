// Package deviceid writes and reads the IDs by which the kubelet knows devices and the units of shared devices.
package deviceid

import (
	"iter"
	"strconv"
	"strings"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/health/deviceref"
)

// separator stands between the parts of an ID, as in NVIDIA's plugin.
const separator = "::"

// Kind is what an ID identifies.
type Kind int

// The kinds of IDs. Those of MPS shares and of memory contain what serves the units and their size. So a container that holds a unit of
// another kind or size, from before a change, holds an ID outside the layout, and the device is withheld.
const (
	Whole       Kind = iota // UUID: the device
	Replica                 // UUID::3: a replica of time-slicing, as in NVIDIA's plugin
	MPSShare                // UUID::mps4::3: one of Size shares that MPS serves, which have the memory in equal parts
	MPSMemory               // UUID::mps8192Mi::3: a share that MPS serves with Size MiB of pinned memory
	Memory                  // UUID::1024Mi::3: Size MiB of memory
	MemoryByMPS             // UUID::1024Mi-mps::3: Size MiB of memory that MPS limits
	Other                   // UUID::…: a unit, in a form that the agent does not write
)

// Form is the kind and the size that the IDs of all units of a device have.
type Form struct {
	Kind Kind
	Size uint64 // 0 of a Whole, Replica and Other
}

// ID is an ID of the kubelet. Its parts are read when they are asked for: a request of the kubelet may have thousands of IDs.
type ID struct {
	text   string
	device int // its length
}

// Parse reads an ID in any form.
func Parse(text string) ID {
	if i := strings.Index(text, separator); i >= 0 {
		return ID{text, i}
	}
	return ID{text, len(text)}
}

// String returns the ID as the kubelet has it.
func (id ID) String() string { return id.text }

// Device returns the device. It is a UUID; another plugin's may be an index or a name, such as 0:1 or nvidia0/gi1.
func (id ID) Device() health.DeviceID { return health.DeviceID(id.text[:id.device]) }

// Form returns the kind and the size of a unit.
func (id ID) Form() Form {
	if id.device == len(id.text) {
		return Form{}
	}
	unit := id.text[id.device+len(separator):]
	if _, ok := parseNumber(unit); ok {
		return Form{Kind: Replica}
	}
	form, number, _ := strings.Cut(unit, separator)
	if _, ok := parseNumber(number); ok {
		return parseForm(form)
	}
	return Form{Kind: Other}
}

// parseForm reads what stands between the separators.
func parseForm(text string) Form {
	size, ofMPS := strings.CutPrefix(text, "mps")
	size, limitedByMPS := strings.CutSuffix(size, "-mps")
	size, mebibytes := strings.CutSuffix(size, "Mi")
	n, ok := parseNumber(size)
	f := Form{Size: uint64(n)} //nolint:gosec // not negative
	switch {
	case !ok, ofMPS && limitedByMPS, !ofMPS && !mebibytes:
		return Form{Kind: Other}
	case ofMPS && mebibytes:
		f.Kind = MPSMemory
	case ofMPS:
		f.Kind = MPSShare
	case limitedByMPS:
		f.Kind = MemoryByMPS
	default:
		f.Kind = Memory
	}
	return f
}

// parseNumber reads a number as strconv writes it, of at most nine digits: no device has so many units or MiB.
func parseNumber(text string) (n int, ok bool) {
	n, ok = deviceref.ParseDigits(text)
	return n, ok && (text[0] != '0' || text == "0")
}

// ID returns the ID of a unit of a device.
func (f Form) ID(device health.DeviceID, number int) ID {
	if f.Kind == Whole {
		return ID{string(device), len(device)}
	}
	return ID{f.prefix(device) + strconv.Itoa(number), len(device)}
}

// Units yields the numbers and the IDs of the first n units of a device; of a Whole one there is one. The IDs are substrings of one string,
// which saves thousands of allocations.
func (f Form) Units(device health.DeviceID, n int) iter.Seq2[int, string] {
	return func(yield func(int, string) bool) {
		if f.Kind == Whole {
			yield(0, string(device))
			return
		}
		prefix := f.prefix(device)
		var b strings.Builder
		b.Grow(n * (len(prefix) + len(strconv.Itoa(n))))
		var digits [20]byte
		for i := range n {
			first := b.Len()
			b.WriteString(prefix)
			b.Write(strconv.AppendInt(digits[:0], int64(i), 10))
			if !yield(i, b.String()[first:]) {
				return
			}
		}
	}
}

// Number returns the number of a unit, and whether the ID has this form. It does not allocate: a request of the kubelet may have thousands
// of IDs.
func (f Form) Number(id ID) (n int, ok bool) {
	unit := id.text[id.device:]
	switch f.Kind {
	case Whole:
		return 0, unit == ""
	case Other:
		return 0, false
	}
	end := 1 + strings.LastIndexByte(unit, ':')
	var infix [40]byte
	n, ok = parseNumber(unit[end:])
	return n, ok && unit[:end] == string(f.appendInfix(infix[:0]))
}

// prefix returns what the IDs of a device's units have in common.
func (f Form) prefix(device health.DeviceID) string { return string(f.appendInfix([]byte(device))) }

// appendInfix appends what stands between the device and the number.
func (f Form) appendInfix(to []byte) []byte {
	to = append(to, separator...)
	switch f.Kind {
	case MPSShare:
		to = append(strconv.AppendUint(append(to, "mps"...), f.Size, 10), separator...)
	case MPSMemory:
		to = append(strconv.AppendUint(append(to, "mps"...), f.Size, 10), "Mi"+separator...)
	case Memory:
		to = append(strconv.AppendUint(to, f.Size, 10), "Mi"+separator...)
	case MemoryByMPS:
		to = append(strconv.AppendUint(to, f.Size, 10), "Mi-mps"+separator...)
	}
	return to
}
