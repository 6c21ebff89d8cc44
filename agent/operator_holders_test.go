package agent

import (
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/plugin"
)

// A pod that got a GPU since the kubelet was last asked is not overlooked.
func TestHoldersNow(t *testing.T) {
	gpu := health.DeviceState{Device: health.Device{ID: "GPU-0"}}
	s := &health.Snapshot{Devices: []health.DeviceState{gpu}}
	nobody := map[health.DeviceID][]plugin.Holder{}
	pod := map[health.DeviceID][]plugin.Holder{"GPU-0": {{Namespace: "lab", Pod: "train"}}}
	for name, c := range map[string]struct {
		later plugin.Holders // what the kubelet says when it is asked
		after time.Duration
		want  string
	}{
		"a pod since":   {plugin.Holders{By: pod}, 800 * time.Millisecond, "is held by lab/train"},
		"still nobody":  {plugin.Holders{By: nobody}, 800 * time.Millisecond, ""},
		"no answer":     {after: time.Hour, want: "not known: the kubelet has not answered within 10s; with --force"},
		"a late answer": {plugin.Holders{By: nobody}, 6 * time.Second, ""},
		"an error":      {plugin.Holders{Err: "Unimplemented"}, time.Second, "not known: Unimplemented"},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				begin := time.Now()
				known := plugin.Holders{At: begin.Add(-time.Second), By: nobody}
				asked := 0
				holders := func() plugin.Holders {
					if time.Since(begin) < c.after {
						return known
					}
					h := c.later
					h.At = begin.Add(c.after)
					return h
				}
				err := heldError(s, holdersNow(t.Context(), holders, func() { asked++ }), time.Now())
				if (err == nil) != (c.want == "") || err != nil && !strings.Contains(err.Error(), c.want) {
					t.Errorf("%v, want %q", err, c.want)
				}
				if took := time.Since(begin); asked != 1 || took > holdersWithin {
					t.Errorf("asked %d times, took %v", asked, took)
				}
			})
		})
	}
}
