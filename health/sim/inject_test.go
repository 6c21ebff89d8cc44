package sim

import (
	"errors"
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	"go.uber.org/zap"

	"github.com/gpu-node-agent/gpu-node-agent/health"
)

// FuzzInject sends a conversation to a machine. What was refused has not happened, what was taken has, and the
// machine goes on.
func FuzzInject(f *testing.F) {
	for _, text := range []string{
		"{gpu: 3, xid: 79, lost: true}\n{gpu: 3, lost: false}", "{source: stalled}\n{source: down}\n{gpu: 0, xid: 13}\n{source: up}", "{gpu: 0, temperature: 97.5}\n{gpu: 0, temperature: 0}",
		"{gpu: 7, recoveryAction: drainAndReset, rowRemapPending: true}", "{gpu: 8, xid: 1}\n{gpu: -1, xid: 1}\n{gpu: 99999999999, xid: 1}", "{gpu: 0, xid: 0x4f}\n{gpu: 0, xid: 0o17}\n{gpu: 0, xid: 1_3}",
		"{gpu: 1, xid: 999}\n{gpu: 1, xid: 1000}", "{gpu: 2, temperature: 1e-300}\n{gpu: 2, temperature: -0.0}", "{gpu: 1, mig: balanced, xid: 31, times: 700}\n{gpu: 1, mig: off}\n{gpu: 1, mig: all}\n{gpu: 1, times: 3}\n{source: blind}", "{<<: {gpu: 1}, xid: 5}", "{gpu: &a 1, xid: *a}", "{}\n\n{gpu: 0}\nnull", "{\"gpu\":0,\"lost\":true}",
		"{gpu: 1, stale: true, xid: 64}\n{source: empty}\n{gpu: 2, xid: 48, recoveryAction: 512}", "{gpu: 0, stale: true}\n{gpu: 0, lost: true}",
		"{gpu: 0, incident: DCGM_FR_NVLINK_DOWN}\n{gpu: 0, incident: NVLINK_DOWN, severity: none}\n{gpu: 1, incident: FAULTY_MEMORY}", "{gpu: 0, retiredPages: 63, doubleBitErrors: 2}\n{gpu: 0, rowRemapFailed: true, clocksSlowed: true}",
		strings.Repeat("{gpu: 0, xid: 31}\n", maxPending+1),
	} {
		f.Add(uint8(0), text)
		f.Add(uint8(2), text)
		f.Add(uint8(3), text)
	}
	f.Fuzz(func(t *testing.T, which uint8, text string) {
		cfg := DefaultConfig()
		cfg.Profile = profiles()[int(which)%len(profiles())].name
		s, err := New(cfg, zap.NewNop())
		if err != nil {
			t.Fatal(err)
		}
		n := len(s.gpus)
		xids, lost, stale, empty := make([][]int, n), make([]bool, n), make([]bool, n), false
		found := make([]map[int]string, n) // what DCGM's checks do
		for i := range found {
			found[i] = map[int]string{}
		}
		for line := range strings.SplitSeq(text, "\n") {
			e, err := ParseEvent(line)
			if err != nil {
				continue
			}
			taken := s.inject(e) == nil
			can := e.GPU == nil || *e.GPU >= 0 && *e.GPU < n && (e.MIG == nil || s.profile.layouts) && (e.RetiredPages == nil || s.profile.model.retires)
			if taken != can {
				t.Fatalf("%q of a machine with %d GPUs: taken is %v", line, n, taken)
			}
			if !taken {
				continue
			}
			unheard := empty // XIDs while the source lists no GPU are lost
			if e.Source != nil {
				empty = *e.Source == sourceEmpty
			}
			if e.GPU == nil {
				continue
			}
			stale[*e.GPU] = is(first(e.Stale, &stale[*e.GPU]))
			lost[*e.GPU] = is(first(e.Lost, &lost[*e.GPU]))
			if e.Incident != nil {
				code, _ := health.IncidentCode(*e.Incident)
				found[*e.GPU][code] = e.severity()
			}
			if e.XID != nil && !unheard {
				xids[*e.GPU] = append(xids[*e.GPU], slices.Repeat([]int{*e.XID}, is(first(e.Times, new(1))))...)
			}
		}
		if err := s.inject(Event{Source: new(sourceUp)}); err != nil {
			t.Fatal(err)
		}
		session, err := s.Open(t.Context())
		seen := slices.ContainsFunc(s.gpus, func(g gpu) bool { i := s.devices[g.device].Index; return !lost[i] && !stale[i] })
		if blind := !seen && slices.ContainsFunc(lost, func(lost bool) bool { return !lost }); blind {
			if !errors.Is(err, errBlind) {
				t.Fatalf("every GPU is lost or stale, and Open gave %v", err)
			}
			return
		}
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = session.Close() }()
		reading, err := session.Poll(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		if len(reading.Samples) != len(reading.Devices) {
			t.Fatalf("%d samples of %d devices", len(reading.Samples), len(reading.Devices))
		}
		for i, d := range reading.Devices {
			sample := reading.Samples[i]
			if sample.Device != d.ID || (sample.Presence == health.Lost) != lost[d.Index] || sample.Stale != (stale[d.Index] && !lost[d.Index]) ||
				(lost[d.Index] || sample.Stale) == (len(sample.Values) > 0) {
				t.Errorf("%s is %v with %d values; lost is %v", d.ID, sample.Presence, len(sample.Values), lost[d.Index])
			}
			if d.Kind != health.KindGPU {
				continue
			}
			maps.DeleteFunc(found[d.Index], func(_ int, severity string) bool { return severity == severityNone })
			n := len(found[d.Index]) + len(s.gpus[d.Index].incidents())
			if sample.Checked && len(sample.Incidents) != n || sample.Checked == (lost[d.Index] || sample.Stale) {
				t.Errorf("checked is %v and the incidents of GPU %d are %+v, want %d", sample.Checked, d.Index, sample.Incidents, n)
			}
			want := xids[d.Index]
			if len(want) > maxPending { // what is left comes with the next polls, and the order of the oldest is not kept
				if len(sample.XIDs) != maxTaken {
					t.Errorf("%d XIDs of GPU %d in a reading, want %d", len(sample.XIDs), d.Index, maxTaken)
				}
				continue
			}
			if len(sample.XIDs) != len(want) {
				t.Fatalf("%d XIDs of GPU %d, want %d", len(sample.XIDs), d.Index, len(want))
			}
			for j, x := range sample.XIDs {
				if x.Code != want[j] || time.Since(x.At) < 0 {
					t.Errorf("XID %d of GPU %d is %+v, want %d", j, d.Index, x, want[j])
				}
			}
		}
	})
}
