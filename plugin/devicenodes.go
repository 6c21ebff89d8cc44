package plugin

import (
	"bufio"
	"bytes"
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

// host is the file system as the agent sees it, from its root on: /dev and /proc for device nodes, and
// the driver's files. Tests give it another.
type host struct {
	root fs.FS
	cfg  *Config
}

// controlNodes are the device nodes that every container with a GPU needs (NVIDIA/libnvidia-container; in
// this order in NVIDIA's plugin). Those that the host lacks are left out.
func (h host) controlNodes() []string {
	all := []string{"/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia-uvm-tools", "/dev/nvidia-modeset"}
	return slices.DeleteFunc(all, func(node string) bool { return !h.has(node) })
}

// has reports whether there is such a device node: below the device root, or in our own /dev if we do not see
// that.
func (h host) has(node string) bool {
	root := h.cfg.devRoot()
	if root == cmp.Or(h.cfg.DriverRoot, "/") {
		root = h.cfg.driverRootHere()
	}
	if _, err := fs.Stat(h.root, below(path.Join(root, "dev"))); err != nil {
		root = "/"
	}
	_, err := fs.Stat(h.root, below(path.Join(root, node)))
	return err == nil
}

// below turns an absolute path into one of an fs.FS.
func below(p string) string {
	if p = strings.TrimPrefix(path.Clean(p), "/"); p == "" {
		return "."
	}
	return p
}

// deviceNodes are the device nodes of one device: /dev/nvidia<minor>, and for a MIG device those of its two
// capabilities.
func (h host) deviceNodes(d *health.Device) ([]string, error) {
	minor, err := h.minor(d)
	if err != nil {
		return nil, err
	}
	nodes := []string{fmt.Sprintf("/dev/nvidia%d", minor)}
	if d.Kind != health.KindMIG {
		return nodes, nil
	}
	caps, err := h.migCapabilities(minor, d.GI, d.CI)
	return append(nodes, caps...), err
}

// minor is the number in /dev/nvidia<minor>, from the driver itself if the source does not know it.
func (h host) minor(d *health.Device) (int, error) {
	if d.Minor >= 0 {
		return d.Minor, nil
	}
	address, ok := deviceref.ParsePCI(d.PCI)
	if !ok {
		return 0, errors.New("its minor number is not known, and neither is its PCI bus id")
	}
	// NVIDIA driver README, "the /proc file system interface".
	file := "/proc/driver/nvidia/gpus/" + address.String() + "/information"
	text, err := fs.ReadFile(h.root, below(file))
	if err != nil {
		return 0, fmt.Errorf("its minor number is not known: %s: %w", file, cause(err))
	}
	for line := range strings.Lines(string(text)) {
		if key, value, _ := strings.Cut(line, ":"); strings.TrimSpace(key) == "Device Minor" {
			if n, ok := deviceref.ParseDigits(strings.TrimSpace(value)); ok {
				return n, nil
			}
		}
	}
	return 0, fmt.Errorf("its minor number is not known: %s has no Device Minor", file)
}

// cause is an error without the path, which in an fs.FS has lost its slash.
func cause(err error) error {
	if e, ok := errors.AsType[*fs.PathError](err); ok {
		return e.Err
	}
	return err
}

// migMinors says which node under /dev/nvidia-caps stands for which capability (NVIDIA MIG user guide, "Device
// Nodes and Capabilities").
const migMinors = "/proc/driver/nvidia-caps/mig-minors"

// migCapabilities are the nodes of a GPU instance and of a compute instance in it. A container needs both.
func (h host) migCapabilities(minor, gi, ci int) ([]string, error) {
	text, err := fs.ReadFile(h.root, below(migMinors))
	if err != nil {
		return nil, fmt.Errorf("the nodes of its MIG capabilities are not known: %s: %w", migMinors, cause(err))
	}
	var nodes []string
	for _, name := range []string{fmt.Sprintf("gpu%d/gi%d/access", minor, gi), fmt.Sprintf("gpu%d/gi%d/ci%d/access", minor, gi, ci)} {
		n, ok := capability(text, name)
		if !ok {
			return nil, fmt.Errorf("the node of its MIG capability is not known: %s has no %s", migMinors, name)
		}
		nodes = append(nodes, "/dev/nvidia-caps/nvidia-cap"+strconv.Itoa(n))
	}
	return nodes, nil
}

// capability finds the line "gpu0/gi7/access 66".
func capability(text []byte, name string) (minor int, ok bool) {
	for lines := bufio.NewScanner(bytes.NewReader(text)); lines.Scan(); {
		if key, value, _ := strings.Cut(lines.Text(), " "); key == name {
			return deviceref.ParseDigits(strings.TrimSpace(value))
		}
	}
	return 0, false
}
