//go:build cgo && linux

package dcgm

import (
	"fmt"
	"maps"

	"github.com/NVIDIA/go-dcgm/pkg/dcgm"
	"go.uber.org/zap"

	"github.com/gpu-node-agent/gpu-node-agent/health"
)

// systemName returns the name of the health system that found an incident.
func systemName(s dcgm.HealthSystem) string {
	if s == dcgm.DCGM_HEALTH_WATCH_ALL {
		return "xid" // DCGM reports the XIDs that it considers errors of all systems
	}
	for _, system := range healthSystems {
		if uint32(s)&system.bits != 0 {
			return system.name
		}
	}
	return fmt.Sprintf("0x%x", uint32(s))
}

// runHealthCheck updates the incidents by GPU, and reports whether those of measured GPUs are current.
//
// Its group has GPUs only: DCGM looks XIDs up by number, so it would report an XID of GPU 7 on instance 7 of another GPU
// too (OBSERVED.md#instance-numbers). Incidents without a GPU, such as those of IMEX, concern no device. If the check
// fails, the incidents stay as they were; reading values shows whether the engine is alive. The same holds for GPUs that
// DCGM cannot measure: it warns of the values that it cannot read (OBSERVED.md#blind-engine).
func (s *session) runHealthCheck() bool {
	if s.systems == 0 {
		return true // disabled: incidents from an earlier configuration end
	}
	if !s.watches.health || s.allGPUs.unmeasured() {
		return false
	}
	response, err := dcgm.HealthCheck(s.watches.gpuGroup)
	if failing := err != nil; failing != s.healthFailing {
		s.healthFailing = failing
		if failing {
			s.log.Warn("DCGM health check failed; keeping the incidents", zap.Error(err))
		} else {
			s.log.Info("DCGM health check works again")
		}
	}
	if err != nil {
		return false
	}
	maps.DeleteFunc(s.incidents, func(id uint, _ []health.Incident) bool { return !s.unmeasured(id) })
	for _, in := range response.Incidents {
		if in.EntityInfo.EntityGroupId != dcgm.FE_GPU || in.Health == dcgm.DCGM_HEALTH_RESULT_PASS || s.unmeasured(in.EntityInfo.EntityId) {
			continue
		}
		severity := health.SeverityWarn
		if in.Health == dcgm.DCGM_HEALTH_RESULT_FAIL {
			severity = health.SeverityFail
		}
		s.incidents[in.EntityInfo.EntityId] = append(s.incidents[in.EntityInfo.EntityId], health.Incident{
			System: systemName(in.System), Code: int(in.Error.Code), Severity: severity, Message: in.Error.Message,
		})
	}
	return true
}

// unmeasured reports whether a GPU is stale, or has no values in this poll.
func (s *session) unmeasured(gpu uint) bool {
	g := s.gpuStaleness[gpu]
	return s.stale[gpu] || g != nil && g.unmeasured()
}
