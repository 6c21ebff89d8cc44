package health

import (
	"errors"
	"fmt"
	"path/filepath"
	"strings"
	"time"

	"github.com/gpu-node-agent/gpu-node-agent/health/deviceref"
	"github.com/gpu-node-agent/gpu-node-agent/health/unixsock"
)

// Config is the `health` section of config.yaml.
type Config struct {
	Interval     time.Duration `yaml:"interval"`     // between two polls; an XIDWatcher is asked in between
	Confirm      int           `yaml:"confirm"`      // checks in a row that must agree before a FAIL of DCGM counts
	Recovery     string        `yaml:"recovery"`     // RecoverAuto, RecoverAfterReset, RecoverNever
	RecoverAfter time.Duration `yaml:"recoverAfter"` // how long a condition must be gone before its finding goes
	Temperature  float64       `yaml:"temperature"`  // °C from which a GPU is Degraded
	Flap         FlapConfig    `yaml:"flap"`

	Cordon         []string `yaml:"cordon"`         // GPUs that are taken away: UUIDs, indexes, PCI bus ids
	IsolatePending bool     `yaml:"isolatePending"` // take a GPU that waits for a reset away once no pod holds it

	XID       XIDConfig      `yaml:"xid"`
	Incidents IncidentConfig `yaml:"incidents"`

	StateFile string `yaml:"stateFile"` // where findings are kept over a restart; "" for nowhere
	Socket    string `yaml:"socket"`    // where an operator speaks to the agent; "" for nowhere

	Kubernetes KubernetesConfig `yaml:"kubernetes"`
}

// KubernetesConfig says whether the API server is told: a condition of the node, and events.
type KubernetesConfig struct {
	Enabled    bool   `yaml:"enabled"`
	Kubeconfig string `yaml:"kubeconfig"` // "" for the pod's service account
}

// FlapConfig says when a device that keeps coming back is not believed any more.
type FlapConfig struct {
	Trips  int           `yaml:"trips"`  // times that a device may become unhealthy; 0 for any number
	Within time.Duration `yaml:"within"` // of each other
}

// The values of Config.Recovery: what it takes for an Unhealthy finding to go.
const (
	RecoverAuto       = "auto"       // any positive evidence: the condition is gone, or a reset was seen
	RecoverAfterReset = "afterReset" // a reset was seen, or the GPU came back to the bus
	RecoverNever      = "never"      // none: an operator's word or a reboot
)

// DefaultConfig returns the defaults.
func DefaultConfig() Config {
	return Config{
		Interval:     time.Second,
		Confirm:      2,
		Recovery:     RecoverAuto,
		RecoverAfter: time.Minute,
		// Data-centre GPUs slow themselves down between 85 and 90 °C (NVML's slowdown threshold).
		Temperature: 90,
		Flap:        FlapConfig{Trips: 3, Within: time.Hour},
		Cordon:      []string{},
		XID:         DefaultXIDConfig(),
		Incidents:   DefaultIncidentConfig(),
		StateFile:   "/var/lib/gpu-node-agent/state.json",
		Socket:      "/run/gpu-node-agent/agent.sock",
	}
}

// Validate returns every fault, each with its key below `health`.
func (c Config) Validate() error {
	var errs []error
	bad := func(format string, args ...any) { errs = append(errs, fmt.Errorf(format, args...)) }
	if c.Interval < 100*time.Millisecond || c.Interval > time.Minute {
		bad("interval: %v is out of range; use 100ms to 1m", c.Interval)
	}
	if c.Confirm < 1 || c.Confirm > 100 {
		bad("confirm: %d is out of range; use 1 to 100", c.Confirm)
	}
	switch c.Recovery {
	case RecoverAuto, RecoverAfterReset, RecoverNever:
	default:
		bad("recovery: %q is not known; use one of auto, afterReset, never", c.Recovery)
	}
	if c.RecoverAfter < 0 {
		bad("recoverAfter: %v is negative; use 0s or more", c.RecoverAfter)
	}
	if !(c.Temperature > 0 && c.Temperature < 200) {
		bad("temperature: %v is out of range; use degrees Celsius, such as 90", c.Temperature)
	}
	if c.Flap.Trips < 0 || c.Flap.Trips > 100 {
		bad("flap.trips: %d is out of range; use 1 to 100, or 0 for no limit", c.Flap.Trips)
	}
	if c.Flap.Within < time.Second {
		bad("flap.within: %v is too short; use 1s or more, such as 1h", c.Flap.Within)
	}
	for i, word := range c.Cordon {
		if !deviceref.Valid(word) {
			bad("cordon[%d]: %q names no GPU; use a UUID, an index such as 0 or 0:1, or a PCI bus id such as 0000:1b:00.0", i, word)
		}
	}
	errs = append(errs, section("xid", c.XID.Validate()), section("incidents", c.Incidents.Validate()))
	if c.StateFile != "" && !filepath.IsAbs(c.StateFile) {
		bad("stateFile: %q is not an absolute path; use a file of the agent's own, or \"\" to keep nothing", c.StateFile)
	}
	if c.Socket != "" && (!filepath.IsAbs(c.Socket) || unixsock.PathLen(c.Socket) > unixsock.MaxPath) {
		bad("socket: %q is not an absolute path of at most %d bytes; use a shorter one, or \"\" for none", c.Socket, unixsock.MaxPath)
	}
	if k := c.Kubernetes.Kubeconfig; k != "" && !filepath.IsAbs(k) {
		bad("kubernetes.kubeconfig: %q is not an absolute path; use one, or \"\" for the pod's service account", k)
	}
	return errors.Join(errs...)
}

// section puts a section's name before the key of each of its faults.
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
