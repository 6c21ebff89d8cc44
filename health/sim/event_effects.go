package sim

import (
	"fmt"
	"math"
	"slices"
	"strings"

	"go.uber.org/zap"
	"go.yaml.in/yaml/v3"

	"github.com/gpu-node-agent/gpu-node-agent/health"
)

// Limits of values.
const (
	maxXID         = 999 // NVIDIA's catalogue ends at 173 (Xid Errors, r580)
	maxTemperature = 200 // °C; a GPU shuts down far below
	maxCount       = 1_000_000
	maxRetired     = 64 // pages, as many as a GPU can retire (NVIDIA, Dynamic Page Retirement)
)

const keyRecoveryAction = "recoveryAction"

// effects is the table of simulated events: the configuration, the control socket, the log and the documentation use it. A new fault needs
// a field of Event and a row here, with the metric that it sets or the code that applies it.
//
//nolint:gochecknoglobals // a table of constants
var effects = [...]effect{
	{
		key: "xid", help: "the driver reports this XID once",
		parameter: integer(func(e *Event) **int { return &e.XID }, 1, maxXID),
	},
	{
		key: "times", help: "how often the driver reports the XID, at the same time", with: "xid",
		parameter: integer(func(e *Event) **int { return &e.Times }, 1, maxCount),
	},
	{
		key: "lost", help: "the GPU and its MIG devices are off the bus; false: back",
		parameter: boolean(func(e *Event) **bool { return &e.Lost }),
	},
	{
		key: "unbound", help: "the driver does not have the GPU: detached, and no more listed by later sessions of the source; false: it has " +
			"it again",
		parameter: boolean(func(e *Event) **bool { return &e.Unbound }),
	},
	{
		key: "stale", help: "the source has no values of the GPU and its MIG devices",
		parameter: boolean(func(e *Event) **bool { return &e.Stale }),
	},
	{
		key: keyRecoveryAction, help: "the recovery action that the driver asks for: a name such as reset, or a number",
		metric: health.FieldRecoveryAction,
		parameter: &param[Recovery]{
			field: func(e *Event) **Recovery { return &e.RecoveryAction }, tags: []string{"!!int", "!!str"},
			expected: "a number or one of " + strings.Join(recoveryNames(), ", "),
			valid:    func(r Recovery) bool { _, ok := r.number(); return ok },
			use:      fmt.Sprintf("a number from 0 to %d or one of %s", math.MaxInt32, strings.Join(recoveryNames(), ", ")),
			number:   func(r Recovery) float64 { n, _ := r.number(); return float64(n) },
		},
	},
	{
		key: "rowRemapPending", help: "rows wait for a GPU reset to be remapped", metric: health.FieldRemapPending,
		parameter: boolean(func(e *Event) **bool { return &e.RowRemapPending }),
	},
	{
		key: "rowRemapFailed", help: "a row could not be remapped", metric: health.FieldRemapFailed,
		parameter: boolean(func(e *Event) **bool { return &e.RowRemapFailed }),
	},
	{
		key: "doubleBitErrors", help: "double-bit ECC errors since the last GPU reset", metric: health.FieldDBEVolatile,
		parameter: integer(func(e *Event) **int { return &e.DoubleBitErrors }, 0, maxCount),
	},
	{
		key: "retiredPages", help: "pages retired for double-bit errors; 63 are too many", metric: health.FieldRetiredDBE,
		parameter: integer(func(e *Event) **int { return &e.RetiredPages }, 0, maxRetired), only: func(m *model) bool { return m.retires },
	},
	{
		key: "clocksSlowed", help: "the hardware slows the clocks down",
		parameter: boolean(func(e *Event) **bool { return &e.ClocksSlowed }),
	},
	{
		key: "temperature", help: "the GPU's temperature in °C; 0: the simulated one again",
		parameter: &param[float64]{
			field: func(e *Event) **float64 { return &e.Temperature }, tags: []string{"!!int", "!!float"}, expected: "a number of °C",
			valid: func(t float64) bool { return t >= 0 && t <= maxTemperature }, use: fmt.Sprintf("0 to %d", maxTemperature), // false for NaN
		},
	},
	{
		key: "incident", help: "DCGM's health check finds this incident, such as " + exampleIncident,
		parameter: &param[string]{
			field: func(e *Event) **string { return &e.Incident }, tags: []string{"!!str", "!!int"},
			expected: "the name of an incident, such as " + exampleIncident,
			valid:    func(name string) bool { _, ok := health.IncidentCode(name); return ok },
			use:      "the name of an incident, such as " + exampleIncident,
		},
	},
	{
		key: "severity", help: "the incident's severity: fail, which is the default, warn, or none to end it", with: "incident",
		parameter: choice(func(e *Event) **string { return &e.Severity }, severityFail, severityWarn, severityNone),
	},
	{
		key: "mig", help: "partition the GPU: off, sevenths or balanced",
		parameter: choice(func(e *Event) **string { return &e.MIG }, migOff, migSevenths, migBalanced),
		only:      func(m *model) bool { return m.repartitions },
	},
	{
		key: "processes", help: "the GPU's processes, such as " + exampleProcesses + "; they replace the earlier ones, and [] ends them",
		parameter: processList{},
	},
	{
		key: "source", ofSource: true, help: "the source's state: up, down, stalled, blind, empty, lost or checksDown",
		parameter: choice(func(e *Event) **string { return &e.Source }, sourceUp, sourceDown, sourceStalled, sourceBlind, sourceEmpty, sourceLost,
			sourceChecksDown),
	},
	{
		key: "events", ofSource: true, help: "the driver's events with source.events: up, down, or lossy: up, but none arrives",
		parameter: choice(func(e *Event) **string { return &e.Events }, eventsUp, eventsDown, eventsLossy),
	},
}

// effect is one kind of effect of an event.
type effect struct {
	key, help string
	parameter                   // how its value is parsed and checked
	with      string            // the key that has to be set too
	metric    health.Field      // the field of the GPU that has the value
	only      func(*model) bool // which models support it; nil for all
	ofSource  bool              // it concerns the source and no GPU
}

func (f *effect) supports(m *model) bool { return f.only == nil || f.only(m) }

// effectOf returns the effect with a key, or nil.
func effectOf(key string) *effect {
	if i := slices.IndexFunc(effects[:], func(f effect) bool { return f.key == key }); i >= 0 {
		return &effects[i]
	}
	return nil
}

// effectKeys returns all keys, for errors.
func effectKeys() string {
	keys := make([]string, len(effects))
	for i := range effects {
		keys[i] = effects[i].key
	}
	return strings.Join(keys, ", ")
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

// parameter is an event's field of an effect, whatever its type.
type parameter interface {
	isSet(e *Event) bool
	decode(e *Event, key string, node *yaml.Node) error
	check(e *Event, key string) error
	merge(to, from *Event)
	value(e *Event) float64 // 0 if not set
	logField(key string, e *Event) zap.Field
}

type param[T comparable] struct {
	field    func(*Event) **T
	tags     []string // of YAML, which the value must resolve to
	expected string   // the type, for an error of decode
	valid    func(T) bool
	use      string // the valid values, for an error of check
	number   func(T) float64
}

func boolean(field func(*Event) **bool) *param[bool] {
	return &param[bool]{
		field: field, tags: []string{"!!bool"}, expected: "true or false",
		valid: func(bool) bool { return true }, number: boolValue,
	}
}

func integer(field func(*Event) **int, least, most int) *param[int] {
	return &param[int]{
		field: field, tags: []string{"!!int"}, expected: "a whole number",
		valid: func(n int) bool { return n >= least && n <= most }, use: fmt.Sprintf("%d to %d", least, most),
		number: func(n int) float64 { return float64(n) },
	}
}

func choice(field func(*Event) **string, values ...string) *param[string] {
	one := "one of " + strings.Join(values, ", ")
	return &param[string]{
		field: field, tags: []string{"!!str"}, expected: one,
		valid: func(s string) bool { return slices.Contains(values, s) }, use: one,
	}
}

func (p *param[T]) isSet(e *Event) bool { return *p.field(e) != nil }

func (p *param[T]) decode(e *Event, key string, node *yaml.Node) error {
	v, err := decodeScalar[T](key, node, p.tags, p.expected)
	if err == nil {
		*p.field(e) = v
	}
	return err
}

// decodeScalar checks the tags because the decoder would convert values that they exclude: 3.7 to the number 3, "on" to true.
// Quotes have no meaning, as in the configuration.
func decodeScalar[T any](key string, node *yaml.Node, tags []string, expected string) (*T, error) {
	v := new(T)
	if plain := (&yaml.Node{Kind: node.Kind, Value: node.Value}); node.Kind == yaml.ScalarNode && slices.Contains(tags, plain.ShortTag()) {
		node = plain
	}
	if node.Kind != yaml.ScalarNode || !slices.Contains(tags, node.ShortTag()) || node.Decode(v) != nil {
		got := "a list or mapping"
		if node.Kind == yaml.ScalarNode {
			got = quote(node.Value)
		}
		return nil, keyErrorf(key, "%s is not %s", got, expected)
	}
	return v, nil
}

func (p *param[T]) check(e *Event, key string) error {
	v := **p.field(e)
	if p.valid(v) {
		return nil
	}
	if slices.Contains(p.tags, "!!str") {
		return keyErrorf(key, "%s is not known; use %s", quote(fmt.Sprint(v)), p.use)
	}
	return keyErrorf(key, "%v is out of range; use %s", v, p.use)
}

func (p *param[T]) merge(to, from *Event) {
	if v := *p.field(from); v != nil {
		*p.field(to) = v
	}
}

func (p *param[T]) value(e *Event) float64 {
	if v := *p.field(e); v != nil {
		return p.number(*v)
	}
	return 0
}

func (p *param[T]) logField(key string, e *Event) zap.Field { return zap.Any(key, **p.field(e)) }
