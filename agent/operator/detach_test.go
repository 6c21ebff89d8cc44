package operator

import (
	"slices"
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

// A pod that is admitted after the kubelet was first asked keeps its GPU: the devices are withheld, the kubelet is asked again, and they are
// given back.
func TestDetachAsksAgainWhenTheDevicesAreWithheld(t *testing.T) {
	t.Parallel()
	for name, admitted := range map[string]bool{"nobody": false, "a pod since": true} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			a := startAgent(t)
			before := a.Snapshots.Load().Devices
			var asked []bool // whether the devices were withheld
			a.RefreshHolders = func() {
				withheld := 0
				for _, d := range a.Snapshots.Load().Devices {
					if d.Verdict.State == health.Unhealthy && d.Verdict.Cause() == health.CauseReleased {
						withheld++
					}
				}
				asked = append(asked, withheld == len(before))
			}
			a.Holders = func() plugin.Holders {
				h := plugin.Holders{At: time.Now(), By: map[health.DeviceID][]plugin.Holder{}}
				if admitted && len(asked) > 1 {
					h.By[before[2].Device.ID] = []plugin.Holder{{Namespace: "lab", Pod: "train"}}
				}
				return h
			}
			w, err := a.withhold(t.Context(), Detach{}, time.Hour)
			if !slices.Equal(asked, []bool{false, true}) {
				t.Errorf("asked with the devices withheld: %v", asked)
			}
			after := a.Snapshots.Load()
			if !admitted {
				if err != nil || after.Devices[2].Verdict.State != health.Unhealthy {
					t.Errorf("%v, %+v", err, after.Devices[2].Verdict)
				}
				w.End()
				return
			}
			if err == nil || !strings.Contains(err.Error(), "is held by lab/train") {
				t.Errorf("%v", err)
			}
			for i, d := range after.Devices {
				if was := before[i].Verdict; d.Verdict.State != was.State || !d.Verdict.Since.Equal(was.Since) || len(d.Verdict.Trips) > 0 || len(d.Verdict.Findings) > 0 {
					t.Errorf("%s is %+v, was %+v", d.Device.ID, d.Verdict, was)
				}
			}
			if after.Source.Status != health.SourceUp {
				t.Errorf("source %+v", after.Source)
			}
		})
	}
}

// A detach that has no chance withholds nothing: a pod that runs sees no change of its GPU.
func TestDetachRefusedChangesNothing(t *testing.T) {
	t.Parallel()
	a := startAgent(t)
	id := a.Snapshots.Load().Devices[2].Device.ID
	pod := map[health.DeviceID][]plugin.Holder{id: {{Namespace: "lab", Pod: "train"}}}
	a.Holders = func() plugin.Holders { return plugin.Holders{At: time.Now(), By: pod} }
	if _, err := a.withhold(t.Context(), Detach{}, time.Hour); err == nil {
		t.Error("not refused")
	}
	for _, d := range a.Snapshots.Load().Devices {
		if d.Verdict.State != health.Healthy {
			t.Errorf("%+v", d.Verdict)
		}
	}
}
