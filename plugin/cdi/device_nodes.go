package cdi

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"path"
	"slices"
	"strconv"
	"strings"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/health/deviceref"
)

// Host locates device nodes and driver files. The roots come from the configuration.
type Host struct {
	FS                  fs.FS  // the agent's view of the file system, from its root on
	DriverRoot          string // where the driver is installed on the host
	ContainerDriverRoot string // the same directory in the agent's view; empty: DriverRoot
	DevRoot             string // the parent of /dev on the host; empty: DriverRoot, as in NVIDIA's plugin
}

// driverRoot returns the driver's root in the agent's view.
func (h Host) driverRoot() string { return cmp.Or(h.ContainerDriverRoot, h.DriverRoot, "/") }

// HostPath returns the path of a device node on the host.
func (h Host) HostPath(node string) string { return path.Join(h.devRoot(), node) }

func (h Host) devRoot() string { return cmp.Or(h.DevRoot, h.DriverRoot, "/") }

// driverFS returns the file system below the driver's root.
func (h Host) driverFS() (fs.FS, error) { return fs.Sub(h.FS, relative(h.driverRoot())) }

// ControlNodes returns the device nodes that every container with a GPU needs (NVIDIA/libnvidia-container), in the order of NVIDIA's
// plugin. It leaves out nodes that the host lacks.
func (h Host) ControlNodes() []string {
	all := []string{"/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia-uvm-tools", "/dev/nvidia-modeset"}
	return slices.DeleteFunc(all, func(node string) bool { return !h.hasNode(node) })
}

// hasNode reports whether a device node exists.
func (h Host) hasNode(node string) bool { return exists(h.FS, path.Join(h.visibleDevRoot(), node)) }

// visibleDevRoot returns the device root in the agent's view or, if the agent does not see that, the parent of its own /dev.
func (h Host) visibleDevRoot() string {
	root := h.devRoot()
	if root == cmp.Or(h.DriverRoot, "/") {
		root = h.driverRoot()
	}
	if !exists(h.FS, path.Join(root, "dev")) {
		root = "/"
	}
	return root
}

func exists(fsys fs.FS, name string) bool {
	_, err := fs.Stat(fsys, relative(name))
	return err == nil
}

// relative converts an absolute path to one that fs.FS accepts.
func relative(p string) string { return cmp.Or(strings.TrimPrefix(path.Clean(p), "/"), ".") }

// DeviceNodes returns the device nodes of a device: /dev/nvidia<minor>, and for a MIG device the nodes of its two
// capabilities.
func (h Host) DeviceNodes(d *health.Device) ([]string, error) {
	minor, err := h.minor(d)
	if err != nil {
		return nil, err
	}
	nodes := []string{fmt.Sprintf("/dev/nvidia%d", minor)}
	if d.Kind != health.KindMIG {
		return nodes, nil
	}
	capabilities, err := h.migCapabilities(minor, d.GI, d.CI)
	return append(nodes, capabilities...), err
}

// minor returns the number in /dev/nvidia<minor>. It asks the driver if the source does not report it.
func (h Host) minor(d *health.Device) (int, error) {
	if d.Minor >= 0 {
		return d.Minor, nil
	}
	address, ok := deviceref.ParsePCI(d.PCI)
	if !ok {
		return 0, errors.New("unknown minor number and PCI bus ID")
	}
	// NVIDIA driver README, "the /proc file system interface".
	file := "/proc/driver/nvidia/gpus/" + address.String() + "/information"
	text, err := h.read(file)
	if err != nil {
		return 0, fmt.Errorf("unknown minor number: %w", err)
	}
	for line := range strings.Lines(text) {
		if key, value, _ := strings.Cut(line, ":"); strings.TrimSpace(key) == "Device Minor" {
			if n, ok := deviceref.ParseDigits(strings.TrimSpace(value)); ok {
				return n, nil
			}
		}
	}
	return 0, fmt.Errorf("unknown minor number: %s has no Device Minor", file)
}

// read returns a file. Its error names the absolute path, which an error of fs.FS does not.
func (h Host) read(file string) (string, error) {
	text, err := fs.ReadFile(h.FS, relative(file))
	if e, ok := errors.AsType[*fs.PathError](err); ok {
		err = fmt.Errorf("%s: %w", file, e.Err)
	}
	return string(text), err
}

// migMinors maps capabilities to the nodes in /dev/nvidia-caps, one per line: "gpu0/gi7/access 66" (NVIDIA MIG user
// guide, "Device Nodes and Capabilities").
const migMinors = "/proc/driver/nvidia-caps/mig-minors"

// migCapabilities returns the nodes of a GPU instance and of a compute instance in it. A container needs both.
func (h Host) migCapabilities(minor, gi, ci int) ([]string, error) {
	text, err := h.read(migMinors)
	if err != nil {
		return nil, fmt.Errorf("unknown MIG capability nodes: %w", err)
	}
	var nodes []string
	for _, name := range []string{fmt.Sprintf("gpu%d/gi%d/access", minor, gi), fmt.Sprintf("gpu%d/gi%d/ci%d/access", minor, gi, ci)} {
		n, ok := capability(text, name)
		if !ok {
			return nil, fmt.Errorf("unknown MIG capability node: %s has no %s", migMinors, name)
		}
		nodes = append(nodes, "/dev/nvidia-caps/nvidia-cap"+strconv.Itoa(n))
	}
	return nodes, nil
}

func capability(text, name string) (minor int, ok bool) {
	for line := range strings.Lines(text) {
		if key, value, _ := strings.Cut(line, " "); key == name {
			return deviceref.ParseDigits(strings.TrimSpace(value))
		}
	}
	return 0, false
}
