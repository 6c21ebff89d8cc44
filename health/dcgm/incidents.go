//go:build cgo && linux

package dcgm

import (
	"fmt"

	"github.com/NVIDIA/go-dcgm/pkg/dcgm"
	"go.uber.org/zap"

	"github.com/gpu-node-agent/gpu-node-agent/health"
)

// system names the health system that an incident is of.
func system(s dcgm.HealthSystem) string {
	if s == dcgm.DCGM_HEALTH_WATCH_ALL {
		return "xid" // how DCGM files the XIDs that it knows as errors
	}
	for _, known := range healthSystems {
		if uint32(s)&known.bits != 0 {
			return known.name
		}
	}
	return fmt.Sprintf("0x%x", uint32(s))
}

// checkHealth reads DCGM's own findings and keeps them by GPU. The group has whole GPUs only: DCGM looks
// XIDs up by number, so that an XID of GPU 7 would be reported of instance 7 of another GPU too (9).
// Where DCGM names no GPU, as of IMEX, there is no device that the finding is of. A check that fails
// leaves what was known; whether the engine still lives is told by the reads.
//
// The result tells whether what is known of incidents is what stands now.
func (s *session) checkHealth() bool {
	if s.systems == 0 {
		return true // nobody wants to know of any: what an earlier configuration found is over
	}
	if !s.watches.health {
		return false
	}
	response, err := dcgm.HealthCheck(s.watches.gpuGroup.handle)
	if failing := err != nil; failing != s.healthFailing {
		s.healthFailing = failing
		if failing {
			s.log.Warn("DCGM's health check fails; its findings are kept as they were", zap.Error(err))
		} else {
			s.log.Info("DCGM's health check works again")
		}
	}
	if err != nil {
		return false
	}
	clear(s.incidents)
	for _, in := range response.Incidents {
		if in.EntityInfo.EntityGroupId != dcgm.FE_GPU || in.Health == dcgm.DCGM_HEALTH_RESULT_PASS {
			continue
		}
		severity := health.SeverityWarn
		if in.Health == dcgm.DCGM_HEALTH_RESULT_FAIL {
			severity = health.SeverityFail
		}
		s.incidents[in.EntityInfo.EntityId] = append(s.incidents[in.EntityInfo.EntityId], health.Incident{
			System: system(in.System), Code: int(in.Error.Code), Severity: severity, Message: in.Error.Message,
		})
	}
	return true
}
