package catalog

import (
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/gpu-node-agent/gpu-node-agent/health"
)

// XIDConfig is the `health.xid` section: the effect of each XID, as a preset with overrides by number.
type XIDConfig struct {
	Preset    string `yaml:"preset"` // default, nvidia-device-plugin, gke, aws, none
	Unhealthy []int  `yaml:"unhealthy"`
	Warn      []int  `yaml:"warn"`
	Ignore    []int  `yaml:"ignore"`
}

// The presets. xids.csv has a column for each of them but the last.
const (
	XIDPresetDefault = "default" // the table's own effects
	// Every XID is unhealthy, known or not, except application errors (NVIDIA k8s-device-plugin, internal/rm/health.go).
	XIDPresetNVIDIA = "nvidia-device-plugin"
	// XID 48 is unhealthy. The XIDs that only set the node condition XidCriticalError warn (GKE container-engine-accelerators,
	// pkg/gpu/nvidia/health_check).
	XIDPresetGKE = "gke"
	// The XIDs that EKS calls fatal are unhealthy, all others warn (AWS eks-node-monitoring-agent, WellKnownXidCodes).
	XIDPresetAWS  = "aws"
	XIDPresetNone = "none" // all XIDs are counted and otherwise ignored
)

//nolint:gochecknoglobals // a table of constants
var xidPresets = [...]string{XIDPresetDefault, XIDPresetNVIDIA, XIDPresetGKE, XIDPresetAWS, XIDPresetNone}

// DefaultXIDConfig returns the defaults of the section.
func DefaultXIDConfig() XIDConfig { return preset(XIDPresetDefault) }

// preset returns a preset without overrides. The lists are empty and not nil, as after parsing YAML.
func preset(name string) XIDConfig {
	return XIDConfig{Preset: name, Unhealthy: []int{}, Warn: []int{}, Ignore: []int{}}
}

// Validate returns every error, each with its key below health.xid.
func (c XIDConfig) Validate() error {
	var errs []error
	if !slices.Contains(xidPresets[:], c.Preset) {
		errs = append(errs, fmt.Errorf("preset: expected one of %s, got %q", strings.Join(xidPresets[:], ", "), c.Preset))
	}
	lists := [...][]int{c.Unhealthy, c.Warn, c.Ignore}
	for i, codes := range lists {
		for j, code := range codes {
			if code < 1 {
				errs = append(errs, fmt.Errorf("%v[%d]: expected an XID of 1 or more, got %d", overrideLists[i], j, code))
			}
		}
	}
	return errors.Join(append(errs, overlaps(lists, func(code int) string { return fmt.Sprintf("XID %d", code) })...)...)
}

// overrideLists are the effects of the lists of overrides, in the order of the lists in the configuration.
//
//nolint:gochecknoglobals // constants
var overrideLists = [...]Effect{EffectUnhealthy, EffectWarn, EffectIgnore}

// overlaps returns an error for each number that is in two lists of overrides.
func overlaps(lists [len(overrideLists)][]int, name func(code int) string) (errs []error) {
	for i, codes := range lists {
		for j := i + 1; j < len(lists); j++ {
			for k, code := range codes {
				if slices.Contains(lists[j], code) && !slices.Contains(codes[:k], code) {
					errs = append(errs, fmt.Errorf("%v: %s is also in %v; it can have only one effect", overrideLists[i], name(code), overrideLists[j]))
				}
			}
		}
	}
	return errs
}

// override returns the effect of an XID if one of the lists has it.
func (c XIDConfig) override(code int) (e Effect, ok bool) {
	switch {
	case slices.Contains(c.Unhealthy, code):
		return EffectUnhealthy, true
	case slices.Contains(c.Warn, code):
		return EffectWarn, true
	}
	return EffectIgnore, slices.Contains(c.Ignore, code)
}

// Effect returns the effect of an XID: its override, else the preset's.
func (c XIDConfig) Effect(code int) Effect {
	if e, ok := c.override(code); ok {
		return e
	}
	return lookupXID(code).effects[max(0, slices.Index(xidPresets[:], c.Preset))]
}

// FollowsRecoveryAction reports whether the driver's recovery action decides the effect of an XID. It does so only in the
// default preset, and not for XIDs with an override.
func (c XIDConfig) FollowsRecoveryAction(code int) bool {
	_, overridden := c.override(code)
	return c.Preset == XIDPresetDefault && !overridden && LookupXID(code).FollowsRecoveryAction
}

// Lookup returns the description of an XID with its configured effect, and with an action and a Clears that match it: an
// Unhealthy finding needs evidence to clear, any other clears itself.
func (c XIDConfig) Lookup(code int) XIDInfo {
	info := LookupXID(code)
	effect := c.Effect(code)
	if effect == info.Effect {
		return info
	}
	info.Effect = effect
	switch {
	case effect == EffectUnhealthy:
		info.Clears, info.Action = health.ClearsGPUReset, health.ActionResetGPU
	case info.Clears != health.ClearsRestart:
		info.Clears = health.ClearsItself
	}
	return info
}

// The environment variables of NVIDIA's device plugin.
const (
	EnvDisableHealthChecks = "DP_DISABLE_HEALTHCHECKS"
	EnvEnableHealthChecks  = "DP_ENABLE_HEALTHCHECKS"
)

// WithNVIDIAEnv applies the environment variables of NVIDIA's device plugin with their documented meaning. It returns the
// changed configuration, which is valid if c is, and notes about invalid values and unused lists.
//
//   - DP_DISABLE_HEALTHCHECKS=all, or xids, ignores every XID; a list adds to the ignored XIDs. It concerns XIDs only: a lost
//     GPU stays lost.
//   - DP_ENABLE_HEALTHCHECKS=all, or xids, makes every XID unhealthy; a list makes its XIDs unhealthy, even if the other
//     variable, or NVIDIA's list of application errors, ignores them. The documentation promises this together with
//     DP_DISABLE_HEALTHCHECKS=all too, although NVIDIA's code then checks nothing at all.
func (c XIDConfig) WithNVIDIAEnv(disable, enable string) (XIDConfig, []string) {
	off, allOff, notes := parseXIDs(EnvDisableHealthChecks, disable)
	on, allOn, more := parseXIDs(EnvEnableHealthChecks, enable)
	notes = append(notes, more...)

	lists := len(c.Unhealthy)+len(c.Warn)+len(c.Ignore) > 0
	switch {
	case allOn:
		if lists {
			notes = append(notes, EnvEnableHealthChecks+": all XIDs are unhealthy; the lists in health.xid have no effect")
		}
		c = preset(XIDPresetNVIDIA)
		for code := range xidRows() {
			if c.Effect(code) == EffectIgnore {
				c.Unhealthy = append(c.Unhealthy, code)
			}
		}
		return c, notes
	case allOff:
		if lists {
			notes = append(notes, EnvDisableHealthChecks+": all XIDs are ignored; the lists in health.xid have no effect")
		}
		c = preset(XIDPresetNone)
		c.Unhealthy = union(c.Unhealthy, on)
		return c, notes
	}
	if len(off)+len(on) == 0 {
		return c, notes
	}
	c.Unhealthy = union(difference(c.Unhealthy, off), on)
	c.Warn = difference(c.Warn, slices.Concat(off, on))
	c.Ignore = difference(union(c.Ignore, off), on)
	return c, notes
}

// parseXIDs parses such a variable: a comma-separated list of numbers, all or xids, in any case.
func parseXIDs(key, list string) (codes []int, all bool, notes []string) {
	for item := range strings.SplitSeq(list, ",") {
		item = strings.TrimSpace(item)
		switch strings.ToLower(item) {
		case "":
			continue
		case "all", "xids":
			all = true
			continue
		}
		code, err := strconv.ParseUint(item, 10, strconv.IntSize-1)
		if err != nil || code == 0 {
			notes = append(notes, fmt.Sprintf("%s: expected XID numbers, all or xids, got %q", key, item))
			continue
		}
		codes = append(codes, int(code))
	}
	return codes, all, notes
}

// union returns the numbers in a or b, in order. Neither is changed.
func union(a, b []int) []int {
	all := append(slices.Clone(a), b...)
	slices.Sort(all)
	return slices.Compact(all)
}

// difference returns the numbers in a that are not in b. Neither is changed.
func difference(a, b []int) []int {
	return slices.DeleteFunc(slices.Clone(a), func(code int) bool { return slices.Contains(b, code) })
}

// LookupDetailed is Lookup with what the kernel log shows: an XID that needs a reset is Unhealthy. Only XIDs that follow the recovery
// action are raised: those depend on bits which the kernel log has and the source has not. A configured effect stays.
func (c XIDConfig) LookupDetailed(x health.XID) XIDInfo {
	i := c.Lookup(x.Code)
	if e, ok := nvlinkDetail(x); ok && e.needsReset() && c.FollowsRecoveryAction(x.Code) {
		i.Effect, i.Action, i.Clears = EffectUnhealthy, health.ActionResetGPU, health.ClearsGPUReset
	}
	return i
}
