package kernellog

import (
	"bytes"
	"fmt"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/health/deviceref"
)

// event returns the event of an XID in the kernel log. gi and ci are -1 for none.
func event(gpu string, gi, ci, code int, d health.XIDDetail) health.Event {
	return health.Event{
		Kind: health.EventXID, GPU: gpu, GI: gi, CI: ci, XID: health.XID{Code: code, Witness: health.WitnessKernelLog, Detail: d},
	}
}

// received returns the event that a message leads to.
func received(message string) (health.Event, bool) {
	if !isXID([]byte(message)) {
		return health.Event{}, false
	}
	return parseXID(unescape([]byte(message)))
}

func TestParseXID(t *testing.T) {
	const gpu = "00000000:1B:00.0"
	detail := func(process string, pid int, text string) health.XIDDetail {
		return health.XIDDetail{Process: process, PID: pid, Text: text}
	}
	long := strings.Repeat("ä", 200)
	for name, c := range map[string]struct {
		message string
		want    health.Event
	}{
		"of a process": {
			"NVRM: Xid (PCI:0000:1b:00): 31, pid=7194, name=python3, Ch 00000008, intr 0",
			event(gpu, -1, -1, 31, detail("python3", 7194, "Ch 00000008, intr 0")),
		},
		"of none": {
			"NVRM: Xid (PCI:0000:1b:00): 79, GPU has fallen off the bus.",
			event(gpu, -1, -1, 79, detail("", 0, "GPU has fallen off the bus.")),
		},
		"of a compute instance": {
			"NVRM: Xid (PCI:0000:1b:00 GPU-I:05 GPU-CI:00): 13, pid=7194, name=python3, Graphics Exception",
			event(gpu, 5, 0, 13, detail("python3", 7194, "Graphics Exception")),
		},
		"of a GPU instance":      {"NVRM: Xid (PCI:0000:1b:00 GPU-I:12): 94, Contained", event(gpu, 12, -1, 94, detail("", 0, "Contained"))},
		"with another attribute": {"NVRM: Xid (PCI:0000:1b:00 GPU-I:05 NEW:1): 13, text", event(gpu, 5, -1, 13, detail("", 0, "text"))},
		"of an older driver":     {"NVRM: Xid (0000:1b:00): 48, text", event(gpu, -1, -1, 48, detail("", 0, "text"))},
		"of an unknown process": {
			"NVRM: Xid (PCI:0000:1b:00): 13, pid='<unknown>', name=<unknown>, Graphics Exception",
			event(gpu, -1, -1, 13, detail("", 0, "Graphics Exception")),
		},
		"domain above ffff": {"NVRM: Xid (PCI:10000:01:1f): 63, text", event("00010000:01:1F.0", -1, -1, 63, detail("", 0, "text"))},
		"name with a bracket": {
			"NVRM: Xid (PCI:0000:1b:00): 31, pid=1, name=a): 79, b, text",
			event(gpu, -1, -1, 31, detail("a): 79", 1, "b, text")),
		},
		"name with commas": {"NVRM: Xid (PCI:0000:1b:00): 31, pid=1, name=a,b,c, text", event(gpu, -1, -1, 31, detail("a,b,c", 1, "text"))},
		"name with quotes": {`NVRM: Xid (PCI:0000:1b:00): 31, pid=1, name='a"b', text`, event(gpu, -1, -1, 31, detail(`'a"b'`, 1, "text"))},
		"name with an escape code": {
			`NVRM: Xid (PCI:0000:1b:00): 31, pid=1, name=a\x1b[2Jb\x5c\x0ac, text`,
			event(gpu, -1, -1, 31, detail(`a?[2Jb\?c`, 1, "text")),
		},
		"name in UTF-8": {
			`NVRM: Xid (PCI:0000:1b:00): 31, pid=1, name=\xe8\xae\xad\xe7\xbb\x83\xe8, text`,
			event(gpu, -1, -1, 31, detail("训练?", 1, "text")),
		},
		"name that is an XID": {
			"NVRM: Xid (PCI:0000:1b:00): 31, pid=1, name=NVRM: Xid (PCI:0000:17:00): 79, text",
			event(gpu, -1, -1, 31, detail("NVRM: Xid (PCI:", 1, "text")),
		},
		"no message":           {"NVRM: Xid (PCI:0000:1b:00): 31, pid=1, name=a,", event(gpu, -1, -1, 31, detail("a", 1, ""))},
		"cut in the name":      {"NVRM: Xid (PCI:0000:1b:00): 31, pid=1, name=pyth", event(gpu, -1, -1, 31, detail("pyth", 1, ""))},
		"cut after the pid":    {"NVRM: Xid (PCI:0000:1b:00): 31, pid=1", event(gpu, -1, -1, 31, detail("", 0, "pid=1"))},
		"cut after the number": {"NVRM: Xid (PCI:0000:1b:00): 31", event(gpu, -1, -1, 31, detail("", 0, ""))},
		"a cause": {
			"NVRM: Xid (PCI:0000:1b:00): 45, pid=1, name=a, Ch 00000001 caused by previous Xid 13",
			event(gpu, -1, -1, 45, detail("a", 1, "Ch 00000001 caused by previous Xid 13")),
		},
		"recovery action": {
			"NVRM: Xid (PCI:0000:1b:00): 154, GPU recovery action changed from 0x1 (GPU Reset Required) to 0x0 (None)",
			event(gpu, -1, -1, 154, detail("", 0, "GPU recovery action changed from 0x1 (GPU Reset Required) to 0x0 (None)")),
		},
		"injected": {
			"NVRM: Xid (PCI:0018:01:00): 149, NETIR_LINK_EVT Fatal XC0 i1 Link 08 (0x004505c6 0x00000000)",
			event("00000018:01:00.0", -1, -1, 149, detail("", 0, "NETIR_LINK_EVT Fatal XC0 i1 Link 08 (0x004505c6 0x00000000)")),
		},
		"a long message": {"NVRM: Xid (PCI:0000:1b:00): 31, " + long, event(gpu, -1, -1, 31, detail("", 0, long[:maxText]))},
		"message with a wrong escape": {
			`NVRM: Xid (PCI:0000:1b:00): 31, \xzz\x4 100% \`,
			event(gpu, -1, -1, 31, detail("", 0, `\xzz\x4 100% \`)),
		},
	} {
		if got, ok := received(c.message); !ok || got != c.want {
			t.Errorf("%s: %+v, %v; want %+v", name, got, ok, c.want)
		}
	}
}

func TestParseXIDRefuses(t *testing.T) {
	for _, message := range []string{
		"",
		"NVRM: Xid (",
		"NVRM: Xid (PCI:0000:1b:00: 31, text",
		"NVRM: Xid (PCI:0000:1b): 31, text",
		"NVRM: Xid (PCI:1b:00): 31, text",
		"NVRM: Xid (PCI:0000:1b:00.0): 31, text",
		"NVRM: Xid (PCI:100000000:1b:00): 31, text",
		"NVRM: Xid (PCI:0000:1g:00): 31, text",
		"NVRM: Xid (PCI:0000:1b:00 GPU-I:x): 31, text",
		"NVRM: Xid (PCI:0000:1b:00 GPU-I:05 GPU-CI:-1): 31, text",
		"NVRM: Xid (PCI:0000:1b:00): , text",
		"NVRM: Xid (PCI:0000:1b:00): 0, text",
		"NVRM: Xid (PCI:0000:1b:00): -1, text",
		"NVRM: Xid (PCI:0000:1b:00): 10000, text",
		"NVRM: Xid (PCI:0000:1b:00): 31x, text",
		"xNVRM: Xid (PCI:0000:1b:00): 31, text",
		"nvidia-nvswitch3: SXid (PCI:0000:c1:00.0): 12028, Non-fatal, Link 32",
		"NVRM: The NVIDIA GPU 0000:18:00.0",
		"NVRM: GPU 0000:18:00.0: GPU has fallen off the bus.",
		"NVRM: GPU at PCI:0000:1b:00: GPU-5a1c",
	} {
		if e, ok := received(message); ok {
			t.Errorf("%q: %+v, want nothing", message, e)
		}
	}
}

func TestParseRecord(t *testing.T) {
	for name, c := range map[string]struct {
		line     string
		facility uint64
		sequence uint64
		message  string
		ok       bool
	}{
		"of the kernel":       {"4,1526,23603062006,-;NVRM: a;b,c\n", 0, 1526, "NVRM: a;b,c", true},
		"of a process":        {"12,3652,47099489729,-;text\n", 1, 3652, "text", true},
		"with a caller":       {"6,1,2,-,caller=T1234;text\n", 0, 1, "text", true},
		"a fragment":          {"6,1,2,c;text\n", 0, 1, "text", true},
		"no message":          {"6,18446744073709551615,0,-;\n", 0, 1<<64 - 1, "", true},
		"of syslog":           {"Nov 22 15:32:30 node kernel: NVRM: Xid (PCI:0000:1b:00): 31, text\n", 0, 0, "", false},
		"no sequence number":  {"6,,2,-;text\n", 0, 0, "", false},
		"a negative number":   {"6,-1,2,-;text\n", 0, 0, "", false},
		"too few fields":      {"6,1,2;text\n", 0, 0, "", false},
		"no semicolon":        {"6,1,2,- text\n", 0, 0, "", false},
		"a priority too high": {"4294967296,1,2,-;text\n", 0, 0, "", false},
		"empty":               {"\n", 0, 0, "", false},
	} {
		r, ok := parseRecord([]byte(c.line))
		if ok != c.ok || ok && (r.facility != c.facility || r.sequence != c.sequence || string(r.message) != c.message) {
			t.Errorf("%s: %+v, %v; want %+v", name, r, ok, c)
		}
	}
}

// FuzzRecord takes arbitrary lines. A line that leads to an event is one of the kernel, and the event is within its limits. The
// event is written as the driver would, and must be read back.
func FuzzRecord(f *testing.F) {
	f.Add([]byte("4,1526,23603062006,-;NVRM: Xid (PCI:0000:1b:00 GPU-I:05 GPU-CI:00): 13, pid=7194, name=python3, Graphics Exception\n"))
	f.Add([]byte("4,1,2,-;NVRM: Xid (PCI:10000:01:00): 79, GPU has fallen off the bus.\n SUBSYSTEM=pci\n"))
	f.Add([]byte(`12,3,4,-,caller=T1;NVRM: Xid (PCI:0000:01:00): 31, pid=1, name=\x1b[\xff, \x0a` + "\n"))
	f.Add([]byte("4,1,2,-;NVRM: Xid (0000:01:00): 31, pid='<unknown>', name=<unknown>, \n4,2,2,-;NVRM: Xid (PCI:0000:01:00): 9999\n"))
	f.Fuzz(func(t *testing.T, log []byte) {
		var to recorder
		r := newReader(&to)
		if err := r.readRecords(bytes.NewReader(log)); err == nil {
			t.Fatal("the end of the log is no error")
		}
		candidates := 0
		for line := range bytes.Lines(log) {
			facility, _, _ := bytes.Cut(line, []byte(","))
			if len(line) <= maxRecord && bytes.Contains(line, []byte(";"+xidPrefix)) && len(bytes.TrimLeft(facility, "0")) <= 1 {
				candidates++
			}
		}
		if len(to.events) > candidates {
			t.Fatalf("%d events of %d records of the kernel", len(to.events), candidates)
		}
		for _, e := range to.events {
			d := e.XID.Detail
			_, address := deviceref.ParsePCI(e.GPU)
			switch {
			case !address || len(e.GPU) != len("00000000:1B:00.0"):
				t.Errorf("%+v: not a bus ID", e)
			case e.Kind != health.EventXID || e.XID.Witness != health.WitnessKernelLog || e.XID.Code < 1 || e.XID.Code > health.MaxXID ||
				e.GI < -1 || e.CI < -1:
				t.Errorf("%+v: outside of its limits", e)
			case len(d.Process) > maxProcess || len(d.Text) > maxText || d.PID < 0 || !utf8.ValidString(d.Process+d.Text):
				t.Errorf("%+v: the detail is outside of its limits", d)
			case strings.ContainsFunc(d.Process+d.Text, func(r rune) bool { return r < ' ' || r == 0x7f || r >= 0x80 && r < 0xa0 }):
				t.Errorf("%+v: the detail controls a terminal", d)
			}
			if strings.Contains(d.Process, ", ") || strings.HasSuffix(d.Process, ",") || d.Process == "<unknown>" ||
				strings.HasPrefix(d.Text, "pid=") {
				continue // cannot be written again
			}
			e.XID.At = time.Time{}
			if again, ok := received(written(e)); !ok || again != e {
				t.Errorf("%q is read as %+v, want %+v", written(e), again, e)
			}
		}
	})
}

// written returns an event as the driver prints it.
func written(e health.Event) string {
	location := "PCI:" + strings.TrimSuffix(e.GPU, ".0")
	if e.GI >= 0 {
		location += fmt.Sprintf(" GPU-I:%02d", e.GI)
	}
	if e.CI >= 0 {
		location += fmt.Sprintf(" GPU-CI:%02d", e.CI)
	}
	process := ""
	if d := e.XID.Detail; d.Process != "" || d.PID != 0 {
		process = fmt.Sprintf("pid=%d, name=%s, ", d.PID, d.Process)
	}
	text := fmt.Sprintf("%s%s): %d, %s%s", xidPrefix, location, e.XID.Code, process, e.XID.Detail.Text)
	return strings.ReplaceAll(text, `\`, `\x5c`)
}
