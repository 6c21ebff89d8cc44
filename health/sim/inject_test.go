package sim

import (
	"errors"
	"slices"
	"strings"
	"testing"
	"time"

	"go.uber.org/zap"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/health/catalog"
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
		model := newInjected(s)
		for line := range strings.SplitSeq(text, "\n") {
			e, err := ParseEvent(line)
			if err != nil {
				continue
			}
			accepted := s.inject(e) == nil
			if accepted != model.accepts(e) {
				t.Fatalf("%q on %d GPUs: accepted %v", line, len(model.gpus), accepted)
			}
			if accepted {
				model.apply(e)
			}
		}
		if err := s.inject(Event{Source: new(sourceUp)}); err != nil {
			t.Fatal(err)
		}
		session, err := s.Open(t.Context())
		if model.blind() {
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
		model.check(t, reading)
	})
}

// injected is what the fuzz test has injected into a source.
type injected struct {
	source *Source
	empty  bool // the source lists no GPU
	gpus   []injectedGPU
}

type injectedGPU struct {
	lost, stale bool
	migs        int // MIG devices
	xids        []int
	incidents   map[int]string // severity by code
}

func newInjected(s *Source) *injected {
	in := &injected{source: s, gpus: make([]injectedGPU, len(s.gpus))}
	for i := range in.gpus {
		in.gpus[i].incidents = map[int]string{}
	}
	for _, d := range s.devices {
		if d.Kind == health.KindMIG {
			in.gpus[d.Index].migs++
		}
	}
	return in
}

// accepts reports whether the source must accept an event.
func (in *injected) accepts(e Event) bool {
	if e.GPU == nil {
		return true
	}
	if *e.GPU < 0 || *e.GPU >= len(in.gpus) {
		return false
	}
	model := in.source.profile.models[*e.GPU]
	if e.MIG != nil && !model.repartitions || e.RetiredPages != nil && !model.retires {
		return false
	}
	migs := in.migsAfter(e)
	return !slices.ContainsFunc(valueOf(e.Processes), func(p Process) bool { return p.MIG != nil && *p.MIG >= migs })
}

// migsAfter returns how many MIG devices the GPU of an event has after it.
func (in *injected) migsAfter(e Event) int {
	if e.MIG == nil {
		return in.gpus[*e.GPU].migs
	}
	return map[string]int{migSevenths: 7, migBalanced: 4}[*e.MIG]
}

// apply takes over the effects of an accepted event.
func (in *injected) apply(e Event) {
	wasEmpty := in.empty // an empty source reads no XIDs
	if e.Source != nil {
		in.empty = *e.Source == sourceEmpty
	}
	if e.GPU == nil {
		return
	}
	g := &in.gpus[*e.GPU]
	g.migs = in.migsAfter(e)
	if e.Stale != nil {
		g.stale = *e.Stale
	}
	if e.Lost != nil {
		g.lost = *e.Lost
	}
	if e.Incident != nil {
		code, _ := catalog.IncidentCode(*e.Incident)
		if g.incidents[code] = e.severity(); e.severity() == severityNone {
			delete(g.incidents, code)
		}
	}
	if e.XID != nil && !wasEmpty {
		times := 1
		if e.Times != nil {
			times = *e.Times
		}
		g.xids = append(g.xids, slices.Repeat([]int{*e.XID}, times)...)
	}
}

// blind reports whether a source that is up measures no GPU although not all are lost.
func (in *injected) blind() bool {
	measured := slices.ContainsFunc(in.gpus, func(g injectedGPU) bool { return !g.lost && !g.stale })
	return !measured && slices.ContainsFunc(in.gpus, func(g injectedGPU) bool { return !g.lost })
}

// check compares a reading with the model.
func (in *injected) check(t *testing.T, reading *health.Reading) {
	t.Helper()
	if len(reading.Samples) != len(reading.Devices) {
		t.Fatalf("%d samples of %d devices", len(reading.Samples), len(reading.Devices))
	}
	for i, d := range reading.Devices {
		s, g := reading.Samples[i], in.gpus[d.Index]
		if s.Device != d.ID || (s.Presence == health.Lost) != g.lost || s.Stale != (g.stale && !g.lost) ||
			(g.lost || s.Stale) == (len(s.Values) > 0) {
			t.Errorf("%s is %v with %d values; lost is %v", d.ID, s.Presence, len(s.Values), g.lost)
		}
		if d.Kind != health.KindGPU {
			continue
		}
		if s.Checked && len(s.Incidents) != len(g.incidents) || s.Checked == (g.lost || s.Stale) {
			t.Errorf("checked is %v and the incidents of GPU %d are %+v, want %v", s.Checked, d.Index, s.Incidents, g.incidents)
		}
		g.checkXIDs(t, d.Index, s.XIDs)
	}
}

func (g injectedGPU) checkXIDs(t *testing.T, gpu int, xids []health.XID) {
	t.Helper()
	var all []health.XID
	for _, x := range xids {
		all = append(all, slices.Repeat([]health.XID{x}, x.Count())...)
	}
	if len(all) != len(g.xids) {
		t.Fatalf("%d XIDs of GPU %d, want %d", len(all), gpu, len(g.xids))
	}
	if len(g.xids) > maxQueued {
		return // merging changes the order
	}
	for i, x := range all {
		if x.Code != g.xids[i] || time.Since(x.At) < 0 {
			t.Errorf("XID %d of GPU %d is %+v, want %d", i, gpu, x, g.xids[i])
		}
	}
}
