package doctor

import (
	"cmp"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"

	"github.com/gpu-node-agent/gpu-node-agent/plugin"
)

// versionIn returns the first version like 580.95.05 in a text, "" if there is none.
func versionIn(text string) string { return regexp.MustCompile(`\d{3,}\.\d+(\.\d+)*`).FindString(text) }

// kernelDriver returns the version of the loaded kernel module, "" if none is loaded.
func (h host) kernelDriver() string {
	line, _, _ := strings.Cut(h.read("/proc/driver/nvidia/version"), "\n")
	if v := cmp.Or(versionIn(line), h.read("/sys/module/nvidia/version")); v != "" {
		return v
	}
	if line != "" || h.exists("/sys/module/nvidia") {
		return "of unknown version"
	}
	return ""
}

// driverLibraries returns the paths and versions of libnvidia-ml.so.1 below the roots of driver installations, in their
// order.
func (h host) driverLibraries(roots ...string) (paths, versions []string) {
	var patterns []string
	for _, root := range roots {
		for _, dir := range []string{
			"/usr/lib64", "/usr/lib/*-linux-gnu", "/usr/lib/*-linux-gnu/nvidia/current", "/usr/lib",
			"/usr/local/nvidia/lib64", "/home/kubernetes/bin/nvidia/lib64",
		} {
			patterns = append(patterns, filepath.Join(root, dir, "libnvidia-ml.so.1"))
		}
	}
	for _, p := range h.glob(patterns...) {
		target := p
		for range 5 { // read by name: an absolute link leads out of a root other than /
			next, err := os.Readlink(h.path(target))
			if err != nil {
				break
			}
			if !filepath.IsAbs(next) {
				next = filepath.Join(filepath.Dir(target), next)
			}
			target = next
		}
		if v := versionIn(filepath.Base(target)); v != "" {
			paths, versions = append(paths, p), append(versions, v)
		}
	}
	return paths, versions
}

func (d doctor) checkDriver(s survey, c plugin.Config) []Check {
	kernel := d.host.kernelDriver()
	paths, versions := d.host.driverLibraries("/run/nvidia/driver", c.ContainerDriverRoot, c.DriverRoot, "/")
	works := len(s.gpus()) > 0 // and so does its library
	switch {
	case kernel == "" && len(d.host.pciGPUs()) == 0:
		return info("not loaded, and no GPU found")
	case kernel == "":
		return fail("the kernel module nvidia is not loaded",
			"install the NVIDIA driver, or load it (modprobe nvidia) and read the kernel log (dmesg) if that fails")
	case works || slices.Contains(versions, kernel):
		found := "kernel module " + kernel
		if i := slices.Index(versions, kernel); i >= 0 {
			found += ", same version in " + paths[i]
		}
		return pass(found)
	case len(versions) == 0:
		checks := warn("kernel module "+kernel+", but libnvidia-ml.so.1 not found",
			"install the driver's libraries in the same version; they come with nvidia-smi")
		if d.inContainer {
			checks[0].Fix = "start this container with the NVIDIA runtime and NVIDIA_VISIBLE_DEVICES=all"
		}
		return checks
	default:
		return fail(fmt.Sprintf("kernel module %s, but %s is %s", kernel, paths[0], versions[0]),
			"drain and reboot the node: the driver was updated, but its old kernel module is still loaded")
	}
}
