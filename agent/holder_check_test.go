package agent

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/offer"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/podresources"
)

func TestHolderCheckNeedsCurrentHolders(t *testing.T) {
	free := map[health.DeviceID][]podresources.Holder{"GPU-1": {{Pod: "other"}}}
	held := map[health.DeviceID][]podresources.Holder{"GPU-0": {{Pod: "train"}}}
	synctest.Test(t, func(t *testing.T) {
		var holders podresources.Holders
		var claims []offer.Claim
		c := &holderCheck{
			facts: func() offer.Facts {
				return offer.Facts{Now: time.Now(), Holders: holders, Claims: offer.Claims{List: claims}}
			}, refresh: func() {},
		}
		for _, step := range []struct {
			name   string
			wait   time.Duration
			report bool // a new response with by
			by     map[health.DeviceID][]podresources.Holder
			err    string
			want   bool

			settling, prepared bool
		}{
			{name: "no response yet", err: "not asked yet", want: true},
			{name: "first response", report: true, by: free, want: true},
			{name: "settled", wait: holdersSettleTime, report: true, by: free, want: false},
			{name: "claim prepared", report: true, by: free, prepared: true, want: true},
			{name: "held", report: true, by: held, want: true},
			{name: "pod ended", report: true, by: free, want: false},
			{name: "old response", wait: podresources.MaxHoldersAge + time.Second, want: true},
			{name: "first response after a gap", report: true, by: free, want: true},
			{name: "settled after the gap", wait: holdersSettleTime, report: true, by: free, want: false},
			{name: "error", err: "List: denied", want: true},
			{name: "response after the error", report: true, by: free, want: true},
			{name: "settled after the error", wait: holdersSettleTime, report: true, by: free, want: false},
			{name: "kubelet restarted", report: true, by: free, settling: true, want: true},
			{name: "kubelet read its pods", report: true, by: free, want: true},
			{name: "settled after the restart", wait: holdersSettleTime, report: true, by: free, want: false},
			{name: "response without holders", wait: time.Minute, report: true, want: true},
		} {
			<-time.After(step.wait)
			if step.report {
				holders = podresources.Holders{At: time.Now(), By: step.by, Settling: step.settling}
			}
			if claims = nil; step.prepared {
				claims = []offer.Claim{{UID: "c", Parts: []offer.Part{{Device: "GPU-0"}}}}
			}
			holders.Err = step.err
			if got := c.mayBeHeld("GPU-0"); got != step.want {
				t.Errorf("%s: %v, want %v", step.name, got, step.want)
			}
		}
	})
}
