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
	"github.com/gpu-node-agent/gpu-node-agent/health/driver"
	"github.com/gpu-node-agent/gpu-node-agent/health/kernellog"
	"github.com/gpu-node-agent/gpu-node-agent/health/monitor"
	"github.com/gpu-node-agent/gpu-node-agent/health/nvml"
	"github.com/gpu-node-agent/gpu-node-agent/health/sim"
	"github.com/gpu-node-agent/gpu-node-agent/metrics/processes"
)

// sourceConfig is the source section and the fields that the source must measure for the metrics.
type sourceConfig struct {
	config.SourceConfig
	fields []health.Field
}

// sourceConfigOf returns the source of a configuration. A simulation measures the same fields in any case, so a change of
// the fields does not restart it.
func sourceConfigOf(c config.Config) sourceConfig {
	s := sourceConfig{SourceConfig: c.Source}
	if c.Source.Resolved() != config.ModeSim {
		s.fields = c.Metrics.Chosen.IDs()
	}
	return s
}

// runSource gives the monitor the configured source until ctx ends.
func (a *Agent) runSource(ctx context.Context) error {
	for ctx.Err() == nil {
		c, same, cancel := health.WatchPart(ctx, &a.sourceConfig, func(c *sourceConfig) *sourceConfig { return c })
		source, run, err := newSource(*c, &a.snapshots, a.processes.Measure, a.gpusOnBus, a.level, a.log)
		if err == nil {
			open := openMemoryLimits(c.SourceConfig)
			source.Beside = append(source.Beside, a.mps.Run, func(ctx context.Context) { a.memoryLimits.Run(ctx, open) })
			source.Release = a.mps.Stop
			if !source.Simulated {
				source.Beside = append(source.Beside, a.plugin.GenerateCDI, a.dra.GenerateCDI)
			}
			a.sources.Store(&source)
			err = run(same)
		}
		cancel()
		if err != nil {
			return err // without a retry: the configuration is valid
		}
	}
	return nil
}

// sourceID identifies the source's inventory. A reload that only changes how the source measures keeps the findings.
func sourceID(c config.SourceConfig) health.SourceID {
	if c.Resolved() == config.ModeSim {
		return health.SourceID{Kind: config.ModeSim, Inventory: fmt.Sprintf("sim %s %d", c.Sim.Profile, c.Sim.Seed), Simulated: true}
	}
	return health.SourceID{Kind: "dcgm", Inventory: "dcgm " + c.Address}
}

// isLocal reports whether the source's GPUs are on this host.
func isLocal(c config.SourceConfig) bool {
	host, _, _ := net.SplitHostPort(c.Address)
	return c.Address == "" || strings.HasPrefix(c.Address, "unix://") || host == "localhost" || net.ParseIP(host).IsLoopback()
}

// newSource returns the configured source, and a function that must run while the source is in use. snapshots are the source's; measure
// measures the processes of the devices beside it; onBus lists the GPUs on this host's PCI bus.
func newSource(
	c sourceConfig, snapshots *health.Latest[health.Snapshot], measure func(context.Context, processes.Source), onBus func() []string,
	level zap.AtomicLevel, log *zap.Logger,
) (source monitor.Source, run func(context.Context) error, err error) {
	measureWith := func(open processes.Open, allProcesses bool) []func(context.Context) {
		return []func(context.Context){func(ctx context.Context) {
			measure(ctx, processes.Source{Open: open, Interval: c.Interval, Limit: c.StallAfter, AllProcesses: allProcesses})
		}}
	}
	source = monitor.Source{SourceID: sourceID(c.SourceConfig), StallAfter: c.StallAfter}
	if c.Resolved() == config.ModeSim {
		s, err := sim.New(c.Sim, log.Named("sim"))
		if err != nil {
			return monitor.Source{}, nil, err
		}
		source.Open, source.OnBus = s.Open, s.OnBus
		source.Events, source.RecoveryAction = eventSources(c.SourceConfig, s.Events, log), s.RecoveryAction
		source.Beside = measureWith(func() (driver.ProcessLister, func(), error) { return s.ListProcesses, func() {}, nil }, true)
		return source, s.Run, nil
	}
	var listed func() []string
	if c.EventsIfListed() {
		listed = func() []string { return listedGPUs(snapshots.Load()) }
	}
	source.Events = eventSources(c.SourceConfig, nvml.Events(log.Named("nvml"), listed), log)
	if c.EventsReason() == "" {
		source.RecoveryAction = nvml.RecoveryAction
	}
	open := nvml.OpenProcesses
	if !isLocal(c.SourceConfig) {
		open = func() (driver.ProcessLister, func(), error) {
			return nil, nil, fmt.Errorf("source.address: the GPUs of %s are on another host; processes are listed on this one only", c.Address)
		}
	}
	source.Beside = measureWith(open, processes.InHostPIDNamespace())
	log = log.Named("dcgm")
	opener := func(attach bool) health.Opener {
		return func(ctx context.Context) (health.Session, error) {
			return dcgm.Open(ctx, dcgm.Config{
				Address: c.Address, Interval: c.Interval, Fields: c.fields,
				HealthSystems: c.HealthSystems, LogLevel: dcgmLogLevel(level.Level()), Attach: attach,
			}, log)
		}
	}
	source.Open = opener(false)
	if c.Address != "" { // only a host engine has to be asked to attach the driver
		source.Attach = opener(true)
	}
	if isLocal(c.SourceConfig) {
		source.DriverLoad, source.OnBus = monitor.DriverLoad, onBus
	}
	return source, func(ctx context.Context) error { <-ctx.Done(); return nil }, nil
}

// eventSources returns the event sources, also the ones that are off; events runs NVML's.
func eventSources(c config.SourceConfig, events func(context.Context, health.EventReceiver), log *zap.Logger) []health.EventSource {
	all := []health.EventSource{{Witness: health.WitnessNVML, Off: c.EventsReason()}, {Witness: health.WitnessKernelLog}}
	if all[0].Off == "" {
		all[0].Run = events
	}
	if c.KernelLog {
		all[1].Run = kernellog.Events(c.KernelLogPath, log.Named("kernel log"))
	} else {
		all[1].Off = "source.kernelLog is false"
	}
	return all
}

// listedGPUs returns the UUIDs of the GPUs that the source has listed and that its driver reaches, none before the first reading.
func listedGPUs(s *health.Snapshot) (uuids []string) {
	if s == nil || s.Source.Polls == 0 {
		return nil
	}
	for i := range s.Devices {
		if d := &s.Devices[i]; d.Device.Kind == health.KindGPU && d.Sample.Presence == health.Present {
			uuids = append(uuids, string(d.Device.ID))
		}
	}
	return uuids
}

// dcgmLogLevel returns what an embedded engine logs to standard output. Above debug level that is next to nothing, because
// DCGM logs an ERROR for every read of a field without a sample, and returns its failures as errors anyway.
func dcgmLogLevel(l zapcore.Level) string {
	if l <= zapcore.DebugLevel {
		return "DEBUG"
	}
	return "FATAL"
}
