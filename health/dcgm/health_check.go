//go:build cgo && linux

package dcgm

import (
	"fmt"
	"maps"

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
// leaves what was known; whether the engine still lives is told by the reads. So does a check of a GPU that DCGM does
// not see: it makes a warning of what it cannot read (12).
//
// The result tells whether what is known of incidents is what stands now, of the GPUs that DCGM sees.
func (s *session) checkHealth() bool {
	if s.systems == 0 {
		return true // nobody wants to know of any: what an earlier configuration found is over
	}
	if !s.watches.health || s.node.unseen() {
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
	maps.DeleteFunc(s.incidents, func(id uint, _ []health.Incident) bool { return !s.unseen(id) })
	for _, in := range response.Incidents {
		if in.EntityInfo.EntityGroupId != dcgm.FE_GPU || in.Health == dcgm.DCGM_HEALTH_RESULT_PASS || s.unseen(in.EntityInfo.EntityId) {
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

// unseen reports whether DCGM sees other GPUs and not this one, or did not in this poll.
func (s *session) unseen(gpu uint) bool {
	g := s.sights[gpu]
	return s.stale[gpu] || g != nil && g.unseen()
}
