package plugin

import (
	"slices"
	"strings"
	"testing"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/internal/kubelettest"
)

// TestSingleWhileServing lays out one snapshot after another, each with what the one before has handed out.
func TestSingleWhileServing(t *testing.T) {
	whole, empty := []string(nil), []string{}
	small, big := []string{"1g.10gb", "1g.10gb"}, []string{"3g.40gb"}
	single := configured(func(c *Config) { c.MIGStrategy = MIGSingle })
	mixed := configured(func(c *Config) { c.MIGStrategy = MIGMixed })
	off := configured(func(c *Config) { c.MIGStrategy, c.Enabled = MIGSingle, false })
	lost := func(s *health.Snapshot, gpu int) *health.Snapshot {
		for i := range s.Devices {
			if d := &s.Devices[i]; d.Device.Index == gpu {
				d.Sample.Presence, d.Verdict.State = health.Missing, health.Unhealthy
			}
		}
		return s
	}
	const differ = "of different profiles"
	type look struct {
		cfg  Config
		snap *health.Snapshot
		want string // ids of nvidia.com/gpu
		says string // a part of the warning or the error; empty: nothing is said
	}
	for name, looks := range map[string][]look{
		"a GPU loses its instances, and has them again": {
			{single, partitioned(small, small), "MIG-0-0 MIG-0-1 MIG-1-0 MIG-1-1", ""},
			{single, partitioned(small, empty), "MIG-0-0 MIG-0-1", "GPU 1 is in MIG mode and has no MIG devices"},
			{single, partitioned(small, small), "MIG-0-0 MIG-0-1 MIG-1-0 MIG-1-1", ""},
		},
		"a GPU leaves MIG mode": {
			{single, partitioned(small, small), "MIG-0-0 MIG-0-1 MIG-1-0 MIG-1-1", ""},
			{single, partitioned(whole, small), "MIG-1-0 MIG-1-1", "GPU 0 is not in MIG mode"},
		},
		"a GPU is partitioned differently": {
			{single, partitioned(small, small), "MIG-0-0 MIG-0-1 MIG-1-0 MIG-1-1", ""},
			{single, partitioned(small, big), "MIG-0-0 MIG-0-1", "GPU 1 has 3g.40gb, and 1g.10gb is handed out"},
		},
		"a part of a GPU is partitioned differently": {
			{single, partitioned(small, small), "MIG-0-0 MIG-0-1 MIG-1-0 MIG-1-1", ""},
			{single, partitioned([]string{"1g.10gb", "3g.40gb"}, small), "MIG-0-0 MIG-1-0 MIG-1-1", "GPU 0 has 3g.40gb"},
		},
		"one GPU after the other is partitioned anew": {
			{single, partitioned(small, small), "MIG-0-0 MIG-0-1 MIG-1-0 MIG-1-1", ""},
			{single, partitioned(big, small), "MIG-1-0 MIG-1-1", "GPU 0 has 3g.40gb"},
			{single, partitioned(big, empty), "", "GPU 1 is in MIG mode and has no MIG devices"},
			{single, partitioned(big, big), "MIG-0-0 MIG-1-0", ""},
			{single, partitioned(empty, big), "MIG-1-0", "GPU 0 is in MIG mode and has no MIG devices"},
		},
		"whole GPUs, and one enters MIG mode": {
			{single, partitioned(whole, whole), "GPU-0 GPU-1", ""},
			{single, partitioned(whole, small), "GPU-0", "GPU 1 is in MIG mode, and whole GPUs are handed out"},
			{single, partitioned(whole, empty), "GPU-0", "GPU 1 is in MIG mode, and whole GPUs are handed out"},
			{single, partitioned(small, small), "MIG-0-0 MIG-0-1 MIG-1-0 MIG-1-1", ""},
		},
		"a node that differs serves nothing at first": {
			{single, partitioned(small, empty), "", "GPU 1 is in MIG mode and has no MIG devices"},
			{single, partitioned(small, big), "", differ},
			{single, partitioned(small, small), "MIG-0-0 MIG-0-1 MIG-1-0 MIG-1-1", ""},
			{single, partitioned(small, big), "MIG-0-0 MIG-0-1", "GPU 1 has 3g.40gb"},
		},
		"nothing is left, so the node has to be uniform again": {
			{single, partitioned(small, small), "MIG-0-0 MIG-0-1 MIG-1-0 MIG-1-1", ""},
			{single, partitioned(empty, whole), "", "GPU 1 is not in MIG mode, and others are"},
			{single, partitioned(small, empty), "", "GPU 1 is in MIG mode and has no MIG devices"},
		},
		"another strategy in between": {
			{single, partitioned(small, small), "MIG-0-0 MIG-0-1 MIG-1-0 MIG-1-1", ""},
			{mixed, partitioned(small, big), "", ""},
			{single, partitioned(small, big), "", differ},
		},
		"off in between": {
			{single, partitioned(small, small), "MIG-0-0 MIG-0-1 MIG-1-0 MIG-1-1", ""},
			{off, partitioned(small, big), "", ""},
			{single, partitioned(small, big), "", differ},
		},
		"a lost GPU is not one that has left MIG mode": {
			{single, lost(partitioned(small, whole), 1), "MIG-0-0 MIG-0-1", ""},
			{single, lost(partitioned(small, small), 1), "MIG-0-0 MIG-0-1 MIG-1-0 MIG-1-1", ""},
			{single, lost(partitioned(small, empty), 1), "MIG-0-0 MIG-0-1", ""},
		},
		"nor one that has entered it": {
			{single, lost(partitioned(whole, empty), 1), "GPU-0 GPU-1", ""},
			{single, lost(partitioned(whole, empty), 1), "GPU-0 GPU-1", ""},
		},
	} {
		t.Run(name, func(t *testing.T) {
			var before singleLayout
			for i, l := range looks {
				a := arrange(layoutInput{cfg: &l.cfg, snap: l.snap, before: before})
				before = a.Single
				ids := strings.Join(all(find(a.Resources, gpu)), " ")
				text := strings.Join(append(slices.Clone(a.Warnings), a.Err), "")
				if ids != l.want || l.says == "" && text != "" || !strings.Contains(text, l.says) {
					t.Fatalf("%d: %q, says %q; want %q, %q", i, ids, text, l.want, l.says)
				}
				if l.want != "" && a.Err != "" {
					t.Errorf("%d: served, and %q", i, a.Err)
				}
			}
		})
	}
}

// The kubelet keeps the devices of all GPUs but the one that has lost its instances, and people are told of that one.
func TestSingleTakesOneGPUAway(t *testing.T) {
	small := []string{"1g.10gb", "1g.10gb"}
	r := newRig(t, partitioned(small, small))
	r.set(func(c *Config) { c.MIGStrategy = MIGSingle })
	k := r.kubelet()
	r.run()
	r.wait(k, gpu, listed(4, 4))
	if _, err := k.AllocateIDs(r.ctx, gpu, "MIG-0-0"); err != nil {
		t.Fatal(err)
	}
	r.snaps.Store(partitioned(small, []string{}))
	res := r.wait(k, gpu, func(r kubelettest.Resource) bool { return r.Capacity() != 4 })
	if !listed(2, 2)(res) || res.Registrations != 1 {
		t.Errorf("%+v", res)
	}
	const says = "migStrategy single: GPU 1 is in MIG mode and has no MIG devices: it is left out; the other GPUs are served"
	r.whole(func(s Status) bool { return slices.Equal(s.Warnings, []string{says}) && s.Err == "" })
	if n := r.logs.FilterMessage("layout").Len(); n != 1 {
		t.Errorf("logged %d times: %v", n, r.lines())
	}
	r.snaps.Store(partitioned(small, small))
	r.wait(k, gpu, listed(4, 4))
	r.whole(func(s Status) bool { return len(s.Warnings) == 0 })
}
