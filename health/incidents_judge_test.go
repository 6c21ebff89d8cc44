package health

import (
	"slices"
	"testing"
)

// checked is a sample in which DCGM has made its checks and found these incidents.
func checked(incidents ...Incident) Sample {
	s := present()
	s.Checked, s.Incidents = true, incidents
	return s
}

func TestIncidentSequences(t *testing.T) {
	fail := Incident{System: "memory", Code: 4, Severity: SeverityFail, Message: "a double-bit error"}
	warn := Incident{System: "pcie", Code: 3, Severity: SeverityWarn, Message: "replays"}
	sticky := Incident{System: "memory", Code: 101, Severity: SeverityFail, Message: "XID 31"}
	const cause, warning = "dcgm-volatile-dbe-detected", "dcgm-pci-replay-rate"
	for name, steps := range map[string][]step{
		"one FAIL is not enough, two in a row are": {
			{0, checked(fail), Healthy, nil},
			{1, checked(), Healthy, nil},
			{2, checked(fail), Healthy, nil},
			{3, checked(fail), Unhealthy, []string{cause}},
		},
		"a poll that looked at nothing breaks no row": {
			{0, checked(fail), Healthy, nil},
			{1, present(), Healthy, nil},
			{2, checked(fail), Unhealthy, []string{cause}},
		},
		"it goes when it has been gone for long enough": {
			{0, checked(fail), Healthy, nil},
			{1, checked(fail), Unhealthy, []string{cause}},
			{2, checked(), Unhealthy, []string{cause}},
			{60, present(), Unhealthy, []string{cause}}, // nobody looked
			{61, checked(), Healthy, nil},
		},
		"and not while nobody looks": {
			{0, checked(fail), Healthy, nil},
			{1, checked(fail), Unhealthy, []string{cause}},
			{9999, present(), Unhealthy, []string{cause}},
		},
		"a WARN is degraded at once and never unhealthy": {
			{0, checked(warn), Degraded, []string{warning}},
			{1, checked(warn), Degraded, []string{warning}},
			{2, checked(warn, warn), Degraded, []string{warning}},
		},
		"a WARN never hides a FAIL of the same code": {
			{0, checked(Incident{Code: 4, Severity: SeverityWarn}, fail, Incident{Code: 4, Severity: SeverityWarn}), Healthy, nil},
			{1, checked(Incident{Code: 4, Severity: SeverityWarn}, fail), Unhealthy, []string{cause}},
		},
		"a WARN does not end a FAIL": {
			{0, checked(fail), Healthy, nil},
			{1, checked(fail), Unhealthy, []string{cause}},
			{2, checked(Incident{Code: 4, Severity: SeverityWarn}), Unhealthy, []string{cause}},
			{61, checked(), Healthy, nil},
		},
		"a FAIL that comes and goes is not over": {
			{0, checked(fail), Healthy, nil},
			{1, checked(fail), Unhealthy, []string{cause}},
			{30, checked(), Unhealthy, []string{cause}},
			{59, checked(fail), Unhealthy, []string{cause}},
			{62, checked(), Unhealthy, []string{cause}},
			{119, checked(), Healthy, nil},
		},
		"what DCGM never takes back is not believed": {
			{0, checked(sticky), Healthy, nil},
			{1, checked(sticky), Healthy, nil},
			{2, checked(sticky, fail), Healthy, nil},
			{3, checked(sticky, fail), Unhealthy, []string{cause}},
		},
	} {
		t.Run(name, func(t *testing.T) { runSteps(t, DefaultConfig(), steps) })
	}

	c := DefaultConfig()
	c.Incidents.Ignore = []string{"DCGM_FR_VOLATILE_DBE_DETECTED"}
	c.Confirm = 1
	runSteps(t, c, []step{{0, checked(fail), Healthy, nil}})
	c.Incidents = IncidentConfig{}
	known := runSteps(t, c, []step{{0, checked(fail), Unhealthy, []string{cause}}})
	if f := known[0].Verdict.Findings[0]; f.Reason != fail.Message || f.Action == "" {
		t.Errorf("finding %+v", f)
	}
}

// Polls that events bring close together are one check, not several.
func TestConfirmCountsChecksNotWakes(t *testing.T) {
	c := DefaultConfig()
	fail := checked(Incident{Code: 4, Severity: SeverityFail})
	var known []DeviceState
	for range 20 {
		known = judgeWith(c, known, gpu0, step{at: 0, sample: fail})
	}
	if s := known[0].Verdict.State; s != Healthy {
		t.Fatalf("%v after one moment", s)
	}
	known = judgeWith(c, known, gpu0, step{at: 1, sample: fail})
	if s := known[0].Verdict.State; s != Unhealthy {
		t.Fatalf("%v after two checks", s)
	}
}

func TestXIDOverrides(t *testing.T) {
	c := DefaultConfig()
	c.XID = XIDConfig{Preset: XIDPresetNone, Unhealthy: []int{45}, Warn: []int{109}}
	known := runSteps(t, c, []step{
		{0, present(xids(48, 79, 999)), Healthy, nil},
		{1, present(xids(109)), Degraded, []string{"xid-109"}},
		{2, present(xids(45)), Unhealthy, []string{"xid-45", "xid-109"}},
		{62, present(), Unhealthy, []string{"xid-45"}},
		{63, blank(Lost), Unhealthy, []string{"xid-45", CauseLost}},
		{64, blank(Lost), Unhealthy, []string{"xid-45", CauseLost}},
		{65, present(), Healthy, nil},
	})
	if n := known[0].XIDCounts[48]; n != 1 {
		t.Errorf("an XID that is ignored is counted %d times, want 1", n)
	}
}

func TestCausesAreUnique(t *testing.T) {
	seen := map[string]bool{}
	for _, c := range conditions {
		if seen[c.cause] {
			t.Errorf("cause %s is there twice", c.cause)
		}
		seen[c.cause] = true
	}
	if fs := JudgedFields(); slices.Contains(fs, FieldXID) || len(fs) < 8 {
		t.Errorf("judged fields %v", fs)
	}
}
