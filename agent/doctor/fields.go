package doctor

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"

	"go.uber.org/zap"

	"github.com/gpu-node-agent/gpu-node-agent/agent/config"
	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/health/dcgm"
	"github.com/gpu-node-agent/gpu-node-agent/health/sim"
	"github.com/gpu-node-agent/gpu-node-agent/metrics/fields"
)

// FieldReport is what `fields` prints: the fields that metrics.fields may name, and which of them the source has.
type FieldReport struct {
	Source  string        `json:"source,omitempty"`  // what was asked: embedded, standalone, sim
	Unknown string        `json:"unknown,omitempty"` // why it is not known which are supported, in words
	Fields  []fields.Info `json:"fields"`
}

// JSON returns the report as one document.
func (r FieldReport) JSON() (string, error) {
	text, err := json.MarshalIndent(r, "", "  ")
	return string(text) + "\n", err
}

// String returns the report as a table.
func (r FieldReport) String() string {
	text := fields.FormatTable(r.Fields)
	if r.Unknown != "" {
		text += "\nWhich are supported here is not known: " + r.Unknown + "\n"
	}
	return text
}

// Fields lists the known fields, and asks the source that the configuration names which of them it has: as doctor
// does, beside a running agent and without taking anything from it. Whatever is wrong with the source is no error:
// the list is of use without it.
func Fields(ctx context.Context, loader config.Loader) FieldReport {
	c, err := loader.Load()
	if err != nil {
		return FieldReport{Unknown: "the configuration cannot be used: " + err.Error(), Fields: fields.List(nil)}
	}
	r := FieldReport{Source: c.Source.Resolved()}
	type answer struct {
		has map[health.Field]bool
		err error
	}
	a, ok := bounded(ctx, dcgmLimit, func(ctx context.Context) answer {
		has, err := fieldsOf(ctx, c.Source)
		return answer{has, err}
	})
	switch {
	case !ok:
		r.Unknown = fmt.Sprintf("the source %s does not answer within %v; gpu-node-agent doctor looks for the reason", r.Source, dcgmLimit)
	case a.err != nil:
		r.Unknown = a.err.Error()
	}
	r.Fields = fields.List(a.has)
	return r
}

// fieldsOf measures everything once.
func fieldsOf(ctx context.Context, c config.SourceConfig) (has map[health.Field]bool, err error) {
	var reading *health.Reading
	var profiling []health.Field
	if c.Resolved() == config.ModeSim {
		reading, err = pollSim(ctx, c.Sim)
	} else {
		dc := dcgm.Config{Address: c.Address, Interval: c.Interval, Fields: fields.IDs(), LogLevel: "NONE"}
		reading, profiling, err = dcgm.MeasureOnce(ctx, dc, zap.NewNop())
	}
	if err != nil {
		return nil, err
	}
	reached := func(s health.Sample) bool { return s.Presence == health.Present }
	if !slices.ContainsFunc(reading.Samples, reached) {
		return nil, fmt.Errorf("the source %s has no GPU that can be reached", c.Resolved())
	}
	has = fields.Supported(reading)
	for _, f := range profiling {
		has[f] = true
	}
	return has, nil
}

func pollSim(ctx context.Context, c sim.Config) (*health.Reading, error) {
	source, err := sim.New(c, zap.NewNop())
	if err != nil {
		return nil, err
	}
	s, err := source.Open(ctx)
	if err != nil {
		return nil, err
	}
	defer s.Close() //nolint:errcheck // a simulation has nothing to lose
	return s.Poll(ctx)
}
