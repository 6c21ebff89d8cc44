package doctor

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"go.uber.org/zap"

	"github.com/gpu-node-agent/gpu-node-agent/agent/config"
	"github.com/gpu-node-agent/gpu-node-agent/agent/terminal"
	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/health/dcgm"
	"github.com/gpu-node-agent/gpu-node-agent/health/sim"
	"github.com/gpu-node-agent/gpu-node-agent/metrics/fields"
)

// FieldReport is the output of `fields`: the fields that metrics.fields may name, and which of them the source has.
type FieldReport struct {
	Source  string        `json:"source,omitempty"`  // embedded, standalone, sim
	Unknown string        `json:"unknown,omitempty"` // why it is unknown which fields the source has
	Fields  []fields.Info `json:"fields"`
}

// String returns the report as a table.
func (r FieldReport) String() string { return r.Table(terminal.Output{}) }

// Table returns the report as a table that fits the output.
func (r FieldReport) Table(out terminal.Output) string {
	p := terminal.Printer{Output: out}
	t := terminal.Table{MinLast: 30, Columns: []terminal.Column{
		{Name: "NAME"},
		{Name: "TYPE", Drop: 1},
		{Name: "UNIT", Drop: 2},
		{Name: "SET", Drop: 3},
		{Name: "SUPPORTED"},
		{Name: "SINCE DCGM", Drop: 4},
		{Name: "NAME IN DCGM-EXPORTER 4.9", Drop: 5},
		{Name: "HELP"},
	}}
	for _, f := range r.Fields {
		t.Rows = append(t.Rows, terminal.Cells("", f.Name, f.Type, f.Unit, f.Set, f.Supported, f.Since, f.Name49, f.Help))
	}
	if left := p.Table(t); left != "" {
		p.WriteByte('\n')
		p.Paragraph(0, terminal.Cell{Text: left + "; -o json shows all", Colour: terminal.Dim})
	}
	if r.Unknown != "" {
		p.WriteByte('\n')
		for line := range strings.SplitSeq("Unknown which fields are supported: "+r.Unknown, "\n") {
			p.Paragraph(2, terminal.Cell{Text: line})
		}
	}
	return p.String()
}

// Fields lists the fields and polls the configured source to find out which of them it has, without an effect on a running
// agent. A failure of the source is part of the report: the list is useful without it.
func Fields(ctx context.Context, loader config.Loader) FieldReport {
	c, err := loader.Load()
	if err != nil {
		return FieldReport{Unknown: "invalid configuration: " + err.Error(), Fields: fields.List(nil)}
	}
	r := FieldReport{Source: c.Source.Resolved()}
	has, err := callWithTimeout(ctx, dcgmTimeout, func(ctx context.Context) (map[health.Field]bool, error) { return fieldsOf(ctx, c.Source) })
	switch {
	case errors.Is(err, errTimeout):
		r.Unknown = fmt.Sprintf("source %s: no response within %v; run gpu-node-agent doctor", r.Source, dcgmTimeout)
	case err != nil:
		r.Unknown = err.Error()
	}
	r.Fields = fields.List(has)
	return r
}

// fieldsOf polls every field once.
func fieldsOf(ctx context.Context, c config.SourceConfig) (has map[health.Field]bool, err error) {
	reading, profiling, err := pollOnce(ctx, c, fields.IDs())
	if err != nil {
		return nil, err
	}
	reachable := func(s health.Sample) bool { return s.Presence == health.Present }
	if !slices.ContainsFunc(reading.Samples, reachable) {
		return nil, fmt.Errorf("source %s: no reachable GPU", c.Resolved())
	}
	has = fields.Supported(reading)
	for _, f := range profiling {
		has[f] = true
	}
	return has, nil
}

// pollOnce polls the source once. profiling are the profiling fields that DCGM has.
func pollOnce(ctx context.Context, c config.SourceConfig, ids []health.Field) (r *health.Reading, profiling []health.Field, err error) {
	if c.Resolved() == config.ModeSim {
		r, err = pollSim(ctx, c.Sim)
		return r, nil, err
	}
	return dcgm.MeasureOnce(ctx, dcgm.Config{Address: c.Address, Interval: c.Interval, Fields: ids, LogLevel: "NONE"}, zap.NewNop())
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
	defer s.Close() //nolint:errcheck // a simulation releases nothing
	return s.Poll(ctx)
}
