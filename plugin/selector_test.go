package plugin

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/health/deviceref"
)

func TestSelects(t *testing.T) {
	gpu := &candidate{state: &health.DeviceState{Device: health.Device{
		ID: "GPU-a", MIGIndex: -1, Index: 3, PCI: "00000000:1B:00.0", Model: "NVIDIA H100 80GB HBM3",
	}}}
	mig := &candidate{profile: "1g.10gb+me", state: &health.DeviceState{Device: health.Device{
		ID: "MIG-b", Parent: "GPU-a", Kind: health.KindMIG, Index: 3, MIGIndex: 1, PCI: "00000000:1B:00.0", Model: "NVIDIA H100 80GB HBM3",
	}}}
	blank := &candidate{state: &health.DeviceState{Device: health.Device{ID: "GPU-c", MIGIndex: -1}}}
	for _, c := range []struct {
		selector       string
		gpu, mig, none bool // whether it chooses each of the three
	}{
		{"GPU-a", true, true, false},
		{"GPU-", false, false, false},
		{"MIG-b", false, true, false},
		{"3", true, true, false},
		{"0", false, false, true},
		{"3:1", false, true, false},
		{"3:0", false, false, false},
		{"0000:1b:00.0", true, true, false},
		{"00000000:1B:00.0", true, true, false},
		{"1b:00.0", true, true, false},
		{"0001:1b:00.0", false, false, false},
		{"*H100*", true, true, false},
		{"nvidia h100 80gb hbm3", true, true, false},
		{"NVIDIA ????*HBM?", true, true, false},
		{"*H100", false, false, false},
		{"*", true, true, true},
		{"", false, false, true},
		{"mig-1g.*", false, true, false},
		{"mig-1g.10gb", false, false, false},
		{"mig-*+me", false, true, false},
	} {
		got := [3]bool{selects(c.selector, gpu), selects(c.selector, mig), selects(c.selector, blank)}
		if want := [3]bool{c.gpu, c.mig, c.none}; got != want {
			t.Errorf("%q chooses %v, want %v", c.selector, got, want)
		}
	}
}

func TestValidateSelectors(t *testing.T) {
	good := []string{"GPU-a", "MIG-b", "0", "12:3", "1b:00.0", "0000:1b:00.0", "00000000:1B:00.0", "*H100*", "mig-1g.10gb", "NVIDIA L4"}
	if err := validateSelectors("include", good); err != nil {
		t.Error(err)
	}
	for _, bad := range []string{"", "  ", "0:", "a:b", "1b:00", "zz:00.0", "0:1:2", "-1", "123456789012:1b:00.0"} {
		if err := validateSelectors("include", []string{"0", bad}); err == nil || !strings.HasPrefix(err.Error(), `include[1]: "`+bad+`" is`) {
			t.Errorf("%q: %v", bad, err)
		}
	}
}

// A word that names a device which the node has not is told, with its key, once. A pattern may fit nowhere.
func TestIdleSelectors(t *testing.T) {
	core, logs := observer.New(zap.InfoLevel)
	p := &Plugin{log: zap.New(core)}
	for _, c := range []struct {
		name  string
		set   func(*Config)
		wants []string // what is news
	}{
		{"nothing", func(*Config) {}, nil},
		{"what fits", func(c *Config) {
			c.Include, c.Exclude = []string{"0", "10:00.0", "GPU-0", "MIG-0-1", "0:1", "GPU-1"}, []string{"1"}
		}, nil},
		{"patterns", func(c *Config) { c.Include, c.Exclude = []string{"*L4*", "*"}, []string{"mig-9g.*", "NVIDIA A100"} }, nil},
		{
			"typing errors", func(c *Config) {
				c.Include, c.Exclude = []string{"0", "7", "GPU-O"}, []string{"0:2"}
				c.Sharing.TimeSlicing.Resources = []SharedResource{{Name: gpu}, {Name: gpu, Devices: []string{"1", "99:00.0", "MIG-x"}}}
			},
			[]string{
				"plugin.include [7 GPU-O]", "plugin.exclude [0:2]", "plugin.sharing.timeSlicing.resources[1].devices [99:00.0 MIG-x]",
			},
		},
		{"one of them is left", func(c *Config) { c.Include, c.Exclude = []string{"*", "7"}, []string{"0:2"} }, []string{"plugin.include [7]"}},
		{"off", func(c *Config) { c.Enabled, c.Exclude = false, []string{"0:2"} }, nil},
		{"on again", func(c *Config) { c.Exclude = []string{"0:2"} }, []string{"plugin.exclude [0:2]"}},
	} {
		cfg := configured(c.set)
		for range 2 { // said once
			a := arrange(layoutInput{cfg: &cfg, snap: partitioned([]string{"1g.10gb", "3g.40gb"}, nil)})
			p.lacking(&a)
		}
		var got []string
		for _, e := range logs.TakeAll() {
			if e.Message == "no device of this node has this name" {
				got = append(got, fmt.Sprint(e.ContextMap()["key"], " ", e.ContextMap()["entries"]))
			}
		}
		if !slices.Equal(got, c.wants) {
			t.Errorf("%s: %q, want %q", c.name, got, c.wants)
		}
	}
}

func TestGlob(t *testing.T) {
	for _, c := range []struct {
		pattern, s string
		want       bool
	}{
		{"", "", true},
		{"", "a", false},
		{"*", "", true},
		{"**", "abc", true},
		{"a*c", "abbc", true},
		{"a*c", "abcb", false},
		{"a*b*c", "aXbYbZc", true},
		{"?", "", false},
		{"??", "ab", true},
		{"a?c*", "ABC", true},
		{"*ab*ab", "abab", true},
		{"*ab*ab", "ab", false},
		{"[a]", "a", false},
		{"6000/8000", "6000/8000", true},
	} {
		if got := glob(c.pattern, c.s); got != c.want {
			t.Errorf("glob(%q, %q) = %v", c.pattern, c.s, got)
		}
	}
	// Many stars must not take long.
	if glob(strings.Repeat("*a", 50)+"b", strings.Repeat("a", 10000)) {
		t.Error("matched")
	}
}

func FuzzSelects(f *testing.F) {
	for _, s := range []string{"GPU-a", "0:1", "1b:00.0", "*a?", "mig-1g.*", "::", ":.", "-"} {
		f.Add(s, "00000000:1B:00.0", "NVIDIA L4")
	}
	f.Fuzz(func(t *testing.T, selector, pci, model string) {
		c := &candidate{state: &health.DeviceState{Device: health.Device{ID: "GPU-0", MIGIndex: -1, PCI: pci, Model: model}}}
		selects(selector, c)
		if a, ok := deviceref.ParsePCI(pci); ok {
			if again, ok := deviceref.ParsePCI(a.String()); !ok || again != a {
				t.Errorf("%q is %v, and that %v", pci, a, again)
			}
			if !selects(a.String(), c) {
				t.Errorf("%v does not choose %q", a, pci)
			}
		}
	})
}
