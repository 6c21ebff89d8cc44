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

	"github.com/gpu-node-agent/gpu-node-agent/plugin"
)

// runtimeConfigs are where container runtimes are told of others that they can start.
func runtimeConfigs() []string {
	return []string{
		"/etc/containerd/config.toml", "/etc/containerd/conf.d/*.toml",
		"/var/lib/rancher/k3s/agent/etc/containerd/config.toml", "/var/lib/rancher/rke2/agent/etc/containerd/config.toml",
		"/etc/k0s/containerd.toml", "/etc/k0s/containerd.d/*.toml", "/var/snap/microk8s/current/args/containerd.toml",
		"/etc/crio/crio.conf", "/etc/crio/crio.conf.d/*", "/etc/docker/daemon.json",
	}
}

// tool returns where a program of NVIDIA's container toolkit is, empty if it is nowhere.
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

// checkRuntime looks for what turns NVIDIA_VISIBLE_DEVICES into device nodes and libraries. It never
// fails: a runtime can be set up in ways that leave no trace in these places.
func (d doctor) checkRuntime(c plugin.Config) []Check {
	if !slices.Contains(c.DeviceList, plugin.ListEnv) && !slices.Contains(c.DeviceList, plugin.ListMounts) {
		return []Check{{Status: CheckInfo, Found: "needs nothing of NVIDIA's: plugin.deviceList is " + strings.Join(c.DeviceList, ", ")}}
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

	const configure = "make it the default (nvidia-ctk runtime configure --set-as-default, with --runtime=containerd, crio or docker) and restart the runtime"
	switch {
	case (len(defaults) > 0 || len(hooks) > 0) && len(tools) == 0:
		return []Check{{
			Status: CheckWarn, Found: strings.Join(slices.Concat(defaults, hooks), ", ") + " names NVIDIA's runtime, but that is not in the usual places",
			Fix: "install the NVIDIA container toolkit",
		}}
	case len(defaults) > 0:
		return []Check{{Status: CheckOK, Found: "NVIDIA's is the default in " + strings.Join(defaults, ", ") + "; " + tools[0]}}
	case len(hooks) > 0:
		return []Check{{Status: CheckOK, Found: "hook " + strings.Join(hooks, ", ") + "; " + tools[0]}}
	case len(runtimes) > 0:
		return []Check{{
			Status: CheckWarn, Found: "NVIDIA's is known in " + strings.Join(runtimes, ", ") + ", but is not the default",
			Fix: configure + ", or give GPU pods its runtimeClassName",
		}}
	case d.inside:
		return []Check{{
			Status: CheckInfo, Found: "not known: these are the files of a container",
			Fix: "mount the node's root read-only and name it with --root",
		}}
	case len(tools) > 0:
		return []Check{{
			Status: CheckWarn, Found: strings.Join(tools, ", ") + ", but no container runtime is set up for it",
			Fix: configure,
		}}
	default:
		return []Check{{
			Status: CheckWarn, Found: "no NVIDIA container toolkit in the usual places: containers would not see their GPUs",
			Fix: "install the NVIDIA container toolkit, then " + configure,
		}}
	}
}

// kindToolkit is the kind of the CDI devices that NVIDIA's container toolkit declares.
const kindToolkit = "nvidia.com/gpu"

// checkCDI lists the CDI specifications of GPUs. One that was made for another driver breaks every
// container that is started by it.
func (d doctor) checkCDI(c plugin.Config) []Check {
	var checks []Check
	kernel, wanted := d.host.kernelDriver(), cmp.Or(c.CDI.Kind, kindToolkit)
	kinds := map[string]bool{}
	seen := map[string]bool{} // by text: /var/run is /run
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
		if err == nil && spec.Kind != wanted && !strings.HasSuffix(spec.Kind, kindToolkit) {
			continue
		}
		kinds[spec.Kind] = true
		made := versionIn(regexp.MustCompile(`libcuda\.so\.\d+\.\d+(\.\d+)*`).FindString(text))
		again := "make it anew: nvidia-ctk cdi generate --output=" + file
		switch {
		case err != nil:
			checks = append(checks, Check{Status: CheckWarn, Found: file + " cannot be read: " + err.Error(), Fix: again})
		case made != "" && versionIn(kernel) != "" && made != kernel:
			found := fmt.Sprintf("%s is for driver %s, but %s is loaded", file, made, kernel)
			checks = append(checks, Check{Status: CheckWarn, Found: found, Fix: again})
		default:
			checks = append(checks, Check{Status: CheckInfo, Found: fmt.Sprintf("%s: %s, %s", file, spec.Kind, plural(len(spec.Devices), "device"))})
		}
	}
	uses := slices.Contains(c.DeviceList, plugin.ListCDICRI) || slices.Contains(c.DeviceList, plugin.ListCDIAnnotations)
	switch {
	case uses && !c.CDI.Generate && !kinds[wanted]: // no proof: the runtime may have directories of its own
		checks = append(checks, Check{
			Status: CheckWarn, Found: "none declares " + wanted + ", which plugin.deviceList needs",
			Fix: "nvidia-ctk cdi generate --output=/etc/cdi/nvidia.yaml, or set plugin.cdi.generate",
		})
	case len(checks) == 0 && uses:
		checks = []Check{{Status: CheckInfo, Found: "none yet; the agent writes one to " + c.CDI.Dir}}
	case len(checks) == 0:
		checks = []Check{{Status: CheckInfo, Found: "none for GPUs, and none is needed"}}
	}
	return checks
}

// checkOperator says how far NVIDIA's GPU operator has come, if it is here.
func (d doctor) checkOperator() []Check {
	const dir = "/run/nvidia/validations"
	if !d.host.exists(dir) {
		return nil
	}
	var ready []string
	for _, file := range d.host.glob(dir + "/*-ready") {
		ready = append(ready, filepath.Base(file))
	}
	c := Check{Status: CheckInfo, Found: strings.Join(ready, ", ")}
	for _, must := range []string{"driver-ready", "toolkit-ready"} {
		if !slices.Contains(ready, must) {
			c.Status = CheckWarn
			c.Found = strings.TrimPrefix(c.Found+", no "+must, ", ")
			c.Fix = "wait for the GPU operator, or look at the log of its validator pod on this node"
		}
	}
	return []Check{c}
}
