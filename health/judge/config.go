package judge

import (
	"errors"
	"fmt"
	"path/filepath"
	"strings"
	"time"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/health/catalog"
	"github.com/gpu-node-agent/gpu-node-agent/health/deviceref"
	"github.com/gpu-node-agent/gpu-node-agent/health/unixsock"
)

// KeyCordon is the key of Config.Cordon.
const KeyCordon = "health.cordon"

// Config is the `health` section of config.yaml.
type Config struct {
	Interval     time.Duration `yaml:"interval"`     // between two polls; an XIDWatcher checks for XIDs more often
	Confirm      int           `yaml:"confirm"`      // consecutive checks that must show a FAIL of DCGM before it counts
	Recovery     string        `yaml:"recovery"`     // RecoverAuto, RecoverAfterReset, RecoverNever
	RecoverAfter time.Duration `yaml:"recoverAfter"` // how long a condition must be over before its finding clears
	Temperature  float64       `yaml:"temperature"`  // °C from which on a GPU is Degraded
	Flap         FlapConfig    `yaml:"flap"`

	Cordon         []string `yaml:"cordon"`         // references of the devices to keep from pods
	IsolatePending bool     `yaml:"isolatePending"` // keep a GPU that waits for a reset from pods once no pod holds it

	XID       catalog.XIDConfig      `yaml:"xid"`
	Incidents catalog.IncidentConfig `yaml:"incidents"`

	Socket string `yaml:"socket"` // path of the socket for operators' commands; "" for none

	Kubernetes KubernetesConfig `yaml:"kubernetes"`

	bindings health.Bindings // of the entries of Cordon
}

// WithBindings returns the configuration with the bindings of the entries of Cordon.
func (c Config) WithBindings(b health.Bindings) Config {
	c.bindings = b
	return c
}

// KubernetesConfig configures the node condition and the events that the agent writes to the API server.
type KubernetesConfig struct {
	Enabled    bool   `yaml:"enabled"`
	Kubeconfig string `yaml:"kubeconfig"` // "" for the pod's service account
}

// FlapConfig configures when a device that repeatedly becomes unhealthy stays Unhealthy.
type FlapConfig struct {
	Trips  int           `yaml:"trips"`  // how often a device must become unhealthy; 0 turns the check off
	Within time.Duration `yaml:"within"` // the time within which it must happen
}

// The values of Config.Recovery: what clears an Unhealthy finding.
const (
	RecoverAuto       = "auto"       // any positive evidence: the condition is over, or the GPU was reset
	RecoverAfterReset = "afterReset" // a reset of the GPU, or its return to the bus
	RecoverNever      = "never"      // only an operator or a reboot
)

// DefaultConfig returns the defaults.
func DefaultConfig() Config {
	return Config{
		Interval:     time.Second,
		Confirm:      2,
		Recovery:     RecoverAuto,
		RecoverAfter: time.Minute,
		// Data-centre GPUs reduce their clocks between 85 and 90 °C (NVML's slowdown threshold).
		Temperature: 90,
		Flap:        FlapConfig{Trips: 3, Within: time.Hour},
		Cordon:      []string{},
		XID:         catalog.DefaultXIDConfig(),
		Incidents:   catalog.DefaultIncidentConfig(),
		Socket:      "/run/gpu-node-agent/agent.sock",
	}
}

// Validate returns every error, each with its key below `health`.
func (c Config) Validate() error {
	var errs []error
	bad := func(format string, args ...any) { errs = append(errs, fmt.Errorf(format, args...)) }
	if c.Interval < 100*time.Millisecond || c.Interval > time.Minute {
		bad("interval: expected 100ms to 1m, got %v", c.Interval)
	}
	if c.Confirm < 1 || c.Confirm > 100 {
		bad("confirm: expected 1 to 100, got %d", c.Confirm)
	}
	switch c.Recovery {
	case RecoverAuto, RecoverAfterReset, RecoverNever:
	default:
		bad("recovery: expected auto, afterReset or never, got %q", c.Recovery)
	}
	if c.RecoverAfter < 0 {
		bad("recoverAfter: expected 0s or more, got %v", c.RecoverAfter)
	}
	if !(c.Temperature > 0 && c.Temperature < 200) {
		bad("temperature: expected degrees Celsius such as 90, got %v", c.Temperature)
	}
	if c.Flap.Trips < 0 || c.Flap.Trips > 100 {
		bad("flap.trips: expected 1 to 100, or 0 to turn the check off, got %d", c.Flap.Trips)
	}
	if c.Flap.Within < time.Second {
		bad("flap.within: expected 1s or more, such as 1h, got %v", c.Flap.Within)
	}
	for i, ref := range c.Cordon {
		if !deviceref.Valid(ref) {
			bad("cordon[%d]: expected a UUID, an index such as 0 or 0:1, or a PCI bus ID such as 0000:1b:00.0, got %q", i, ref)
		}
	}
	errs = append(errs, section("xid", c.XID.Validate()), section("incidents", c.Incidents.Validate()))
	if c.Socket != "" && (!filepath.IsAbs(c.Socket) || unixsock.PathLen(c.Socket) > unixsock.MaxPath) {
		bad("socket: expected an absolute path of at most %d bytes, or \"\" for none, got %q", unixsock.MaxPath, c.Socket)
	}
	if k := c.Kubernetes.Kubeconfig; k != "" && !filepath.IsAbs(k) {
		bad("kubernetes.kubeconfig: expected an absolute path, or \"\" for the pod's service account, got %q", k)
	}
	return errors.Join(errs...)
}

// section prefixes the key of each error with the section's name.
func section(name string, err error) error {
	if err == nil {
		return nil
	}
	var errs []error
	for line := range strings.SplitSeq(err.Error(), "\n") {
		errs = append(errs, fmt.Errorf("%s.%s", name, line))
	}
	return errors.Join(errs...)
}

// IndexRefs returns the entries of the section that name a GPU by its index.
func (c Config) IndexRefs() []health.IndexRef { return health.IndexRefs(KeyCordon, c.Cordon) }

// UnmatchedCordons returns the references in Config.Cordon that match no device.
func (c Config) UnmatchedCordons(b health.Bindings, devices []health.DeviceState) []health.UnmatchedRefs {
	return b.Unmatched(KeyCordon, KeyCordon, c.Cordon, devices)
}
