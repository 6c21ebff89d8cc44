package sim

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"go.uber.org/zap"
)

// Event is a simulated event: something that happens to a GPU or to the source. One event may have several effects;
// an unset field leaves things as they are. XID happens once. Every other effect lasts until another event changes it.
// Each field except At and GPU has a row in effects.
type Event struct {
	At              time.Duration `yaml:"at,omitempty" json:"-"` // since the start of the scenario; invalid on the control socket
	GPU             *int          `yaml:"gpu,omitempty" json:"gpu,omitempty"`
	XID             *int          `yaml:"xid,omitempty" json:"xid,omitempty"`
	Times           *int          `yaml:"times,omitempty" json:"times,omitempty"`
	Lost            *bool         `yaml:"lost,omitempty" json:"lost,omitempty"`
	Unbound         *bool         `yaml:"unbound,omitempty" json:"unbound,omitempty"`
	Stale           *bool         `yaml:"stale,omitempty" json:"stale,omitempty"`
	RecoveryAction  *Recovery     `yaml:"recoveryAction,omitempty" json:"recoveryAction,omitempty"`
	RowRemapPending *bool         `yaml:"rowRemapPending,omitempty" json:"rowRemapPending,omitempty"`
	RowRemapFailed  *bool         `yaml:"rowRemapFailed,omitempty" json:"rowRemapFailed,omitempty"`
	DoubleBitErrors *int          `yaml:"doubleBitErrors,omitempty" json:"doubleBitErrors,omitempty"`
	RetiredPages    *int          `yaml:"retiredPages,omitempty" json:"retiredPages,omitempty"`
	ClocksSlowed    *bool         `yaml:"clocksSlowed,omitempty" json:"clocksSlowed,omitempty"`
	Temperature     *float64      `yaml:"temperature,omitempty" json:"temperature,omitempty"`
	Incident        *string       `yaml:"incident,omitempty" json:"incident,omitempty"`
	Severity        *string       `yaml:"severity,omitempty" json:"severity,omitempty"`
	MIG             *string       `yaml:"mig,omitempty" json:"mig,omitempty"`
	Processes       *[]Process    `yaml:"processes,omitempty" json:"processes,omitempty"`
	Source          *string       `yaml:"source,omitempty" json:"source,omitempty"`
	Events          *string       `yaml:"events,omitempty" json:"events,omitempty"`
}

// States of the source, the values of Event.Source.
const (
	sourceUp      = "up"
	sourceDown    = "down"    // calls fail at once, as with a dead host engine
	sourceStalled = "stalled" // calls do not return, as with a hung driver
	sourceBlind   = "blind"   // calls return no values, as after an XID 119; sessions fail after blindAfter
	sourceEmpty   = "empty"   // calls list no GPU, as with an engine started without a driver; meanwhile XIDs are lost
	sourceLost    = "lost"    // every GPU is lost, as an engine reports while the driver lists none

	sourceChecksDown = "checksDown" // DCGM's health checks fail, as with a library and an engine that do not match
)

// Recovery is a recovery action of the driver (nvml.h: nvmlDeviceGpuRecoveryAction_t), by name or by number. Any number
// is valid, because a driver may be newer than the names.
type Recovery string

// recoveryNames returns the names of the recovery actions, by number.
func recoveryNames() []string {
	return []string{"none", "reset", "reboot", "drainP2P", "drainAndReset", "recoverIMEX", "pcieBusReset", "systemReboot"}
}

// number returns the driver's number of the action.
func (r Recovery) number() (int, bool) {
	if i := slices.Index(recoveryNames(), string(r)); i >= 0 {
		return i, true
	}
	n, err := strconv.ParseUint(string(r), 0, 31) // base 0: numbers as YAML writes them
	return int(n), err == nil
}

// keyError is an invalid value of an event or the configuration. The key is empty if the event as a whole is invalid.
type keyError struct{ key, text string }

func (e *keyError) Error() string {
	if e.key == "" {
		return e.text
	}
	return e.key + ": " + e.text
}

func keyErrorf(key, format string, args ...any) error {
	return &keyError{key, fmt.Sprintf(format, args...)}
}

// validate returns all errors of the event that do not depend on the profile.
func (e *Event) validate() (errs []error) {
	ofGPU, empty := false, true
	for i := range effects {
		f := &effects[i]
		if !f.isSet(e) {
			continue
		}
		empty, ofGPU = false, ofGPU || !f.ofSource
		if f.with != "" && !effectOf(f.with).isSet(e) {
			errs = append(errs, keyErrorf(f.key, "needs %s; set both", f.with))
		} else if f.check != nil {
			if err := f.check(f.key, f.value(e)); err != nil {
				errs = append(errs, err)
			}
		}
	}
	switch {
	case empty:
		errs = append(errs, keyErrorf("", "no effect; use at least one of %s", effectKeys))
	case ofGPU && e.GPU == nil:
		errs = append(errs, keyErrorf("gpu", "is missing; use the index of a GPU"))
	case !ofGPU && e.GPU != nil:
		errs = append(errs, keyErrorf("gpu", "no effect on GPU %d; remove it, or use at least one of %s", *e.GPU, effectKeys))
	}
	return errs
}

// validateFor returns the errors of the event on the GPUs of a profile.
func (e *Event) validateFor(p *profile) (errs []error) {
	n := len(p.pci)
	switch {
	case e.GPU == nil:
	case n == 0:
		errs = append(errs, keyErrorf("gpu", "%d is not a GPU of profile %s, which has none", *e.GPU, p.name))
	case *e.GPU < 0 || *e.GPU >= n:
		errs = append(errs, keyErrorf("gpu", "%d is not a GPU of profile %s, which has 0 to %d", *e.GPU, p.name, n-1))
	default:
		for i := range effects {
			if f := &effects[i]; f.isSet(e) && !f.supports(&p.models[*e.GPU]) {
				errs = append(errs, keyErrorf(f.key, "GPU %d of profile %s, %s, does not support it; profiles with a GPU that does: %s",
					*e.GPU, p.name, p.models[*e.GPU].name, strings.Join(supporting(f), ", ")))
			}
		}
	}
	return errs
}

// supporting returns the names of the profiles with a GPU that supports an effect.
func supporting(f *effect) (names []string) {
	for _, p := range profiles() {
		if slices.ContainsFunc(p.models, func(m model) bool { return f.supports(&m) }) {
			names = append(names, p.name)
		}
	}
	return names
}

// merge overwrites the fields of e that are set in from.
func (e *Event) merge(from *Event) {
	for i := range effects {
		if f := &effects[i]; f.isSet(from) {
			f.field(e).Set(f.field(from))
		}
	}
}

func (e *Event) logFields() (fields []zap.Field) {
	for i := range effects {
		if f := &effects[i]; f.isSet(e) {
			fields = append(fields, zap.Any(f.key, f.value(e)))
		}
	}
	return fields
}

// severity returns the severity of the event's incident.
func (e *Event) severity() string { return cmp.Or(valueOf(e.Severity), severityFail) }

// valueOf returns what p points to, or the zero value.
func valueOf[T any](p *T) (v T) {
	if p != nil {
		v = *p
	}
	return v
}

func quote(s string) string {
	const limit = 40 // enough to recognize the text
	if len(s) > limit {
		s = s[:limit] + "…"
	}
	return strconv.Quote(s)
}

var errAt = errors.New("at: valid in a scenario only; an event sent to the agent happens at once")
