package plugin

import (
	"slices"
	"strings"
	"testing"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/internal/kubelettest"
)

// TestSingleSequence builds the layouts of several snapshots, each with the state of the previous one.
func TestSingleSequence(t *testing.T) {
	const small, big = "1g.10gb 1g.10gb", "3g.40gb"
	single := configured(func(c *Config) { c.MIGStrategy = MIGSingle })
	mixed := configured(func(c *Config) { c.MIGStrategy = MIGMixed })
	disabled := configured(func(c *Config) { c.MIGStrategy, c.Enabled = MIGSingle, false })
	lost := func(s *health.Snapshot, gpu int) *health.Snapshot {
		for i := range s.Devices {
			if d := &s.Devices[i]; d.Device.Index == gpu {
				d.Sample.Presence, d.Verdict.State = health.Missing, health.Unhealthy
			}
		}
		return s
	}
	type step struct {
		cfg  Config
		snap *health.Snapshot
		want string // IDs of nvidia.com/gpu
		data string // in the warnings and the error; empty: there are none
	}
	for name, steps := range map[string][]step{
		"a GPU loses its instances and gets them back": {
			{single, partitioned(small, small), "MIG-0-0 MIG-0-1 MIG-1-0 MIG-1-1", ""},
			{single, partitioned(small, empty), "MIG-0-0 MIG-0-1", "GPU 1 "},
			{single, partitioned(small, small), "MIG-0-0 MIG-0-1 MIG-1-0 MIG-1-1", ""},
		},
		"a GPU leaves MIG mode": {
			{single, partitioned(small, small), "MIG-0-0 MIG-0-1 MIG-1-0 MIG-1-1", ""},
			{single, partitioned(whole, small), "MIG-1-0 MIG-1-1", "GPU 0 "},
		},
		"a GPU is partitioned differently": {
			{single, partitioned(small, small), "MIG-0-0 MIG-0-1 MIG-1-0 MIG-1-1", ""},
			{single, partitioned(small, big), "MIG-0-0 MIG-0-1", "GPU 1 "},
		},
		"part of a GPU is partitioned differently": {
			{single, partitioned(small, small), "MIG-0-0 MIG-0-1 MIG-1-0 MIG-1-1", ""},
			{single, partitioned("1g.10gb 3g.40gb", small), "MIG-0-0 MIG-1-0 MIG-1-1", "GPU 0 "},
		},
		"one GPU after the other is partitioned differently": {
			{single, partitioned(small, small), "MIG-0-0 MIG-0-1 MIG-1-0 MIG-1-1", ""},
			{single, partitioned(big, small), "MIG-1-0 MIG-1-1", "GPU 0 "},
			{single, partitioned(big, empty), "", "GPU 1 "},
			{single, partitioned(big, big), "MIG-0-0 MIG-1-0", ""},
			{single, partitioned(empty, big), "MIG-1-0", "GPU 0 "},
		},
		"whole GPUs, one enters MIG mode": {
			{single, partitioned(whole, whole), "GPU-0 GPU-1", ""},
			{single, partitioned(whole, small), "GPU-0", "GPU 1 "},
			{single, partitioned(whole, empty), "GPU-0", "GPU 1 "},
			{single, partitioned(small, small), "MIG-0-0 MIG-0-1 MIG-1-0 MIG-1-1", ""},
		},
		"differing GPUs at first": {
			{single, partitioned(small, empty), "", "GPU 1 "},
			{single, partitioned(small, big), "", "3g.40gb"},
			{single, partitioned(small, small), "MIG-0-0 MIG-0-1 MIG-1-0 MIG-1-1", ""},
			{single, partitioned(small, big), "MIG-0-0 MIG-0-1", "GPU 1 "},
		},
		"nothing is left, so all GPUs count again": {
			{single, partitioned(small, small), "MIG-0-0 MIG-0-1 MIG-1-0 MIG-1-1", ""},
			{single, partitioned(empty, whole), "", "GPU 1 "},
			{single, partitioned(small, empty), "", "GPU 1 "},
		},
		"other strategy in between": {
			{single, partitioned(small, small), "MIG-0-0 MIG-0-1 MIG-1-0 MIG-1-1", ""},
			{mixed, partitioned(small, big), "", ""},
			{single, partitioned(small, big), "", "3g.40gb"},
		},
		"disabled in between": {
			{single, partitioned(small, small), "MIG-0-0 MIG-0-1 MIG-1-0 MIG-1-1", ""},
			{disabled, partitioned(small, big), "", ""},
			{single, partitioned(small, big), "", "3g.40gb"},
		},
		"lost GPU, MIG devices": {
			{single, lost(partitioned(small, whole), 1), "MIG-0-0 MIG-0-1", ""},
			{single, lost(partitioned(small, small), 1), "MIG-0-0 MIG-0-1 MIG-1-0 MIG-1-1", ""},
			{single, lost(partitioned(small, empty), 1), "MIG-0-0 MIG-0-1", ""},
		},
		"lost GPU, whole GPUs": {
			{single, lost(partitioned(whole, empty), 1), "GPU-0 GPU-1", ""},
			{single, lost(partitioned(whole, empty), 1), "GPU-0 GPU-1", ""},
		},
	} {
		t.Run(name, func(t *testing.T) {
			var before uniformLayout
			for i, st := range steps {
				l := newLayout(layoutInput{cfg: &st.cfg, snap: st.snap, before: before})
				before = l.uniform
				ids := strings.Join(all(findResource(l.resources, gpu)), " ")
				text := strings.Join(append(slices.Clone(l.warnings), l.err), "")
				if ids != st.want || (st.data == "") != (text == "") || !strings.Contains(text, st.data) {
					t.Fatalf("step %d: %q, %q; want %q, %q", i, ids, text, st.want, st.data)
				}
				if st.want != "" && l.err != "" {
					t.Errorf("step %d: offers devices, and %q", i, l.err)
				}
			}
		})
	}
}

// The kubelet keeps the devices of all GPUs except the one that lost its instances.
func TestSingleRemovesOneGPU(t *testing.T) {
	const small = "1g.10gb 1g.10gb"
	h, k := startHarness(t, partitioned(small, small), func(c *Config) { c.MIGStrategy = MIGSingle })
	h.allocate(k, "MIG-0-0")
	h.snaps.Store(partitioned(small, empty))
	res := h.waitResource(k, gpu, func(r kubelettest.Resource) bool { return r.Capacity() != 4 })
	if !listed(2, 2)(res) || res.Registrations != 1 {
		t.Errorf("%+v", res)
	}
	h.waitPlugin(func(s Status) bool {
		return len(s.Warnings) == 1 && strings.Contains(s.Warnings[0], "GPU 1 ") && s.Err == ""
	})
	h.waitLog(msgNotOffered, "GPU 1 ", 1)
	h.snaps.Store(partitioned(small, small))
	h.waitResource(k, gpu, listed(4, 4))
	h.waitPlugin(func(s Status) bool { return len(s.Warnings) == 0 })
}
