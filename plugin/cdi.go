package plugin

import (
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"strings"
)

// CDIConfig is the `cdi` section: how the container runtime finds what a CDI name stands for.
type CDIConfig struct {
	// Generate writes a spec of our own, of the kind that NVIDIA's plugin has. Otherwise one must be there
	// already: the NVIDIA container toolkit keeps one in /var/run/cdi from version 1.18 on.
	Generate         bool   `yaml:"generate"`
	Kind             string `yaml:"kind"`             // VENDOR/CLASS of the names; empty: the one of whoever writes the spec
	Dir              string `yaml:"dir"`              // where specs are written, and looked for beside /etc/cdi
	HookPath         string `yaml:"hookPath"`         // nvidia-cdi-hook or nvidia-ctk on the host; empty: specs without hooks
	AnnotationPrefix string `yaml:"annotationPrefix"` // of the key that cdi-annotations writes
}

// The kinds of CDI device: those that NVIDIA's plugin declares, and those that its container toolkit does.
const (
	kindPlugin  = "k8s.device-plugin.nvidia.com/gpu"
	kindToolkit = "nvidia.com/gpu"
)

func (c *Config) usesCDI() bool {
	return slices.Contains(c.DeviceList, ListCDICRI) || slices.Contains(c.DeviceList, ListCDIAnnotations)
}

func (c *Config) cdiKind() string {
	switch {
	case c.CDI.Kind != "":
		return c.CDI.Kind
	case c.CDI.Generate:
		return kindPlugin
	}
	return kindToolkit
}

func (c CDIConfig) validate() error {
	var errs []error
	vendor, class, found := strings.Cut(c.Kind, "/")
	if c.Kind != "" && (!found || !matches(`^[A-Za-z][-A-Za-z0-9_.]*[A-Za-z0-9]$`, vendor) || !matches(`^[A-Za-z][-A-Za-z0-9_]*[A-Za-z0-9]$`, class)) {
		errs = append(errs, fmt.Errorf("cdi.kind: %q is not a kind; use VENDOR/CLASS such as %s", c.Kind, kindToolkit))
	}
	errs = append(errs, absolute("cdi.dir", c.Dir))
	if c.HookPath != "" {
		errs = append(errs, absolute("cdi.hookPath", c.HookPath))
		if name := filepath.Base(c.HookPath); name != hookCDI && name != hookCTK {
			errs = append(errs, fmt.Errorf("cdi.hookPath: %q is not known; use the path of %s or %s", c.HookPath, hookCDI, hookCTK))
		}
	}
	if !strings.HasSuffix(c.AnnotationPrefix, "/") || len(c.AnnotationPrefix) == 1 {
		errs = append(errs, fmt.Errorf("cdi.annotationPrefix: %q does not end in a slash; use cdi.k8s.io/", c.AnnotationPrefix))
	}
	return errors.Join(errs...)
}

// The programs of the container toolkit that serve as hooks. nvidia-ctk has them below "hook".
const (
	hookCDI = "nvidia-cdi-hook"
	hookCTK = "nvidia-ctk"
)
