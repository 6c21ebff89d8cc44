package sim

import (
	"fmt"
	"math"
	"reflect"
	"slices"
	"strings"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/health/catalog"
)

// Limits of values.
const (
	maxXID         = 999 // NVIDIA's catalogue ends at 173 (Xid Errors, r580)
	maxTemperature = 200 // °C; a GPU shuts down far below
	maxCount       = 1_000_000
	maxRetired     = 64 // pages, as many as a GPU can retire (NVIDIA, Dynamic Page Retirement)
)

// effects is the table of simulated events, in the order of Event's fields: the control socket, the log and the documentation use it.
// A new fault needs a field of Event and a row here, with the metric that it sets or the code that applies it.
//
//nolint:gochecknoglobals // a table of constants
var effects = [...]effect{
	{key: "xid", help: "the driver reports this XID once", check: within(1, maxXID)},
	{key: "times", help: "how often the driver reports the XID, at the same time", with: "xid", check: within(1, maxCount)},
	{key: "lost", help: "the GPU and its MIG devices are off the bus; false: back"},
	{
		key: "unbound", help: "the driver does not have the GPU: detached, and no more listed by later sessions of the source; false: it has " +
			"it again",
	},
	{key: "stale", help: "the source has no values of the GPU and its MIG devices"},
	{
		key: "recoveryAction", help: "the recovery action that the driver asks for: a name such as reset, or a number",
		metric: health.FieldRecoveryAction, check: known(
			func(r Recovery) bool { _, ok := r.number(); return ok },
			fmt.Sprintf("a number from 0 to %d or one of %s", math.MaxInt32, strings.Join(recoveryNames(), ", ")),
		),
	},
	{key: "rowRemapPending", help: "rows wait for a GPU reset to be remapped", metric: health.FieldRemapPending},
	{key: "rowRemapFailed", help: "a row could not be remapped", metric: health.FieldRemapFailed},
	{
		key: "doubleBitErrors", help: "double-bit ECC errors since the last GPU reset",
		metric: health.FieldDBEVolatile, check: within(0, maxCount),
	},
	{
		key: "retiredPages", help: "pages retired for double-bit errors; 63 are too many",
		metric: health.FieldRetiredDBE, check: within(0, maxRetired), only: func(m *model) bool { return m.retires },
	},
	{key: "clocksSlowed", help: "the hardware slows the clocks down"},
	{key: "temperature", help: "the GPU's temperature in °C; 0: the simulated one again", check: within(0.0, maxTemperature)},
	{
		key: "incident", help: "DCGM's health check finds this incident, such as " + exampleIncident, check: known(
			func(name string) bool { _, ok := catalog.IncidentCode(name); return ok }, "the name of an incident, such as "+exampleIncident,
		),
	},
	{
		key: "severity", help: "the incident's severity: fail, which is the default, warn, or none to end it", with: "incident",
		check: oneOf(severityFail, severityWarn, severityNone),
	},
	{
		key: "mig", help: "partition the GPU: off, sevenths or balanced",
		check: oneOf(migOff, migSevenths, migBalanced), only: func(m *model) bool { return m.repartitions },
	},
	{
		key: "processes", help: "the GPU's processes, such as " + exampleProcesses + "; they replace the earlier ones, and [] ends them",
		check: checkProcesses,
	},
	{
		key: "source", ofSource: true, help: "the source's state: up, down, stalled, blind, empty, lost or checksDown",
		check: oneOf(sourceUp, sourceDown, sourceStalled, sourceBlind, sourceEmpty, sourceLost, sourceChecksDown),
	},
	{
		key: "events", ofSource: true, help: "the driver's events with source.events: up, down, or lossy: up, but none arrives",
		check: oneOf(eventsUp, eventsDown, eventsLossy),
	},
}

// effect is one kind of effect of an event.
type effect struct {
	key, help string
	check     check             // of the value; nil: each is valid
	with      string            // the key that has to be set too
	metric    health.Field      // the field of the GPU that has the value
	only      func(*model) bool // which models support it; nil for all
	ofSource  bool              // it concerns the source and no GPU
}

func (f *effect) supports(m *model) bool { return f.only == nil || f.only(m) }

// field returns the event's field of the effect, a pointer.
func (f *effect) field(e *Event) reflect.Value {
	return reflect.ValueOf(e).Elem().Field(slices.Index(eventKeys, f.key))
}

func (f *effect) isSet(e *Event) bool { return !f.field(e).IsNil() }

// value returns the value of an effect that is set.
func (f *effect) value(e *Event) any { return f.field(e).Elem().Interface() }

// measured returns the value of the metric, 0 if the effect is not set.
func (f *effect) measured(e *Event) float64 {
	if !f.isSet(e) {
		return 0
	}
	switch v := f.value(e).(type) {
	case bool:
		return boolValue(v)
	case int:
		return float64(v)
	case Recovery:
		n, _ := v.number()
		return float64(n)
	}
	return 0
}

// effectOf returns the effect with a key, or nil.
func effectOf(key string) *effect {
	if i := slices.IndexFunc(effects[:], func(f effect) bool { return f.key == key }); i >= 0 {
		return &effects[i]
	}
	return nil
}

// Effect describes an effect of events, for documentation.
type Effect struct{ Key, Help string }

// Effects lists the effects that an Event can have.
func Effects() []Effect {
	all := make([]Effect, len(effects))
	for i, f := range effects {
		all[i] = Effect{f.key, f.help}
	}
	return all
}

// check returns the error of a key's value, with what would be right.
type check func(key string, value any) error

func within[T int | float64](least, most T) check {
	return func(key string, value any) error {
		if x, ok := value.(T); ok && x >= least && x <= most { // false for NaN
			return nil
		}
		return keyErrorf(key, "%v is out of range; use %v to %v", value, least, most)
	}
}

func oneOf(names ...string) check {
	return known(func(name string) bool { return slices.Contains(names, name) }, "one of "+strings.Join(names, ", "))
}

func known[T ~string](valid func(T) bool, use string) check {
	return func(key string, value any) error {
		if name, ok := value.(T); ok && valid(name) {
			return nil
		}
		return keyErrorf(key, "%s is not known; use %s", quote(fmt.Sprint(value)), use)
	}
}
