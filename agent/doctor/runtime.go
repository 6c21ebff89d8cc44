package doctor

import (
	"cmp"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"

	"go.yaml.in/yaml/v3"

	"github.com/gpu-node-agent/gpu-node-agent/agent/status"
	"github.com/gpu-node-agent/gpu-node-agent/plugin"
)

// runtimeConfigs returns the configuration files of container runtimes.
func runtimeConfigs() []string {
	return []string{
		"/etc/containerd/config.toml", "/etc/containerd/conf.d/*.toml",
		"/var/lib/rancher/k3s/agent/etc/containerd/config.toml", "/var/lib/rancher/rke2/agent/etc/containerd/config.toml",
		"/etc/k0s/containerd.toml", "/etc/k0s/containerd.d/*.toml", "/var/snap/microk8s/current/args/containerd.toml",
		"/etc/crio/crio.conf", "/etc/crio/crio.conf.d/*", "/etc/docker/daemon.json",
	}
}

// tool returns the path of a program of NVIDIA's container toolkit, "" if it is not found.
func (d doctor) tool(name string) string {
	dirs := []string{"/usr/bin", "/usr/local/bin", "/usr/sbin", "/usr/local/nvidia/toolkit", "/opt/nvidia/toolkit", "/run/nvidia/toolkit"}
	if filepath.Clean(string(d.host)) == "/" {
		dirs = append(filepath.SplitList(os.Getenv("PATH")), dirs...)
	}
	for _, dir := range dirs {
		if path := filepath.Join(dir, name); d.host.exists(path) {
			return path
		}
	}
	return ""
}

// checkRuntime looks for the runtime that turns NVIDIA_VISIBLE_DEVICES into device nodes and libraries. It never fails: the
// runtime may be configured elsewhere.
func (d doctor) checkRuntime(c plugin.Config) []Check {
	if c.ServesDRA() {
		return info("NVIDIA's is not needed: with plugin.api dra, containers get their devices by CDI")
	}
	if !slices.Contains(c.DeviceList, plugin.ListEnv) && !slices.Contains(c.DeviceList, plugin.ListMounts) {
		return info("NVIDIA's is not needed: plugin.deviceList is " + strings.Join(c.DeviceList, ", "))
	}
	var tools, runtimes, defaults []string
	for _, name := range []string{"nvidia-container-runtime", "nvidia-container-runtime-hook", "nvidia-ctk", "nvidia-cdi-hook"} {
		if path := d.tool(name); path != "" {
			tools = append(tools, path)
		}
	}
	// containerd, CRI-O, Docker.
	isDefault := regexp.MustCompile(`(?m)(?:^|[{,])\s*"?default[-_]runtime(_name)?"?\s*[=:]\s*"nvidia[^"]*"`)
	for _, file := range d.host.glob(runtimeConfigs()...) {
		text := d.host.read(file)
		if strings.Contains(text, "nvidia") {
			runtimes = append(runtimes, file)
		}
		if isDefault.MatchString(text) {
			defaults = append(defaults, file)
		}
	}
	hooks := d.host.glob("/usr/share/containers/oci/hooks.d/*nvidia*.json", "/etc/containers/oci/hooks.d/*nvidia*.json")

	const configure = "make it the default (nvidia-ctk runtime configure --set-as-default, with --runtime=containerd, crio or docker) and " +
		"restart the runtime"
	switch {
	case (len(defaults) > 0 || len(hooks) > 0) && len(tools) == 0:
		return warn(strings.Join(slices.Concat(defaults, hooks), ", ")+" refers to NVIDIA's runtime, which is not found",
			"install the NVIDIA container toolkit")
	case len(defaults) > 0:
		return pass("NVIDIA's is the default in " + strings.Join(defaults, ", ") + "; " + tools[0])
	case len(hooks) > 0:
		return pass("hook " + strings.Join(hooks, ", ") + "; " + tools[0])
	case len(runtimes) > 0:
		return warn("NVIDIA's is in "+strings.Join(runtimes, ", ")+", but not the default",
			configure+", or give GPU pods its runtimeClassName")
	case d.inContainer:
		return []Check{{
			Status: CheckInfo, Found: "unknown: this is the root directory of a container",
			Fix: "mount the node's root directory read-only and pass it to --root",
		}}
	case len(tools) > 0:
		return warn(strings.Join(tools, ", ")+", but no container runtime is configured to use it",
			configure)
	default:
		return warn("no NVIDIA container toolkit found: containers would not see their GPUs",
			"install the NVIDIA container toolkit, then "+configure)
	}
}

// toolkitKind is the kind of the CDI devices of NVIDIA's container toolkit.
const toolkitKind = "nvidia.com/gpu"

// checkCDI lists the CDI specifications of GPUs. A specification for another driver version breaks every container that
// uses it.
func (d doctor) checkCDI(c plugin.Config) []Check {
	var checks []Check
	kernel, kind := d.host.kernelDriver(), cmp.Or(c.CDI.Kind, toolkitKind)
	kinds := map[string]bool{}
	seen := map[string]bool{} // by content: /var/run is a link to /run
	for _, file := range d.host.glob("/etc/cdi/*", "/run/cdi/*", "/var/run/cdi/*", c.CDI.Dir+"/*") {
		if ext := filepath.Ext(file); ext != ".yaml" && ext != ".json" {
			continue
		}
		text := d.host.read(file)
		if seen[text] {
			continue
		}
		seen[text] = true
		var spec struct {
			Kind    string
			Devices []struct{ Name string }
		}
		err := yaml.Unmarshal([]byte(text), &spec)
		if err == nil && spec.Kind != kind && !strings.HasSuffix(spec.Kind, toolkitKind) {
			continue
		}
		kinds[spec.Kind] = true
		version := versionIn(regexp.MustCompile(`libcuda\.so\.\d+\.\d+(\.\d+)*`).FindString(text))
		regenerate := "regenerate it: nvidia-ctk cdi generate --output=" + file
		switch {
		case err != nil:
			checks = append(checks, warn(file+": "+err.Error(), regenerate)...)
		case version != "" && versionIn(kernel) != "" && version != kernel:
			found := fmt.Sprintf("%s is for driver %s, but %s is loaded", file, version, kernel)
			checks = append(checks, warn(found, regenerate)...)
		default:
			checks = append(checks, info(fmt.Sprintf("%s: %s, %s", file, spec.Kind, status.Plural(len(spec.Devices), "device")))...)
		}
	}
	needed := c.ServesDRA() || slices.Contains(c.DeviceList, plugin.ListCDICRI) || slices.Contains(c.DeviceList, plugin.ListCDIAnnotations)
	neededBy := "plugin.deviceList"
	if c.ServesDRA() {
		neededBy = "plugin.api dra"
	}
	switch {
	case needed && !c.CDI.Generate && !kinds[kind]: // only a warning: the runtime may have other directories
		checks = append(checks, warn("none for "+kind+", which "+neededBy+" needs",
			"nvidia-ctk cdi generate --output=/etc/cdi/nvidia.yaml, or set plugin.cdi.generate")...)
	case len(checks) == 0 && needed:
		checks = info("none yet; the agent writes one to " + c.CDI.Dir)
	case len(checks) == 0:
		checks = info("none for GPUs; not needed")
	}
	return checks
}

// checkGPUOperator reports the progress of NVIDIA's GPU operator, if it is installed.
func (d doctor) checkGPUOperator() []Check {
	const dir = "/run/nvidia/validations"
	if !d.host.exists(dir) {
		return nil
	}
	var ready []string
	for _, file := range d.host.glob(dir + "/*-ready") {
		ready = append(ready, filepath.Base(file))
	}
	c := Check{Status: CheckInfo, Found: strings.Join(ready, ", ")}
	for _, required := range []string{"driver-ready", "toolkit-ready"} {
		if !slices.Contains(ready, required) {
			c.Status = CheckWarn
			c.Found = strings.TrimPrefix(c.Found+", no "+required, ", ")
			c.Fix = "wait for the GPU operator, or read the log of its validator pod on this node"
		}
	}
	return []Check{c}
}
