package statefile

import (
	"bytes"
	"encoding/json"
	"fmt"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/internal/healthtest"
)

// beforeMinor1 reads a file like the readers from before formatMinor 1, which accept no other keys, tokens and versions. It
// returns the causes of each device. Do not change it.
func beforeMinor1(text []byte, bootID, source string) (map[string][]string, error) {
	var f struct {
		Format  string `json:"format"`
		Version int    `json:"version"`
		BootID  string `json:"bootID"`
		Source  string `json:"source"`
		Devices []struct {
			ID      string `json:"id"`
			Parent  string `json:"parent,omitempty"`
			MIG     bool   `json:"mig,omitempty"`
			MIGMode bool   `json:"migMode,omitempty"`
			Index   int    `json:"index"`
			Minor   int    `json:"minor"`
			Model   string `json:"model"`
			PCI     string `json:"pci"`
			Saved   uint64 `json:"memory"`
			Profile string `json:"profile,omitempty"`
			GI      int    `json:"gi"`
			CI      int    `json:"ci"`

			Since  time.Time   `json:"since"`
			Trips  []time.Time `json:"trips,omitempty"`
			Follow []struct {
				Code int       `json:"code"`
				At   time.Time `json:"at"`
			} `json:"follow,omitempty"`
			Findings []struct {
				Cause  string    `json:"cause"`
				State  string    `json:"state"`
				Reason string    `json:"reason"`
				Action string    `json:"action"`
				Since  time.Time `json:"since"`
				Last   time.Time `json:"last"`
				Reset  time.Time `json:"reset,omitzero"`
				Clears string    `json:"clears"`
			} `json:"findings,omitempty"`
		} `json:"devices"`
	}
	if !json.Valid(text) {
		return nil, fmt.Errorf("not JSON")
	}
	dec := json.NewDecoder(bytes.NewReader(text))
	dec.DisallowUnknownFields()
	if err := dec.Decode(&f); err != nil {
		return nil, err
	}
	if f.Format != "gpu-node-agent findings" || f.Version != 1 {
		return nil, fmt.Errorf("version %d", f.Version)
	}
	if f.BootID != bootID || f.Source != source {
		return nil, nil
	}
	all := make(map[string][]string)
	for _, d := range f.Devices {
		if d.ID == "" || all[d.ID] != nil {
			return nil, fmt.Errorf("id %q", d.ID)
		}
		for _, x := range d.Findings {
			known := slices.Contains([]string{"by itself", "gpu reset", "reboot", "operator", "application restart"}, x.Clears)
			if x.Cause == "" || x.State != "degraded" && x.State != "unhealthy" || !known {
				return nil, fmt.Errorf("%+v", x)
			}
			all[d.ID] = append(all[d.ID], x.Cause)
		}
		if len(d.Findings)+len(d.Trips)+len(d.Follow) > 0 && all[d.ID] == nil {
			all[d.ID] = []string{}
		}
	}
	return all, nil
}

// fullSnapshot returns a snapshot with everything that a state file can hold.
func fullSnapshot(t *testing.T) *health.Snapshot {
	s := &health.Snapshot{At: healthtest.At(2), Source: health.Source{Kind: "dcgm", Inventory: "dcgm "}, Devices: faultyDevices(t)}
	s.Devices[0].XIDHistory = []health.XID{{Code: 48, At: healthtest.At(1)}, {Code: 999, At: healthtest.At(1)}}
	s.Devices[0].Awaited = []health.AwaitedXIDs{{Code: 31, Count: 1000, Left: 15 * time.Second}, {Code: 31, Count: 1, Left: time.Minute}}
	s.Devices[0].EventAction = health.EventAction{Action: health.RecoveryReset, Left: time.Second}
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
				State: health.Unhealthy, Since: at(3), Trips: []time.Time{at(4), at(5)}, PendingXIDs: []health.XID{{Code: 109, At: at(6)}},
				Findings: []health.Finding{
					{
						Cause: "lost", State: health.Unhealthy, Reason: "r", Action: health.ActionRebootNode, Since: at(7), Last: at(8), Reset: at(9),
						Clears: health.ClearsGPUReset, InOutage: true,
					},
					{Cause: "temperature", State: health.Degraded, Reason: "hot", Action: health.ActionCheckCooling, Since: at(10), Last: at(11)},
				},
			},
			XIDHistory:  []health.XID{{Code: 31, At: at(12)}},
			Awaited:     []health.AwaitedXIDs{{Code: 43, Count: 1, Left: 1}, {Code: 44, Count: 2, Left: time.Minute}},
			EventAction: health.EventAction{Action: health.RecoveryReset, Left: 1},
		}},
		Sections: map[string]json.RawMessage{"idle": json.RawMessage(`{"a":1}`)},
		others:   map[string]json.RawMessage{"sim": json.RawMessage(`{"b":2}`)},
	}
	over := Saved{
		Source: "sim", Detachment: health.Detachment{Over: true},
		Devices: []health.DeviceState{{Device: health.Device{ID: "GPU-8", GI: -1, CI: -1, MIGIndex: -1}}},
	}
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
	// What was awaited and has expired is not read.
	expired := full
	expired.Devices = []health.DeviceState{full.Devices[0]}
	expired.Devices[0].Awaited, expired.Devices[0].EventAction = []health.AwaitedXIDs{{Code: 1, Count: 0, Left: 1}, {Code: 2, Count: 1}},
		health.EventAction{Action: health.RecoveryReset}
	if d := roundTrip(t, expired).Devices[0]; len(d.Awaited) > 0 || d.EventAction != (health.EventAction{}) {
		t.Errorf("%+v", d)
	}
}

// The oldest readers find every finding in a file of this release.
func TestDowngradeKeepsFindings(t *testing.T) {
	others := FromSnapshot(&health.Snapshot{Source: health.Source{Kind: "sim"}, Devices: faultyDevices(t)}, "boot")
	s := FromSnapshot(fullSnapshot(t), "boot").withOthers(others)
	text, err := json.Marshal(s)
	must(t, err)
	got, err := beforeMinor1(text, "boot", "dcgm")
	want := map[string][]string{"GPU-1": {}}
	for _, d := range s.Devices {
		if len(d.Verdict.Findings) > 0 {
			want[string(d.Device.ID)] = d.Verdict.Causes()
		}
	}
	if err != nil || !reflect.DeepEqual(got, want) || len(want["GPU-0"]) != 4 {
		t.Errorf("%v, %v; want %v\n%s", got, err, want, text)
	}
}

// oldFile is a file from before formatMinor 1.
const oldFile = `{"format":"gpu-node-agent findings","version":1,"bootID":"boot","source":"dcgm","devices":[{"id":"GPU-0","index":0,"minor":0,` +
	`"model":"H100","pci":"00000000:1B:00.0","memory":85899345920,"gi":-1,"ci":-1,"since":"2000-01-01T00:00:01Z","trips":["2000-01-01T00:00:01Z"],` +
	`"findings":[{"cause":"xid-95","state":"unhealthy","reason":"r","action":"a","since":"2000-01-01T00:00:01Z","last":"2000-01-01T00:00:01Z","clears":"gpu reset"}]}]}`

func TestUpgradeKeepsFindings(t *testing.T) {
	replace := func(old, with string) string { return strings.Replace(oldFile, old, with, 1) }
	extension := `"devices":[{"id":"gpu-node-agent:extension","model":"{\"minor\":9,\"history\":true,\"inventory\":\"dcgm \",\"more\":1,` +
		`\"devices\":{\"GPU-0\":{\"device\":7}}}"},`
	for name, c := range map[string]struct {
		text    string
		clears  health.Clears // ClearsGPUReset if zero
		newer   int
		history bool
	}{
		"from before minor 1":          {text: oldFile},
		"unknown key":                  {text: replace(`"version":1,`, `"version":1,"minor":7,"more":{"x":[1]},`)},
		"unknown key of a device":      {text: replace(`"index":0,`, `"index":0,"slot":"A",`)},
		"unknown key of a finding":     {text: replace(`"cause":`, `"weight":3,"cause":`)},
		"unknown clears":               {text: replace(`"gpu reset"`, `"moon phase"`), clears: health.ClearsOperator},
		"unknown state":                {text: replace(`"unhealthy"`, `"on fire"`)},
		"newer version":                {text: replace(`"version":1`, `"version":2`), newer: 2},
		"unknown key of the extension": {text: replace(`"devices":[`, extension), history: true},
	} {
		t.Run(name, func(t *testing.T) {
			if c.clears == 0 {
				c.clears = health.ClearsGPUReset
			}
			var s Saved
			must(t, json.Unmarshal([]byte(c.text), &s))
			r := s.Restore("boot", health.SourceID{Kind: "dcgm", Inventory: "dcgm "}, healthtest.At(100))
			if len(r.Devices) != 1 || !r.Missed || r.History != c.history || s.newer != c.newer {
				t.Fatalf("%+v", r)
			}
			f := r.Devices[0].Verdict.Findings
			if i := r.Devices[0].Device.MIGIndex; i != -1 {
				t.Errorf("MIG index %d of a device without one", i)
			}
			if len(f) != 1 || f[0].Cause != "xid-95" || f[0].State != health.Unhealthy || f[0].Clears != c.clears ||
				r.Devices[0].Device.Model != "H100" {
				t.Errorf("%+v", r.Devices[0])
			}
		})
	}
}

func TestUnmarshalRefusesInvalidFile(t *testing.T) {
	const head = `"format":"gpu-node-agent findings","version":1,"bootID":"","source":"dcgm"`
	for _, text := range []string{
		``, `[]`, `{}`, `null`, `{"format":"x","version":1}`,
		`{"format":"gpu-node-agent findings","version":0}`,
		`{` + head + `,"devices":[{"id":""}]}`,
		`{` + head + `,"devices":[{"id":"a"},{"id":"a"}]}`,
		`{` + head + `,"devices":[{"id":"a","findings":[{"cause":"","state":"unhealthy","clears":"reboot"}]}]}`,
		`{` + head + `,"devices":[{"id":"a","findings":[{"cause":"x","state":"healthy","clears":"reboot"}]}]}`,
		`{` + head + `,"devices":[{"id":"gpu-node-agent:extension","model":"{"}]}`,
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

func TestClearsTokens(t *testing.T) {
	for c := health.ClearsItself; c <= health.ClearsRestart; c++ {
		if got := parseClears(clearsToken(c)); got != c {
			t.Errorf("%v is written as %q and read as %v", c, clearsToken(c), got)
		}
	}
	if got := parseClears("moon phase"); got != health.ClearsOperator {
		t.Errorf("an unknown token is read as %v", got)
	}
}

func TestParseAction(t *testing.T) {
	for text, want := range map[string]health.Action{
		"reset-gpu":                        health.ActionResetGPU,
		"drain the node and reset the GPU": health.ActionResetGPU,
		"moon dance":                       health.ActionUnknown,
		"":                                 health.ActionUnknown,
	} {
		if got := parseAction(text); got != want {
			t.Errorf("%q is read as %q, want %q", text, got, want)
		}
	}
	for prose, a := range proseActions {
		if !a.Valid() {
			t.Errorf("%q stands for the unknown action %q", prose, a)
		}
	}
}

func FuzzSaved(f *testing.F) {
	epoch := healthtest.Epoch
	text, err := json.Marshal(FromSnapshot(&health.Snapshot{Source: health.Source{Kind: "dcgm"}, Devices: []health.DeviceState{{
		Device: healthtest.GPU0,
		Verdict: health.Verdict{State: health.Unhealthy, Since: epoch, Trips: []time.Time{epoch}, Findings: []health.Finding{
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
	f.Add([]byte(`{"format":"gpu-node-agent findings","version":1,"devices":[]}`))
	f.Add([]byte(oldFile))
	f.Add([]byte(`{"format":"gpu-node-agent findings","version":1,"source":"sim","devices":[{"id":"gpu-node-agent:extension","model":` +
		`"{\"minor\":2,\"history\":true,\"detach\":{\"until\":\"2000-01-01T00:00:01Z\",\"forNanoseconds\":9},\"devices\":{\"a\":{\"seen\":[{\"code\":1}],\"awaited\":[{\"code\":31,\"count\":2,\"leftNanoseconds\":9},{\"code\":13,\"count\":-1,\"leftNanoseconds\":9}],\"eventAction\":{\"action\":1,\"leftNanoseconds\":5}}},\"others\":{\"dcgm\":{\"x\":[ \"<\"]}}}"},{"id":"a"}]}`))
	f.Fuzz(func(t *testing.T, text []byte) {
		var s Saved
		if json.Unmarshal(text, &s) != nil {
			return
		}
		s.newer = 0
		if again := roundTrip(t, s); !reflect.DeepEqual(s, again) {
			t.Fatalf("%+v became %+v", s, again)
		}
		r := s.Restore("boot", health.SourceID{Kind: "dcgm"}, epoch)
		judge(r.Devices, 0, nil, healthtest.GPU0)
	})
}
