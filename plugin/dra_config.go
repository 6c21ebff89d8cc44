package plugin

import (
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"strings"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/health/catalog"
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
				errs = append(errs, fmt.Errorf(
					"%s: the path of the socket %s is %d bytes too long for a unix socket; use a shorter name or a shorter kubeletDir",
					key, path, n))
				break
			}
		}
	}
	for i, taint := range c.DRA.EvictOn {
		switch cause := strings.Replace(taint, "xid=", "xid-", 1); {
		case !catalog.ValidCause(cause) || evictionName(cause) != taint:
			errs = append(errs, fmt.Errorf("dra.evictOn[%d]: expected the taint of a finding such as xid=79, dcgm-nvlink-down or lost, got %q", i,
				taint))
		case slices.Index(c.DRA.EvictOn, taint) < i:
			errs = append(errs, fmt.Errorf("dra.evictOn[%d]: duplicate %q", i, taint))
		}
	}
	return errors.Join(errs...)
}

// Evicts reports whether the taint of an unhealthy finding evicts pods.
func (c *DRAConfig) Evicts(cause string) bool { return slices.Contains(c.EvictOn, evictionName(cause)) }

// evictionName returns how EvictOn names the taint of a cause: xid=79 for xid-79, and other causes as they are.
func evictionName(cause string) string {
	if xid, ok := health.XIDOfCause(cause); ok {
		return fmt.Sprintf("xid=%d", xid)
	}
	return cause
}

// DRADir returns the directory of the driver's socket and of its checkpoint.
func (c *Config) DRADir() string { return filepath.Join(c.KubeletDir, "plugins", c.DRA.DriverName) }
