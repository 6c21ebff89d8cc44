package plugin

import (
	"fmt"
	"regexp"
	"slices"
	"strings"
	"testing"

	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"

	"github.com/gpu-node-agent/gpu-node-agent/health"
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
		selector        string
		gpu, mig, blank bool // whether it matches each of the three
	}{
		{"GPU-a", true, true, false}, // a device reference
		{"3:1", false, true, false},
		{"1b:00.0", true, true, false},
		{"GPU-", false, false, false},
		{"*H100*", true, true, false},
		{"nvidia h100 80gb hbm3", true, true, false},
		{"NVIDIA ????*HBM?", true, true, false},
		{"*H100", false, false, false},
		{"*", true, true, true},
		{"all", true, true, true},
		{"ALL", true, true, true},
		{"", false, false, true},
		{"mig-1g.*", false, true, false},
		{"mig-1g.10gb", false, false, false},
		{"mig-*+me", false, true, false},
	} {
		got := [3]bool{selects(keyInclude, c.selector, gpu), selects(keyInclude, c.selector, mig), selects(keyInclude, c.selector, blank)}
		if want := [3]bool{c.gpu, c.mig, c.blank}; got != want {
			t.Errorf("%q matches %v, want %v", c.selector, got, want)
		}
	}
}

func TestValidateSelectors(t *testing.T) {
	good := []string{
		"GPU-a", "MIG-b", "0", "12:3", "1b:00.0", "0000:1b:00.0", "00000000:1B:00.0", "*H100*", "mig-1g.10gb", "NVIDIA L4", "all",
		"3*", "gpu-a",
	}
	if err := validateSelectors("include", good); err != nil {
		t.Error(err)
	}
	for _, bad := range []string{
		"", "  ", "0:", "a:b", "1b:00", "zz:00.0", "0:1:2", "-1", "123456789012:1b:00.0", " 3", "3 ", "0-3", "0,1",
		"*,*", "3.0", "0x1b", "1234567890",
	} {
		if err := validateSelectors("include", []string{"0", bad}); !slices.Equal(errorKeys(err), []string{"include[1]"}) {
			t.Errorf("%q: %v", bad, err)
		}
	}
}

// A device reference that matches no device is logged once, with its key. Patterns may match none.
func TestUnmatchedRefs(t *testing.T) {
	core, logs := observer.New(zap.InfoLevel)
	p := &Plugin{log: zap.New(core)}
	for _, c := range []struct {
		name string
		set  func(*Config)
		want []string // logged
	}{
		{"none", func(*Config) {}, nil},
		{"matches", func(c *Config) {
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
		{"fewer than before", func(c *Config) { c.Include, c.Exclude = []string{"*", "7"}, []string{"0:2"} }, []string{"plugin.include [7]"}},
		{"disabled", func(c *Config) { c.Enabled, c.Exclude = false, []string{"0:2"} }, nil},
		{"dynamic resource allocation", func(c *Config) { c.API, c.Exclude = APIDRA, []string{"0:3"} }, []string{"plugin.exclude [0:3]"}},
		{"enabled again", func(c *Config) { c.Exclude = []string{"0:2"} }, []string{"plugin.exclude [0:2]"}},
	} {
		cfg := configured(c.set)
		for range 2 { // logged once
			l := newLayout(layoutInput{cfg: &cfg, snap: partitioned("1g.10gb 3g.40gb", whole)})
			p.missingReason(&l)
		}
		var got []string
		for _, e := range logs.FilterMessage(msgUnmatched).All() {
			got = append(got, fmt.Sprint(e.ContextMap()["key"], " ", e.ContextMap()["entries"]))
		}
		logs.TakeAll()
		if !slices.Equal(got, c.want) {
			t.Errorf("%s: %q, want %q", c.name, got, c.want)
		}
	}
}

func TestGlobBacktrackingIsLinear(t *testing.T) {
	if glob(strings.Repeat("*a", 50)+"b", strings.Repeat("a", 10000)) {
		t.Error("matched")
	}
}

// FuzzGlob compares glob with the equivalent regular expression.
func FuzzGlob(f *testing.F) {
	for _, p := range []string{"*H100*", "NVIDIA ????", "", "*", "**a*", "[a]", "a.c", `\*`, "*é?"} {
		f.Add(p, "NVIDIA H100 80GB HBM3")
	}
	for _, c := range [][2]string{
		{"", ""},
		{"", "a"},
		{"*", ""},
		{"**", "abc"},
		{"a*c", "abbc"},
		{"a*c", "abcb"},
		{"a*b*c", "aXbYbZc"},
		{"?", ""},
		{"??", "ab"},
		{"a?c*", "ABC"},
		{"*ab*ab", "abab"},
		{"*ab*ab", "ab"},
		{"[a]", "a"},
		{"6000/8000", "6000/8000"},
		{"?", "é"},
	} {
		f.Add(c[0], c[1])
	}
	f.Fuzz(func(t *testing.T, pattern, s string) {
		if len(pattern) > 100 || len(s) > 1000 {
			return
		}
		// Bytes count as characters, and only A to Z have lower case.
		latin := func(s string) string {
			var b strings.Builder
			for i := range len(s) {
				b.WriteRune(rune(lower(s[i])))
			}
			return b.String()
		}
		expr := strings.NewReplacer(`\*`, `.*`, `\?`, `.`).Replace(regexp.QuoteMeta(latin(pattern)))
		if strings.Contains(pattern, `\`) {
			return // the replacer would replace it
		}
		if got, want := glob(pattern, s), regexp.MustCompile(`(?s)^`+expr+`$`).MatchString(latin(s)); got != want {
			t.Errorf("glob(%q, %q) = %v, and %s = %v", pattern, s, got, expr, want)
		}
	})
}

// FuzzSelectorIsValid checks that no rejected selector matches a device.
func FuzzSelectorIsValid(f *testing.F) {
	for _, s := range []string{
		"GPU-1", "MIG-0-1", "0", "0:1", "1b:00.0", "*H100*", "mig-1g.*", "", " ", "-1", "0:", "a:b", "GPU-:",
		"mig-1g:*",
	} {
		f.Add(s)
	}
	snap := partitioned("1g.10gb 2g.20gb", whole)
	f.Fuzz(func(t *testing.T, selector string) {
		err := validateSelectors("include", []string{selector})
		if err != nil && !strings.HasPrefix(err.Error(), "include[0]: ") {
			t.Errorf("%v does not start with the key", err)
		}
		if err == nil {
			return
		}
		for _, c := range candidates(snap) {
			if selects(keyInclude, selector, &c) {
				t.Errorf("%q matches %s, and is rejected: %v", selector, c.state.Device.ID, err)
			}
		}
	})
}

// Entries by index mean the GPUs that they are bound to, in each key.
func TestSelectorsFollowBindings(t *testing.T) {
	snap := snapshot(3)
	snap.Devices[0].Device.MIGMode = true // GPU-0
	for i := range 2 {
		snap.Devices = append(snap.Devices, health.DeviceState{
			Device: health.Device{
				ID: health.DeviceID(fmt.Sprint("MIG-", i)), Parent: "GPU-0", Kind: health.KindMIG, Index: 0, GI: i + 1,
				MIGIndex: i, Profile: "1g.10gb",
			},
			Verdict: health.Verdict{State: health.Healthy},
		})
	}
	cfg := configured(func(c *Config) {
		c.MIGStrategy = MIGMixed
		c.Include, c.Exclude = []string{"1", "2:1", "all"}, []string{"1", "2:1", "*model*"}
		c.Sharing.TimeSlicing.Resources = []SharedResource{
			{Name: "nvidia.com/gpu", Replicas: 2},
			{Name: "nvidia.com/gpu", Replicas: 2, Devices: []string{"1"}},
		}
	})
	want := []health.IndexRef{
		{Key: "plugin.include", Entry: "1"},
		{Key: "plugin.include", Entry: "2:1"},
		{Key: "plugin.exclude", Entry: "1"},
		{Key: "plugin.exclude", Entry: "2:1"},
		{Key: "plugin.sharing.timeSlicing.resources.devices", Entry: "1"},
	}
	if got := cfg.IndexRefs(); !slices.Equal(got, want) {
		t.Errorf("%v, want %v", got, want)
	}
	for _, c := range []struct {
		name  string
		set   func(*Config)
		bound health.Bindings
		want  []string
	}{
		{"exclude", func(c *Config) { c.Exclude = []string{"1"} }, nil, []string{"GPU-2", "MIG-0", "MIG-1"}},
		{
			"exclude, bound", func(c *Config) { c.Exclude = []string{"1"} }, bindings("plugin.exclude 1 GPU-2"),
			[]string{"GPU-1", "MIG-0", "MIG-1"},
		},
		{
			"of another key", func(c *Config) { c.Exclude = []string{"1"} }, bindings("plugin.include 1 GPU-2"),
			[]string{"GPU-2", "MIG-0", "MIG-1"},
		},
		{
			"to a GPU that is not listed", func(c *Config) { c.Exclude = []string{"1"} }, bindings("plugin.exclude 1 GPU-9"),
			[]string{"GPU-1", "GPU-2", "MIG-0", "MIG-1"},
		},
		{
			"MIG device", func(c *Config) { c.Exclude = []string{"2:1"} }, bindings("plugin.exclude 2:1 GPU-0"),
			[]string{"GPU-1", "GPU-2", "MIG-0"},
		},
		{
			"include", func(c *Config) { c.Include = []string{"1", "2:0"} }, bindings("plugin.include 1 GPU-2", "plugin.include 2:0 GPU-0"),
			[]string{"GPU-2", "MIG-0"},
		},
		{
			"time-slicing",
			func(c *Config) {
				c.Sharing.TimeSlicing.Resources = []SharedResource{{Name: "nvidia.com/gpu", Replicas: 2, Devices: []string{"1"}}}
			},
			bindings("plugin.sharing.timeSlicing.resources.devices 1 GPU-2"),
			[]string{"GPU-1", "GPU-2::0", "GPU-2::1", "MIG-0", "MIG-1"},
		},
		{
			"memory",
			func(c *Config) {
				c.Sharing.Memory.Resource, c.Sharing.Memory.Unit, c.Sharing.Memory.Devices = "nvidia.com/gpu-memory", "40Gi", []string{"1"}
			},
			bindings("plugin.sharing.memory.devices 1 GPU-2"),
			[]string{"GPU-1", "GPU-2::40960Mi::0", "MIG-0", "MIG-1"},
		},
	} {
		cfg := configured(func(c *Config) { c.MIGStrategy = MIGMixed })
		c.set(&cfg)
		snap.Bindings = c.bound
		for i := range snap.Devices {
			snap.Devices[i].Device.Memory = 80 << 30
		}
		var got []string
		for _, r := range Layout(cfg, snap) {
			got = append(got, all(r)...)
		}
		if slices.Sort(got); !slices.Equal(got, c.want) {
			t.Errorf("%s: %v, want %v", c.name, got, c.want)
		}
	}
}

// bindings returns bindings of texts such as "plugin.exclude 1 GPU-2".
func bindings(texts ...string) (all health.Bindings) {
	for _, text := range texts {
		f := strings.Fields(text)
		all = append(all, health.Binding{IndexRef: health.IndexRef{Key: f[0], Entry: f[1]}, GPU: health.DeviceID(f[2])})
	}
	return all
}
