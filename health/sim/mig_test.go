package sim

import (
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/gpu-node-agent/gpu-node-agent/health"
)

// migProfiles returns the MIG profiles of a GPU's MIG devices.
func migProfiles(r *health.Reading, gpu int) (all []string) {
	for i, d := range r.Devices {
		if d.ID != r.Samples[i].Device {
			return []string{"sample of another device"}
		}
		if d.Kind == health.KindMIG && d.Index == gpu {
			all = append(all, d.Profile)
		}
	}
	return all
}

func gpuDevice(r *health.Reading, gpu int) health.Device {
	return r.Devices[slices.IndexFunc(r.Devices, func(d health.Device) bool { return d.Kind == health.KindGPU && d.Index == gpu })]
}

func TestPartition(t *testing.T) {
	simulate(t, DefaultConfig(), func(t *testing.T, src *Source, ses health.Session) {
		sleep(time.Minute)
		before := poll(t, ses)
		energy := gpuSample(t, before, 3).Values[health.FieldEnergy]
		for _, step := range []struct {
			event, mig string
			links      int // of GPU 0 to GPU 3
		}{
			{`{gpu: 3, mig: sevenths, xid: 31}`, strings.Repeat("1g.10gb ", 7), 0},
			{`{gpu: 3, mig: balanced}`, "3g.40gb 2g.20gb 1g.10gb 1g.10gb ", 0},
			{`{gpu: 3, mig: off}`, "", 18},
		} {
			inject(t, src, step.event)
			if !woken(ses) {
				t.Errorf("%s: no wake", step.event)
			}
			r := poll(t, ses)
			got := ""
			for _, p := range migProfiles(r, 3) {
				got += p + " "
			}
			gpu := gpuDevice(r, 3)
			if got != step.mig || gpu.MIGMode != (step.mig != "") || gpu.ID != gpuDevice(before, 3).ID || len(migProfiles(r, 2)) != 0 {
				t.Errorf("%s: %+v with %q", step.event, gpu, got)
			}
			if links := gpuDevice(r, 0).Links[2]; links.Peer != gpu.ID || links.NVLinks != step.links {
				t.Errorf("%s: link from GPU 0 is %+v, want %d NVLinks", step.event, links, step.links)
			}
			s := gpuSample(t, r, 3)
			if s.Values[health.FieldXID] != 31 || s.Values[health.FieldEnergy] < energy {
				t.Errorf("%s: XID %v, energy %v, before %v", step.event, s.Values[health.FieldXID], s.Values[health.FieldEnergy], energy)
			}
			energy = s.Values[health.FieldEnergy]
		}
		if len(before.Devices) != 8 || before.Devices[3].MIGMode {
			t.Error("an earlier reading has changed")
		}
	})
}

// TestLoopResetsPartitions checks that a loop restores the profile's partitions, except where the control socket has set others.
func TestLoopResetsPartitions(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		cfg := scenarioConfig("h100-8-mig", 10*time.Second, event(t, 5*time.Second, `{gpu: 0, mig: off}`),
			event(t, 5*time.Second, `{gpu: 1, mig: off}`))
		src, ses := openSource(t, cfg)
		inject(t, src, `{gpu: 1, mig: balanced}`)
		for _, want := range []struct{ first, second int }{{7, 4}, {0, 4}, {7, 4}} {
			r := poll(t, ses)
			if a, b := len(migProfiles(r, 0)), len(migProfiles(r, 1)); a != want.first || b != want.second {
				t.Errorf("%d and %d MIG devices; want %+v", a, b, want)
			}
			sleep(5 * time.Second)
		}
	})
}
