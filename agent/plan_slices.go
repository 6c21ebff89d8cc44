package agent

import (
	"context"
	"errors"
	"fmt"
	"time"

	"go.uber.org/zap"

	"github.com/gpu-node-agent/gpu-node-agent/agent/config"
	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/health/dcgm"
	"github.com/gpu-node-agent/gpu-node-agent/health/monitor"
	"github.com/gpu-node-agent/gpu-node-agent/health/nvml"
	"github.com/gpu-node-agent/gpu-node-agent/health/sim"
	"github.com/gpu-node-agent/gpu-node-agent/health/statefile"
	"github.com/gpu-node-agent/gpu-node-agent/plugin"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/dra"
)

// planTimeout limits PlanSlices. Without persistence mode, DCGM takes some seconds to wake each GPU.
const planTimeout = 30 * time.Second

// PlanSlices returns the ResourceSlices that an agent with this configuration would publish. It polls the source once and judges the
// reading with the saved findings. It writes nothing and has no effect on a running agent.
func PlanSlices(ctx context.Context, c config.Config) (dra.PublishedSlices, error) {
	ctx, cancel := context.WithTimeoutCause(ctx, planTimeout, fmt.Errorf("source %s: no response within %v; run gpu-node-agent doctor", c.Source.Resolved(), planTimeout))
	defer cancel()
	a := &Agent{log: zap.NewNop(), level: zap.NewAtomicLevel()}
	a.apply(c)
	warnings, err := a.pollOnce(ctx, c)
	if err != nil {
		return dra.PublishedSlices{}, err
	}
	d := dra.New(dra.Options{
		Config: &a.pluginConfig, Snapshots: &a.snapshots, Node: nodeName(), BootID: statefile.BootID(), Released: new(health.Latest[plugin.Handover]),
		Properties: propertiesOf(&a.sourceConfig, &a.snapshots, nvml.Properties(a.log)), Log: a.log,
	})
	s, err := d.Slices(ctx)
	s.NotPublished = "no agent runs; this is what one would publish"
	s.Warnings = append(warnings, s.Warnings...)
	return s, err
}

// pollOnce stores a snapshot of the saved state and one reading.
func (a *Agent) pollOnce(ctx context.Context, c config.Config) (warnings []string, err error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	a.monitor = monitor.New(&a.healthConfig, &a.sources, &a.snapshots, a.log)
	saved, err := statefile.Read(c.Health.StateFile)
	if err != nil {
		warnings = append(warnings, "health.stateFile: "+err.Error())
	}
	restored := saved.Restore(statefile.BootID(), sourceID(c.Source), time.Now())
	if restored.Detachment.InForce() {
		return nil, errors.New("the driver is detached; run gpu-node-agent attach")
	}
	a.monitor.Restore(restored)
	failed := make(chan error, 1)
	a.sources.Store(&monitor.Source{
		SourceID: sourceID(c.Source), StallAfter: planTimeout,
		Open: func(ctx context.Context) (health.Session, error) {
			r, err := readOnce(ctx, c.Source)
			if err != nil {
				select {
				case failed <- err:
				default:
				}
				return nil, err
			}
			return reading{r}, nil
		},
	})
	go func() { _ = a.monitor.Run(ctx) }() // abandoned if the driver hangs
	for {
		snap, changed := a.snapshots.Watch()
		if snap.Polled() {
			return warnings, nil
		}
		select {
		case <-changed:
		case err := <-failed:
			return nil, fmt.Errorf("source %s: %w", c.Source.Resolved(), err)
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		}
	}
}

// readOnce measures the devices once.
func readOnce(ctx context.Context, c config.SourceConfig) (*health.Reading, error) {
	if c.Resolved() != config.ModeSim {
		r, _, err := dcgm.MeasureOnce(ctx, dcgm.Config{Address: c.Address, Interval: c.Interval, LogLevel: "NONE"}, zap.NewNop())
		return r, err
	}
	source, err := sim.New(c.Sim, zap.NewNop())
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

// reading is a session that has measured the devices.
type reading struct{ r *health.Reading }

func (s reading) Poll(context.Context) (*health.Reading, error) { return s.r, nil }
func (s reading) Wake() <-chan struct{}                         { return nil }
func (s reading) Close() error                                  { return nil }
