package operator

import (
	"errors"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/plugin"
)

func TestCurrentHolders(t *testing.T) {
	gpu := health.DeviceState{Device: health.Device{ID: "GPU-0"}}
	s := &health.Snapshot{Devices: []health.DeviceState{gpu}}
	none := map[health.DeviceID][]plugin.Holder{}
	pod := map[health.DeviceID][]plugin.Holder{"GPU-0": {{Namespace: "lab", Pod: "train"}}}
	for name, c := range map[string]struct {
		next plugin.Holders // the kubelet's next response
		in   time.Duration
		want error
	}{
		"pod got a GPU": {plugin.Holders{By: pod}, 800 * time.Millisecond, errHeld},
		"no holder":     {plugin.Holders{By: none}, 800 * time.Millisecond, nil},
		"no response":   {in: time.Hour, want: errHoldersUnknown},
		"late response": {plugin.Holders{By: none}, 6 * time.Second, nil},
		"error":         {plugin.Holders{Err: "Unimplemented"}, time.Second, errHoldersUnknown},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				begin := time.Now()
				last := plugin.Holders{At: begin.Add(-time.Second), By: none}
				refreshes := 0
				holders := func() plugin.Holders {
					if time.Since(begin) < c.in {
						return last
					}
					h := c.next
					h.At = begin.Add(c.in)
					return h
				}
				err := checkNotHeld(s, currentHolders(t.Context(), holders, func() { refreshes++ }), time.Now())
				if !errors.Is(err, c.want) {
					t.Errorf("%v, want %v", err, c.want)
				}
				if took := time.Since(begin); refreshes != 1 || took > holdersTimeout {
					t.Errorf("%d refreshes in %v", refreshes, took)
				}
			})
		})
	}
}

// withhold asks the kubelet before and after it withholds the devices. If a pod got a GPU in between, the devices return to
// their state.
func TestWithholdChecksHoldersTwice(t *testing.T) {
	t.Parallel()
	for name, admitted := range map[string]bool{"no holder": false, "pod got a GPU": true} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			a := startServer(t)
			before := a.Snapshots.Load().Devices
			var refreshes []bool // whether the devices were withheld
			a.RefreshHolders = func() {
				withheld := 0
				for _, d := range a.Snapshots.Load().Devices {
					if d.Verdict.State == health.Unhealthy && d.Verdict.Cause() == health.CauseReleased {
						withheld++
					}
				}
				refreshes = append(refreshes, withheld == len(before))
			}
			a.Holders = func() plugin.Holders {
				h := plugin.Holders{At: time.Now(), By: map[health.DeviceID][]plugin.Holder{}}
				if admitted && len(refreshes) > 1 {
					h.By[before[2].Device.ID] = []plugin.Holder{{Namespace: "lab", Pod: "train"}}
				}
				return h
			}
			w, err := a.withhold(t.Context(), DetachRequest{}, time.Hour)
			if !slices.Equal(refreshes, []bool{false, true}) {
				t.Errorf("refreshes with the devices withheld: %v", refreshes)
			}
			after := a.Snapshots.Load()
			if !admitted {
				if err != nil || after.Devices[2].Verdict.State != health.Unhealthy {
					t.Errorf("%v, %+v", err, after.Devices[2].Verdict)
				}
				w.End()
				return
			}
			if !errors.Is(err, errHeld) {
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

func TestWithholdRefusedChangesNoDevice(t *testing.T) {
	t.Parallel()
	a := startServer(t)
	id := a.Snapshots.Load().Devices[2].Device.ID
	pod := map[health.DeviceID][]plugin.Holder{id: {{Namespace: "lab", Pod: "train"}}}
	a.Holders = func() plugin.Holders { return plugin.Holders{At: time.Now(), By: pod} }
	if _, err := a.withhold(t.Context(), DetachRequest{}, time.Hour); !errors.Is(err, errHeld) {
		t.Error(err)
	}
	for _, d := range a.Snapshots.Load().Devices {
		if d.Verdict.State != health.Healthy {
			t.Errorf("%+v", d.Verdict)
		}
	}
}
