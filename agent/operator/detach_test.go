package operator

import (
	"context"
	"errors"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/offer"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/podresources"
)

// An answer from before the call does not count.
func TestCurrentFacts(t *testing.T) {
	for name, c := range map[string]struct {
		answer  podresources.Holders
		in      time.Duration
		current bool
	}{
		"answer":      {podresources.Holders{}, 800 * time.Millisecond, true},
		"late answer": {podresources.Holders{}, 6 * time.Second, true},
		"no answer":   {podresources.Holders{}, time.Hour, false},
		"error":       {podresources.Holders{Err: "Unimplemented"}, time.Second, false},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				begin := time.Now()
				server := Server{Ask: func(_ context.Context, timeout time.Duration) offer.Facts {
					<-time.After(min(c.in, timeout))
					if c.in > timeout {
						return offer.Facts{Holders: podresources.Holders{At: begin.Add(-time.Second)}}
					}
					h := c.answer
					h.At = time.Now()
					return offer.Facts{Holders: h}
				}}
				f := server.currentFacts(t.Context())
				if (f.Holders.Err == "") != c.current || time.Since(begin) > holdersTimeout {
					t.Errorf("%+v after %v", f.Holders, time.Since(begin))
				}
			})
		})
	}
}

// withhold asks the kubelet before and after it withholds the devices. If a pod holds a GPU, the devices keep or regain
// their state.
func TestWithhold(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		heldFrom  int    // the response of the kubelet from which on a pod holds a GPU
		refreshes []bool // whether the devices are withheld when the kubelet is asked
		want      error
	}{
		"no holder":     {3, []bool{false, true}, nil},
		"pod got a GPU": {2, []bool{false, true}, errHeld},
		"held":          {1, []bool{false}, errHeld},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			server := startServer(t)
			before := server.Snapshots.Load().Devices
			var refreshes []bool
			server.Ask = func(context.Context, time.Duration) offer.Facts {
				refreshes = append(refreshes, !slices.ContainsFunc(server.Snapshots.Load().Devices, func(d health.DeviceState) bool {
					return d.Verdict.State != health.Unhealthy || d.Verdict.Cause() != health.CauseReleased
				}))
				h := podresources.Holders{At: time.Now(), By: map[health.DeviceID][]podresources.Holder{}}
				if len(refreshes) >= c.heldFrom {
					h.By[before[2].Device.ID] = []podresources.Holder{{Namespace: "lab", Pod: "train"}}
				}
				return offer.Facts{Now: h.At, Holders: h}
			}
			w, err := server.withhold(t.Context(), DetachRequest{}, time.Hour)
			if !errors.Is(err, c.want) || !slices.Equal(refreshes, c.refreshes) {
				t.Fatalf("%v, refreshes with the devices withheld: %v", err, refreshes)
			}
			after := server.Snapshots.Load()
			if err == nil {
				if after.Devices[2].Verdict.State != health.Unhealthy {
					t.Errorf("not withheld: %+v", after.Devices[2].Verdict)
				}
				w.End()
				return
			}
			for i, d := range after.Devices {
				if was := before[i].Verdict; d.Verdict.State != was.State || !d.Verdict.Since.Equal(was.Since) || len(d.Memory.Trips) > 0 ||
					len(d.Verdict.Findings) > 0 {
					t.Errorf("%s is %+v, was %+v", d.Device.ID, d.Verdict, was)
				}
			}
			if after.Source.Status != health.SourceUp {
				t.Errorf("source %+v", after.Source)
			}
		})
	}
}
