package sim

import (
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/gpu-node-agent/gpu-node-agent/health"
)

// profilesOf lists the MIG profiles of a GPU's devices.
func profilesOf(r *health.Reading, gpu int) (all []string) {
	for i, d := range r.Devices {
		if d.ID != r.Samples[i].Device {
			return []string{"the samples are of other devices"}
		}
		if d.Kind == health.KindMIG && d.Index == gpu {
			all = append(all, d.Profile)
		}
	}
	return all
}

func gpuOf(r *health.Reading, gpu int) health.Device {
	return r.Devices[slices.IndexFunc(r.Devices, func(d health.Device) bool { return d.Kind == health.KindGPU && d.Index == gpu })]
}

func TestPartition(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		src := newSource(t, DefaultConfig())
		ses := open(t, src)
		pass(time.Minute)
		before := poll(t, ses)
		energy := sampleOf(t, before, 3).Values[health.FieldEnergy]
		for _, step := range []struct {
			event, mig string
			links      int // of GPU 0 to GPU 3
		}{
			{`{gpu: 3, mig: sevenths, xid: 31}`, strings.Repeat("1g.10gb ", 7), 0},
			{`{gpu: 3, mig: balanced}`, "3g.40gb 2g.20gb 1g.10gb 1g.10gb ", 0},
			{`{gpu: 3, mig: off}`, "", 18},
		} {
			if err := src.inject(ev(t, 0, step.event)); err != nil {
				t.Fatal(err)
			}
			if !woken(ses) {
				t.Errorf("%s wakes nobody", step.event)
			}
			r := poll(t, ses)
			got := ""
			for _, p := range profilesOf(r, 3) {
				got += p + " "
			}
			gpu := gpuOf(r, 3)
			if got != step.mig || gpu.MIGMode != (step.mig != "") || gpu.ID != gpuOf(before, 3).ID || len(profilesOf(r, 2)) != 0 {
				t.Errorf("%s: %+v with %q", step.event, gpu, got)
			}
			if links := gpuOf(r, 0).Links[2]; links.Peer != gpu.ID || links.NVLinks != step.links {
				t.Errorf("%s: GPU 0 reaches it over %+v, want %d NVLinks", step.event, links, step.links)
			}
			s := sampleOf(t, r, 3)
			if s.Values[health.FieldXID] != 31 || s.Values[health.FieldEnergy] < energy {
				t.Errorf("%s: XID %v, energy %v after %v", step.event, s.Values[health.FieldXID], s.Values[health.FieldEnergy], energy)
			}
			energy = s.Values[health.FieldEnergy]
		}
		if len(before.Devices) != 8 || before.Devices[3].MIGMode {
			t.Error("a reading that was handed out has changed")
		}
	})
}

// TestPartitionOfAScenario: a loop begins with the profile's, what a person has set stays.
func TestPartitionOfAScenario(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		cfg := profileConfig("h100-8-mig")
		cfg.Loop = 10 * time.Second
		cfg.Scenario = []Event{ev(t, 5*time.Second, `{gpu: 0, mig: off}`), ev(t, 5*time.Second, `{gpu: 1, mig: off}`)}
		src := newSource(t, cfg)
		ses := open(t, src)
		if err := src.inject(ev(t, 0, `{gpu: 1, mig: balanced}`)); err != nil {
			t.Fatal(err)
		}
		for _, want := range []struct{ first, second int }{{7, 4}, {0, 4}, {7, 4}} {
			r := poll(t, ses)
			if a, b := len(profilesOf(r, 0)), len(profilesOf(r, 1)); a != want.first || b != want.second {
				t.Errorf("%d and %d MIG devices; want %+v", a, b, want)
			}
			pass(5 * time.Second)
		}
	})
}

func TestEventsThatDoNotFit(t *testing.T) {
	for text, want := range map[string]string{
		`{gpu: 0, mig: halves}`:              `mig: "halves" is not known; use one of off, sevenths, balanced`,
		`{gpu: 0, times: 3}`:                 `times: is for xid; say which`,
		`{gpu: 0, xid: 31, times: 0}`:        `times: 0 is not how often; use 1 to 1000000`,
		`{gpu: 0, xid: 31, times: 10000000}`: `times: 10000000 is not how often; use 1 to 1000000`,
	} {
		if _, err := ParseEvent(text); err == nil || err.Error() != want {
			t.Errorf("%s: %v; want %s", text, err, want)
		}
	}
	src := newSource(t, profileConfig("l4-1"))
	want := "mig: the GPUs of profile l4-1 are not partitioned here; use h100-8 or h100-8-mig"
	if err := src.inject(ev(t, 0, `{gpu: 0, mig: sevenths}`)); err == nil || err.Error() != want {
		t.Errorf("%v; want %s", err, want)
	}
}
