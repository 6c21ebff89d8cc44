// Package config loads and validates the configuration of the agent.
package config

import (
	"crypto/sha256"
	"errors"
	"fmt"
	"os"
	"reflect"
	"slices"
	"strings"
	"time"

	"github.com/spf13/pflag"
	"github.com/spf13/viper"
	"go.uber.org/zap/zapcore"
	"go.yaml.in/yaml/v3"

	"github.com/gpu-node-agent/gpu-node-agent/agent/web"
	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/health/dcgm"
	"github.com/gpu-node-agent/gpu-node-agent/health/sim"
	"github.com/gpu-node-agent/gpu-node-agent/metrics"
	"github.com/gpu-node-agent/gpu-node-agent/plugin"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/nvidiaconfig"
)

// Config is config.yaml.
type Config struct {
	Log     LogConfig      `yaml:"log"`
	Source  SourceConfig   `yaml:"source"`
	Health  health.Config  `yaml:"health"`
	Plugin  plugin.Config  `yaml:"plugin"`
	Metrics metrics.Config `yaml:"metrics"`

	// Notes is what was understood and is still worth saying, each with its file or key: what has no effect here.
	Notes []string `yaml:"-"`

	Web *web.Config `yaml:"-"` // the content of metrics.webConfigFile

	Sum [sha256.Size]byte `yaml:"-"` // of the content of all files that it was loaded from
}

// LogConfig is the `log` section.
type LogConfig struct {
	Level  string `yaml:"level"`  // debug, info, warn, error
	Format string `yaml:"format"` // json, console
}

// DefaultConfig returns the defaults.
func DefaultConfig() Config {
	return Config{
		Log: LogConfig{Level: "info", Format: "json"},
		Source: SourceConfig{
			Mode: ModeAuto, Interval: 10 * time.Second, StallAfter: 10 * time.Second,
			HealthSystems: []string{dcgm.AllHealthSystems}, Sim: sim.DefaultConfig(),
		},
		Health:  health.DefaultConfig(),
		Plugin:  plugin.DefaultConfig(),
		Metrics: metrics.DefaultConfig(),
	}
}

// Validate returns every fault, each with its whole key.
func (c Config) Validate() error {
	return errors.Join(
		within("log", c.Log.validate()),
		within("source", c.Source.validate()),
		within("health", c.Health.Validate()),
		within("plugin", c.Plugin.Validate()),
		within("metrics", c.Metrics.Validate()),
	)
}

func (c LogConfig) validate() error {
	var errs []error
	if _, err := zapcore.ParseLevel(c.Level); err != nil || !slices.Contains(logLevels(), c.Level) {
		errs = append(errs, fmt.Errorf("level: %q is not known; use one of %s", c.Level, strings.Join(logLevels(), ", ")))
	}
	if c.Format != "json" && c.Format != "console" {
		errs = append(errs, fmt.Errorf("format: %q is not known; use json or console", c.Format))
	}
	return errors.Join(errs...)
}

func logLevels() []string { return []string{"debug", "info", "warn", "error"} }

// EnvPrefix begins the environment variables: GPU_NODE_AGENT_SOURCE_MODE is source.mode.
const EnvPrefix = "GPU_NODE_AGENT"

// Loader finds and reads the configuration: defaults < file < environment < flags.
type Loader struct {
	File  string         // "": the first of defaultFiles that is there, else none
	Flags *pflag.FlagSet // as AddFlags made them; nil for none

	// Running is set for a reload. An empty file is then an error: a program that empties the file before it writes it would
	// otherwise switch the node to the defaults.
	Running bool
	// FieldsShown is set when the running agent shows fields of DCGM. A list without any field is then an error.
	FieldsShown bool
}

func defaultFiles() []string { return []string{"config.yaml", "/etc/gpu-node-agent/config.yaml"} }

// AddFlags adds a flag for every key, named as the key is: --source.mode. They are too many to show in each
// help.
func AddFlags(flags *pflag.FlagSet) {
	var c Config
	for _, leaf := range leavesOf(reflect.ValueOf(&c).Elem(), "") {
		flags.String(leaf.key, "", "overrides "+leaf.key)
		flag := flags.Lookup(leaf.key)
		flag.Hidden = true
		if leaf.value.Kind() == reflect.Bool {
			flag.NoOptDefVal = "true" // or it would take the next flag for its value
		}
	}
}

// Path returns the file that Load reads, "" if there is none.
func (l Loader) Path() string {
	if l.File != "" {
		return l.File
	}
	for _, f := range defaultFiles() {
		if _, err := os.Stat(f); err == nil {
			return f
		}
	}
	return ""
}

// Load returns the configuration, or every fault in it, each with its key.
func (l Loader) Load() (Config, error) {
	text, tree, err := l.read()
	if err != nil {
		return Config{}, err
	}
	c := DefaultConfig()
	leaves := leavesOf(reflect.ValueOf(&c).Elem(), "")
	known := make([]string, len(leaves))
	for i, leaf := range leaves {
		known[i] = leaf.key
	}
	unknown := prune(tree, reflect.TypeFor[Config](), "", known)

	// Resource names and MIG profiles hold dots, so the keys are not split at them.
	const delim = "::"
	v := viper.NewWithOptions(viper.KeyDelimiter(delim))
	if err := v.MergeConfigMap(tree); err != nil {
		return Config{}, err
	}
	var errs []error
	from := make(origins)
	for _, leaf := range leaves {
		vkey := strings.ReplaceAll(leaf.key, ".", delim)
		if err := v.BindEnv(append([]string{vkey}, envNames(leaf.key)...)...); err != nil {
			return Config{}, err
		}
		if l.Flags != nil && l.Flags.Changed(leaf.key) {
			v.Set(vkey, l.Flags.Lookup(leaf.key).Value.String())
		}
		if v.IsSet(vkey) {
			errs = append(errs, leaf.set(v.Get(vkey))...)
			from[leaf.key] = origin{l.origin(leaf.key), fmt.Sprint(leaf.value)}
		}
	}
	c.Source.Address = plainAddress(c.Source.Address)
	c.Sum = sumOf(text, c.Plugin, c.Metrics) // before they are read: what changes from now on is another sum at the next look
	if file := c.Plugin.NVIDIAConfig; file != "" {
		imported, notes, err := importNVIDIA(c.Plugin)
		if err != nil {
			errs = append(errs, prefixed("plugin.nvidiaConfig: "+file+": ", err))
		}
		c.Plugin = imported
		for _, n := range notes {
			c.Notes = append(c.Notes, file+": "+n)
		}
	}
	chosen, err := c.Metrics.Resolve()
	if err == nil && l.FieldsShown && c.Metrics.FieldsFile != "" && len(chosen.Chosen.Fields) == 0 {
		// At the start, and as long as nothing is shown, the rest is worth more. Later it would take away every series.
		err = fmt.Errorf("fieldsFile: %s: has no field that can be shown; for none write fields: []", c.Metrics.FieldsFile)
	}
	errs = append(errs, within("metrics", err))
	c.Metrics, c.Notes = chosen, append(c.Notes, chosen.Notes()...)
	if c.Web, err = web.LoadConfig(c.Metrics.WebConfigFile); err != nil {
		errs = append(errs, within("metrics", err))
	}
	xid, notes := c.Health.XID.WithNVIDIAEnv(os.Getenv(health.EnvDisableHealthChecks), os.Getenv(health.EnvEnableHealthChecks))
	c.Health.XID, c.Notes = xid, slices.Concat(c.Notes, notes, strayEnv(os.Environ(), known), othersEnv(os.Environ(), from), c.noKubeconfig())
	// What could not be read has its default here, so only other faults are added.
	errs = append(errs, c.Validate())
	return c, errors.Join(behind(errors.Join(unknown...), l.Path()), from.behind(errors.Join(errs...)))
}

// importNVIDIA reads the file of NVIDIA's device plugin that the section names. It changes nothing that the
// file does not say, so that it may be read over its own result.
func importNVIDIA(c plugin.Config) (plugin.Config, []string, error) {
	text, err := os.ReadFile(c.NVIDIAConfig)
	if err != nil {
		return c, nil, err
	}
	return nvidiaconfig.Import(text, c)
}

// String returns the configuration as YAML.
func (c Config) String() string {
	text, err := yaml.Marshal(c)
	if err != nil {
		return err.Error() // a struct of plain values always marshals
	}
	return string(text)
}
