package judge

import (
	"fmt"
	"strings"
	"testing"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/health/catalog"
)

// withXID adds an XID with the detail of the kernel log.
func withXID(all ...health.XID) func(*health.Sample) {
	return func(s *health.Sample) { s.XIDs = append(s.XIDs, all...) }
}

// linkXID returns an XID with the kernel log's line of an NVLink error.
func linkXID(code int, grade string, info, status uint32) health.XID {
	return health.XID{Code: code, Detail: health.XIDDetail{Text: fmt.Sprintf(
		"UNIT %s XC0 i0 Link 08 (0x%08x 0x%08x 0x00000000 0x00000000 0x00000000 0x00000000)", grade, info, status)}}
}

// The kernel log makes an NVLink error worse than the table, never better, and never against the configuration.
func TestXIDFindingsOfNVLink(t *testing.T) {
	fatal, harmless := linkXID(149, "Fatal", 0x4505c6, 0), linkXID(149, "Nonfatal", 0x226, 1)
	follows := linkXID(145, "Nonfatal", 0x82, 0x20)
	config := func(edit func(*catalog.XIDConfig)) Config {
		c := DefaultConfig()
		edit(&c.XID)
		return c
	}
	for name, c := range map[string]struct {
		config Config
		x      health.XID
		action float64 // the driver's recovery action
		want   health.State
	}{
		"unknown detail":                  {DefaultConfig(), health.XID{Code: 149}, 0, health.Degraded},
		"fatal":                           {DefaultConfig(), fatal, 0, health.Unhealthy},
		"non-fatal":                       {DefaultConfig(), harmless, 0, health.Degraded},
		"non-fatal, the driver resets":    {DefaultConfig(), harmless, 1, health.Unhealthy},
		"follows the recovery action":     {DefaultConfig(), follows, 0, health.Degraded},
		"and the driver asks for a reset": {DefaultConfig(), follows, 1, health.Unhealthy},
		"fatal, configured to warn":       {config(func(c *catalog.XIDConfig) { c.Warn = []int{149} }), fatal, 0, health.Degraded},
		"fatal, configured to ignore":     {config(func(c *catalog.XIDConfig) { c.Ignore = []int{149} }), fatal, 0, health.Healthy},
		"fatal, with a preset":            {config(func(c *catalog.XIDConfig) { c.Preset = catalog.XIDPresetGKE }), fatal, 0, health.Healthy},
		"non-fatal, configured":           {config(func(c *catalog.XIDConfig) { c.Unhealthy = []int{149} }), harmless, 0, health.Unhealthy},
		"fatal text of another XID":       {DefaultConfig(), health.XID{Code: 32, Detail: fatal.Detail}, 0, health.Degraded},
	} {
		before := judgeAll(c.config, nil, 0, nil, nil, gpu0)
		d := judgeAll(c.config, before, 1, nil, samples{"GPU-0": present(value(health.FieldRecoveryAction, c.action), withXID(c.x))}, gpu0)
		if got := d[0].Verdict.State; got != c.want {
			t.Errorf("%s: %v, want %v: %+v", name, got, c.want, d[0].Verdict.Findings)
		}
	}
	// A reset cures it, and nothing else.
	runSteps(t, DefaultConfig(), []step{
		{0, present(withXID(fatal)), health.Unhealthy, []string{"xid-149"}},
		{100, present(), health.Unhealthy, []string{"xid-149"}},
		{101, present(value(health.FieldRecoveryAction, 1)), health.Unhealthy, []string{"xid-149", "recovery-action"}},
		{102, present(), health.Healthy, nil},
	})
}

func TestXIDFindingOfMIGDeviceKeepsDetail(t *testing.T) {
	s := health.Sample{Presence: health.Present, XIDs: []health.XID{linkXID(149, "Fatal", 0x4505c6, 0)}}
	all := judge(nil, 0, samples{"MIG-0": s, "MIG-1": s}, gpu0, mig0, mig1)
	if gpu := verdictOf(all, "GPU-0"); gpu.State != health.Unhealthy || len(gpu.Findings) != 1 ||
		!strings.Contains(gpu.Findings[0].Reason, "on link 8") {
		t.Errorf("%+v, want XID 149 with its detail", gpu)
	}
}

func TestEnrich(t *testing.T) {
	process := health.XIDDetail{Process: "python3", PID: 7194, Text: "Uncontained: LTC TAG. RST: Yes, D-RST: No"}
	state := func(codes ...int) []health.Finding {
		return judge(nil, 0, samples{"GPU-0": present(xids(codes...))}, gpu0)[0].Verdict.Findings
	}
	asked := func() []health.Finding {
		return judge(nil, 0, samples{"GPU-0": present(xids(149), value(health.FieldRecoveryAction, 1))}, gpu0)[0].Verdict.Findings
	}
	for name, c := range map[string]struct {
		findings []health.Finding
		twin     health.XID
		cause    string // of the finding to compare; "" for no findings at all
		state    health.State
		reason   string // part of it
	}{
		"the detail of an XID":     {state(95), health.XID{Code: 95, Detail: process}, "xid-95", health.Unhealthy, "python3 (pid 7194)"},
		"of another XID":           {state(95), health.XID{Code: 140, Detail: process}, "xid-95", health.Unhealthy, "uncontained memory error"},
		"no detail":                {state(95), health.XID{Code: 95}, "xid-95", health.Unhealthy, "uncontained memory error"},
		"of an XID that is over":   {nil, health.XID{Code: 95, Detail: process}, "", health.Healthy, ""},
		"of an ignored XID":        {state(31), health.XID{Code: 31, Detail: process}, "", health.Healthy, ""},
		"a fatal NVLink error":     {state(149), linkXID(149, "Fatal", 0x4505c6, 0), "xid-149", health.Unhealthy, "subcode 4"},
		"a non-fatal NVLink error": {state(149), linkXID(149, "Nonfatal", 0x226, 0), "xid-149", health.Degraded, "status 0x0"},
		"with a recovery action":   {asked(), linkXID(149, "Nonfatal", 0x226, 0), "xid-149", health.Unhealthy, asksForResetSuffix},
		"of an inherited finding": {
			[]health.Finding{{Cause: "xid-95", State: health.Unhealthy, From: "GPU-0", Reason: "XID 95"}},
			health.XID{Code: 95, Detail: process},
			"xid-95", health.Unhealthy, "XID 95",
		},
	} {
		before := append([]health.Finding(nil), c.findings...)
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
			if raised := f.State > before[i].State; raised && (f.Clears != health.ClearsGPUReset || f.Action != health.ActionResetGPU) {
				t.Errorf("%s: %+v, want it to need a reset", name, f)
			}
		}
	}
}

// The kernel log is read after NVML has reported the XID, and before or after DCGM has.
func TestKernelLogIsTwin(t *testing.T) {
	rc := ReadingContext{XIDHistory: true, Witnesses: []health.Witness{health.WitnessNVML, health.WitnessKernelLog}}
	process := health.XIDDetail{Process: "python3", PID: 7194, Text: "text"}
	fatal, harmless := linkXID(149, "Fatal", 0x4505c6, 0).Detail, linkXID(149, "Nonfatal", 0x226, 0).Detail
	type step struct {
		events bool
		sample health.Sample
		want   health.State
	}
	event := func(w health.Witness, code int, d health.XIDDetail, want health.State) step {
		return step{true, health.Sample{XIDs: []health.XID{{Code: code, At: at(0), Witness: w, Detail: d}}}, want}
	}
	for name, c := range map[string]struct {
		readings []step
		code     int
		reason   string // part of the finding's reason; "" for no finding
		last     health.XIDDetail
	}{
		"detail after NVML": {
			[]step{
				event(health.WitnessNVML, 95, health.XIDDetail{}, health.Unhealthy),
				event(health.WitnessKernelLog, 95, process, health.Unhealthy),
			},
			95,
			"python3 (pid 7194)", process,
		},
		"detail before": {
			[]step{
				event(health.WitnessKernelLog, 95, process, health.Unhealthy),
				event(health.WitnessNVML, 95, health.XIDDetail{}, health.Unhealthy),
			},
			95,
			"python3 (pid 7194)", process,
		},
		"all three, 79": {[]step{
			event(health.WitnessNVML, 79, health.XIDDetail{}, health.Unhealthy),
			{false, present(xids(79)), health.Unhealthy},
			event(health.WitnessKernelLog, 79, health.XIDDetail{Text: "GPU has fallen off the bus."}, health.Unhealthy),
			{false, present(), health.Unhealthy},
		}, 79, "fallen off the bus", health.XIDDetail{Text: "GPU has fallen off the bus."}},
		"all three, 119, DCGM first": {[]step{
			{false, present(xids(119)), health.Unhealthy},
			event(health.WitnessKernelLog, 119, process, health.Unhealthy),
			event(health.WitnessNVML, 119, health.XIDDetail{}, health.Unhealthy),
		}, 119, "python3", process},
		"an application's": {[]step{
			event(health.WitnessNVML, 31, health.XIDDetail{}, health.Healthy), event(health.WitnessKernelLog, 31, process, health.Healthy),
			{false, present(xids(31)), health.Healthy},
		}, 31, "", process},
		"fatal NVLink, late": {
			[]step{
				event(health.WitnessNVML, 149, health.XIDDetail{}, health.Degraded),
				event(health.WitnessKernelLog, 149, fatal, health.Unhealthy),
			},
			149,
			"subcode 4", fatal,
		},
		"NVLink, and the driver asks for a reset": {[]step{
			event(health.WitnessNVML, 149, health.XIDDetail{}, health.Degraded), event(health.WitnessKernelLog, 149, harmless, health.Degraded),
			{false, present(value(health.FieldRecoveryAction, 1), xids(149)), health.Unhealthy},
		}, 149, "status 0x0; the driver asks", harmless},
		"fatal NVLink after a reset": {[]step{
			event(health.WitnessNVML, 149, health.XIDDetail{}, health.Degraded),
			{false, present(value(health.FieldRecoveryAction, 1), xids(149)), health.Unhealthy},
			{false, present(), health.Healthy},
			event(health.WitnessKernelLog, 149, fatal, health.Healthy),
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
				before = []health.DeviceState{d}
			}
			d := before[0]
			if d.XIDs.Codes[c.code].Total != 1 || d.XIDs.Newest().Detail != c.last {
				t.Errorf("counted %d, last %+v; want 1, %+v", d.XIDs.Codes[c.code].Total, d.XIDs.Newest(), c.last)
			}
			f := d.Verdict.OwnFinding(health.HasCause(health.XIDCause(c.code)))
			if (f != nil) != (c.reason != "") || f != nil && !strings.Contains(f.Reason, c.reason) {
				t.Errorf("finding %+v, want %q", f, c.reason)
			}
		})
	}
}
