package monitor

import (
	"errors"
	"testing"
	"time"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/health/judge"
	"github.com/gpu-node-agent/gpu-node-agent/internal/healthtest"
)

// While DCGM's health checks do not work, incidents stay, also over a reconnect, and everything else is judged. Their end has
// to last for RecoverAfter once the checks work again. Only changes are logged.
func TestMonitorHealthChecksDown(t *testing.T) {
	const cause = "dcgm-volatile-dbe-detected"
	runTest(t, func(t *testing.T, h *harness) {
		fail := health.Incident{System: "memory", Code: 4, Severity: health.SeverityFail, Message: "a double-bit error"}
		imex := health.Incident{System: "imex", Code: 122, Severity: health.SeverityFail, Message: "IMEX daemon is not ready"}
		report := func(checks health.ChecksStatus, reason string, node []health.Incident, sample health.Sample) {
			h.reportGPU0(sample)
			h.set(func(s *fakeSource) {
				s.reading.Checks, s.reading.Incidents = health.Checks{Status: checks, Err: reason}, node
			})
			advance(3 * time.Second)
		}
		want := func(when string, checks health.ChecksStatus, since time.Time, incidents int, causes string) {
			t.Helper()
			h.wantCauses(t, when, health.SourceUp, causes)
			s := h.status()
			if s.Checks.Status != checks || !s.Checks.Since.Equal(since) || (s.Checks.Err != "") != (checks == health.ChecksDown) ||
				len(s.Incidents) != incidents {
				t.Errorf("%s: %+v, %+v; want %v since %v", when, s.Checks, s.Incidents, checks, since)
			}
		}
		report(health.ChecksUp, "", []health.Incident{imex}, healthtest.Checked(fail))
		up := h.status().Checks.Since
		want("fault", health.ChecksUp, up, 1, cause)

		report(health.ChecksDown, "version mismatch", nil, healthtest.Present())
		down := h.status().Checks.Since
		if !down.After(up) {
			t.Errorf("down since %v, up since %v", down, up)
		}
		advance(judge.DefaultConfig().RecoverAfter * 2)
		report(health.ChecksDown, "another reason", nil, healthtest.Present(healthtest.XIDs(95)))
		want("down for long", health.ChecksDown, down, 1, cause+",xid-95")
		h.set(func(s *fakeSource) { s.pollErr = errors.New("engine died") })
		advance(3 * time.Second)
		h.set(func(s *fakeSource) { s.pollErr = nil })
		advance(time.Minute)
		want("reconnected", health.ChecksDown, down, 1, cause+",xid-95")
		report(health.ChecksUnknown, "", nil, healthtest.Present())
		want("without a result", health.ChecksDown, down, 1, cause+",xid-95")

		report(health.ChecksUp, "", nil, healthtest.Checked())
		want("up again", health.ChecksUp, h.status().Checks.Since, 0, cause+",xid-95")
		advance(judge.DefaultConfig().RecoverAfter)
		want("up for long", health.ChecksUp, h.status().Checks.Since, 0, "xid-95")

		for message, n := range map[string]int{
			"health checks down; keeping the incidents": 1, "health checks up": 1, "incident of no GPU": 1, "incident of no GPU ended": 1,
		} {
			if got := h.logs.FilterMessage(message).Len(); got != n {
				t.Errorf("%q is logged %d times, want %d", message, got, n)
			}
		}
	})
}
