// Package config loads and validates the configuration of the agent.
package config

import (
	"crypto/sha256"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"go.yaml.in/yaml/v3"

	"github.com/gpu-node-agent/gpu-node-agent/agent/node"
	"github.com/gpu-node-agent/gpu-node-agent/agent/web"
	"github.com/gpu-node-agent/gpu-node-agent/health/dcgm"
	"github.com/gpu-node-agent/gpu-node-agent/health/judge"
	"github.com/gpu-node-agent/gpu-node-agent/health/sim"
	"github.com/gpu-node-agent/gpu-node-agent/metrics"
	"github.com/gpu-node-agent/gpu-node-agent/plugin"
)

// Config is the configuration, as in config.yaml.
type Config struct {
	Log     LogConfig      `yaml:"log"`
	Source  SourceConfig   `yaml:"source"`
	Health  judge.Config   `yaml:"health"`
	Plugin  plugin.Config  `yaml:"plugin"`
	Metrics metrics.Config `yaml:"metrics"`
	Node    node.Config    `yaml:"node"`

	// Notes warn about valid settings that have no effect, or one that is easily overlooked. Each starts with its file, key or
	// variable.
	Notes []string `yaml:"-"`

	Web *web.Config `yaml:"-"` // the content of metrics.webConfigFile

	Sum [sha256.Size]byte `yaml:"-"` // of the content of all files that it was loaded from

	// StateDir is the state directory, "" to keep nothing. It is a flag and no key: a file that cannot be read must not move what it needs.
	StateDir string `yaml:"-"`

	LastGood []byte `yaml:"-"` // these files, as LoadOrLastGood reads them; empty without a configuration file
}

// LogConfig is the `log` section.
type LogConfig struct {
	Level  string `yaml:"level"`  // debug, info, warn, error
	Format string `yaml:"format"` // LogAuto, LogJSON, LogConsole
}

// Formats of the log, the values of log.format.
const (
	LogAuto    = "auto" // LogConsole if standard error is a terminal, else LogJSON
	LogJSON    = "json"
	LogConsole = "console"
)

// DefaultConfig returns the defaults.
func DefaultConfig() Config {
	return Config{
		Log: LogConfig{Level: "info", Format: LogAuto},
		Source: SourceConfig{
			Mode: ModeAuto, Interval: 10 * time.Second, StallAfter: 10 * time.Second,
			HealthSystems: []string{dcgm.AllHealthSystems}, Events: EventsAuto, KernelLogPath: "/dev/kmsg", Sim: sim.DefaultConfig(),
		},
		Health:  judge.DefaultConfig(),
		Plugin:  plugin.DefaultConfig(),
		Metrics: metrics.DefaultConfig(),
		Node:    node.DefaultConfig(),
	}
}

// Validate returns all errors. Each starts with its key.
func (c Config) Validate() error {
	return errors.Join(
		withPrefix("log.", c.Log.validate()),
		withPrefix("source.", c.Source.validate()),
		withPrefix("health.", c.Health.Validate()),
		withPrefix("plugin.", c.Plugin.Validate()),
		withPrefix("metrics.", errors.Join(c.Metrics.Validate(), c.validateFields())),
		withPrefix("node.", c.Node.Validate()),
		c.validateIdle(),
	)
}

// validateIdle checks that the evidence of node.idle is measured. Without it, no pod would ever be reported.
func (c Config) validateIdle() error {
	if c.Node.Idle.After > 0 && c.Node.Idle.Evidence == node.EvidenceNoProcess && !c.Metrics.Processes.Enabled {
		return errors.New("node.idle.evidence: noProcess requires metrics.processes.enabled, which is false; enable it, or set noWork")
	}
	return nil
}

// validateFields returns the typos in metrics.fields.
func (c Config) validateFields() error {
	var errs []error
	for i, f := range c.Metrics.Fields {
		errs = append(errs, withPrefix(fmt.Sprintf("fields[%d].", i), f.Validate(suggest)))
	}
	return errors.Join(errs...)
}

func (c LogConfig) validate() error {
	var errs []error
	if levels := []string{"debug", "info", "warn", "error"}; !slices.Contains(levels, c.Level) {
		errs = append(errs, fmt.Errorf("level: expected one of %s, got %q", strings.Join(levels, ", "), c.Level))
	}
	if formats := []string{LogAuto, LogJSON, LogConsole}; !slices.Contains(formats, c.Format) {
		errs = append(errs, fmt.Errorf("format: expected one of %s, got %q", strings.Join(formats, ", "), c.Format))
	}
	return errors.Join(errs...)
}

// String returns the configuration as YAML.
func (c Config) String() string {
	text, err := yaml.Marshal(c)
	if err != nil {
		return err.Error() // unreachable: a struct of plain values always marshals
	}
	return string(text)
}
