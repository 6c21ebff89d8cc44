package health

import (
	"strings"
	"testing"
)

// withXID adds an XID with the detail of the kernel log.
func withXID(all ...XID) func(*Sample) {
	return func(s *Sample) { s.XIDs = append(s.XIDs, all...) }
}

func TestXIDDescription(t *testing.T) {
	for name, c := range map[string]struct {
		x          XID
		has, hasNo []string
	}{
		"without a detail": {XID{Code: 31}, nil, []string{"process"}},
		"with a process": {
			XID{Code: 31, Detail: XIDDetail{"python3", 7194, "Ch 00000008"}},
			[]string{"process python3 (pid 7194)"},
			[]string{"Ch 0"},
		},
		"with a name only": {XID{Code: 31, Detail: XIDDetail{Process: "python3"}}, []string{"process python3"}, []string{"pid"}},
		"with a pid only":  {XID{Code: 31, Detail: XIDDetail{PID: 7194}}, []string{"process 7194"}, []string{"pid"}},
		"contained error": {
			XID{Code: 94, Detail: XIDDetail{Text: "Contained: CE User Channel (0x9). RST: No, D-RST: No"}},
			[]string{"Contained: CE User Channel (0x9). RST: No, D-RST: No"},
			nil,
		},
		"uncontained error": {
			XID{Code: 95, Detail: XIDDetail{"a", 1, "Uncontained: LTC TAG. RST: Yes, D-RST: No"}},
			[]string{"process a (pid 1)", "Uncontained: LTC TAG. RST: Yes"},
			nil,
		},
		"recovery action": {
			XID{Code: 154, Detail: XIDDetail{Text: "GPU recovery action changed from 0x0 (None) to 0x1 (GPU Reset Required)"}},
			[]string{"GPU recovery action changed from 0x0 (None) to 0x1 (GPU Reset Required)"},
			nil,
		},
		"recovery action, another text": {XID{Code: 154, Detail: XIDDetail{Text: "other"}}, nil, []string{"other"}},
		"NVLink": {
			XID{Code: 149, Detail: XIDDetail{Text: "NETIR_LINK_EVT Fatal XC0 i1 Link 08 (0x004505c6 0x00000000)"}},
			[]string{"fatal NETIR_LINK_EVT on link 8", "subcode 4", hintSignal, "injected"},
			[]string{"non-fatal", "status"},
		},
		"NVLink of no link": {
			XID{Code: 145, Detail: XIDDetail{Text: "RLW_REMAP Nonfatal XC0 i0 Link -1 (0x82 0x20)"}},
			[]string{"non-fatal RLW_REMAP", "status 0x20"},
			[]string{"link -1", "injected", "subcode"},
		},
	} {
		text := c.x.Description()
		if name := LookupXID(c.x.Code).Name; !strings.HasPrefix(text, name) || strings.Count(text, name) != 1 {
			t.Errorf("%s: %q, want it to begin with %q", name, text, name)
		}
		for _, s := range c.has {
			if !strings.Contains(text, s) {
				t.Errorf("%s: %q has no %q", name, text, s)
			}
		}
		for _, s := range c.hasNo {
			if strings.Contains(text, s) {
				t.Errorf("%s: %q has %q", name, text, s)
			}
		}
	}
}

// The kernel log makes an NVLink error worse than the table, never better, and never against the configuration.
func TestXIDFindingsOfNVLink(t *testing.T) {
	fatal, harmless := nvlinkXID(149, "Fatal", 0x4505c6, 0), nvlinkXID(149, "Nonfatal", 0x226, 1)
	follows := nvlinkXID(145, "Nonfatal", 0x82, 0x20)
	config := func(edit func(*XIDConfig)) Config {
		c := DefaultConfig()
		edit(&c.XID)
		return c
	}
	for name, c := range map[string]struct {
		config Config
		x      XID
		action float64 // the driver's recovery action
		want   State
	}{
		"unknown detail":                  {DefaultConfig(), XID{Code: 149}, 0, Degraded},
		"fatal":                           {DefaultConfig(), fatal, 0, Unhealthy},
		"non-fatal":                       {DefaultConfig(), harmless, 0, Degraded},
		"non-fatal, the driver resets":    {DefaultConfig(), harmless, 1, Unhealthy},
		"follows the recovery action":     {DefaultConfig(), follows, 0, Degraded},
		"and the driver asks for a reset": {DefaultConfig(), follows, 1, Unhealthy},
		"fatal, configured to warn":       {config(func(c *XIDConfig) { c.Warn = []int{149} }), fatal, 0, Degraded},
		"fatal, configured to ignore":     {config(func(c *XIDConfig) { c.Ignore = []int{149} }), fatal, 0, Healthy},
		"fatal, with a preset":            {config(func(c *XIDConfig) { c.Preset = XIDPresetGKE }), fatal, 0, Healthy},
		"non-fatal, configured":           {config(func(c *XIDConfig) { c.Unhealthy = []int{149} }), harmless, 0, Unhealthy},
		"fatal text of another XID":       {DefaultConfig(), XID{Code: 32, Detail: fatal.Detail}, 0, Degraded},
	} {
		before := judgeAll(c.config, nil, 0, nil, nil, gpu0)
		d := judgeAll(c.config, before, 1, nil, samples{"GPU-0": present(value(FieldRecoveryAction, c.action), withXID(c.x))}, gpu0)
		if got := d[0].Verdict.State; got != c.want {
			t.Errorf("%s: %v, want %v: %+v", name, got, c.want, d[0].Verdict.Findings)
		}
	}
	// A reset cures it, and nothing else.
	runSteps(t, DefaultConfig(), []step{
		{0, present(withXID(fatal)), Unhealthy, []string{"xid-149"}},
		{100, present(), Unhealthy, []string{"xid-149"}},
		{101, present(value(FieldRecoveryAction, 1)), Unhealthy, []string{"xid-149", "recovery-action"}},
		{102, present(), Healthy, nil},
	})
}

func TestXIDFindingOfMIGDeviceKeepsDetail(t *testing.T) {
	s := Sample{Presence: Present, XIDs: []XID{nvlinkXID(149, "Fatal", 0x4505c6, 0)}}
	all := judge(nil, 0, samples{"MIG-0": s, "MIG-1": s}, gpu0, mig0, mig1)
	if gpu := verdictOf(all, "GPU-0"); gpu.State != Unhealthy || len(gpu.Findings) != 1 ||
		!strings.Contains(gpu.Findings[0].Reason, "on link 8") {
		t.Errorf("%+v, want XID 149 with its detail", gpu)
	}
}

func TestEnrich(t *testing.T) {
	process := XIDDetail{"python3", 7194, "Uncontained: LTC TAG. RST: Yes, D-RST: No"}
	state := func(codes ...int) []Finding {
		return judge(nil, 0, samples{"GPU-0": present(xids(codes...))}, gpu0)[0].Verdict.Findings
	}
	asked := func() []Finding {
		return judge(nil, 0, samples{"GPU-0": present(xids(149), value(FieldRecoveryAction, 1))}, gpu0)[0].Verdict.Findings
	}
	for name, c := range map[string]struct {
		findings []Finding
		twin     XID
		cause    string // of the finding to compare; "" for no findings at all
		state    State
		reason   string // part of it
	}{
		"the detail of an XID":     {state(95), XID{Code: 95, Detail: process}, "xid-95", Unhealthy, "python3 (pid 7194)"},
		"of another XID":           {state(95), XID{Code: 140, Detail: process}, "xid-95", Unhealthy, "uncontained memory error"},
		"no detail":                {state(95), XID{Code: 95}, "xid-95", Unhealthy, "uncontained memory error"},
		"of an XID that is over":   {nil, XID{Code: 95, Detail: process}, "", Healthy, ""},
		"of an ignored XID":        {state(31), XID{Code: 31, Detail: process}, "", Healthy, ""},
		"a fatal NVLink error":     {state(149), nvlinkXID(149, "Fatal", 0x4505c6, 0), "xid-149", Unhealthy, "subcode 4"},
		"a non-fatal NVLink error": {state(149), nvlinkXID(149, "Nonfatal", 0x226, 0), "xid-149", Degraded, "status 0x0"},
		"with a recovery action":   {asked(), nvlinkXID(149, "Nonfatal", 0x226, 0), "xid-149", Unhealthy, asksForResetSuffix},
		"of an inherited finding": {
			[]Finding{{Cause: "xid-95", State: Unhealthy, From: "GPU-0", Reason: "XID 95"}},
			XID{Code: 95, Detail: process},
			"xid-95", Unhealthy, "XID 95",
		},
	} {
		before := append([]Finding(nil), c.findings...)
		got := enrich(DefaultConfig(), c.findings, c.twin)
		if len(got) != len(before) {
			t.Errorf("%s: %+v, want %d findings", name, got, len(before))
			continue
		}
		for i, f := range got {
			if f.Since != before[i].Since || f.Last != before[i].Last || f.Reset != before[i].Reset {
				t.Errorf("%s: %+v is renewed", name, f)
			}
			if f.Cause == c.cause && (f.State != c.state || !strings.Contains(f.Reason, c.reason) ||
				f.Reason != enrich(DefaultConfig(), got, c.twin)[i].Reason) {
				t.Errorf("%s: %+v, want %v with %q, the same after a second twin", name, f, c.state, c.reason)
			}
			if raised := f.State > before[i].State; raised && (f.Clears != ClearsGPUReset || f.Action != ActionResetGPU) {
				t.Errorf("%s: %+v, want it to need a reset", name, f)
			}
		}
	}
}

// The kernel log is read after NVML has reported the XID, and before or after DCGM has.
func TestKernelLogIsTwin(t *testing.T) {
	rc := ReadingContext{XIDHistory: true, Witnesses: []Witness{WitnessNVML, WitnessKernelLog}}
	process := XIDDetail{Process: "python3", PID: 7194, Text: "text"}
	fatal, harmless := nvlinkXID(149, "Fatal", 0x4505c6, 0).Detail, nvlinkXID(149, "Nonfatal", 0x226, 0).Detail
	type step struct {
		events bool
		sample Sample
		want   State
	}
	event := func(w Witness, code int, d XIDDetail, want State) step {
		return step{true, Sample{XIDs: []XID{{Code: code, At: at(0), Witness: w, Detail: d}}}, want}
	}
	for name, c := range map[string]struct {
		readings []step
		code     int
		reason   string // part of the finding's reason; "" for no finding
		last     XIDDetail
	}{
		"detail after NVML": {
			[]step{event(WitnessNVML, 95, XIDDetail{}, Unhealthy), event(WitnessKernelLog, 95, process, Unhealthy)},
			95,
			"python3 (pid 7194)", process,
		},
		"detail before": {
			[]step{event(WitnessKernelLog, 95, process, Unhealthy), event(WitnessNVML, 95, XIDDetail{}, Unhealthy)},
			95,
			"python3 (pid 7194)", process,
		},
		"all three, 79": {[]step{
			event(WitnessNVML, 79, XIDDetail{}, Unhealthy),
			{false, present(xids(79)), Unhealthy},
			event(WitnessKernelLog, 79, XIDDetail{Text: "GPU has fallen off the bus."}, Unhealthy),
			{false, present(), Unhealthy},
		}, 79, "fallen off the bus", XIDDetail{Text: "GPU has fallen off the bus."}},
		"all three, 119, DCGM first": {[]step{
			{false, present(xids(119)), Unhealthy},
			event(WitnessKernelLog, 119, process, Unhealthy),
			event(WitnessNVML, 119, XIDDetail{}, Unhealthy),
		}, 119, "python3", process},
		"an application's": {[]step{
			event(WitnessNVML, 31, XIDDetail{}, Healthy), event(WitnessKernelLog, 31, process, Healthy),
			{false, present(xids(31)), Healthy},
		}, 31, "", process},
		"fatal NVLink, late": {
			[]step{event(WitnessNVML, 149, XIDDetail{}, Degraded), event(WitnessKernelLog, 149, fatal, Unhealthy)},
			149,
			"subcode 4", fatal,
		},
		"NVLink, and the driver asks for a reset": {[]step{
			event(WitnessNVML, 149, XIDDetail{}, Degraded), event(WitnessKernelLog, 149, harmless, Degraded),
			{false, present(value(FieldRecoveryAction, 1), xids(149)), Unhealthy},
		}, 149, "status 0x0; the driver asks", harmless},
		"fatal NVLink after a reset": {[]step{
			event(WitnessNVML, 149, XIDDetail{}, Degraded),
			{false, present(value(FieldRecoveryAction, 1), xids(149)), Unhealthy},
			{false, present(), Healthy},
			event(WitnessKernelLog, 149, fatal, Healthy),
		}, 149, "", fatal},
	} {
		t.Run(name, func(t *testing.T) {
			before := judge(nil, 0, nil, gpu0)
			for i, r := range c.readings {
				judge := judgeReading
				if r.events {
					judge = observe
				}
				reading, now := reading(i+1, samples{gpu0.ID: r.sample}, gpu0)
				d := judge(DefaultConfig(), before, reading, rc, now)[0]
				if d.Verdict.State != r.want {
					t.Fatalf("after reading %d: %v %+v, want %v", i, d.Verdict.State, d.Verdict.Findings, r.want)
				}
				before = []DeviceState{d}
			}
			d := before[0]
			if d.XIDs.Codes[c.code].Total != 1 || d.XIDs.Newest().Detail != c.last {
				t.Errorf("counted %d, last %+v; want 1, %+v", d.XIDs.Codes[c.code].Total, d.XIDs.Newest(), c.last)
			}
			f := d.Verdict.ownFinding(hasCause(xidCause(c.code)))
			if (f != nil) != (c.reason != "") || f != nil && !strings.Contains(f.Reason, c.reason) {
				t.Errorf("finding %+v, want %q", f, c.reason)
			}
		})
	}
}
