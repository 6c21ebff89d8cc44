//go:build cgo && linux

package dcgm

import (
	"time"

	"github.com/NVIDIA/go-dcgm/pkg/dcgm"

	"github.com/gpu-node-agent/gpu-node-agent/health"
)

// detachedDelay is how long a GPU must be without its driver before it counts as detached: while one GPU is bound or
// unbound, DCGM calls all of them detached (OBSERVED.md#short-detach).
const detachedDelay = 2 * time.Second

// presence tracks whether the driver reaches a GPU.
type presence struct {
	status        dcgm.EntityStatus // as of the last call
	detachedSince time.Time         // zero if the status is not detached
	current       health.Presence
}

// update takes the GPU's status. It reports whether the presence has changed, and whether the GPU has returned: DCGM may
// then have forgotten its watches.
func (p *presence) update(status dcgm.EntityStatus, now time.Time) (changed, returned bool) {
	oldPresence, oldStatus := p.current, p.status
	p.status = status
	if status != dcgm.EntityStatusDetached {
		p.detachedSince = time.Time{}
	}
	switch status {
	case dcgm.EntityStatusUnknown: // go-dcgm returns it for a failed call
		p.current = health.PresenceUnknown
	case dcgm.EntityStatusLost:
		p.current = health.Lost
	case dcgm.EntityStatusInaccessible:
		p.current = health.Inaccessible
	case dcgm.EntityStatusDetached:
		if p.detachedSince.IsZero() {
			p.detachedSince = now
		}
		if now.Sub(p.detachedSince) >= detachedDelay {
			p.current = health.Detached
		}
	default: // OK; unsupported, fake and disabled concern DCGM's support, not the GPU
		p.current = health.Present
	}
	return p.current != oldPresence, reachable(status) && unreachable(oldStatus)
}

// reaches reports whether the driver reached a GPU when its status was read.
func (s *session) reaches(gpu uint) bool { return reachable(s.presence[gpu].status) }

func reachable(s dcgm.EntityStatus) bool {
	return s == dcgm.EntityStatusOk || s == dcgm.EntityStatusFake
}

func unreachable(s dcgm.EntityStatus) bool {
	return s == dcgm.EntityStatusLost || s == dcgm.EntityStatusInaccessible || s == dcgm.EntityStatusDetached
}
