package sim

import (
	"encoding/json"
	"errors"
	"math"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"
)

func TestParseEvent(t *testing.T) {
	for _, tt := range []struct {
		in   string
		want Event
	}{
		{`{gpu: 3, xid: 79}`, Event{GPU: new(3), XID: new(79)}},
		{`{"gpu":3,"xid":79}`, Event{GPU: new(3), XID: new(79)}},
		{"{\"gpu\":\t3,\n\t\"lost\":\ttrue}", Event{GPU: new(3), Lost: new(true)}},
		{"gpu: 0\nlost: false\nrecoveryAction: reset", Event{GPU: new(0), Lost: new(false), RecoveryAction: new(Recovery("reset"))}},
		{`{gpu: 1, temperature: 97, rowRemapPending: true}`, Event{GPU: new(1), Temperature: new(97.0), RowRemapPending: new(true)}},
		{`{gpu: 1, temperature: 36.6}`, Event{GPU: new(1), Temperature: new(36.6)}},
		{`{gpu: 1, rowRemapFailed: true, doubleBitErrors: 3, retiredPages: 63, clocksSlowed: false}`, Event{
			GPU: new(1), RowRemapFailed: new(true), DoubleBitErrors: new(3), RetiredPages: new(63), ClocksSlowed: new(false),
		}},
		{`{gpu: 1, incident: DCGM_FR_NVLINK_DOWN}`, Event{GPU: new(1), Incident: new("DCGM_FR_NVLINK_DOWN")}},
		{
			`{gpu: 1, incident: DCGM_FR_NVLINK_DOWN, severity: none}`,
			Event{GPU: new(1), Incident: new("DCGM_FR_NVLINK_DOWN"), Severity: new("none")},
		},
		{`{source: down}`, Event{Source: new("down")}},
		{`{"gpu":"3","xid":"79","lost":"true"}`, Event{GPU: new(3), XID: new(79), Lost: new(true)}}, // as in the configuration
		{`{gpu: 1, incident: 14}`, Event{GPU: new(1), Incident: new("14")}},
		{`{gpu: 1, recoveryAction: 7}`, Event{GPU: new(1), RecoveryAction: new(Recovery("7"))}},
		{`{"gpu":1,"recoveryAction":"7"}`, Event{GPU: new(1), RecoveryAction: new(Recovery("7"))}}, // as Send encodes it
		{`{"gpu":1,"recoveryAction":512}`, Event{GPU: new(1), RecoveryAction: new(Recovery("512"))}},
		{`{gpu: 1, stale: true}`, Event{GPU: new(1), Stale: new(true)}},
		{
			`{gpu: 0, processes: [{pid: 4242, memory: 1073741824}]}`,
			Event{GPU: new(0), Processes: &[]Process{{PID: new(4242), Memory: new(1 << 30)}}},
		},
		{
			`{gpu: 0, processes: [{pid: "7", sm: 0.25, kind: mps, mig: 0}, {pid: 7, sm: 1, kind: graphics, mig: 0}]}`,
			Event{GPU: new(0), Processes: &[]Process{
				{PID: new(7), SM: new(.25), Kind: new("mps"), MIG: new(0)}, {PID: new(7), SM: new(1.), Kind: new("graphics"), MIG: new(0)},
			}},
		},
		{
			`{gpu: 0, processes: [{pid: 7}, {pid: 7, mig: 0}]}`,
			Event{GPU: new(0), Processes: &[]Process{{PID: new(7)}, {PID: new(7), MIG: new(0)}}},
		},
		{`{"gpu":0,"processes":[]}`, Event{GPU: new(0), Processes: &[]Process{}}},
		{`{gpu: 1, mig: off, xid: 31, times: 3}`, Event{GPU: new(1), MIG: new("off"), XID: new(31), Times: new(3)}},
	} {
		got, err := ParseEvent(tt.in)
		if err != nil || !reflect.DeepEqual(got, tt.want) {
			t.Errorf("ParseEvent(%q) = %+v, %v; want %+v", tt.in, got, err, tt.want)
		}
	}
}

// errorKeys returns the keys of the keyErrors in err, in order.
func errorKeys(err error) (keys []string) {
	if joined, ok := err.(interface{ Unwrap() []error }); ok {
		for _, err := range joined.Unwrap() {
			keys = append(keys, errorKeys(err)...)
		}
		return keys
	}
	if e := new(keyError); errors.As(err, &e) {
		keys = append(keys, e.key)
	}
	return keys
}

// TestParseEventRefuses checks the key of each error, and that its text contains the invalid value or what is valid.
func TestParseEventRefuses(t *testing.T) {
	for _, tt := range []struct {
		in   string
		keys []string // nil: the text is not an event
		data string
	}{
		{``, nil, `{gpu: 3, xid: 79}`},
		{`# nothing`, nil, `{gpu: 3, xid: 79}`},
		{`79`, nil, `"79"`},
		{`[{gpu: 3, xid: 79}]`, nil, `[{gpu: 3, xid: 79}]`},
		{`{gpu: 3, xid: 79`, nil, `{gpu: 3, xid: 79}`},
		{`{? [a] : b}`, []string{`""`}, `xid, times, lost`},
		{`{lost: &gpu true, *gpu : 3}`, []string{`"gpu"`}, `xid, times, lost`},
		{"{gpu: 3, xid: 79}\n---\n{gpu: 4, xid: 79}", nil, ``},
		{`{}`, []string{""}, `xid, times, lost`},
		{`{gpu: 3}`, []string{""}, `xid, times, lost`},
		{`{gpu: 3, source: down}`, []string{"gpu"}, `3`},
		{`{xid: 79}`, []string{"gpu"}, ``},
		{`{gpu: 3, xdi: 79}`, []string{`"xdi"`}, `xid, times, lost`},
		{`{gpu: three, xid: 79}`, []string{"gpu"}, `"three"`},
		{`{gpu: 3.7, xid: 79}`, []string{"gpu"}, `"3.7"`},
		{`{gpu: "3.7", xid: 79}`, []string{"gpu"}, `"3.7"`},
		{`{gpu:3,xid:79}`, []string{`"gpu:3"`}, `write gpu: 3`},
		{`{gpu: 3, xid: null}`, []string{"xid"}, `"null"`},
		{`{gpu: 3, xid: [79]}`, []string{"xid"}, ``},
		{`{gpu: 99999999999999999999, xid: 79}`, []string{"gpu"}, `"99999999999999999999"`},
		{`{gpu: 3, xid: 0}`, []string{"xid"}, `1 to 999`},
		{`{gpu: 3, xid: 79, xid: 48}`, []string{"xid"}, ``},
		{`{gpu: 0, times: 3}`, []string{"times"}, `xid`},
		{`{gpu: 0, xid: 31, times: 0}`, []string{"times"}, `1 to 1000000`},
		{`{gpu: 0, xid: 31, times: 10000000}`, []string{"times"}, `10000000`},
		{`{gpu: 3, lost: on}`, []string{"lost"}, `"on"`},
		{`{gpu: 3, lost: 1}`, []string{"lost"}, `"1"`},
		{`{gpu: 3, recoveryAction: explode}`, []string{"recoveryAction"}, `0 to 2147483647 or one of none, reset, reboot, drainP2P`},
		{`{gpu: 3, recoveryAction: true}`, []string{"recoveryAction"}, `"true"`},
		{`{gpu: 3, recoveryAction: -1}`, []string{"recoveryAction"}, `"-1"`},
		{`{gpu: 3, recoveryAction: 2147483648}`, []string{"recoveryAction"}, `"2147483648"`},
		{`{gpu: 3, recoveryAction: 1.5}`, []string{"recoveryAction"}, `"1.5"`},
		{`{gpu: 3, stale: 1}`, []string{"stale"}, `"1"`},
		{`{gpu: 3, temperature: .nan}`, []string{"temperature"}, `NaN`},
		{`{gpu: 3, temperature: 1000}`, []string{"temperature"}, `0 to 200`},
		{`{gpu: 3, temperature: hot}`, []string{"temperature"}, `"hot"`},
		{`{gpu: 3, rowRemapFailed: 1}`, []string{"rowRemapFailed"}, `"1"`},
		{`{gpu: 3, clocksSlowed: hw}`, []string{"clocksSlowed"}, `"hw"`},
		{`{gpu: 3, doubleBitErrors: -1}`, []string{"doubleBitErrors"}, `0 to 1000000`},
		{`{gpu: 3, doubleBitErrors: some}`, []string{"doubleBitErrors"}, `"some"`},
		{`{gpu: 3, retiredPages: 65}`, []string{"retiredPages"}, `0 to 64`},
		{`{gpu: 3, retiredPages: 6.3}`, []string{"retiredPages"}, `"6.3"`},
		{`{gpu: 3, incident: NVLINK}`, []string{"incident"}, exampleIncident},
		{`{gpu: 3, incident: DCGM_FR_OK}`, []string{"incident"}, `"DCGM_FR_OK"`},
		{`{gpu: 3, incident: 0}`, []string{"incident"}, `"0"`},
		{`{gpu: 3, severity: fail}`, []string{"severity"}, `incident`},
		{`{gpu: 3, incident: DCGM_FR_NVLINK_DOWN, severity: bad}`, []string{"severity"}, `fail, warn, none`},
		{`{gpu: 3, incident: DCGM_FR_NVLINK_DOWN, severity: true}`, []string{"severity"}, `fail, warn, none`},
		{`{incident: DCGM_FR_NVLINK_DOWN}`, []string{"gpu"}, ``},
		{`{gpu: 0, mig: halves}`, []string{"mig"}, `off, sevenths, balanced`},
		{`{gpu: 0, mig: [off]}`, []string{"mig"}, `off, sevenths, balanced`},
		{`{gpu: 0, incident: {a: b}}`, []string{"incident"}, exampleIncident},
		{`{gpu: 0, recoveryAction: null}`, []string{"recoveryAction"}, `"null"`},
		{`{processes: []}`, []string{"gpu"}, ``},
		{`{gpu: 0, processes: 4242}`, []string{"processes"}, exampleProcesses},
		{`{gpu: 0, processes: {pid: 4242}}`, []string{"processes"}, exampleProcesses},
		{`{gpu: 0, processes: [4242]}`, []string{"processes[0]"}, `{pid: 4242`},
		{`{gpu: 0, processes: [{pid: 1}, {memory: 1}]}`, []string{"processes[1].pid"}, `1 to 4194304`},
		{`{gpu: 0, processes: [{pid: 0}]}`, []string{"processes[0].pid"}, `1 to 4194304`},
		{`{gpu: 0, processes: [{pid: 4194305}]}`, []string{"processes[0].pid"}, `1 to 4194304`},
		{`{gpu: 0, processes: [{pid: 7, pid: 8}]}`, []string{"processes[0].pid"}, ``},
		{`{gpu: 0, processes: [{pid: 7, [a]: 8}]}`, []string{"processes[0]"}, `pid`},
		{`{gpu: 0, processes: [{pid: 7, mem: 8}]}`, []string{"processes[0]"}, `"mem" is not known; use pid with memory, sm, kind, mig`},
		{`{gpu: 0, processes: [{pid: 7, memory: 1Gi}]}`, []string{"processes[0].memory"}, `"1Gi"`},
		{`{gpu: 0, processes: [{pid: 7, memory: -1}]}`, []string{"processes[0].memory"}, `-1`},
		{`{gpu: 0, processes: [{pid: 7, sm: 25}]}`, []string{"processes[0].sm"}, `0 to 1`},
		{`{gpu: 0, processes: [{pid: 7, sm: .nan}]}`, []string{"processes[0].sm"}, `NaN`},
		{`{gpu: 0, processes: [{pid: 7, kind: cuda}]}`, []string{"processes[0].kind"}, `compute, graphics, mps`},
		{`{gpu: 0, processes: [{pid: 7, mig: 7}]}`, []string{"processes[0].mig"}, `0 to 6`},
		{`{gpu: 0, processes: [{pid: 7}, {pid: 8}, {pid: 7, kind: compute}]}`, []string{"processes[2].pid"}, `7`},
		{`{gpu: 0, processes: [` + strings.Repeat("{pid: 7}, ", maxProcesses+1) + `]}`, []string{"processes"}, `at most 1000`},
		{`{gpu: 0, lost: &off true, mig: *off}`, []string{"mig"}, `off, sevenths, balanced`},
		{`{events: sideways}`, []string{"events"}, `up, down, lossy`},
		{`{source: sideways}`, []string{"source"}, `up, down, stalled, blind, empty`},
		{`{gpu: 3, xid: 1000, lost: true, retiredPages: 65}`, []string{"xid", "retiredPages"}, `1000`},
	} {
		e, err := ParseEvent(tt.in)
		if err == nil {
			t.Errorf("ParseEvent(%q) = %+v; want an error", tt.in, e)
			continue
		}
		if keys := errorKeys(err); !slices.Equal(keys, tt.keys) || !strings.Contains(err.Error(), tt.data) {
			t.Errorf("ParseEvent(%q): keys %q, %q; want keys %q and %q", tt.in, keys, err, tt.keys, tt.data)
		}
	}
	if _, err := ParseEvent(`{at: 5s, gpu: 3, xid: 79}`); !errors.Is(err, errAt) {
		t.Errorf("with at: %v; want %v", err, errAt)
	}
}

// TestEffectsAreFieldsOfEvent compares the table with the fields that the configuration reads, and their order.
func TestEffectsAreFieldsOfEvent(t *testing.T) {
	var keys []string
	for field := range reflect.TypeFor[Event]().Fields() {
		key, _, _ := strings.Cut(field.Tag.Get("yaml"), ",")
		if jsonKey, _, _ := strings.Cut(field.Tag.Get("json"), ","); key != "at" && jsonKey != key {
			t.Errorf("key %s is %s in JSON", key, jsonKey)
		}
		if key != "at" && key != "gpu" {
			keys = append(keys, key)
		}
	}
	var rows []string
	for _, f := range Effects() {
		rows = append(rows, f.Key)
		if f.Help == "" {
			t.Errorf("no help for %s", f.Key)
		}
	}
	if !slices.Equal(keys, rows) {
		t.Errorf("fields of Event %v, rows %v", keys, rows)
	}
}

func FuzzParseEvent(f *testing.F) {
	for _, s := range []string{
		`{gpu: 3, xid: 79}`, `{"gpu":3,"lost":true}`, `{gpu: 1, recoveryAction: reset, temperature: 97.5}`,
		`{gpu: 2, incident: nvlink_down, severity: warn}`, `{gpu: 2, incident: "14", retiredPages: 0x3f, doubleBitErrors: 0}`,
		`{gpu: 2, clocksSlowed: true, rowRemapFailed: false}`, `{source: stalled}`, `{source: empty}`,
		`{gpu: 2, stale: true, recoveryAction: 0x7fffffff}`, "gpu: 2\nrowRemapPending: true",
		`{gpu: 0, processes: [{pid: 4242, memory: 1073741824}, {pid: 4242, kind: graphics, sm: 1e-7, mig: 6}]}`, `{gpu: 0, processes: []}`,
		`{gpu: 0, processes: &a [{pid: 1, <<: *a}]}`,
		`{gpu: &a 3, xid: *a}`, `{<<: {gpu: 1}, xid: 5}`, `{? [a] : b}`, "{", "---\n---",
	} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		start := time.Now()
		e, err := ParseEvent(s)
		if took := time.Since(start); took > time.Second {
			t.Errorf("%d bytes took %v", len(s), took)
		}
		if err != nil {
			if err.Error() == "" {
				t.Error("error without a text")
			}
			return
		}
		if e == (Event{GPU: e.GPU}) {
			t.Errorf("%q is valid without an effect", s)
		}
		if e.At != 0 || e.Temperature != nil && math.IsNaN(*e.Temperature) {
			t.Errorf("%q was parsed as %+v", s, e)
		}
		// A valid event survives encoding by Send.
		line, err := json.Marshal(e)
		if err != nil {
			t.Fatalf("Marshal(%+v): %v", e, err)
		}
		again, err := ParseEvent(string(line))
		if err != nil || !reflect.DeepEqual(again, e) {
			t.Errorf("%q was encoded as %s and parsed as %+v, %v", s, line, again, err)
		}
	})
}
