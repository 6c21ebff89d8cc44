//go:build cgo && linux

package dcgm

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"time"

	"github.com/NVIDIA/go-dcgm/pkg/dcgm"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/health/backoff"
	"github.com/gpu-node-agent/gpu-node-agent/health/dcgm/lib"
)

// The bounds of the pause after a failed attempt to run DCGM's health checks; see backoff.Backoff. A new session and a changed inventory
// try again at once.
const (
	minCheckPause = 10 * time.Second // at least 5 s
	maxCheckPause = 5 * time.Minute
)

// healthChecks is the state of DCGM's health checks in a session.
type healthChecks struct {
	status health.ChecksStatus
	err    error         // of the last attempt, nil if it succeeded
	failed time.Time     // when the last attempt failed; zero if the next is due
	pause  time.Duration // until the next attempt
	retry  backoff.Backoff
}

func newHealthChecks(s health.ChecksStatus) healthChecks {
	return healthChecks{status: s, retry: backoff.Backoff{Min: minCheckPause, Max: maxCheckPause}}
}

func (c *healthChecks) state() health.Checks {
	if c.err == nil {
		return health.Checks{Status: c.status}
	}
	return health.Checks{Status: c.status, Err: c.err.Error()}
}

func (c *healthChecks) fail(err error, now time.Time) {
	c.status, c.err, c.failed, c.pause = health.ChecksDown, err, now, c.retry.Next()
}

// runHealthCheck updates the incidents by GPU, and reports whether they are current for measured GPUs. The incidents of GPUs that DCGM
// cannot measure stay as they were, because DCGM warns of values that it cannot read (OBSERVED.md#blind-engine).
//
// A failed check does not end the session: it is a state of the checks, and is tried again (OBSERVED.md#refused-health-checks). Reading
// values shows whether the engine is alive.
//
// Its group has GPUs only: DCGM looks XIDs up by number, so it would report an XID of GPU 7 on instance 7 of another GPU
// too (OBSERVED.md#instance-numbers).
func (s *session) runHealthCheck() bool {
	c := &s.checks
	switch {
	case s.systems == 0:
		c.status = health.ChecksOff
		return true // incidents from an earlier configuration end
	case len(s.watches.gpus) == 0 || s.allGPUs.unmeasured() || c.err != nil && !elapsed(c.failed, s.now(), c.pause):
		return false
	case !s.watches.checked:
		if s.enableHealthChecks(s.watches); !s.watches.checked {
			return false
		}
	}
	response, err := dcgm.HealthCheck(s.watches.gpuGroup)
	if err != nil {
		s.watches.checked = false // enable them again before the next check
		c.fail(s.explainError(fmt.Errorf("error reading health watches: %w", err)), s.now())
		return false
	}
	*c = newHealthChecks(health.ChecksUp)
	s.nodeIncidents = nil
	maps.DeleteFunc(s.incidents, func(id uint, _ []health.Incident) bool { return !s.unmeasured(id) })
	for _, in := range response.Incidents {
		if in.Health == dcgm.DCGM_HEALTH_RESULT_PASS || systemOf(in) == systemNVLink && s.systems&systemNVLink == 0 {
			continue // NVLink is checked for IMEX only: see systemsToSet
		}
		switch e := in.EntityInfo; {
		case e.EntityGroupId == dcgm.FE_GPU && !s.unmeasured(e.EntityId):
			s.incidents[e.EntityId] = append(s.incidents[e.EntityId], incident(in))
		case e.EntityGroupId == dcgm.FE_NONE:
			s.nodeIncidents = append(s.nodeIncidents, incident(in))
		}
	}
	return true
}

func incident(in dcgm.Incident) health.Incident {
	severity := health.SeverityWarn
	if in.Health == dcgm.DCGM_HEALTH_RESULT_FAIL {
		severity = health.SeverityFail
	}
	return health.Incident{System: systemName(systemOf(in)), Code: int(in.Error.Code), Severity: severity, Message: in.Error.Message}
}

// systemOf returns the bits of the health system that found an incident. Before 4.6.1, DCGM reports IMEX as NVLink.
func systemOf(in dcgm.Incident) uint32 {
	if in.Error.Code == dcgm.DCGM_FR_IMEX_UNHEALTHY {
		return systemIMEX
	}
	return uint32(in.System)
}

// systemName returns the name of a health system.
func systemName(bits uint32) string {
	if bits == everyHealthSystem {
		return "xid" // DCGM reports the XIDs that it considers errors of all systems
	}
	for _, system := range healthSystems {
		if bits&system.bits != 0 {
			return system.name
		}
	}
	return fmt.Sprintf("0x%x", bits)
}

// unmeasured reports whether a GPU is stale, or has no values in this poll.
func (s *session) unmeasured(gpu uint) bool {
	g := s.gpuStaleness[gpu]
	return s.stale[gpu] || g != nil && g.unmeasured()
}

// enableHealthChecks makes DCGM check the selected systems of the watched GPUs.
func (s *session) enableHealthChecks(w *watches) {
	if err := setHealthSystems(w.gpuGroup, s.systems); err != nil {
		s.checks.fail(s.explainError(err), s.now())
		return
	}
	w.checked, s.checks.failed = true, time.Time{}
}

func setHealthSystems(group dcgm.GroupHandle, selected uint32) (err error) {
	for _, function := range []string{"dcgmHealthSet", "dcgmHealthCheck"} {
		if !lib.Has(function) {
			return fmt.Errorf("libdcgm.so.4 lacks %s", function)
		}
	}
	for _, systems := range systemsToSet(selected) {
		err = dcgm.HealthSet(group, dcgm.HealthSystem(systems))
		if err == nil || isResult(err, dcgm.DCGM_ST_TIMEOUT) { // a hung engine makes each call last a minute
			break
		}
	}
	return err
}

// explainError adds the versions, and what to do if the error tells.
func (s *session) explainError(err error) error {
	text := fmt.Sprintf("%v (libdcgm %s", err, cmp.Or(s.versions.DCGM, "of unknown version"))
	if s.cfg.Address != "" {
		text += ", host engine " + cmp.Or(s.versions.Engine, "of unknown version")
	}
	text += ")"
	switch {
	case isResult(err, dcgm.DCGM_ST_VER_MISMATCH):
		text += "; install the same version of DCGM's library, modules and host engine"
	case isResult(err, dcgm.DCGM_ST_MODULE_NOT_LOADED):
		text += "; install DCGM's health module, from 4.7 on in the package datacenter-gpu-manager-4-module-health"
	}
	return errors.New(text)
}
