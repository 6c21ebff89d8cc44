package plugin

import (
	"maps"
	"strings"
	"testing"

	"github.com/gpu-node-agent/gpu-node-agent/internal/kubelettest"
)

// Another plugin is seen by what the kubelet counts. Nothing is asked of it, so its next health event reaches the kubelet.
func TestOtherPlugins(t *testing.T) {
	t.Parallel()
	const foreign = "example.com/gpu"
	h, k := startHarness(t, snapshot(2))
	if others := h.p.OtherPlugins(); len(others) > 0 {
		t.Errorf("before there is another: %v", others)
	}
	other, err := kubelettest.StartNVIDIA(h.ctx, h.root, foreign, id(0), id(1))
	if err != nil {
		t.Fatal(err)
	}
	defer other.Stop()
	h.waitPlugin(func(s Status) bool { return maps.Equal(s.OtherPlugins, map[string]int{foreign: 2}) })
	if texts := OtherPluginTexts(h.p.OtherPlugins()); len(texts) != 1 || !strings.Contains(texts[0], "2 devices of this node as "+foreign) {
		t.Errorf("%q", texts)
	}
	if err := other.Fail(id(1)); err != nil {
		t.Fatal(err)
	}
	h.waitResource(k, foreign, func(r kubelettest.Resource) bool { return r.Allocatable() == 1 })
	h.waitPlugin(func(s Status) bool { return s.OtherPlugins[foreign] == 1 })
	if streams, allocates := other.Calls(); streams != 1 || allocates != 0 {
		t.Errorf("%d streams and %d allocations, want only the kubelet's", streams, allocates)
	}
	h.setConfig(func(c *Config) { c.Resource = foreign + "s" }) // our own former resource is none of another plugin
	h.waitResource(k, foreign+"s", listed(2, 2))
	h.waitPlugin(func(s Status) bool { return maps.Equal(s.OtherPlugins, map[string]int{foreign: 1}) })
}

func TestOtherPluginsByID(t *testing.T) {
	t.Parallel()
	c := DefaultConfig()
	ours := func(resource string) bool { return resource == gpu }
	ids := map[string][]string{
		gpu: {"GPU-0"}, "nvidia.com/mig-1g.10gb": {"nvidia0/gi7"}, "example.com/nic": {"nic0", "0"},
		"example.com/gpu":       {"GPU-0::0", "GPU-0::1", "GPU-1"},
		"nvidia.com/gpu.shared": {"nvidia1", "nvidia9"},
	}
	if got, want := c.OtherPlugins(ids, ours, snapshot(2)), map[string]int{"example.com/gpu": 2, "nvidia.com/gpu.shared": 1}; !maps.Equal(got,
		want) {
		t.Errorf("%v, want %v", got, want)
	}
	if got, want := c.OtherPlugins(ids, ours, nil), map[string]int{
		"example.com/gpu": 2, "nvidia.com/gpu.shared": 2,
		"nvidia.com/mig-1g.10gb": 1,
	}; !maps.Equal(got, want) {
		t.Errorf("without a snapshot: %v, want %v", got, want)
	}
}
