package agent

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/gpu-node-agent/gpu-node-agent/agent/operator"
	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/plugin"
)

func TestHolding(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var now plugin.Holders
		h := &holding{holders: func() plugin.Holders { return now }, hurry: func() {}}
		want := func(what string, want bool) {
			t.Helper()
			if got := h.held("GPU-0"); got != want {
				t.Errorf("%s: held is %v", what, got)
			}
		}
		wait := func(d time.Duration) { <-time.After(d) }
		says := func(by map[health.DeviceID][]plugin.Holder) { now = plugin.Holders{At: time.Now(), By: by} }
		nobody := map[health.DeviceID][]plugin.Holder{"GPU-1": {{Pod: "other"}}}

		now = plugin.Holders{Err: "the kubelet has not been asked yet"}
		want("never asked", true)
		says(nobody)
		want("a kubelet that has only begun to say", true)
		wait(holdersSettle)
		says(nobody)
		want("known for a while", false)
		says(map[health.DeviceID][]plugin.Holder{"GPU-0": {{Pod: "train"}}})
		want("a pod has it", true)
		says(nobody)
		want("the pod has ended", false)
		wait(operator.MaxHoldersAge + time.Second)
		want("an old word", true)
		says(nobody)
		want("a word after a gap", true)
		wait(holdersSettle)
		want("long enough after the gap", false)
		now.Err = "List: denied"
		want("what was known before an error", true)
		says(nil)
		wait(time.Minute)
		says(nil)
		want("an answer that is not known", true)
	})
}
