package agent

import (
	"time"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/offer"
)

const (
	// holdersSettleTime is how long the kubelet must have reported holders before a device counts as free: a restarted
	// kubelet does not know all of its pods at once.
	holdersSettleTime = 10 * time.Second

	// maxCheckGap is the longest time between two checks after which the previous one still counts. The monitor checks at
	// every poll while a GPU waits for a reset, at most a minute apart.
	maxCheckGap = 2 * time.Minute
)

// holderCheck tells the monitor whether a pod may hold a device. An uncertain answer is yes, because a GPU that a pod uses
// must not be reset. It is for one goroutine.
type holderCheck struct {
	facts     func() offer.Facts
	refresh   func()    // asks the kubelet soon: a pending pod takes a free GPU within seconds
	since     time.Time // since when the kubelet has reported holders without a gap; zero if it does not
	lastCheck time.Time
}

func (c *holderCheck) mayBeHeld(id health.DeviceID) bool {
	facts := c.facts()
	now := facts.Now
	if now.Sub(c.lastCheck) > maxCheckGap {
		c.since = time.Time{}
	}
	c.lastCheck = now
	c.refresh()
	answer := facts.Decide(&offer.Request{Purpose: offer.Take, Device: &health.Device{ID: id}, MustKnow: true})
	if facts.Unknown() != "" {
		c.since = time.Time{}
		return true
	}
	if c.since.IsZero() {
		c.since = now
	}
	return now.Sub(c.since) < holdersSettleTime || !answer.Allows(offer.Take)
}
