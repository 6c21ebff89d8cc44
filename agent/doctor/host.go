package doctor

import (
	"cmp"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/gpu-node-agent/gpu-node-agent/plugin"
)

// host is the root of a node's files.
type host string

func (h host) path(p string) string { return filepath.Join(string(h), p) }

func (h host) exists(p string) bool {
	_, err := os.Lstat(h.path(p))
	return err == nil
}

// read returns a small file, empty if it cannot be read.
func (h host) read(p string) string {
	text, err := os.ReadFile(h.path(p))
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(text))
}

// glob returns the paths on the node that match, sorted.
func (h host) glob(patterns ...string) (found []string) {
	for _, pattern := range patterns {
		matches, err := filepath.Glob(h.path(pattern))
		if err != nil {
			continue // the patterns are ours
		}
		for _, m := range matches {
			if rel, err := filepath.Rel(string(h), m); err == nil {
				found = append(found, "/"+rel)
			}
		}
	}
	return found
}

// versionIn is the first number like 580.95.05 in a text, empty if there is none.
func versionIn(text string) string { return regexp.MustCompile(`\d{3,}\.\d+(\.\d+)*`).FindString(text) }

// kernelDriver is the version of the loaded kernel module, empty if none is loaded.
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

// driverLibraries returns where libnvidia-ml.so.1 is and of which version it is, first below the roots
// that the driver can be installed in.
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
		for range 5 { // by name alone: an absolute link leads out of another root
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

func (d doctor) checkDriver(p probe, c plugin.Config) []Check {
	kernel := d.host.kernelDriver()
	paths, versions := d.host.driverLibraries("/run/nvidia/driver", c.ContainerDriverRoot, c.DriverRoot, "/")
	works := len(p.gpus()) > 0 // then so does the library, wherever it is
	switch {
	case kernel == "" && len(d.host.pciGPUs()) == 0:
		return []Check{{Status: CheckInfo, Found: "not loaded, and no GPU that would need it"}}
	case kernel == "":
		return []Check{{
			Status: CheckFail, Found: "the kernel module nvidia is not loaded",
			Fix: "install the NVIDIA driver, or load it (modprobe nvidia) and read the kernel log (dmesg) if that fails",
		}}
	case works || slices.Contains(versions, kernel):
		found := "kernel module " + kernel
		if i := slices.Index(versions, kernel); i >= 0 {
			found += ", " + paths[i] + " the same"
		}
		return []Check{{Status: CheckOK, Found: found}}
	case len(versions) == 0:
		c := Check{
			Status: CheckWarn, Found: "kernel module " + kernel + ", but libnvidia-ml.so.1 is not in the usual places",
			Fix: "install the driver's libraries of the same version; they come with nvidia-smi",
		}
		if d.inside {
			c.Fix = "start this container with the NVIDIA runtime and NVIDIA_VISIBLE_DEVICES=all"
		}
		return []Check{c}
	default:
		return []Check{{
			Status: CheckFail, Found: fmt.Sprintf("kernel module %s, but %s is %s", kernel, paths[0], versions[0]),
			Fix: "drain and reboot the node: the driver was updated while its kernel module was loaded",
		}}
	}
}

// pciGPU is an NVIDIA display controller on the PCI bus.
type pciGPU struct {
	id     string // 0000:1b:00.0
	driver string // nvidia, vfio-pci, nouveau; empty if none has it
}

func (h host) pciGPUs() (gpus []pciGPU) {
	for _, dir := range h.glob("/sys/bus/pci/devices/*") {
		class := h.read(dir + "/class")
		if h.read(dir+"/vendor") != "0x10de" || !strings.HasPrefix(class, "0x0300") && !strings.HasPrefix(class, "0x0302") {
			continue
		}
		g := pciGPU{id: busID(filepath.Base(dir))}
		if link, err := os.Readlink(h.path(dir + "/driver")); err == nil {
			g.driver = filepath.Base(link)
		}
		gpus = append(gpus, g)
	}
	return gpus
}

// busID writes a PCI bus id as the kernel does: the driver has 8 digits for the domain, the kernel at
// least 4.
func busID(id string) string {
	domain, rest, found := strings.Cut(strings.ToLower(id), ":")
	n, err := strconv.ParseUint(domain, 16, 32)
	if !found || err != nil {
		return id
	}
	return fmt.Sprintf("%04x:%s", n, rest)
}

func (d doctor) checkGPUs(p probe) []Check {
	if !d.host.exists("/sys/bus/pci/devices") {
		return []Check{{Status: CheckInfo, Found: "not known: there is no " + d.host.path("/sys/bus/pci/devices")}}
	}
	gpus, listed := d.host.pciGPUs(), map[string]bool{}
	for _, g := range p.gpus() {
		listed[busID(g.PCI)] = true
	}
	var ours, unlisted, idle, nouveau, passed []string
	for _, g := range gpus {
		switch g.driver {
		case "nvidia":
			if ours = append(ours, g.id); len(listed) > 0 && !listed[g.id] {
				unlisted = append(unlisted, g.id)
			}
		case "nouveau":
			nouveau = append(nouveau, g.id)
		case "":
			idle = append(idle, g.id)
		default:
			passed = append(passed, g.id+" ("+g.driver+")")
		}
	}
	head := Check{Status: CheckOK, Found: plural(len(gpus), "GPU") + " on the PCI bus"}
	bad := CheckWarn // as long as there is another that can be used
	switch {
	case len(gpus) == 0 && len(listed) > 0: // a platform device, or a sysfs that is not the node's
		head.Status = CheckInfo
		head.Found = "none on the PCI bus, but DCGM lists " + fmt.Sprint(len(listed))
	case len(gpus) == 0:
		head.Status, head.Found = CheckFail, "none: the PCI bus has no GPU of NVIDIA"
		head.Fix = "run the agent on GPU nodes only; for a virtual machine, pass a GPU through"
	case len(ours) == 0:
		bad, head.Status = CheckFail, CheckFail
		head.Found += ", none bound to the driver nvidia"
		head.Fix = "bind one to nvidia; see what follows"
	default:
		head.Found += fmt.Sprintf(", %d bound to the driver nvidia", len(ours))
		if len(listed) > 0 {
			head.Found += fmt.Sprintf(", %d listed by DCGM", len(listed))
		}
	}
	checks := []Check{head}
	add := func(status CheckStatus, ids []string, what, fix string) {
		if len(ids) > 0 {
			checks = append(checks, Check{Status: status, Found: what + ": " + strings.Join(ids, ", "), Fix: fix})
		}
	}
	add(bad, idle, "no driver has", "load the driver (modprobe nvidia), then look for NVRM in the kernel log (dmesg)")
	add(bad, nouveau, "the driver nouveau has", "install the NVIDIA driver, blacklist nouveau and reboot")
	add(CheckInfo, passed, "left to another driver", "")
	add(CheckWarn, unlisted, "bound to nvidia, but not listed by DCGM",
		"look for NVRM and Xid in the kernel log (dmesg), then reset the GPU or reboot; in a container, set NVIDIA_VISIBLE_DEVICES=all")
	add(CheckWarn, p.lost(), "listed by DCGM, but not within reach", "drain the node, then reset the GPU (nvidia-smi --gpu-reset) or reboot")
	return checks
}

// majorNVIDIA is the major number of /dev/nvidiactl and /dev/nvidia<N>; the kernel's list of devices
// reserves it.
const majorNVIDIA = 195

func (d doctor) checkNodes(p probe) []Check {
	if d.host.kernelDriver() == "" {
		return []Check{{Status: CheckInfo, Found: "none without the driver"}}
	}
	type node struct {
		path  string
		minor int // -1: the major is not fixed
	}
	nodes := []node{{"/dev/nvidiactl", 255}, {"/dev/nvidia-uvm", -1}}
	for _, file := range d.host.glob("/proc/driver/nvidia/gpus/*/information") {
		for line := range strings.Lines(d.host.read(file)) {
			if key, value, _ := strings.Cut(line, ":"); key == "Device Minor" {
				if n, err := strconv.Atoi(strings.TrimSpace(value)); err == nil {
					nodes = append(nodes, node{fmt.Sprint("/dev/nvidia", n), n})
				}
			}
		}
	}
	var there, missing, unlinked []string
	for _, n := range nodes {
		link := fmt.Sprintf("/dev/char/%d:%d", majorNVIDIA, n.minor)
		switch {
		case !d.host.exists(n.path):
			missing = append(missing, n.path)
		default:
			there = append(there, n.path)
			if n.minor >= 0 && !d.host.exists(link) {
				unlinked = append(unlinked, link)
			}
		}
	}
	checks := []Check{{Status: CheckOK, Found: strings.Join(there, ", ")}}
	if len(missing) > 0 {
		c := Check{
			Status: CheckWarn, Found: "missing: " + strings.Join(missing, ", "),
			Fix: "run nvidia-smi and nvidia-modprobe -u as root on the node; in a container, set NVIDIA_VISIBLE_DEVICES=all",
		}
		if len(p.gpus()) == 0 { // the container toolkit makes nodes, but DCGM needs them as well
			c.Status = CheckFail
		}
		checks = []Check{c}
	}
	if len(unlinked) > 0 && !d.inside {
		checks = append(checks, Check{
			Status: CheckWarn,
			Found:  "no " + strings.Join(unlinked, ", ") + ": running containers lose their GPUs at a systemctl daemon-reload",
			Fix:    "nvidia-ctk system create-dev-char-symlinks --create-all",
		})
	}
	return checks
}
