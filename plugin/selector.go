package plugin

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/health/deviceref"
)

// A selector chooses devices, in include, exclude and sharing. It is what health/which reads, such as a UUID,
// an index or a place on the PCI bus, or one of
//
//	mig-1g.*       MIG devices by profile
//	*H100*         anything else: the model, for GPUs and their MIG devices
//
// In these two "*" stands for any run of characters, "?" for one, and capitals make no difference.
//
// selects reports whether a selector chooses a device. It is called for every device at every layout, so it
// does not allocate.
func selects(selector string, c *candidate) bool {
	d := &c.state.Device
	if profile, ok := strings.CutPrefix(selector, migPrefix); ok {
		return d.Kind == health.KindMIG && glob(profile, c.profile)
	}
	if chosen, ok := d.Matches(selector); ok {
		return chosen
	}
	return glob(selector, d.Model)
}

// selectsAny reports whether one of the selectors chooses the device.
func selectsAny(selectors []string, c *candidate) bool {
	for _, s := range selectors {
		if selects(s, c) {
			return true
		}
	}
	return false
}

// idleSelectors are the words of one key that mean no device.
type idleSelectors struct {
	key   string
	words []string
}

// idle returns the selectors that name a device by UUID, index or place, and no device of this node has this name. A model
// or a profile that none has is no such: one file may serve many nodes.
func (c Config) idle(all []candidate) (idle []idleSelectors) {
	add := func(key string, selectors []string) {
		words := slices.DeleteFunc(slices.Clone(selectors), func(word string) bool {
			_, named := (&deviceref.Names{}).Match(word)
			return !named || slices.ContainsFunc(all, func(d candidate) bool { return selects(word, &d) })
		})
		if len(words) > 0 {
			idle = append(idle, idleSelectors{key, words})
		}
	}
	add("plugin.include", c.Include)
	add("plugin.exclude", c.Exclude)
	for i, r := range c.Sharing.TimeSlicing.Resources {
		add("plugin."+sharedKey(i)+".devices", r.Devices)
	}
	return idle
}

// validateSelectors refuses what can choose nothing. A UUID, an index or a model that no GPU of this node
// has is no error: one file may serve many nodes.
func validateSelectors(key string, selectors []string) error {
	var errs []error
	for i, s := range selectors {
		_, _, isIndex := deviceref.ParseIndex(s)
		_, isPCI := deviceref.ParsePCI(s)
		bad := ""
		switch {
		case strings.TrimSpace(s) == "":
			bad = "is empty"
		case strings.Contains(s, ":") && !isIndex && !isPCI:
			bad = "is neither a PCI bus id nor the index of a MIG device"
		case strings.HasPrefix(s, "-"):
			bad = "is not an index"
		}
		if bad != "" {
			errs = append(errs, fmt.Errorf("%s[%d]: %q %s; use a UUID, an index such as 0 or 0:1, a PCI bus id such as 0000:1b:00.0, "+
				"a model such as *H100* or a MIG profile such as mig-1g.*", key, i, s, bad))
		}
	}
	return errors.Join(errs...)
}

// glob reports whether the whole of s is like the pattern. It goes back to the last * only, which is enough:
// an earlier one could match no more than the last.
func glob(pattern, s string) bool {
	p, i := 0, 0
	star, from := -1, 0
	for i < len(s) {
		switch {
		case p < len(pattern) && pattern[p] == '*':
			star, from = p, i
			p++
		case p < len(pattern) && (pattern[p] == '?' || lower(pattern[p]) == lower(s[i])):
			p++
			i++
		case star >= 0:
			from++
			p, i = star+1, from
		default:
			return false
		}
	}
	return strings.Trim(pattern[p:], "*") == ""
}

func lower(c byte) byte {
	if 'A' <= c && c <= 'Z' {
		return c + 'a' - 'A'
	}
	return c
}
