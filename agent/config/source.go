package config

import (
	"errors"
	"fmt"
	"net"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/gpu-node-agent/gpu-node-agent/health/dcgm"
	"github.com/gpu-node-agent/gpu-node-agent/health/sim"
)

// SourceConfig is the `source` section: what measures the GPUs.
type SourceConfig struct {
	Mode       string        `yaml:"mode"`       // auto, embedded, standalone, sim
	Address    string        `yaml:"address"`    // of the DCGM host engine: HOST[:PORT] or unix:///PATH
	Interval   time.Duration `yaml:"interval"`   // between two measurements of the metric fields
	StallAfter time.Duration `yaml:"stallAfter"` // a call that takes longer is a stall

	HealthSystems []string `yaml:"healthSystems"` // of DCGM's health checks: all, none, or names

	Events        string `yaml:"events"`        // auto, nvml, off: see EventsReason
	KernelLog     bool   `yaml:"kernelLog"`     // read XIDs from the kernel log too
	KernelLogPath string `yaml:"kernelLogPath"` // of the kernel log

	Sim sim.Config `yaml:"sim"`
}

// The values of Events.
const (
	EventsAuto = "auto"
	EventsNVML = "nvml"
	EventsOff  = "off"
)

// EventsReason returns why NVML's events are off, "" if they are on. Beside a host engine auto uses them only if the driver lists the
// engine's GPUs: see EventsIfListed.
func (c SourceConfig) EventsReason() string {
	switch {
	case c.Events == EventsNVML:
		return ""
	case c.Events == EventsOff:
		return "source.events is off"
	case c.Resolved() == ModeSim:
		return "source.events is auto, and the source is a simulation"
	}
	return ""
}

// EventsIfListed reports whether NVML's events depend on the GPUs that the source lists: a host engine may run on another host.
func (c SourceConfig) EventsIfListed() bool {
	return c.Events == EventsAuto && c.Resolved() == ModeStandalone
}

// The modes of a source.
const (
	ModeAuto       = "auto"
	ModeEmbedded   = "embedded"
	ModeStandalone = "standalone"
	ModeSim        = "sim"
)

// Resolved returns the mode, with auto resolved to standalone if an address is set, else to embedded.
func (c SourceConfig) Resolved() string {
	switch {
	case c.Mode != ModeAuto:
		return c.Mode
	case c.Address != "":
		return ModeStandalone
	default:
		return ModeEmbedded
	}
}

func (c SourceConfig) validate() error {
	var errs []error
	switch c.Mode {
	case ModeAuto, ModeSim:
	case ModeEmbedded:
		if c.Address != "" {
			errs = append(errs, errors.New("address: mode embedded uses no address; remove it or set mode standalone"))
		}
	case ModeStandalone:
		if c.Address == "" {
			errs = append(errs, errors.New("address: mode standalone requires the address of the DCGM host engine, such as localhost:5555"))
		}
	default:
		errs = append(errs, fmt.Errorf("mode: expected one of auto, embedded, standalone, sim, got %q", c.Mode))
	}
	if c.Address != "" {
		errs = append(errs, validateAddress(c.Address))
	}
	if c.Interval < time.Second || c.Interval > 10*time.Minute {
		errs = append(errs, fmt.Errorf("interval: expected 1s to 10m, got %v", c.Interval))
	}
	if c.StallAfter < time.Second || c.StallAfter > 10*time.Minute {
		errs = append(errs, fmt.Errorf("stallAfter: expected 1s to 10m, got %v", c.StallAfter))
	}
	switch c.Events {
	case EventsAuto, EventsNVML, EventsOff:
	default:
		errs = append(errs, fmt.Errorf("events: expected one of auto, nvml, off, got %q", c.Events))
	}
	if !filepath.IsAbs(c.KernelLogPath) {
		errs = append(errs, fmt.Errorf("kernelLogPath: expected an absolute path, such as /dev/kmsg, got %q", c.KernelLogPath))
	}
	errs = append(errs, withPrefix("healthSystems: ", dcgm.ValidateHealthSystems(c.HealthSystems)), withPrefix("sim.", c.Sim.Validate()))
	return errors.Join(errs...)
}

// enginePort is the default port of a host engine (nv-hostengine --help).
const enginePort = "5555"

// normalizeAddress removes the scheme tcp:// and adds the default port: DCGM's tools accept both forms.
func normalizeAddress(address string) string {
	address = strings.TrimPrefix(address, "tcp://")
	isPort := strings.Trim(address, "0123456789") == "" // which validateAddress refuses
	if !isPort && !strings.ContainsAny(address, ":/[") {
		address = net.JoinHostPort(address, enginePort)
	}
	return address
}

func validateAddress(address string) error {
	if path, ok := strings.CutPrefix(address, "unix://"); ok {
		if !filepath.IsAbs(path) {
			return fmt.Errorf("address: expected unix:// and an absolute path, got %q", address)
		}
		return nil
	}
	host, port, err := net.SplitHostPort(address)
	if n, perr := strconv.ParseUint(port, 10, 16); err != nil || perr != nil || n == 0 || host == "" {
		return fmt.Errorf("address: expected HOST, HOST:PORT or unix:///PATH, such as localhost:5555, got %q", address)
	}
	return nil
}
