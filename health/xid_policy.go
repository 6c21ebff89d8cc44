package health

import (
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
)

// XIDConfig is the `health.xid` section: what each XID does. A preset, then overrides by number.
type XIDConfig struct {
	Preset    string `yaml:"preset"` // default, nvidia-device-plugin, gke, aws, none
	Unhealthy []int  `yaml:"unhealthy"`
	Warn      []int  `yaml:"warn"`
	Ignore    []int  `yaml:"ignore"`
}

// The presets.
const (
	XIDPresetDefault = "default"              // our table
	XIDPresetNVIDIA  = "nvidia-device-plugin" // every XID is unhealthy, known or not, but the application errors
	XIDPresetGKE     = "gke"                  // 48 is unhealthy; those of GKE's node condition warn
	XIDPresetAWS     = "aws"                  // what EKS calls fatal is unhealthy; all else warns
	XIDPresetNone    = "none"                 // all are counted and ignored
)

//nolint:gochecknoglobals // tables of constants
var (
	xidPresets = []string{XIDPresetDefault, XIDPresetNVIDIA, XIDPresetGKE, XIDPresetAWS, XIDPresetNone}

	// NVIDIA k8s-device-plugin, internal/rm/health.go: application errors.
	xidsNVIDIAIgnores = []int{13, 31, 43, 45, 68, 109}
	// GKE container-engine-accelerators, pkg/gpu/nvidia/health_check: what makes a device unhealthy, and
	// what sets the node condition XidCriticalError beside it.
	xidsGKEUnhealthy = []int{48}
	xidsGKEWarn      = []int{63, 64, 79, 119, 120, 123, 140}
	// AWS eks-node-monitoring-agent, WellKnownXidCodes: fatal.
	xidsAWSFatal = []int{46, 48, 54, 62, 63, 64, 74, 79, 95, 109, 110, 119, 120, 136, 140, 142, 143, 151, 155, 156, 158}
)

// DefaultXIDConfig returns the section as it is when config.yaml says nothing.
func DefaultXIDConfig() XIDConfig { return preset(XIDPresetDefault) }

// preset is one without overrides. The lists are empty and not nil, as they are when they were read from YAML.
func preset(name string) XIDConfig {
	return XIDConfig{Preset: name, Unhealthy: []int{}, Warn: []int{}, Ignore: []int{}}
}

// Validate returns every fault, each with its key below health.xid.
func (c XIDConfig) Validate() error {
	var errs []error
	if !slices.Contains(xidPresets, c.Preset) {
		errs = append(errs, fmt.Errorf("preset: %q is not known; use one of %s", c.Preset, strings.Join(xidPresets, ", ")))
	}
	lists := []effectList[int]{{EffectUnhealthy, c.Unhealthy}, {EffectWarn, c.Warn}, {EffectIgnore, c.Ignore}}
	for _, l := range lists {
		for _, code := range l.of {
			if code < 1 {
				errs = append(errs, fmt.Errorf("%v: %d is not an XID; use 1 or more", l.effect, code))
			}
		}
	}
	for _, t := range twice(lists) {
		errs = append(errs, fmt.Errorf("%v: %d is in %v too; an XID has one effect", t.effect, t.what, t.also))
	}
	return errors.Join(errs...)
}

// effectList is one list of overrides.
type effectList[T comparable] struct {
	effect Effect
	of     []T
}

// twoEffects is something that has two effects.
type twoEffects[T comparable] struct {
	what         T
	effect, also Effect
}

// twice returns what is in more than one of the lists.
func twice[T comparable](lists []effectList[T]) []twoEffects[T] {
	var found []twoEffects[T]
	for i, l := range lists {
		for _, other := range lists[i+1:] {
			for j, v := range l.of {
				if slices.Contains(other.of, v) && !slices.Contains(l.of[:j], v) {
					found = append(found, twoEffects[T]{v, l.effect, other.effect})
				}
			}
		}
	}
	return found
}

// Effect returns what an XID does: its override, or what the preset says.
func (c XIDConfig) Effect(code int) Effect {
	switch {
	case slices.Contains(c.Unhealthy, code):
		return EffectUnhealthy
	case slices.Contains(c.Warn, code):
		return EffectWarn
	case slices.Contains(c.Ignore, code):
		return EffectIgnore
	}
	switch c.Preset {
	case XIDPresetNVIDIA:
		return effectOf(!slices.Contains(xidsNVIDIAIgnores, code), false)
	case XIDPresetGKE:
		return effectOf(slices.Contains(xidsGKEUnhealthy, code), slices.Contains(xidsGKEWarn, code))
	case XIDPresetAWS:
		return effectOf(slices.Contains(xidsAWSFatal, code), true)
	case XIDPresetNone:
		return EffectIgnore
	}
	return LookupXID(code).Effect
}

// follows tells whether the driver's recovery action decides what an XID does: by our table, and unless
// somebody has decided already.
func (c XIDConfig) follows(code int) bool {
	decided := slices.Contains(c.Unhealthy, code) || slices.Contains(c.Warn, code) || slices.Contains(c.Ignore, code)
	return c.Preset == XIDPresetDefault && !decided && LookupXID(code).FollowsRecoveryAction
}

func effectOf(unhealthy, warn bool) Effect {
	switch {
	case unhealthy:
		return EffectUnhealthy
	case warn:
		return EffectWarn
	}
	return EffectIgnore
}

// Lookup returns what is known of an XID, with the effect that it has here. The rest of the row follows:
// what is unhealthy takes evidence to go, and what is not goes by itself.
func (c XIDConfig) Lookup(code int) XIDInfo {
	info := LookupXID(code)
	effect := c.Effect(code)
	if effect == info.Effect {
		return info
	}
	info.Effect = effect
	switch {
	case effect == EffectUnhealthy:
		info.Clears, info.Action = ClearsGPUReset, ActionResetGPU
	case info.Clears != ClearsRestart:
		info.Clears = ClearsItself
	}
	return info
}

// The environment variables of NVIDIA's device plugin.
const (
	EnvDisableHealthChecks = "DP_DISABLE_HEALTHCHECKS"
	EnvEnableHealthChecks  = "DP_ENABLE_HEALTHCHECKS"
)

// WithNVIDIAEnv returns the configuration as the environment variables of NVIDIA's device plugin change it,
// by their documented meaning, and what is wrong with them. The result is valid if c is.
//
//   - DP_DISABLE_HEALTHCHECKS=all, or xids, ignores every XID; a list is ignored beside what is already.
//     Only XIDs are meant: a GPU that is lost is lost.
//   - DP_ENABLE_HEALTHCHECKS=all, or xids, makes every XID unhealthy; a list makes those unhealthy, even if
//     the other variable, or NVIDIA's list of application errors, ignores them. That this works with
//     DP_DISABLE_HEALTHCHECKS=all is documented; NVIDIA's code checks nothing at all then.
func (c XIDConfig) WithNVIDIAEnv(disable, enable string) (XIDConfig, []string) {
	off, allOff, notes := parseXIDs(EnvDisableHealthChecks, disable)
	on, allOn, more := parseXIDs(EnvEnableHealthChecks, enable)
	notes = append(notes, more...)

	lists := len(c.Unhealthy)+len(c.Warn)+len(c.Ignore) > 0
	switch {
	case allOn:
		if lists {
			notes = append(notes, EnvEnableHealthChecks+": all XIDs are unhealthy; the lists of health.xid are not used")
		}
		c = preset(XIDPresetNVIDIA)
		c.Unhealthy = slices.Clone(xidsNVIDIAIgnores)
		return c, notes
	case allOff:
		if lists {
			notes = append(notes, EnvDisableHealthChecks+": all XIDs are ignored; the lists of health.xid are not used")
		}
		c = preset(XIDPresetNone)
		c.Unhealthy = plus(c.Unhealthy, on)
		return c, notes
	}
	if len(off)+len(on) == 0 {
		return c, notes
	}
	c.Unhealthy = plus(minus(c.Unhealthy, off), on)
	c.Warn = minus(c.Warn, slices.Concat(off, on))
	c.Ignore = minus(plus(c.Ignore, off), on)
	return c, notes
}

// parseXIDs reads such a variable: a comma-separated list of numbers, or all, or xids, in any case.
func parseXIDs(key, list string) (codes []int, all bool, notes []string) {
	for word := range strings.SplitSeq(list, ",") {
		word = strings.TrimSpace(word)
		switch strings.ToLower(word) {
		case "":
			continue
		case "all", "xids":
			all = true
			continue
		}
		code, err := strconv.ParseUint(word, 10, strconv.IntSize-1)
		if err != nil || code == 0 {
			notes = append(notes, fmt.Sprintf("%s: %q is not an XID; use a number, all or xids", key, word))
			continue
		}
		codes = append(codes, int(code))
	}
	return codes, all, notes
}

// plus returns what is in a or b, in order. Neither is changed.
func plus(a, b []int) []int {
	all := append(slices.Clone(a), b...)
	slices.Sort(all)
	return slices.Compact(all)
}

// minus returns what is in a and not in b. Neither is changed.
func minus(a, b []int) []int {
	return slices.DeleteFunc(slices.Clone(a), func(code int) bool { return slices.Contains(b, code) })
}
