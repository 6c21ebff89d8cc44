// Package cdi writes the CDI specs by which container runtimes find GPUs, checks the specs of other programs, and locates
// device nodes.
package cdi

import (
	"errors"
	"fmt"
	"path/filepath"
	"regexp"
	"strings"
)

// Config is the `cdi` section: how the container runtime resolves a CDI device name.
type Config struct {
	// Generate writes a spec as NVIDIA's plugin does. Without it a spec must exist: the NVIDIA container toolkit maintains
	// one in /var/run/cdi from version 1.18 on.
	Generate bool   `yaml:"generate"`
	Kind     string `yaml:"kind"` // VENDOR/CLASS of the names; empty: as the program that writes the spec has it
	Dir      string `yaml:"dir"`  // where specs are written, and read from in addition to /etc/cdi
	// nvidia-cdi-hook or nvidia-ctk on the host; empty: specs without hooks, and without nvcdi
	HookPath         string `yaml:"hookPath"`
	AnnotationPrefix string `yaml:"annotationPrefix"` // of the key that cdi-annotations writes
	Runtime          string `yaml:"runtime"`          // whether the container runtime supports CDI: auto, supported
}

// The default kinds of NVIDIA's plugin and of its container toolkit.
const (
	kindPlugin  = "k8s.device-plugin.nvidia.com/gpu"
	kindToolkit = "nvidia.com/gpu"
)

// The hook programs of the container toolkit. nvidia-ctk has the hooks below its command "hook".
const (
	hookCDI = "nvidia-cdi-hook"
	hookCTK = "nvidia-ctk"
)

// EffectiveKind returns Kind or its default.
func (c Config) EffectiveKind() string {
	switch {
	case c.Kind != "":
		return c.Kind
	case c.Generate:
		return kindPlugin
	}
	return kindToolkit
}

// QualifiedName returns the CDI name of a device, VENDOR/CLASS=NAME.
func (c Config) QualifiedName(device string) string { return c.EffectiveKind() + "=" + device }

// file returns the path of the generated spec. It equals the path of NVIDIA's plugin, so that ours replaces a spec that
// NVIDIA's plugin left behind.
func (c Config) file() string {
	return filepath.Join(c.Dir, strings.ReplaceAll(c.EffectiveKind(), "/", "-")+".json")
}

// Dirs returns the directories of the specs that are written, or read if other programs write them.
func (c Config) Dirs() []string {
	if c.Generate {
		return []string{c.Dir}
	}
	return []string{c.Dir, staticDir}
}

// Validate returns every error in the section, joined. Each starts with its key.
func (c Config) Validate() error {
	var errs []error
	fail := func(format string, args ...any) { errs = append(errs, fmt.Errorf(format, args...)) }
	kind := regexp.MustCompile(`^[A-Za-z][-A-Za-z0-9_.]*[A-Za-z0-9]/[A-Za-z][-A-Za-z0-9_]*[A-Za-z0-9]$`)
	if c.Kind != "" && !kind.MatchString(c.Kind) {
		fail("cdi.kind: expected VENDOR/CLASS such as %s, got %q", kindToolkit, c.Kind)
	}
	if !filepath.IsAbs(c.Dir) {
		fail("cdi.dir: %q is not an absolute path", c.Dir)
	}
	if name := filepath.Base(c.HookPath); c.HookPath != "" && !filepath.IsAbs(c.HookPath) {
		fail("cdi.hookPath: %q is not an absolute path", c.HookPath)
	} else if c.HookPath != "" && name != hookCDI && name != hookCTK {
		fail("cdi.hookPath: expected the path of %s or %s, got %q", hookCDI, hookCTK, c.HookPath)
	}
	if !strings.HasSuffix(c.AnnotationPrefix, "/") || len(c.AnnotationPrefix) == 1 {
		fail("cdi.annotationPrefix: expected a prefix that ends in a slash, such as cdi.k8s.io/, got %q", c.AnnotationPrefix)
	}
	if c.Runtime != RuntimeAuto && c.Runtime != RuntimeSupported {
		fail("cdi.runtime: expected one of %s, %s, got %q", RuntimeAuto, RuntimeSupported, c.Runtime)
	}
	return errors.Join(errs...)
}
