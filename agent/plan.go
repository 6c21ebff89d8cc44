package agent

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"go.uber.org/zap"

	"github.com/gpu-node-agent/gpu-node-agent/agent/config"
	"github.com/gpu-node-agent/gpu-node-agent/agent/node"
	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/health/dcgm"
	"github.com/gpu-node-agent/gpu-node-agent/health/monitor"
	"github.com/gpu-node-agent/gpu-node-agent/health/nvml"
	"github.com/gpu-node-agent/gpu-node-agent/health/sim"
	"github.com/gpu-node-agent/gpu-node-agent/health/statefile"
	"github.com/gpu-node-agent/gpu-node-agent/plugin"
)

// planTimeout limits PlanLabels. Without persistence mode, DCGM takes some seconds to wake each GPU.
const planTimeout = 30 * time.Second

// PlanLabels returns the labels that an agent with this configuration would write. They follow from what the source measures now. If the
// source does not answer, they are the ones that an agent has saved. PlanLabels writes nothing and has no effect on a running agent.
func PlanLabels(ctx context.Context, c config.Config) (node.Labels, error) {
	ctx, cancel := context.WithTimeoutCause(ctx, planTimeout, fmt.Errorf("source %s: no response within %v; run gpu-node-agent doctor",
		c.Source.Resolved(), planTimeout))
	defer cancel()
	saved, warnings := readState(c)
	l, err := planLabels(ctx, c, saved)
	if err != nil && l.Labels == nil && c.Source.Resolved() == config.ModeSim {
		// A simulated source that fails from the beginning has GPUs nevertheless.
		c.Source.Sim.Scenario = slices.DeleteFunc(slices.Clone(c.Source.Sim.Scenario), func(e sim.Event) bool { return e.Source != nil })
		l, _ = planLabels(ctx, c, saved)
	}
	switch {
	case err != nil && l.Labels == nil:
		return l, fmt.Errorf("labels are unknown: %w", err)
	case err != nil:
		l.Warnings = []string{fmt.Sprintf("%v; the labels are those from before", err)}
	}
	l.Warnings = append(warnings, l.Warnings...)
	return l, nil
}

// planLabels returns the saved labels with an error, if there are any.
func planLabels(ctx context.Context, c config.Config, saved statefile.Contents) (node.Labels, error) {
	a := planningAgent(c)
	a.plugin = plugin.New(&a.pluginConfig, &a.snapshots, a.log)
	a.node = a.newNode(nvml.Properties(a.log), a.log)
	err := restoreNode(saved.Node, statefile.BootID(), a.node.Restore)
	pollErr := a.pollOnce(ctx, c, saved)
	l, labelsErr := a.node.LabelsOnce(ctx)
	if err != nil {
		l.Warnings = append(l.Warnings, "--state-dir: "+err.Error())
	}
	return l, cmp.Or(pollErr, labelsErr)
}

// planningAgent returns an agent that does not run.
func planningAgent(c config.Config) *Agent {
	a := &Agent{log: zap.NewNop(), level: zap.NewAtomicLevel()}
	a.apply(c)
	return a
}

// readState returns the saved state of the agent.
func readState(c config.Config) (saved statefile.Contents, warnings []string) {
	saved, err := statefile.Read(c.StateDir)
	if err != nil {
		warnings = append(warnings, "--state-dir: "+err.Error())
	}
	return saved, warnings
}

// pollOnce stores a snapshot of the saved state and of what the source measures now.
func (a *Agent) pollOnce(ctx context.Context, c config.Config, saved statefile.Contents) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	a.monitor = monitor.New(&a.healthConfig, &a.sources, &a.snapshots, a.log)
	restored := saved.Restore(statefile.BootID(), sourceID(c.Source), time.Now())
	if restored.Detachment.InForce() {
		return errors.New("the driver is detached; run gpu-node-agent attach")
	}
	a.monitor.SetIndexEntries(&a.indexEntries)
	a.monitor.Restore(restored)
	failed := make(chan error, 1)
	a.sources.Store(&monitor.Source{
		SourceID: sourceID(c.Source), StallAfter: planTimeout,
		Open: func(ctx context.Context) (health.Session, error) {
			s, err := openOnce(ctx, c.Source)
			if err != nil {
				select {
				case failed <- err:
				default:
				}
			}
			return s, err
		},
	})
	go func() { _ = a.monitor.Run(ctx) }() // abandoned if the driver hangs
	var confirmed <-chan time.Time
	for {
		snap, changed := a.snapshots.Watch()
		switch confirm := c.Health.Confirm; {
		case !snap.Polled():
		case snap.Source.Polls >= uint64(confirm) || !slices.ContainsFunc(snap.Devices,
			func(d health.DeviceState) bool { return len(d.Sample.Incidents) > 0 }): //nolint:gosec // positive
			return nil
		case confirmed == nil: // a check that fails counts when it has failed health.confirm times
			confirmed = time.After(min(time.Duration(confirm)*c.Health.Interval, planTimeout/2))
		}
		select {
		case <-changed:
		case <-confirmed:
			return nil
		case err := <-failed:
			return fmt.Errorf("source %s: %w", c.Source.Resolved(), err)
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

// openOnce opens a session for pollOnce. DCGM's session has measured the devices once.
func openOnce(ctx context.Context, c config.SourceConfig) (health.Session, error) {
	if c.Resolved() != config.ModeSim {
		r, _, err := dcgm.MeasureOnce(ctx, dcgm.Config{Address: c.Address, Interval: c.Interval, LogLevel: "NONE"}, zap.NewNop())
		return reading{r}, err
	}
	source, err := sim.New(c.Sim, zap.NewNop())
	if err != nil {
		return nil, err
	}
	return source.Open(ctx)
}

// reading is a session that has measured the devices.
type reading struct{ r *health.Reading }

func (s reading) Poll(context.Context) (*health.Reading, error) { return s.r, nil }
func (s reading) Wake() <-chan struct{}                         { return nil }
func (s reading) Close() error                                  { return nil }
