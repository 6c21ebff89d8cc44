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
	Address    string        `yaml:"address"`    // of the DCGM host engine: host[:port] or unix:///path
	Interval   time.Duration `yaml:"interval"`   // between two measurements of the metric fields
	StallAfter time.Duration `yaml:"stallAfter"` // a call that takes longer is a stall

	HealthSystems []string `yaml:"healthSystems"` // of DCGM's own checks: all, none, or names

	Sim sim.Config `yaml:"sim"`
}

// The modes of a source.
const (
	ModeAuto       = "auto"
	ModeEmbedded   = "embedded"
	ModeStandalone = "standalone"
	ModeSim        = "sim"
)

// Resolved is the mode with auto decided: the host engine at the address if there is one, else our own.
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
			errs = append(errs, errors.New("address: mode embedded connects to nothing; remove the address or use mode standalone"))
		}
	case ModeStandalone:
		if c.Address == "" {
			errs = append(errs, errors.New("address: mode standalone needs the address of the DCGM host engine, such as localhost:5555"))
		}
	default:
		errs = append(errs, fmt.Errorf("mode: %q is not known; use one of auto, embedded, standalone, sim", c.Mode))
	}
	if c.Address != "" {
		errs = append(errs, validateAddress(c.Address))
	}
	if c.Interval < time.Second || c.Interval > 10*time.Minute {
		errs = append(errs, fmt.Errorf("interval: %v is out of range; use 1s to 10m", c.Interval))
	}
	if c.StallAfter < time.Second || c.StallAfter > 10*time.Minute {
		errs = append(errs, fmt.Errorf("stallAfter: %v is out of range; use 1s to 10m", c.StallAfter))
	}
	errs = append(errs, prefixed("healthSystems: ", dcgm.ValidateHealthSystems(c.HealthSystems)), within("sim", c.Sim.Validate()))
	return errors.Join(errs...)
}

// enginePort is where a host engine listens unless it is told (nv-hostengine --help).
const enginePort = "5555"

// plainAddress returns the address of a host engine in one form: DCGM's users write a URL too, and leave the port out.
func plainAddress(address string) string {
	address = strings.TrimPrefix(address, "tcp://")
	if address != "" && !strings.ContainsAny(address, ":/[") {
		address = net.JoinHostPort(address, enginePort)
	}
	return address
}

func validateAddress(address string) error {
	if path, ok := strings.CutPrefix(address, "unix://"); ok {
		if !filepath.IsAbs(path) {
			return fmt.Errorf("address: %q has no absolute path; use unix:///path/of/the.socket", address)
		}
		return nil
	}
	host, port, err := net.SplitHostPort(address)
	if n, perr := strconv.ParseUint(port, 10, 16); err != nil || perr != nil || n == 0 || host == "" {
		return fmt.Errorf("address: %q is not an address; use HOST, HOST:PORT or unix:///PATH", address)
	}
	return nil
}
