package plugin

import (
	"errors"
	"fmt"
	"path/filepath"
	"slices"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/health/unixsock"
)

// maxDriverName is the most characters of a driver's name, which is also the domain of its attributes.
const maxDriverName = 63

// validateDRA returns every error in the section dra.
func (c Config) validateDRA() error {
	const key = "dra.driverName"
	var errs []error
	switch name := c.DRA.DriverName; {
	case len(name) > maxDriverName:
		errs = append(errs, fmt.Errorf("%s: expected at most %d characters, got %d: %q", key, maxDriverName, len(name), name))
	case !matches(domainPattern, name):
		errs = append(errs, fmt.Errorf("%s: expected a name in lower case such as %s, got %q", key, DefaultDRADriver, name))
	case c.API == APIDRA && filepath.IsAbs(c.KubeletDir):
		for _, path := range []string{
			filepath.Join(c.DRADir(), "dra.sock"), filepath.Join(c.KubeletDir, "plugins_registry", name+"-reg.sock"),
		} {
			if n := len(path) - unixsock.MaxPath; n > 0 {
				errs = append(errs, fmt.Errorf("%s: the path of the socket %s is %d bytes too long for a unix socket; use a shorter name or a shorter kubeletDir",
					key, path, n))
				break
			}
		}
	}
	for i, cause := range c.DRA.EvictOn {
		switch {
		case !health.ValidCause(cause):
			errs = append(errs, fmt.Errorf("dra.evictOn[%d]: expected the cause of a finding such as xid-79, dcgm-nvlink-down or lost, got %q", i, cause))
		case slices.Index(c.DRA.EvictOn, cause) < i:
			errs = append(errs, fmt.Errorf("dra.evictOn[%d]: duplicate %q", i, cause))
		}
	}
	return errors.Join(errs...)
}

// DRADir returns the directory of the driver's socket and of its checkpoint.
func (c *Config) DRADir() string { return filepath.Join(c.KubeletDir, "plugins", c.DRA.DriverName) }
