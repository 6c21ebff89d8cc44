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
		got := [3]bool{selects(c.selector, gpu), selects(c.selector, mig), selects(c.selector, blank)}
		if want := [3]bool{c.gpu, c.mig, c.blank}; got != want {
			t.Errorf("%q matches %v, want %v", c.selector, got, want)
		}
	}
}

func TestValidateSelectors(t *testing.T) {
	good := []string{"GPU-a", "MIG-b", "0", "12:3", "1b:00.0", "0000:1b:00.0", "00000000:1B:00.0", "*H100*", "mig-1g.10gb", "NVIDIA L4", "all", "3*", "gpu-a"}
	if err := validateSelectors("include", good); err != nil {
		t.Error(err)
	}
	for _, bad := range []string{"", "  ", "0:", "a:b", "1b:00", "zz:00.0", "0:1:2", "-1", "123456789012:1b:00.0", " 3", "3 ", "0-3", "0,1", "*,*", "3.0", "0x1b", "1234567890"} {
		if err := validateSelectors("include", []string{"0", bad}); !slices.Equal(errorKeys(err), []string{"include[1]"}) {
			t.Errorf("%q: %v", bad, err)
		}
	}
}

// A device reference that matches no device is logged once, with its key. Patterns may match none.
func TestUnmatchedSelectors(t *testing.T) {
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
	for _, s := range []string{"GPU-1", "MIG-0-1", "0", "0:1", "1b:00.0", "*H100*", "mig-1g.*", "", " ", "-1", "0:", "a:b", "GPU-:", "mig-1g:*"} {
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
			if selects(selector, &c) {
				t.Errorf("%q matches %s, and is rejected: %v", selector, c.state.Device.ID, err)
			}
		}
	})
}
