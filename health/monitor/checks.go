package monitor

import (
	"slices"
	"time"

	"go.uber.org/zap"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/health/catalog"
)

// applyChecks publishes the state of DCGM's health checks and the incidents that name no device, and logs the changes. Without
// a result of the checks, the incidents stay as they are. m.mu is held.
func (m *Monitor) applyChecks(r *health.Reading, now time.Time) {
	s, checks := &m.now.Source, r.Checks
	if checks.Status == health.ChecksUnknown {
		return
	}
	checks.Since = s.Checks.Since
	if before := s.Checks.Status; checks.Status != before {
		checks.Since = now
		m.logLater(func() {
			switch {
			case checks.Status == health.ChecksDown:
				m.log.Warn("health checks down; keeping the incidents", zap.String("cause", checks.Err))
			case before == health.ChecksDown:
				m.log.Info("health checks " + checks.Status.String())
			}
		})
	}
	s.Checks = checks
	if checks.Status == health.ChecksDown {
		return
	}
	before := s.Incidents
	s.Incidents = r.Incidents
	m.logIncidents(r.Incidents, before, "incident of no GPU")
	m.logIncidents(before, r.Incidents, "incident of no GPU ended")
}

// logIncidents logs the incidents that have no equal, by code and severity, among the others. m.mu is held.
func (m *Monitor) logIncidents(incidents, others []health.Incident, message string) {
	for _, i := range incidents {
		same := func(o health.Incident) bool { return o.Code == i.Code && o.Severity == i.Severity }
		if !slices.ContainsFunc(others, same) {
			m.logLater(func() {
				m.log.Warn(message, zap.String("system", i.System), zap.String("incident", catalog.LookupIncident(i.Code).Name),
					zap.Stringer("severity", i.Severity), zap.String("message", i.Message))
			})
		}
	}
}
