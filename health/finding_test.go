package health

import "testing"

func TestFindingFamilies(t *testing.T) {
	for cause, want := range map[string][3]bool{ // of an XID, of an incident, of presence
		"xid-79": {true}, IncidentCausePrefix + "nvlink-down": {false, true}, CauseLost: {false, false, true}, CauseTemperature: {}, "other": {},
	} {
		f := Finding{Cause: cause}
		if got := [3]bool{f.OfXID(), f.OfIncident(), f.OfPresence()}; got != want {
			t.Errorf("%s: %v, want %v", cause, got, want)
		}
	}
}

// Of the findings only the device's own decisions continue in the next process, but for a release, whose end no process awaits.
func TestVerdictDecisions(t *testing.T) {
	v := Verdict{Findings: []Finding{
		{Cause: CauseReleased}, {Cause: CauseCordoned, From: "GPU-0"}, {Cause: CauseCordoned}, {Cause: "xid-79"},
	}}
	if got := v.Decisions(); len(got) != 1 || got[0].Cause != CauseCordoned || got[0].From != "" || len(v.Findings) != 4 {
		t.Errorf("%+v", got)
	}
}

func TestMemoryFind(t *testing.T) {
	m := &Memory{Findings: []Finding{{Cause: "xid-79"}, {Cause: CauseLost}}}
	for i := range m.Findings {
		if got := m.Find(HasCause(m.Findings[i].Cause)); got != &m.Findings[i] {
			t.Errorf("%s: %p, want %p", m.Findings[i].Cause, got, &m.Findings[i])
		}
	}
	if m.Has(CauseTemperature) || !m.Has("xid-79") {
		t.Error("the causes of others")
	}
}
