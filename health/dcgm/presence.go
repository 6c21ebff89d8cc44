//go:build cgo && linux

package dcgm

import (
	"time"

	"github.com/NVIDIA/go-dcgm/pkg/dcgm"

	"github.com/gpu-node-agent/gpu-node-agent/health"
)

// blip is for how long a GPU may be without its driver before it counts as such: binding or unbinding
// one GPU makes all of them "detached" for about 0.3 s (11).
const blip = 2 * time.Second

// presence follows whether the driver can reach one GPU.
type presence struct {
	status   dcgm.EntityStatus // as DCGM last said
	detached time.Time         // since when it says so; zero if it does not
	shown    health.Presence
}

// update takes what DCGM says now. It reports whether what is shown has changed, and whether the GPU
// has come back: DCGM may have forgotten what it watched then.
func (p *presence) update(status dcgm.EntityStatus, now time.Time) (changed, back bool) {
	before, was := p.shown, p.status
	p.status = status
	if status != dcgm.EntityStatusDetached {
		p.detached = time.Time{}
	}
	switch status {
	case dcgm.EntityStatusUnknown: // go-dcgm's word for a call that failed: not knowing is not losing
		p.shown = health.PresenceUnknown
	case dcgm.EntityStatusLost:
		p.shown = health.Lost
	case dcgm.EntityStatusInaccessible:
		p.shown = health.Inaccessible
	case dcgm.EntityStatusDetached:
		if p.detached.IsZero() {
			p.detached = now
		}
		if now.Sub(p.detached) >= blip {
			p.shown = health.Detached
		}
	default: // OK; and unsupported, fake and disabled, which are words on DCGM's support, not on the GPU
		p.shown = health.Present
	}
	return p.shown != before, reachable(status) && gone(was)
}

func reachable(s dcgm.EntityStatus) bool {
	return s == dcgm.EntityStatusOk || s == dcgm.EntityStatusFake
}

func gone(s dcgm.EntityStatus) bool {
	return s == dcgm.EntityStatusLost || s == dcgm.EntityStatusInaccessible || s == dcgm.EntityStatusDetached
}
