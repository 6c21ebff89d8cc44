// Package pci lists the GPUs on a node's PCI bus, whether a driver uses them or not.
package pci

import (
	"context"
	"fmt"
	"io/fs"
	"path"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/health/wait"
)

// GPU is an NVIDIA GPU on the PCI bus.
type GPU struct {
	ID      string // as the kernel writes it: 0000:1b:00.0
	Driver  string // nvidia, vfio-pci, nouveau; empty if it is unbound
	Virtual bool   // a virtual function, which belongs to a virtual machine
}

// The vendor NVIDIA, and the classes of VGA-compatible and 3D controllers. Others of the vendor are NVSwitches, and the audio and USB
// functions of a GPU.
const (
	nvidia  = "0x10de"
	classes = "0x0300 0x0302"
)

// devicesDir is the directory of sysfs with the devices on the PCI bus.
const devicesDir = "sys/bus/pci/devices"

// GPUs returns the GPUs on the PCI bus of a node with a root directory. A device that is removed meanwhile is none. Reading these files
// does not reach the devices, so that it is quick also while a GPU hangs.
func GPUs(root fs.FS) ([]GPU, error) {
	entries, err := fs.ReadDir(root, devicesDir)
	if err != nil {
		return nil, err
	}
	var gpus []GPU
	for _, e := range entries {
		dir := path.Join(devicesDir, e.Name())
		class := read(root, dir+"/class")
		if read(root, dir+"/vendor") != nvidia || len(class) < 6 || !strings.Contains(classes, class[:6]) {
			continue
		}
		g := GPU{ID: ID(e.Name())}
		if link, err := fs.ReadLink(root, dir+"/driver"); err == nil {
			g.Driver = path.Base(link)
		}
		_, err := fs.ReadLink(root, dir+"/physfn")
		g.Virtual = err == nil
		gpus = append(gpus, g)
	}
	return gpus, nil
}

func read(root fs.FS, name string) string {
	text, err := fs.ReadFile(root, name)
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(text))
}

// ID converts a PCI bus ID to the kernel's format: its domain has at least 4 digits, NVIDIA's has 8.
func ID(id string) string {
	domain, rest, found := strings.Cut(strings.ToLower(id), ":")
	n, err := strconv.ParseUint(domain, 16, 32)
	if !found || err != nil {
		return id
	}
	return fmt.Sprintf("%04x:%s", n, rest)
}

// ForContainers returns the IDs of the GPUs that the node's own driver is to use. It omits virtual functions, and GPUs that are bound to a
// driver for virtual machines: others use them on purpose.
func ForContainers(gpus []GPU) (ids []string) {
	for _, g := range gpus {
		if !g.Virtual && !strings.Contains(g.Driver, "vfio") && g.Driver != "pci-stub" {
			ids = append(ids, g.ID)
		}
	}
	return ids
}

// interval is how often the bus is read. GPUs are rarely added to a running node.
const interval = time.Minute

// Follow stores the IDs of the GPUs for containers on the PCI bus until ctx ends; nil while they are unknown.
func Follow(ctx context.Context, root fs.FS, latest *health.Latest[[]string]) {
	tick := time.NewTicker(interval)
	defer tick.Stop()
	defer latest.Store(nil)
	for {
		gpus, err := GPUs(root)
		switch ids, last := ForContainers(gpus), latest.Load(); {
		case err != nil:
			latest.Store(nil)
		case last == nil || !slices.Equal(*last, ids):
			latest.Store(&ids)
		}
		if !wait.For(ctx, tick.C) {
			return
		}
	}
}
