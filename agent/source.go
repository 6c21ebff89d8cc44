package agent

import (
	"context"
	"fmt"

	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/health/dcgm"
	"github.com/gpu-node-agent/gpu-node-agent/health/sim"
)

// sourceWanted is what a source is opened for: what it is, and what it must measure for the metrics.
type sourceWanted struct {
	SourceConfig
	fields []health.Field
}

// sourceOf returns what the configuration wants. A simulation measures what it can, whatever is asked for, so
// another list of fields does not begin it anew.
func sourceOf(c Config) sourceWanted {
	w := sourceWanted{SourceConfig: c.Source}
	if c.Source.Resolved() != ModeSim {
		w.fields = c.Metrics.Chosen.IDs()
	}
	return w
}

// runSource keeps the monitor's source as the configuration wants it.
func (a *Agent) runSource(ctx context.Context) error {
	for ctx.Err() == nil {
		w, same, cancel := health.While(ctx, &a.source, func(w *sourceWanted) *sourceWanted { return w })
		c := &w.SourceConfig
		open, run, err := newSource(*w, a.level, a.log)
		if err == nil {
			a.monitored.Store(&health.MonitorSource{
				Kind: sourceKind(*c), Inventory: inventoryOf(*c), Open: open, StallAfter: c.StallAfter,
			})
			err = run(same)
		}
		cancel()
		if err != nil {
			return err // not even tried again: the configuration was validated
		}
	}
	return nil
}

// sourceKind is what the source's devices belong to: those of a simulation are no others'.
func sourceKind(c SourceConfig) string {
	if c.Resolved() == ModeSim {
		return ModeSim
	}
	return "dcgm"
}

// inventoryOf names the machine whose devices a source shows: a reload that only changes how it is asked
// forgets none of them.
func inventoryOf(c SourceConfig) string {
	if c.Resolved() == ModeSim {
		return fmt.Sprintf("sim %s %d", c.Sim.Profile, c.Sim.Seed)
	}
	return "dcgm " + c.Address
}

// newSource returns how to open the configured source, and what must run beside it.
func newSource(c sourceWanted, level zap.AtomicLevel, log *zap.Logger) (health.Opener, func(context.Context) error, error) {
	if c.Resolved() == ModeSim {
		s, err := sim.New(c.Sim, log.Named("sim"))
		if err != nil {
			return nil, nil, err
		}
		return s.Open, s.Run, nil
	}
	log = log.Named("dcgm")
	open := func(ctx context.Context) (health.Session, error) {
		return dcgm.Open(ctx, dcgm.Config{
			Address: c.Address, Interval: c.Interval, Fields: c.fields,
			HealthSystems: c.HealthSystems, LogLevel: dcgmLogLevel(level.Level()),
		}, log)
	}
	run := func(ctx context.Context) error {
		// go-dcgm says through the standard logger what it does.
		restore, err := zap.RedirectStdLogAt(log, zapcore.DebugLevel)
		if err != nil {
			return err
		}
		defer restore()
		<-ctx.Done()
		return nil
	}
	return open, run, nil
}

// dcgmLogLevel is what an engine in this process writes to standard output, which keeps our own log on standard
// error clean. Short of debugging that is next to nothing: DCGM has written an ERROR for every read of a field
// without a sample, and what fails is told to us as an error too.
func dcgmLogLevel(l zapcore.Level) string {
	if l <= zapcore.DebugLevel {
		return "DEBUG"
	}
	return "FATAL"
}
