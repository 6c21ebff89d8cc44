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

// beforeMinor1 reads a file as the readers of before memoryMinor 1 did, which know no other keys, words and versions, and
// returns the findings of each device. It must not be changed.
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

// full is a snapshot with all that a state file can hold.
func full(t *testing.T) *health.Snapshot {
	s := &health.Snapshot{At: healthtest.At(2), Source: health.Source{Kind: "dcgm", Inventory: "dcgm "}, Devices: bad(t)}
	s.Devices[0].Seen = []health.XID{{Code: 48, At: healthtest.At(1)}, {Code: 999, At: healthtest.At(1)}}
	s.Devices[0].Device.NUMA = []int{1}
	s.Source.Detachment = health.Detachment{Since: healthtest.At(1), Until: healthtest.At(601), For: 10 * time.Minute}
	return s
}

// An upgrade and a downgrade again lose no findings, whatever the newer release has written besides.
func TestDowngradeKeepsFindings(t *testing.T) {
	m := FromSnapshot(full(t), "boot").with(FromSnapshot(&health.Snapshot{Source: health.Source{Kind: "sim"}, Devices: bad(t)}, "boot"))
	text, err := json.Marshal(m)
	if err != nil {
		t.Fatal(err)
	}
	got, err := beforeMinor1(text, "boot", "dcgm")
	want := map[string][]string{"GPU-1": {}}
	for _, d := range m.Devices {
		if len(d.Verdict.Findings) > 0 {
			want[string(d.Device.ID)] = d.Verdict.Causes()
		}
	}
	if err != nil || !reflect.DeepEqual(got, want) || len(want["GPU-0"]) != 4 {
		t.Errorf("%v, %v; want %v\n%s", got, err, want, text)
	}
}

// oldFile is what a writer of before memoryMinor 1 has left.
const oldFile = `{"format":"gpu-node-agent findings","version":1,"bootID":"boot","source":"dcgm","devices":[{"id":"GPU-0","index":0,"minor":0,` +
	`"model":"H100","pci":"00000000:1B:00.0","memory":85899345920,"gi":-1,"ci":-1,"since":"2000-01-01T00:00:01Z","trips":["2000-01-01T00:00:01Z"],` +
	`"findings":[{"cause":"xid-95","state":"unhealthy","reason":"r","action":"a","since":"2000-01-01T00:00:01Z","last":"2000-01-01T00:00:01Z","clears":"gpu reset"}]}]}`

func TestUpgradeKeepsFindings(t *testing.T) {
	for name, c := range map[string]struct {
		text        string
		state       health.State
		clears      health.Clears
		newer       int
		historyThen bool
	}{
		"of before minor 1":         {text: oldFile, state: health.Unhealthy, clears: health.ClearsGPUReset},
		"an unknown key":            {text: strings.Replace(oldFile, `"version":1,`, `"version":1,"minor":7,"more":{"x":[1]},`, 1), state: health.Unhealthy, clears: health.ClearsGPUReset},
		"an unknown key of devices": {text: strings.Replace(oldFile, `"index":0,`, `"index":0,"slot":"A",`, 1), state: health.Unhealthy, clears: health.ClearsGPUReset},
		"an unknown key of finding": {text: strings.Replace(oldFile, `"cause":`, `"weight":3,"cause":`, 1), state: health.Unhealthy, clears: health.ClearsGPUReset},
		"an unknown evidence":       {text: strings.Replace(oldFile, `"gpu reset"`, `"moon phase"`, 1), state: health.Unhealthy, clears: health.ClearsOperator},
		"an unknown state":          {text: strings.Replace(oldFile, `"unhealthy"`, `"on fire"`, 1), state: health.Unhealthy, clears: health.ClearsGPUReset},
		"a newer version":           {text: strings.Replace(oldFile, `"version":1`, `"version":2`, 1), state: health.Unhealthy, clears: health.ClearsGPUReset, newer: 2},
		"an unknown key of the extension": {
			text:  strings.Replace(oldFile, `"devices":[`, `"devices":[{"id":"gpu-node-agent:extension","model":"{\"minor\":9,\"history\":true,\"inventory\":\"dcgm \",\"more\":1,\"devices\":{\"GPU-0\":{\"device\":7}}}"},`, 1),
			state: health.Unhealthy, clears: health.ClearsGPUReset, historyThen: true,
		},
	} {
		t.Run(name, func(t *testing.T) {
			var m Saved
			if err := json.Unmarshal([]byte(c.text), &m); err != nil {
				t.Fatal(err)
			}
			r := m.Restore("boot", health.SourceID{Kind: "dcgm", Inventory: "dcgm "}, healthtest.At(100))
			if len(r.Devices) != 1 || !r.SameBoot || !r.Missed || r.History != c.historyThen || m.newer != c.newer {
				t.Fatalf("%+v", r)
			}
			f := r.Devices[0].Verdict.Findings
			if len(f) != 1 || f[0].Cause != "xid-95" || f[0].State != c.state || f[0].Clears != c.clears || r.Devices[0].Device.Model != "H100" {
				t.Errorf("%+v", r.Devices[0])
			}
		})
	}
}

func recallOf(t *testing.T, m Saved, bootID string, src health.SourceID) Restored {
	t.Helper()
	text, err := json.Marshal(m)
	if err != nil {
		t.Fatal(err)
	}
	var read Saved
	if err := json.Unmarshal(text, &read); err != nil {
		t.Fatal(err)
	}
	return read.Restore(bootID, src, healthtest.At(100))
}

// What the devices of an inventory are worth for another one.
func TestRecallOfInventories(t *testing.T) {
	mine := health.SourceID{Kind: "dcgm", Inventory: "dcgm "}
	sim := health.SourceID{Kind: "sim", Inventory: "sim a", Simulated: true}
	for name, c := range map[string]struct {
		before, now     health.SourceID
		boot            string
		devices         int
		missed, history bool
		detached        bool
	}{
		"the same":               {mine, mine, "boot", 3, true, true, true},
		"another address":        {mine, health.SourceID{Kind: "dcgm", Inventory: "dcgm localhost"}, "boot", 3, false, false, true},
		"another boot":           {mine, mine, "later", 1, false, false, false},
		"the same simulation":    {sim, sim, "boot", 3, true, true, true},
		"another simulation":     {sim, health.SourceID{Kind: "sim", Inventory: "sim b", Simulated: true}, "boot", 0, false, false, false},
		"another kind of source": {mine, sim, "boot", 0, false, false, false},
	} {
		t.Run(name, func(t *testing.T) {
			s := full(t)
			s.Source.Kind, s.Source.Inventory = c.before.Kind, c.before.Inventory
			r := recallOf(t, FromSnapshot(s, "boot"), c.boot, c.now)
			if len(r.Devices) != c.devices || r.Missed != c.missed || r.History != c.history || r.Detachment.InForce() != c.detached {
				t.Errorf("%+v", r)
			}
			if len(r.Devices) > 0 && (len(r.Devices[0].Seen) > 0) != c.history {
				t.Errorf("history: %+v", r.Devices[0].Seen)
			}
		})
	}
}

// Devices that have nothing but a history of XIDs are remembered for it, and what describes a device is too.
func TestMemoryOfHistory(t *testing.T) {
	s := &health.Snapshot{At: healthtest.Epoch, Source: health.Source{Kind: "dcgm", Inventory: "dcgm "}, Devices: healthtest.Judge(health.DefaultConfig(), nil, 0, nil, nil, healthtest.GPU0, healthtest.GPU1)}
	if m := FromSnapshot(s, "boot"); len(m.Devices) != 0 {
		t.Errorf("%+v", m.Devices)
	}
	s.Devices[1].Device.NUMA = []int{1}
	s.Devices[1].Device.Texts = map[health.Field]string{7: "serial"}
	s.Devices[1].Seen = []health.XID{{Code: 13, At: healthtest.At(1)}, {Code: 31, At: healthtest.At(2).Add(time.Nanosecond)}, {Code: 43, At: time.Date(40000, 1, 1, 0, 0, 0, 0, time.UTC)}}
	r := recallOf(t, FromSnapshot(s, "boot"), "boot", health.SourceID{Kind: "dcgm", Inventory: "dcgm "})
	if len(r.Devices) != 1 || !reflect.DeepEqual(r.Devices[0].Device, s.Devices[1].Device) {
		t.Fatalf("%+v", r.Devices)
	}
	for i, x := range r.Devices[0].Seen[:2] {
		if want := s.Devices[1].Seen[i]; x.Code != want.Code || !x.At.Equal(want.At) {
			t.Errorf("%+v, want %+v", x, want)
		}
	}
	if len(r.Devices[0].Seen) != 3 {
		t.Error("a row of a source whose clock is beyond all years is lost")
	}
}

// What is written in the GPU's InfoROM outlives a boot; whatever else stands does not.
func TestOutlivesBoot(t *testing.T) {
	for cause, want := range map[string]bool{
		health.CauseRemapFailed: true, health.CauseUnrepairable: true, health.CauseRetiredPages: true,
		"xid-95": false, health.CauseLost: false, health.CauseRemapPending: false, health.CauseRetiredPending: false, health.CauseDBE: false, health.CauseTemperature: false, health.CauseFlapping: false,
	} {
		s := &health.Snapshot{Source: health.Source{Kind: "dcgm"}, Devices: []health.DeviceState{{
			Device: healthtest.GPU0, Verdict: health.Verdict{State: health.Unhealthy, Findings: []health.Finding{{Cause: cause, State: health.Unhealthy, Since: healthtest.At(1), Last: healthtest.At(1), Clears: health.ClearsReboot}}},
		}}}
		if r := recallOf(t, FromSnapshot(s, "boot"), "later", health.SourceID{Kind: "dcgm"}); (len(r.Devices) == 1) != want {
			t.Errorf("%s after a boot: %+v", cause, r.Devices)
		}
	}
}

// The ages of findings are on the monotonic clock of this process: a wall clock that steps later changes none.
func TestRecallIsMonotonic(t *testing.T) {
	now := time.Now()
	for name, wall := range map[string]time.Time{"past": now.Add(-time.Hour).Round(0), "ahead": now.Add(time.Hour).Round(0)} {
		v := health.Verdict{Since: wall, Trips: []time.Time{wall}, Follow: []health.XID{{Code: 48, At: wall}}, Findings: []health.Finding{{Cause: "xid-999", Since: wall, Last: wall, Reset: wall}}}
		v = v.Restored(now)
		f := v.Findings[0]
		for _, got := range []time.Time{v.Since, v.Trips[0], v.Follow[0].At, f.Since, f.Last, f.Reset} {
			want := wall
			if wall.After(now) {
				want = now
			}
			if !got.Equal(want) || !strings.Contains(got.String(), " m=") {
				t.Errorf("%s: %v", name, got)
			}
		}
	}
	if got := (health.Verdict{}).Restored(now); !got.Since.IsZero() {
		t.Errorf("%+v", got)
	}
}

func TestRecallOfDetachment(t *testing.T) {
	for name, c := range map[string]struct {
		until, length time.Duration
		over          bool
		left          time.Duration // 0: it is over
	}{
		"in force":                         {5 * time.Minute, 10 * time.Minute, false, 5 * time.Minute},
		"its time is up":                   {-time.Second, 10 * time.Minute, false, 0},
		"the clock was set back by a year": {365 * 24 * time.Hour, 10 * time.Minute, false, 10 * time.Minute},
		"attach was said":                  {5 * time.Minute, 10 * time.Minute, true, 0},
		"of no time":                       {5 * time.Minute, 0, false, 0},
	} {
		now := time.Now()
		d := restoreDetachment(health.Detachment{Since: now.Add(c.until - c.length), Until: now.Add(c.until), For: c.length, Over: c.over}, now)
		if d.InForce() != (c.left > 0) || d.InForce() && d.Until.Sub(now) != c.left || d.Since.After(now) {
			t.Errorf("%s: %+v", name, d)
		}
	}
	if d := restoreDetachment(health.Detachment{}, time.Now()); d != (health.Detachment{}) {
		t.Errorf("none became %+v", d)
	}
}
