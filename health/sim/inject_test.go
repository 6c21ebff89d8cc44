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

func TestInjectValidatesForTheProfile(t *testing.T) {
	src := newSource(t, profileConfig("l4-1"))
	for text, key := range map[string]string{`{gpu: 3, xid: 79}`: "gpu", `{gpu: 0, mig: sevenths}`: "mig"} {
		if err := src.inject(event(t, 0, text)); !slices.Equal(errorKeys(err), []string{key}) || !strings.Contains(err.Error(), "l4-1") {
			t.Errorf("%s: %v; want an error of %s with the profile", text, err, key)
		}
	}
}

func TestInjectValidatesMIGOfProcesses(t *testing.T) {
	src := newSource(t, DefaultConfig())
	for _, step := range []struct {
		event string
		key   string // of the error; "" if the event is valid
	}{
		{`{gpu: 3, processes: [{pid: 1}, {pid: 2, mig: 0}]}`, "processes[1].mig"},
		{`{gpu: 3, mig: balanced, processes: [{pid: 1}, {pid: 2, mig: 3}]}`, ""},
		{`{gpu: 3, processes: [{pid: 1, mig: 4}]}`, "processes[0].mig"},
		{`{gpu: 2, processes: [{pid: 1, mig: 3}]}`, "processes[0].mig"},
		{`{gpu: 3, mig: off, processes: [{pid: 2, mig: 3}]}`, "processes[0].mig"},
	} {
		err := src.inject(event(t, 0, step.event))
		if keys := errorKeys(err); (step.key == "") != (err == nil) || step.key != "" && !slices.Equal(keys, []string{step.key}) {
			t.Errorf("%s: %v; want an error of %q", step.event, err, step.key)
		}
	}
}

// FuzzInject sends lines to a source. A refused event has no effect, an accepted one has all of its effects.
func FuzzInject(f *testing.F) {
	for _, text := range []string{
		"{gpu: 3, xid: 79, lost: true}\n{gpu: 3, lost: false}", "{source: stalled}\n{source: down}\n{gpu: 0, xid: 13}\n{source: up}",
		"{gpu: 0, temperature: 97.5}\n{gpu: 0, temperature: 0}",
		"{gpu: 7, recoveryAction: drainAndReset, rowRemapPending: true}", "{gpu: 8, xid: 1}\n{gpu: -1, xid: 1}\n{gpu: 99999999999, xid: 1}",
		"{gpu: 0, xid: 0x4f}\n{gpu: 0, xid: 0o17}\n{gpu: 0, xid: 1_3}",
		"{gpu: 1, xid: 999}\n{gpu: 1, xid: 1000}", "{gpu: 2, temperature: 1e-300}\n{gpu: 2, temperature: -0.0}",
		"{gpu: 1, mig: balanced, xid: 31, times: 700}\n{gpu: 1, mig: off}\n{gpu: 1, mig: all}\n{gpu: 1, times: 3}\n{source: blind}",
		"{<<: {gpu: 1}, xid: 5}", "{gpu: &a 1, xid: *a}", "{}\n\n{gpu: 0}\nnull", "{\"gpu\":0,\"lost\":true}",
		"{gpu: 1, stale: true, xid: 64}\n{source: empty}\n{gpu: 2, xid: 48, recoveryAction: 512}", "{gpu: 0, stale: true}\n{gpu: 0, lost: true}",
		"{gpu: 0, incident: DCGM_FR_NVLINK_DOWN}\n{gpu: 0, incident: NVLINK_DOWN, severity: none}\n{gpu: 1, incident: FAULTY_MEMORY}",
		"{gpu: 0, retiredPages: 63, doubleBitErrors: 2}\n{gpu: 0, rowRemapFailed: true, clocksSlowed: true}",
		"{gpu: 1, mig: balanced, processes: [{pid: 1, mig: 3}, {pid: 1}]}\n{gpu: 1, processes: [{pid: 2, mig: 4}]}\n{gpu: 1, mig: off}",
		"{gpu: 0, processes: []}\n{gpu: 0, processes: [{pid: 1}, {pid: 1}]}",
		strings.Repeat("{gpu: 0, xid: 31}\n", maxQueued+1),
	} {
		f.Add(uint8(0), text)
		f.Add(uint8(2), text)
		f.Add(uint8(3), text)
	}
	f.Fuzz(func(t *testing.T, profile uint8, text string) {
		cfg := DefaultConfig()
		cfg.Profile = profiles()[int(profile)%len(profiles())].name
		s, err := New(cfg, zap.NewNop())
		if err != nil {
			t.Fatal(err)
		}
		n := len(s.gpus)
		xids, lost, stale, empty := make([][]int, n), make([]bool, n), make([]bool, n), false
		migs := make([]int, n) // MIG devices of each GPU
		for _, d := range s.devices {
			if d.Kind == health.KindMIG {
				migs[d.Index]++
			}
		}
		incidents := make([]map[int]string, n)
		for i := range incidents {
			incidents[i] = map[int]string{}
		}
		for line := range strings.SplitSeq(text, "\n") {
			e, err := ParseEvent(line)
			if err != nil {
				continue
			}
			accepted := s.inject(e) == nil
			valid := e.GPU == nil || *e.GPU >= 0 && *e.GPU < n && (e.MIG == nil || s.profile.models[*e.GPU].repartitions) &&
				(e.RetiredPages == nil || s.profile.models[*e.GPU].retires)
			if valid && e.GPU != nil {
				count := migs[*e.GPU]
				if e.MIG != nil {
					count = map[string]int{migSevenths: 7, migBalanced: 4}[*e.MIG]
				}
				valid = !slices.ContainsFunc(valueOf(e.Processes), func(p Process) bool { return p.MIG != nil && *p.MIG >= count })
				if valid {
					migs[*e.GPU] = count
				}
			}
			if accepted != valid {
				t.Fatalf("%q on %d GPUs: accepted %v", line, n, accepted)
			}
			if !accepted {
				continue
			}
			lostXIDs := empty // an empty source reads no XIDs
			if e.Source != nil {
				empty = *e.Source == sourceEmpty
			}
			if e.GPU == nil {
				continue
			}
			gpu := *e.GPU
			if e.Stale != nil {
				stale[gpu] = *e.Stale
			}
			if e.Lost != nil {
				lost[gpu] = *e.Lost
			}
			if e.Incident != nil {
				code, _ := health.IncidentCode(*e.Incident)
				incidents[gpu][code] = e.severity()
			}
			if e.XID != nil && !lostXIDs {
				times := 1
				if e.Times != nil {
					times = *e.Times
				}
				xids[gpu] = append(xids[gpu], slices.Repeat([]int{*e.XID}, times)...)
			}
		}
		if err := s.inject(Event{Source: new(sourceUp)}); err != nil {
			t.Fatal(err)
		}
		session, err := s.Open(t.Context())
		measured := slices.ContainsFunc(s.gpus, func(g gpu) bool { i := s.devices[g.device].Index; return !lost[i] && !stale[i] })
		if blind := !measured && slices.Contains(lost, false); blind {
			if !errors.Is(err, errBlind) {
				t.Fatalf("every GPU is lost or stale, and Open returned %v", err)
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
			maps.DeleteFunc(incidents[d.Index], func(_ int, severity string) bool { return severity == severityNone })
			n := len(incidents[d.Index])
			if sample.Checked && len(sample.Incidents) != n || sample.Checked == (lost[d.Index] || sample.Stale) {
				t.Errorf("checked is %v and the incidents of GPU %d are %+v, want %d", sample.Checked, d.Index, sample.Incidents, n)
			}
			want := xids[d.Index]
			if len(want) > maxQueued { // later polls deliver the rest, and merging changes the order
				if len(sample.XIDs) != maxDelivered {
					t.Errorf("%d XIDs of GPU %d in a reading, want %d", len(sample.XIDs), d.Index, maxDelivered)
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
