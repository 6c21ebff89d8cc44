package kernellog

import (
	"bytes"
	"strconv"
	"strings"
	"unicode"
	"unicode/utf8"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/health/deviceref"
)

// The limits of health.XIDDetail.
const (
	maxProcess = 15 // bytes of a name in the kernel
	maxText    = 200
)

// record is one record of /dev/kmsg (Linux, Documentation/ABI/testing/dev-kmsg):
//
//	PRIORITY,SEQUENCE,MICROSECONDS,FLAGS[,…];MESSAGE
type record struct {
	facility uint64 // 0 for the kernel; a record that a process writes has another
	sequence uint64
	message  []byte // escaped
}

// parseRecord parses a record.
func parseRecord(line []byte) (r record, ok bool) {
	header, message, ok := bytes.Cut(bytes.TrimSuffix(line, []byte("\n")), []byte(";"))
	fields := strings.SplitN(string(header), ",", 5)
	if !ok || len(fields) < 4 {
		return r, false
	}
	priority, err := strconv.ParseUint(fields[0], 10, 32)
	sequence, sequenceErr := strconv.ParseUint(fields[1], 10, 64)
	_, timeErr := strconv.ParseUint(fields[2], 10, 64)
	return record{priority >> 3, sequence, message}, err == nil && sequenceErr == nil && timeErr == nil
}

// unescape returns a message with \xNN replaced by the byte.
func unescape(message []byte) string {
	var text []byte
	for i := 0; i < len(message); i++ {
		if rest := message[i:]; len(rest) >= 4 && rest[0] == '\\' && rest[1] == 'x' {
			if b, err := strconv.ParseUint(string(rest[2:4]), 16, 8); err == nil {
				text = append(text, byte(b))
				i += 3
				continue
			}
		}
		text = append(text, message[i])
	}
	return string(text)
}

// xidPrefix begins the message of an XID. "SXid" is an error of an NVSwitch. A GPU that is lost when the driver loads is
// printed without a number, in three records; the source does not list such a GPU.
const xidPrefix = "NVRM: Xid ("

func isXID(message []byte) bool { return bytes.HasPrefix(message, []byte(xidPrefix)) }

// parseXID parses the message of an XID, in the forms that the driver prints (open-gpu-kernel-modules, krcReportXid):
//
//	NVRM: Xid (PCI:0000:01:00): 79, GPU has fallen off the bus.
//	NVRM: Xid (PCI:0000:01:00 GPU-I:05 GPU-CI:00): 13, pid=7194, name=python3, Graphics Exception
//	NVRM: Xid (PCI:0000:01:00): 13, pid='<unknown>', name=<unknown>, Graphics Exception
//
// The name of a process may contain anything, also commas and blanks. It is taken to end at the first comma or blank.
func parseXID(message string) (health.Event, bool) {
	e := health.Event{Kind: health.EventXID, GI: -1, CI: -1}
	message, _ = strings.CutPrefix(message, xidPrefix)
	location, rest, ok := strings.Cut(message, "): ")
	if !ok {
		return e, false
	}
	address, instances, _ := strings.Cut(location, " ")
	if e.GPU, ok = busID(strings.TrimPrefix(address, "PCI:")); !ok {
		return e, false
	}
	for field := range strings.FieldsSeq(instances) {
		if id, is := strings.CutPrefix(field, "GPU-I:"); is {
			e.GI, ok = deviceref.ParseDigits(id)
		} else if id, is := strings.CutPrefix(field, "GPU-CI:"); is {
			e.CI, ok = deviceref.ParseDigits(id)
		}
		if !ok {
			return e, false
		}
	}
	number, rest, _ := strings.Cut(rest, ",")
	code, ok := deviceref.ParseDigits(number)
	if !ok || code == 0 || code > health.MaxXID {
		return e, false
	}
	e.XID = health.XID{Code: code, Witness: health.WitnessKernelLog, Detail: parseDetail(strings.TrimPrefix(rest, " "))}
	return e, true
}

// busID returns a bus ID in NVML's form, such as 00000000:1B:00.0. The driver prints it without the function, which is 0.
func busID(s string) (string, bool) {
	id := s + ".0"
	domain, rest, _ := strings.Cut(id, ":")
	if _, valid := deviceref.ParsePCI(id); !valid || len(rest) != len("1b:00.0") {
		return "", false
	}
	return strings.ToUpper(strings.Repeat("0", 8-len(domain)) + id), true
}

// parseDetail parses what follows the number of an XID.
func parseDetail(s string) (d health.XIDDetail) {
	if pid, rest, ok := cutField(s, "pid="); ok {
		if name, text, ok := cutField(rest, "name="); ok {
			s = text
			if d.PID, _ = deviceref.ParseDigits(pid); name != "<unknown>" {
				d.Process = printable(name, maxProcess)
			}
		}
	}
	d.Text = printable(s, maxText)
	return d
}

// cutField cuts a field such as "pid=7194, " from the beginning of s.
func cutField(s, key string) (value, rest string, ok bool) {
	s, ok = strings.CutPrefix(s, key)
	value, rest, found := strings.Cut(s, ", ")
	if !found {
		value = strings.TrimSuffix(value, ",") // a forwarder may remove the blank at the end of a line
	}
	return value, rest, ok
}

// printable returns at most n bytes of s. A process chooses its name, so what a terminal could take for a command, or what is
// no text, becomes "?".
func printable(s string, n int) string {
	var text strings.Builder
	for _, r := range strings.TrimLeftFunc(s, unicode.IsSpace) {
		if r == utf8.RuneError || !unicode.IsPrint(r) {
			r = '?'
		}
		if text.Len()+utf8.RuneLen(r) > n {
			break
		}
		text.WriteRune(r)
	}
	return strings.TrimSpace(text.String())
}
