package doctor

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"

	"github.com/gpu-node-agent/gpu-node-agent/agent/config"
	"github.com/gpu-node-agent/gpu-node-agent/agent/kube"
	"github.com/gpu-node-agent/gpu-node-agent/agent/status"
	"github.com/gpu-node-agent/gpu-node-agent/agent/view"
	"github.com/gpu-node-agent/gpu-node-agent/plugin"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/cdi"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/dra"
)

// draSteps returns the checks of dynamic resource allocation.
func (d doctor) draSteps(c config.Config) []step {
	if !c.Plugin.ServesDRA() {
		return nil
	}
	return []step{
		{"DRA directories", func(context.Context) []Check { return checkDRADirs(c.Plugin) }},
		{"DRA driver", func(ctx context.Context) []Check { return checkDRADriver(ctx, c) }},
	}
}

// checkDRADirs checks whether the driver could open its sockets and write its checkpoint.
func checkDRADirs(c plugin.Config) []Check {
	const mount = "set plugin.kubeletDir to the kubelet's --root-dir; in a container, mount it at the same path"
	registry := filepath.Join(c.KubeletDir, "plugins_registry")
	data := c.DRADir()
	if info, err := os.Stat(registry); err != nil {
		return fail(fmt.Sprintf("no directory %s: %v", registry, rootCause(err)), "start the kubelet, which creates it, or "+mount)
	} else if !info.IsDir() {
		return fail(registry+" is not a directory", mount)
	}
	for _, err := os.Stat(data); errors.Is(err, fs.ErrNotExist) && data != filepath.Clean(c.KubeletDir); _, err = os.Stat(data) {
		data = filepath.Dir(data) // the agent creates missing directories
	}
	var checks []Check
	for _, dir := range []string{registry, data} {
		if err := writable(dir); err != nil {
			checks = append(checks, fail(fmt.Sprintf("user %d cannot write in %s: %v", os.Geteuid(), dir, err),
				"run the agent as root, and mount the directory writable")...)
		}
	}
	if len(checks) == 0 {
		checks = pass(registry + " and " + data + " are writable")
	}
	return checks
}

// checkDRADriver reports what the running agent knows of its driver, or whether another process serves a driver of the name.
func checkDRADriver(ctx context.Context, c config.Config) []Check {
	s, ok := runningAgent(ctx, c)
	if !ok || s.DRA == nil || s.DRA.Driver == "" {
		if err := dra.FindDriver(ctx, &c.Plugin); err != nil && !errors.Is(err, fs.ErrNotExist) {
			// The driver that was found may be the running agent's: without its status, that is unknown.
			if isAgent(ctx, c) && !ok {
				return info(err.Error())
			}
			check := failure("", err.Error(), "")
			return []Check{check}
		}
		if ok && s.DRA != nil && s.DRA.Error != "" {
			return warn(s.DRA.Error, "see the log of the agent")
		}
		return pass("no other driver has the name " + c.Plugin.DRA.DriverName)
	}
	checks := problemsOf(s, view.PartDRA)
	if len(checks) == 0 {
		checks = pass(fmt.Sprintf("%s is registered, %s published", s.DRA.Driver, status.Plural(s.DRA.Devices, "device")))
	}
	return checks
}

// runtimeOf returns the container runtime of this node.
func runtimeOf(ctx context.Context, kubeconfig string) (kube.Runtime, error) {
	ctx, cancel := context.WithTimeout(ctx, dialTimeout)
	defer cancel()
	return kube.ReadRuntime(ctx, kubeconfig, kube.NodeName())
}

// cdiSteps returns the check of the container runtime for nodes whose pods get devices by CDI names alone.
func (d doctor) cdiSteps(c config.Config) []step {
	if !c.Plugin.NeedsCDI() {
		return nil
	}
	return []step{{"CDI support", func(ctx context.Context) []Check {
		found, err := d.runtime(ctx, c.Health.Kubernetes.Kubeconfig)
		r := cdi.Runtime{Version: found.Version, Kubelet: found.Kubelet}
		if err != nil {
			r.Err = err.Error()
		}
		return d.checkCDISupport(&c.Plugin, r)
	}}}
}

// checkCDISupport checks whether the container runtime gives containers their CDI devices. One that ignores them starts the containers
// without an error.
func (d doctor) checkCDISupport(c *plugin.Config, r cdi.Runtime) []Check {
	v := c.JudgeRuntime(r)
	switch v.Support {
	case cdi.Supported:
		return pass(v.Found)
	case cdi.SupportIgnored:
		return fail(v.Found, v.Fix)
	case cdi.SupportUnknown:
		return info(v.Found)
	case cdi.SupportDepends:
	}
	enabled := regexp.MustCompile(`(?m)^\s*enable_cdi\s*=\s*true\b`)
	for _, file := range d.host.glob(runtimeConfigs()...) {
		if v.EnableCDI && enabled.MatchString(d.host.read(file)) {
			return pass(r.Version + " supports CDI: enable_cdi in " + file)
		}
	}
	return warn(v.Found, v.Fix)
}
