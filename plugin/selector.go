package plugin

import (
	"errors"
	"fmt"
	"strings"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/health/deviceref"
)

// selectAll is the selector of every device.
const selectAll = "all"

// selects reports whether a selector of a key, in include, exclude or sharing, matches a device. A selector is a device reference
// (see health/deviceref) such as a UUID, an index or a PCI bus ID, or one of
//
//	all            every device
//	mig-1g.*       MIG devices by profile
//	*H100*         anything else: GPUs and their MIG devices by model
//
// In the last two "*" matches any characters, "?" matches one, and case is ignored. selects runs for every device of every
// layout, so it does not allocate.
func selects(key, selector string, c *candidate) bool {
	d := &c.state.Device
	if profile, ok := strings.CutPrefix(selector, migPrefix); ok {
		return d.Kind == health.KindMIG && glob(profile, c.profile)
	}
	if matches, isRef := c.bindings.Match(key, selector, d); isRef {
		return matches
	}
	return strings.EqualFold(selector, selectAll) || glob(selector, d.Model)
}

// selectsAny reports whether one of the selectors matches the device.
func selectsAny(key string, selectors []string, c *candidate) bool {
	for _, s := range selectors {
		if selects(key, s, c) {
			return true
		}
	}
	return false
}

// UnmatchedRefs returns the device references that match no device of this node. It omits models and profiles, because one file may serve
// nodes with different GPUs.
func (c *Config) UnmatchedRefs(b health.Bindings, devices []health.DeviceState) (unmatched []health.UnmatchedRefs) {
	if !c.Enabled {
		return nil // they have no effect
	}
	for _, list := range c.selectorLists() {
		unmatched = append(unmatched, b.Unmatched(list.key, list.name, list.selectors, devices)...)
	}
	return unmatched
}

// The keys of selectors, as bindings have them.
const (
	keyInclude = "plugin.include"
	keyExclude = "plugin.exclude"
)

// selectorList is one list of selectors. Its key has no positions of lists, its name has.
type selectorList struct {
	key, name string
	selectors []string
}

func (c *Config) selectorLists() []selectorList {
	lists := []selectorList{{keyInclude, keyInclude, c.Include}, {keyExclude, keyExclude, c.Exclude}}
	for _, e := range c.Sharing.entries() {
		lists = append(lists, selectorList{e.selectorKey(), "plugin." + e.key + ".devices", e.devices})
	}
	return lists
}

// IndexRefs returns the selectors that name a GPU by its index.
func (c Config) IndexRefs() (refs []health.IndexRef) {
	for _, list := range c.selectorLists() {
		refs = append(refs, health.IndexRefs(list.key, list.selectors)...)
	}
	return refs
}

// validateSelectors rejects selectors that can match no device of any node.
func validateSelectors(key string, selectors []string) error {
	var errs []error
	for i, s := range selectors {
		problem := ""
		switch trimmed := strings.TrimSpace(s); {
		case trimmed == "":
			problem = "is empty"
		case trimmed != s:
			problem = "starts or ends with a space"
		case looksLikeIndex(s) && !deviceref.Valid(s):
			problem = "is neither an index nor a PCI bus ID"
		}
		if problem != "" {
			errs = append(errs, fmt.Errorf("%s[%d]: %q %s; use all, a UUID, an index such as 0 or 0:1, a PCI bus ID such as 0000:1b:00.0, "+
				"a model such as \"*H100*\" or a MIG profile such as mig-1g.*", key, i, s, problem))
		}
	}
	return errors.Join(errs...)
}

// looksLikeIndex reports whether a selector can be neither a model nor a MIG profile. Several indexes in one entry, such as 0-3,
// are one that would match nothing.
func looksLikeIndex(s string) bool {
	return strings.ContainsAny(s, ":,") || strings.ContainsAny(s[:1], "-+.0123456789") && !strings.ContainsAny(s, "*?")
}

// glob reports whether the pattern matches all of s. It backtracks to the last * only, which suffices: an earlier one
// could match no more than the last.
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
