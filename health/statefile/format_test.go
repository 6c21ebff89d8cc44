package statefile

import (
	"cmp"
	"encoding/json"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/internal/healthtest"
)

// owed are XIDs that the source must report within a time.
func owed(code, count int, left time.Duration) health.OwedXIDs {
	return health.OwedXIDs{Code: code, Count: count, Born: left - health.OwedBySource, Seen: left - health.OwedBySource}
}

func row(code int, at time.Time) health.LedgerRow {
	return health.LedgerRow{XIDRow: health.XIDRow{Code: code, At: at.UnixMicro()}}
}

// fullSnapshot returns a snapshot with everything that a state file can hold.
func fullSnapshot(t *testing.T) *health.Snapshot {
	s := &health.Snapshot{At: healthtest.At(2), Source: health.Source{Kind: "dcgm", Inventory: "dcgm "}, Devices: faultyDevices(t)}
	s.Devices[0].XIDs.Rows = []health.LedgerRow{row(48, healthtest.At(1)), row(999, healthtest.At(1))}
	s.Devices[0].XIDs.Owed = []health.OwedXIDs{owed(31, 1000, 15*time.Second), owed(31, 1, time.Minute)}
	s.Devices[0].Device.NUMA = []int{1}
	s.Source.Detachment = health.Detachment{Since: healthtest.At(1), Until: healthtest.At(601), For: 10 * time.Minute}
	return s
}

// Everything that is saved is read again.
func TestSavedRoundTrip(t *testing.T) {
	at := healthtest.At
	mig := health.Device{
		ID: "MIG-9", Parent: "GPU-8", Kind: health.KindMIG, Index: 3, Minor: 4, NUMA: []int{1, 2}, Model: "H100", PCI: "00000000:1B:00.0",
		Memory:   10 << 30,
		Reserved: 77, ComputeCapability: health.ComputeCapability{Major: 9, Minor: 1}, MIGMode: true, Profile: "1g.10gb", GI: 5, CI: 6,
		MIGIndex: 7,
		Links:    []health.Link{{Peer: "GPU-1", NVLinks: 18, Path: health.PathBoard}}, Properties: &health.Properties{Brand: "Tesla"},
		Texts: map[health.Field]string{health.FieldSerial: "1650522003820"},
	}
	full := Saved{
		BootID: "boot", Source: "dcgm", Inventory: "dcgm x", History: true, DriverLoad: "17", Polled: at(20),
		Detachment: health.Detachment{Since: at(1), Until: at(2), For: time.Second, Undecided: true, EngineUnasked: true},
		Devices: []health.DeviceState{{
			Device: mig,
			Verdict: health.Verdict{
				State: health.Unhealthy, Since: at(3),
				Findings: []health.Finding{{
					Cause: "cordoned", State: health.Unhealthy, Reason: "c", Action: health.ActionUncordon, Since: at(3), Last: at(20),
				}},
			},
			Memory: health.Memory{
				Trips: []time.Time{at(4), at(5)}, PendingXIDs: []health.XID{{Code: 109, At: at(6)}},
				Findings: []health.Finding{
					{
						Cause: "lost", State: health.Unhealthy, Reason: "r", Action: health.ActionRebootNode, Since: at(7), Last: at(8), Reset: at(9),
						Clears: health.ClearsGPUReset, InOutage: true,
					},
					{Cause: "temperature", State: health.Degraded, Reason: "hot", Action: health.ActionCheckCooling, Since: at(10), Last: at(11)},
				},
			},
			XIDs: health.Ledger{
				Rows: []health.LedgerRow{row(31, at(12))}, Owed: []health.OwedXIDs{owed(43, 1, 1), owed(44, 2, time.Minute)},
			},
		}},
		Bindings: health.Bindings{{IndexRef: health.IndexRef{Key: "health.cordon", Entry: "3"}, GPU: "GPU-8", PCI: "00000000:1B:00.0"}},
	}
	over := Saved{
		Source: "sim", Detachment: health.Detachment{Over: true},
		Devices: []health.DeviceState{{Device: health.Device{ID: "GPU-8", GI: -1, CI: -1, MIGIndex: -1}}},
	}
	for c := health.ClearsItself; c <= health.ClearsRestart; c++ {
		m := &full.Devices[0].Memory
		m.Findings = append(m.Findings, health.Finding{
			Cause: "by " + c.String(), State: health.Degraded, Action: health.ActionWatch, Since: at(10), Last: at(11), Clears: c,
		})
	}
	d := &full.Devices[0]
	d.Verdict.Findings = slices.Concat(d.Memory.Findings, d.Verdict.Findings)
	for _, s := range []Saved{full, over} {
		if got := roundTrip(t, s); !reflect.DeepEqual(got, s) {
			t.Errorf("wrote %+v\nread %+v", s, got)
		}
	}
	// A clock that is far off does not prevent the write.
	full.Polled, full.Devices[0].Verdict.Since = time.Date(12000, 1, 1, 0, 0, 0, 0, time.UTC), time.Date(-5, 1, 1, 0, 0, 0, 0, time.UTC)
	if got := roundTrip(t, full); got.Polled.Year() != 9999 || !got.Devices[0].Verdict.Since.IsZero() {
		t.Errorf("polled %v, since %v", got.Polled, got.Devices[0].Verdict.Since)
	}
	// A debt that has expired is not read.
	expired := full
	expired.Devices = []health.DeviceState{full.Devices[0]}
	expired.Devices[0].XIDs.Owed = []health.OwedXIDs{owed(1, 0, 1), owed(2, 1, 0)}
	if d := roundTrip(t, expired).Devices[0]; len(d.XIDs.Owed) > 0 {
		t.Errorf("%+v", d)
	}
}

// otherRelease is a file that knows one finding, to be changed as other releases may.
const otherRelease = `{"format":"gpu-node-agent state","version":1,"bootID":"boot","source":"dcgm","inventory":"dcgm x","history":true,` +
	`"devices":[{"id":"GPU-0","since":"2000-01-01T00:00:01Z","trips":["2000-01-01T00:00:01Z"],"findings":[{"cause":"xid-95",` +
	`"state":"unhealthy","reason":"r","action":"reset-gpu","since":"2000-01-01T00:00:01Z","last":"2000-01-01T00:00:01Z",` +
	`"clears":"gpu-reset"}],"detail":{"device":{"Model":"H100","GI":-1,"CI":-1,"MIGIndex":-1},` +
	`"seen":[{"code":95,"at":"2000-01-01T00:00:01Z"}]}}]}`

// What this release does not know costs no finding.
func TestOtherReleaseKeepsFindings(t *testing.T) {
	replace := func(old, with string) string {
		if !strings.Contains(otherRelease, old) {
			t.Fatalf("the file lacks %s", old)
		}
		return strings.Replace(otherRelease, old, with, 1)
	}
	for name, c := range map[string]struct {
		text   string
		clears health.Clears // ClearsGPUReset if zero
		action health.Action // ActionResetGPU if empty
		newer  int
		bare   bool // the device has only its findings
	}{
		"the same":                 {text: otherRelease},
		"unknown key":              {text: replace(`"version":1,`, `"version":1,"more":{"x":[1]},`)},
		"unknown key of a device":  {text: replace(`"id":`, `"slot":"A","id":`)},
		"unknown key of a finding": {text: replace(`"cause":`, `"weight":3,"cause":`)},
		"unknown key of a detail":  {text: replace(`"device":`, `"weight":3,"device":`)},
		"unknown clears":           {text: replace(`"gpu-reset"`, `"moon phase"`), clears: health.ClearsOperator},
		"unknown action":           {text: replace(`"reset-gpu"`, `"moon dance"`), action: health.ActionUnknown},
		"unknown state":            {text: replace(`"unhealthy"`, `"on fire"`)},
		"newer version":            {text: replace(`"version":1`, `"version":2`), newer: 2},
		"another device":           {text: replace(`"GI":-1`, `"GI":{}`), bare: true},
		"a cordon as a finding": {text: replace(`"findings":[`,
			`"findings":[{"cause":"cordoned","state":"unhealthy","reason":"c","action":"uncordon",`+
				`"since":"2000-01-01T00:00:00Z","last":"2000-01-01T00:00:00Z","clears":"self"},`)},
		"other bindings": {text: replace(`"devices":`, `"bindings":{"3":"GPU-0"},"devices":`)},
		"another detail": {text: replace(`"detail":{`, `"detail":7,"was":{`), bare: true},
	} {
		t.Run(name, func(t *testing.T) {
			var s Saved
			must(t, json.Unmarshal([]byte(c.text), &s))
			r := s.Restore("boot", health.SourceID{Kind: "dcgm", Inventory: "dcgm x"}, healthtest.At(100))
			if len(r.Devices) != 1 || !r.Missed || !r.History || s.newer != c.newer {
				t.Fatalf("%+v", r)
			}
			d := r.Devices[0]
			if bare := d.Device.Model == "" && d.XIDs.Rows == nil; bare != c.bare || !bare && d.Device.Model != "H100" || d.Device.MIGIndex != -1 {
				t.Errorf("%+v", d)
			}
			f := d.Memory.Findings
			if len(f) != 1 || f[0].Cause != "xid-95" || f[0].State != health.Unhealthy || f[0].Clears != cmp.Or(c.clears, health.ClearsGPUReset) ||
				f[0].Action != cmp.Or(c.action, health.ActionResetGPU) {
				t.Errorf("%+v", f)
			}
		})
	}
}

func TestUnmarshalRefusesInvalidFile(t *testing.T) {
	const head = `"format":"gpu-node-agent state","version":1,"bootID":"","source":"dcgm"`
	for _, text := range []string{
		``, `[]`, `{}`, `null`, `{"format":"x","version":1}`,
		`{"format":"gpu-node-agent state","version":0}`,
		`{` + head + `,"devices":[{"id":""}]}`,
		`{` + head + `,"devices":[{"id":"a"},{"id":"a"}]}`,
		`{` + head + `,"devices":[{"id":"a","findings":[{"cause":"","state":"unhealthy","clears":"reboot"}]}]}`,
		`{` + head + `,"devices":[{"id":"a","findings":[{"cause":"x","state":"healthy","clears":"reboot"}]}]}`,
		`{"format":"gpu-node-agent findings","version":1,"bootID":"","source":"dcgm","devices":[]}`,
	} {
		s := Saved{BootID: "untouched"}
		if err := json.Unmarshal([]byte(text), &s); err == nil && text != "null" {
			t.Errorf("%s: no error", text)
		}
		if s.BootID != "untouched" {
			t.Errorf("%s: read in part", text)
		}
	}
}

func FuzzSaved(f *testing.F) {
	epoch := healthtest.Epoch
	text, err := json.Marshal(FromSnapshot(&health.Snapshot{Source: health.Source{Kind: "dcgm"}, Devices: []health.DeviceState{{
		Device:  healthtest.GPU0,
		Verdict: health.Verdict{State: health.Unhealthy, Since: epoch},
		Memory: health.Memory{Trips: []time.Time{epoch}, Findings: []health.Finding{
			{
				Cause: "xid-48", State: health.Unhealthy, Reason: "r", Action: health.ActionResetGPU, Since: epoch, Last: epoch, Reset: epoch,
				Clears: health.ClearsGPUReset,
			},
		}},
	}}}, "boot"))
	if err != nil {
		f.Fatal(err)
	}
	f.Add(text)
	f.Add([]byte(`{"format":"gpu-node-agent state","version":1,"devices":[]}`))
	f.Add([]byte(otherRelease))
	f.Add([]byte(`{"format":"gpu-node-agent state","version":1,"source":"sim","history":true,"detach":{"until":"2000-01-01T00:00:01Z",` +
		`"forNanoseconds":9},"devices":[{"id":"a","detail":{"seen":[{"code":1}],"owed":[{"code":31,"count":2,"leftNanoseconds":9},` +
		`{"code":13,"count":-1,"leftNanoseconds":9}],"eventAction":{"action":1,"leftNanoseconds":5}}}],"bindings":[{"entry":"3","gpu":"a"}]}`))
	f.Add([]byte(`{"format":"gpu-node-agent state","version":1,"bindings":{}}`))
	f.Fuzz(func(t *testing.T, text []byte) {
		var s Saved
		if json.Unmarshal(text, &s) != nil {
			return
		}
		first, err := json.Marshal(s)
		must(t, err)
		if second, err := json.Marshal(roundTrip(t, s)); err != nil || string(second) != string(first) {
			t.Fatalf("%s became %s, %v", first, second, err)
		}
		r := s.Restore("boot", health.SourceID{Kind: "dcgm"}, epoch)
		judged(r.Devices, 0, nil, healthtest.GPU0)
	})
}

// The node's file is read as far as its version allows, like a state.
func TestNodeFormat(t *testing.T) {
	full := Node{BootID: "boot", Sections: map[string]json.RawMessage{"idle": json.RawMessage(`{"a":1}`)}}
	text, err := json.Marshal(full)
	must(t, err)
	for version, newer := range map[string]int{"1": 0, "2": 2} {
		var n Node
		must(t, json.Unmarshal([]byte(strings.Replace(string(text), `"version":1`, `"version":`+version+`,"more":[]`, 1)), &n))
		if n.newer != newer || n.BootID != "boot" || string(n.Sections["idle"]) != `{"a":1}` {
			t.Errorf("version %s: %+v", version, n)
		}
	}
	for _, text := range []string{`{}`, `[]`, strings.Replace(string(text), "node", "state", 1)} {
		if err := json.Unmarshal([]byte(text), new(Node)); err == nil {
			t.Errorf("%s: no error", text)
		}
	}
}
