package doctor

import (
	"fmt"
	"os"
	"strconv"
	"strings"

	"github.com/gpu-node-agent/gpu-node-agent/agent/pci"
	"github.com/gpu-node-agent/gpu-node-agent/agent/status"
)

// pciGPUs returns the GPUs on the PCI bus, none if that is unreadable.
func (h host) pciGPUs() []pci.GPU {
	gpus, err := pci.GPUs(os.DirFS(string(h)))
	if err != nil {
		return nil
	}
	return gpus
}

func (d doctor) checkGPUs(s survey) []Check {
	if !d.host.exists("/sys/bus/pci/devices") {
		return info("unknown: " + d.host.path("/sys/bus/pci/devices") + " not found")
	}
	gpus := d.host.pciGPUs()
	listed := map[string]bool{}
	for _, g := range s.gpus() {
		listed[pci.ID(g.PCI)] = true
	}
	var bound, unlisted, unbound, nouveau, otherDriver []string
	for _, g := range gpus {
		switch g.Driver {
		case "nvidia":
			if bound = append(bound, g.ID); len(listed) > 0 && !listed[g.ID] {
				unlisted = append(unlisted, g.ID)
			}
		case "nouveau":
			nouveau = append(nouveau, g.ID)
		case "":
			unbound = append(unbound, g.ID)
		default:
			otherDriver = append(otherDriver, g.ID+" ("+g.Driver+")")
		}
	}
	head := Check{Status: CheckOK, Found: status.Plural(len(gpus), "GPU") + " on the PCI bus"}
	unusable := CheckWarn // unless no GPU is usable
	switch {
	case len(gpus) == 0 && len(listed) > 0: // a platform device, or not the node's sysfs
		head.Status = CheckInfo
		head.Found = "none on the PCI bus, but DCGM lists " + fmt.Sprint(len(listed))
	case len(gpus) == 0:
		head.Status, head.Found = CheckFail, "no NVIDIA GPU on the PCI bus"
		head.Fix = "run the agent on GPU nodes only; for a virtual machine, pass a GPU through"
	case len(bound) == 0:
		unusable, head.Status = CheckFail, CheckFail
		head.Found += ", none bound to the driver nvidia"
		head.Fix = "bind one to nvidia as described below"
	default:
		head.Found += fmt.Sprintf(", %d bound to the driver nvidia", len(bound))
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
	add(unusable, unbound, "bound to no driver", "load the driver (modprobe nvidia), then look for NVRM in the kernel log (dmesg)")
	add(unusable, nouveau, "bound to the driver nouveau", "install the NVIDIA driver, blacklist nouveau and reboot")
	add(CheckInfo, otherDriver, "bound to another driver", "")
	add(CheckWarn, unlisted, "bound to nvidia, but not listed by DCGM",
		"look for NVRM and Xid in the kernel log (dmesg), then reset the GPU or reboot; in a container, set NVIDIA_VISIBLE_DEVICES=all")
	add(CheckWarn, s.unreachable(), "listed by DCGM, but unreachable", "drain the node, then reset the GPU (nvidia-smi --gpu-reset) or reboot")
	return checks
}

// majorNVIDIA is the major number of /dev/nvidiactl and /dev/nvidia<N>, which the kernel's list of devices reserves.
const majorNVIDIA = 195

// checkDeviceNodes checks that the driver's device nodes exist.
func (d doctor) checkDeviceNodes(s survey) []Check {
	if d.host.kernelDriver() == "" {
		return info("none without the driver")
	}
	type node struct {
		path  string
		minor int // -1: the major number is dynamic
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
	var present, missing, unlinked []string
	for _, n := range nodes {
		if !d.host.exists(n.path) {
			missing = append(missing, n.path)
			continue
		}
		present = append(present, n.path)
		if link := fmt.Sprintf("/dev/char/%d:%d", majorNVIDIA, n.minor); n.minor >= 0 && !d.host.exists(link) {
			unlinked = append(unlinked, link)
		}
	}
	checks := pass(strings.Join(present, ", "))
	if len(missing) > 0 {
		checks = warn("missing: "+strings.Join(missing, ", "),
			"run nvidia-smi and nvidia-modprobe -u as root on the node; in a container, set NVIDIA_VISIBLE_DEVICES=all")
		if len(s.gpus()) == 0 { // the container toolkit creates the nodes, but DCGM needs them too
			checks[0].Status = CheckFail
		}
	}
	if len(unlinked) > 0 && !d.inContainer {
		checks = append(checks, warn("no "+strings.Join(unlinked, ", ")+": systemctl daemon-reload takes the GPUs from running containers",
			"nvidia-ctk system create-dev-char-symlinks --create-all")...)
	}
	return checks
}
