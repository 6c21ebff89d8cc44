package agent

import (
	"context"
	"fmt"
	"net"
	"strings"

	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"

	"github.com/gpu-node-agent/gpu-node-agent/agent/config"
	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/health/dcgm"
	"github.com/gpu-node-agent/gpu-node-agent/health/monitor"
	"github.com/gpu-node-agent/gpu-node-agent/health/sim"
)

// sourceWanted is what a source is opened for: what it is, and what it must measure for the metrics.
type sourceWanted struct {
	config.SourceConfig
	fields []health.Field
}

// sourceOf returns what the configuration wants. A simulation measures what it can, whatever is asked for, so
// another list of fields does not begin it anew.
func sourceOf(c config.Config) sourceWanted {
	w := sourceWanted{SourceConfig: c.Source}
	if c.Source.Resolved() != config.ModeSim {
		w.fields = c.Metrics.Chosen.IDs()
	}
	return w
}

// runSource keeps the monitor's source as the configuration wants it.
func (a *Agent) runSource(ctx context.Context) error {
	for ctx.Err() == nil {
		w, same, cancel := health.While(ctx, &a.source, func(w *sourceWanted) *sourceWanted { return w })
		c := &w.SourceConfig
		open, attach, run, err := newSource(*w, a.level, a.log)
		if err == nil {
			src := monitorSourceOf(*c)
			src.Open, src.Attach = open, attach
			a.monitored.Store(&src)
			err = run(same)
		}
		cancel()
		if err != nil {
			return err // not even tried again: the configuration was validated
		}
	}
	return nil
}

// monitorSourceOf returns what a source shows, without what opens it.
func monitorSourceOf(c config.SourceConfig) monitor.Source {
	return monitor.Source{
		SourceID:   health.SourceID{Kind: sourceKind(c), Inventory: inventoryOf(c), Simulated: c.Resolved() == config.ModeSim},
		StallAfter: c.StallAfter, DriverLoad: driverLoadOf(c),
	}
}

// sourceKind is what the source's devices belong to: those of a simulation are no others'.
func sourceKind(c config.SourceConfig) string {
	if c.Resolved() == config.ModeSim {
		return config.ModeSim
	}
	return "dcgm"
}

// driverLoadOf returns what identifies the load of the driver. A simulation has no driver, and that of another machine's engine
// is not to be seen here.
func driverLoadOf(c config.SourceConfig) func() string {
	host, _, _ := net.SplitHostPort(c.Address)
	ip := net.ParseIP(host)
	here := c.Address == "" || strings.HasPrefix(c.Address, "unix://") || host == "localhost" || ip.IsLoopback()
	if c.Resolved() == config.ModeSim || !here {
		return nil
	}
	return monitor.DriverLoad
}

// inventoryOf names the machine whose devices a source shows: a reload that only changes how it is asked
// forgets none of them.
func inventoryOf(c config.SourceConfig) string {
	if c.Resolved() == config.ModeSim {
		return fmt.Sprintf("sim %s %d", c.Sim.Profile, c.Sim.Seed)
	}
	return "dcgm " + c.Address
}

// newSource returns how to open the configured source and how to have a host engine take the driver back at that, nil
// if there is none, and what must run beside it.
func newSource(c sourceWanted, level zap.AtomicLevel, log *zap.Logger) (open, attach health.Opener, run func(context.Context) error, err error) {
	if c.Resolved() == config.ModeSim {
		s, err := sim.New(c.Sim, log.Named("sim"))
		if err != nil {
			return nil, nil, nil, err
		}
		return s.Open, nil, s.Run, nil
	}
	log = log.Named("dcgm")
	opener := func(attach bool) health.Opener {
		return func(ctx context.Context) (health.Session, error) {
			return dcgm.Open(ctx, dcgm.Config{
				Address: c.Address, Interval: c.Interval, Fields: c.fields,
				HealthSystems: c.HealthSystems, LogLevel: dcgmLogLevel(level.Level()), Attach: attach,
			}, log)
		}
	}
	open = opener(false)
	if c.Address != "" {
		attach = opener(true)
	}
	run = func(ctx context.Context) error {
		<-ctx.Done()
		return nil
	}
	return open, attach, run, nil
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
