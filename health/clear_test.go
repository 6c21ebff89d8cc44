package health

import (
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"
)

// What was just measured is not cleared: the kubelet would give the GPU out until the next poll.
func TestClearKeepsWhatStands(t *testing.T) {
	link := Incident{System: "nvlink", Code: 71, Severity: SeverityFail, Message: "errors"} // NVLINK_ERROR_CRITICAL
	for name, c := range map[string]struct {
		bad   Sample
		cause string
	}{
		"lost":            {blank(Lost), CauseLost},
		"hidden":          {blank(Inaccessible), CauseInaccessible},
		"detached":        {blank(Detached), CauseDetached},
		"missing":         {blank(Missing), CauseMissing},
		"remap failed":    {present(value(FieldRemapFailed, 1)), CauseRemapFailed},
		"recovery action": {present(value(FieldRecoveryAction, 2)), CauseRecoveryAction},
		"hot":             {present(value(FieldGPUTemp, 99)), CauseTemperature},
		"DCGM's checks":   {checked(link), incidentCause(LookupIncident(link.Code))},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				b := monitor(t)
				defer b.stop()
				bad := c.bad
				bad.XIDs = []XID{{Code: 48}}
				b.show(bad)
				pass(3 * time.Second)
				before := b.out.Load().Devices[0].Verdict
				for _, cause := range []string{c.cause, "xid-48"} {
					if !slices.Contains(causes(before), cause) {
						t.Fatalf("%s does not stand: %v", cause, causes(before))
					}
				}
				if _, err := b.m.Clear("GPU-0", c.cause); err == nil || !strings.Contains(err.Error(), "stands as it was just measured") {
					t.Errorf("by its name: %v", err)
				}
				got, err := b.m.Clear("GPU-0", "")
				after := b.out.Load().Devices[0].Verdict
				if err != nil || !slices.Equal(got, []string{"xid-48"}) || !slices.Equal(causes(after), []string{c.cause}) {
					t.Errorf("cleared %v, %v; %v stands", got, err, causes(after))
				}
				f, was := after.Findings[0], before.Findings[slices.Index(causes(before), c.cause)]
				if f.Since != was.Since || f.State != was.State {
					t.Errorf("%+v, was %+v", f, was)
				}
				// What is known of a source that is away is old, and an operator knows better.
				hang := make(chan struct{})
				b.set(func(s *script) { s.hang = hang })
				pass(time.Minute)
				if got, err := b.m.Clear("GPU-0", c.cause); err != nil || !slices.Equal(got, []string{c.cause}) {
					t.Errorf("while the source stalls: %v, %v", got, err)
				}
				b.set(func(s *script) { s.hang = nil })
				close(hang)
			})
		})
	}
}

// A GPU that is back and whose finding is still to age is well at an operator's word.
func TestClearOfWhatIsGone(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := monitor(t)
		defer b.stop()
		b.show(present(value(FieldRemapFailed, 1)))
		pass(2 * time.Second)
		b.show(present())
		pass(2 * time.Second)
		if b.stands() != CauseRemapFailed {
			t.Fatalf("%s stands", b.stands())
		}
		if got, err := b.m.Clear("GPU-0", ""); err != nil || len(got) != 1 || b.stands() != "" {
			t.Errorf("%v, %v; %s stands", got, err, b.stands())
		}
	})
}
