package sim

import (
	"encoding/json"
	"math"
	"reflect"
	"strings"
	"testing"
	"time"
)

func TestParseEvent(t *testing.T) {
	ptr := func(n int) *int { return &n }
	yes, no, reset, seven, wide, down, hot, mild, link, none := true, false, Recovery("reset"), Recovery("7"), Recovery("512"), "down", 97.0, 36.6, "DCGM_FR_NVLINK_DOWN", "none"
	tests := []struct {
		in   string
		want Event
	}{
		{`{gpu: 3, xid: 79}`, Event{GPU: ptr(3), XID: ptr(79)}},
		{`{"gpu":3,"xid":79}`, Event{GPU: ptr(3), XID: ptr(79)}},
		{"{\"gpu\":\t3,\n\t\"lost\":\ttrue}", Event{GPU: ptr(3), Lost: &yes}},
		{"gpu: 0\nlost: false\nrecoveryAction: reset", Event{GPU: ptr(0), Lost: &no, RecoveryAction: &reset}},
		{`{gpu: 1, temperature: 97, rowRemapPending: true}`, Event{GPU: ptr(1), Temperature: &hot, RowRemapPending: &yes}},
		{`{gpu: 1, temperature: 36.6}`, Event{GPU: ptr(1), Temperature: &mild}},
		{`{gpu: 1, rowRemapFailed: true, doubleBitErrors: 3, retiredPages: 63, clocksSlowed: false}`, Event{
			GPU: ptr(1), RowRemapFailed: &yes, DoubleBitErrors: ptr(3), RetiredPages: ptr(63), ClocksSlowed: &no,
		}},
		{`{gpu: 1, incident: DCGM_FR_NVLINK_DOWN}`, Event{GPU: ptr(1), Incident: &link}},
		{`{gpu: 1, incident: DCGM_FR_NVLINK_DOWN, severity: none}`, Event{GPU: ptr(1), Incident: &link, Severity: &none}},
		{`{source: down}`, Event{Source: &down}},
		{`{gpu: 1, recoveryAction: 7}`, Event{GPU: ptr(1), RecoveryAction: &seven}},
		{`{"gpu":1,"recoveryAction":"7"}`, Event{GPU: ptr(1), RecoveryAction: &seven}}, // as Send writes it
		{`{"gpu":1,"recoveryAction":512}`, Event{GPU: ptr(1), RecoveryAction: &wide}},
		{`{gpu: 1, stale: true}`, Event{GPU: ptr(1), Stale: &yes}},
	}
	for _, tt := range tests {
		got, err := ParseEvent(tt.in)
		if err != nil || !reflect.DeepEqual(got, tt.want) {
			t.Errorf("ParseEvent(%q) = %+v, %v; want %+v", tt.in, got, err, tt.want)
		}
	}
}

func TestParseEventRefuses(t *testing.T) {
	tests := []struct{ in, want string }{
		{``, `there is no event; write it as {gpu: 3, xid: 79}`},
		{`# nothing`, `there is no event`},
		{`79`, `"79" is not an event; write it as {gpu: 3, xid: 79}`},
		{`[{gpu: 3, xid: 79}]`, `is not an event`},
		{`{gpu: 3, xid: 79`, `not an event as {gpu: 3, xid: 79}`},
		{"{gpu: 3, xid: 79}\n---\n{gpu: 4, xid: 79}", `more than one event`},
		{`{}`, `nothing would happen; say at least one of xid`},
		{`{gpu: 3}`, `nothing would happen; say at least one of xid`},
		{`{gpu: 3, source: down}`, `gpu: nothing happens to GPU 3`},
		{`{xid: 79}`, `gpu: is missing`},
		{`{gpu: 3, xdi: 79}`, `"xdi": is not known; use gpu with xid, lost, stale,`},
		{`{gpu: three, xid: 79}`, `gpu: "three" is not a whole number`},
		{`{gpu: 3.7, xid: 79}`, `gpu: "3.7" is not a whole number`},
		{`{gpu: "3", xid: 79}`, `gpu: "3" is not a whole number`},
		{`{gpu: 3, xid: null}`, `xid: "null" is not a whole number`},
		{`{gpu: 3, xid: [79]}`, `xid: what is given is not a whole number`},
		{`{gpu: 99999999999999999999, xid: 79}`, `gpu: "99999999999999999999" is not a whole number`},
		{`{gpu: 3, xid: 0}`, `xid: 0 is not an XID; use 1 to 999`},
		{`{gpu: 3, xid: 79, xid: 48}`, `xid: is given twice`},
		{`{gpu: 3, lost: on}`, `lost: "on" is not true or false`},
		{`{gpu: 3, lost: 1}`, `lost: "1" is not true or false`},
		{`{gpu: 3, recoveryAction: explode}`, `recoveryAction: "explode" is not known; use a number from 0 to 2147483647 or one of none, reset, reboot, drainP2P, drainAndReset, recoverIMEX, pcieBusReset, systemReboot`},
		{`{gpu: 3, recoveryAction: true}`, `recoveryAction: "true" is not a number or one of none, reset`},
		{`{gpu: 3, recoveryAction: -1}`, `recoveryAction: "-1" is not known; use a number from 0 to 2147483647 or one of none`},
		{`{gpu: 3, recoveryAction: 2147483648}`, `recoveryAction: "2147483648" is not known`},
		{`{gpu: 3, recoveryAction: 1.5}`, `recoveryAction: "1.5" is not a number or one of none`},
		{`{gpu: 3, stale: 1}`, `stale: "1" is not true or false`},
		{`{gpu: 3, temperature: .nan}`, `temperature: NaN °C is not believable`},
		{`{gpu: 3, temperature: 1000}`, `temperature: 1000 °C is not believable; use 1 to 200, or 0`},
		{`{gpu: 3, temperature: hot}`, `temperature: "hot" is not a number of °C`},
		{`{gpu: 3, rowRemapFailed: 1}`, `rowRemapFailed: "1" is not true or false`},
		{`{gpu: 3, clocksSlowed: hw}`, `clocksSlowed: "hw" is not true or false`},
		{`{gpu: 3, doubleBitErrors: -1}`, `doubleBitErrors: -1 is not how many; use 0 to 1000000`},
		{`{gpu: 3, doubleBitErrors: some}`, `doubleBitErrors: "some" is not a whole number`},
		{`{gpu: 3, retiredPages: 65}`, `retiredPages: 65 is not how many; use 0 to 64, of which 63 are too many`},
		{`{gpu: 3, retiredPages: 6.3}`, `retiredPages: "6.3" is not a whole number`},
		{`{gpu: 3, incident: NVLINK}`, `incident: "NVLINK" is no incident of DCGM's; use a name such as DCGM_FR_NVLINK_DOWN`},
		{`{gpu: 3, incident: DCGM_FR_OK}`, `incident: "DCGM_FR_OK" is no incident of DCGM's`},
		{`{gpu: 3, incident: 14}`, `incident: "14" is not a name of DCGM's, such as DCGM_FR_NVLINK_DOWN`},
		{`{gpu: 3, severity: fail}`, `severity: is for incident; say which`},
		{`{gpu: 3, incident: DCGM_FR_NVLINK_DOWN, severity: bad}`, `severity: "bad" is not known; use one of fail, warn, none`},
		{`{gpu: 3, incident: DCGM_FR_NVLINK_DOWN, severity: true}`, `severity: "true" is not one of fail, warn, none`},
		{`{incident: DCGM_FR_NVLINK_DOWN}`, `gpu: is missing`},
		{`{source: sideways}`, `source: "sideways" is not known; use one of up, down, stalled`},
		{`{at: 5s, gpu: 3, xid: 79}`, `at: belongs into a scenario`},
	}
	for _, tt := range tests {
		e, err := ParseEvent(tt.in)
		if err == nil {
			t.Errorf("ParseEvent(%q) = %+v; want an error", tt.in, e)
			continue
		}
		if !strings.Contains(err.Error(), tt.want) {
			t.Errorf("ParseEvent(%q): %q; want %q in it", tt.in, err, tt.want)
		}
	}
}

func FuzzParseEvent(f *testing.F) {
	for _, s := range []string{
		`{gpu: 3, xid: 79}`, `{"gpu":3,"lost":true}`, `{gpu: 1, recoveryAction: reset, temperature: 97.5}`,
		`{gpu: 2, incident: nvlink_down, severity: warn}`, `{gpu: 2, incident: "14", retiredPages: 0x3f, doubleBitErrors: 0}`, `{gpu: 2, clocksSlowed: true, rowRemapFailed: false}`,
		`{source: stalled}`, `{source: empty}`, `{gpu: 2, stale: true, recoveryAction: 0x7fffffff}`, "gpu: 2\nrowRemapPending: true", `{gpu: &a 3, xid: *a}`, `{<<: {gpu: 1}, xid: 5}`, `{? [a] : b}`, "{", "---\n---",
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
				t.Error("an error without words")
			}
			return
		}
		if !e.touchesGPU() && e.Source == nil {
			t.Errorf("%q has no effect and was taken", s)
		}
		if e.At != 0 || (e.Temperature != nil && math.IsNaN(*e.Temperature)) {
			t.Errorf("%q was taken as %+v", s, e)
		}
		// What was taken can be sent, and is the same when it arrives.
		line, err := json.Marshal(e)
		if err != nil {
			t.Fatalf("Marshal(%+v): %v", e, err)
		}
		again, err := ParseEvent(string(line))
		if err != nil || !reflect.DeepEqual(again, e) {
			t.Errorf("%q became %s, which became %+v, %v", s, line, again, err)
		}
	})
}
