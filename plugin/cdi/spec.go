package cdi

import (
	"fmt"
	"maps"
	"path"
	"slices"

	"tags.cncf.io/container-device-interface/specs-go"

	"github.com/gpu-node-agent/gpu-node-agent/health/grouped"
)

// specVersion is the oldest CDI version with all features used here: version 0.5.0 added device names that begin with a
// digit, and hostPath of a device node (SPEC.md of CDI).
const specVersion = "0.5.0"

// newSpec returns the spec of the devices: the device nodes of each, and the driver files, which are common to all. It
// does not declare a device "all", by which a container could use GPUs that were not allocated to it. It leaves out a
// device without known nodes and returns a warning, so that one broken GPU does not affect the others; Allocate refuses
// the device. It uses only files, so it serves where Toolkit does not: without cgo, without NVML, or without hooks.
func newSpec(in Input) (spec *specs.Spec, warnings []string, err error) {
	h := in.Host
	root, err := h.driverFS()
	if err != nil {
		return nil, nil, err
	}
	files, err := findDriverFiles(root, in.Driver)
	if err != nil {
		return nil, nil, fmt.Errorf("plugin.driverRoot %s, seen by the agent at %s: %w", h.DriverRoot, h.driverRoot(), err)
	}
	// Where NVIDIA's runtime is used as well, NVIDIA_VISIBLE_DEVICES of the image must not add GPUs.
	common := specs.ContainerEdits{Env: []string{"NVIDIA_VISIBLE_DEVICES=void"}, DeviceNodes: h.specNodes(h.ControlNodes())}
	for _, file := range slices.Concat(files.libraries, files.others) {
		common.Mounts = append(common.Mounts, h.mount(file, file))
	}
	for _, file := range files.sockets {
		m := h.mount(file, file)
		m.Options = append(m.Options, "noexec")
		common.Mounts = append(common.Mounts, m)
	}
	in.linkLibraries(&common, files)
	spec = &specs.Spec{Version: specVersion, Kind: in.Config.EffectiveKind(), ContainerEdits: common}
	var texts grouped.Texts
	for _, d := range in.Devices {
		nodes, err := h.DeviceNodes(&d.State.Device)
		if err != nil {
			addError(&texts, d, leftOut, err)
			continue
		}
		edits := specs.ContainerEdits{DeviceNodes: h.specNodes(nodes)}
		if in.limits(&d.State.Device) {
			edits.Hooks = append(edits.Hooks, in.limitsHook(d.State.Device.ID))
		}
		spec.Devices = append(spec.Devices, specs.Device{Name: d.Name, ContainerEdits: edits})
	}
	return spec, texts.NamesFirst(" "), nil
}

// leftOut is what an error does to a device that has no device nodes.
const leftOut = "left out of the CDI spec"

// addError adds a device to the text of what an error does to it.
func addError(to *grouped.Texts, d Device, effect string, err error) {
	if err != nil {
		to.Add(effect+": "+err.Error(), string(d.State.Device.ID))
	}
}

// linkLibraries makes libcuda.so.1 and other links lead to the libraries. The hooks of the container toolkit do this in
// images of any distribution. Without hooks the links are mounted as copies of the library, which serves images that
// search for libraries where the host does.
func (in Input) linkLibraries(edits *specs.ContainerEdits, files *driverFiles) {
	links := slices.Sorted(maps.Keys(files.links))
	if in.Config.HookPath == "" {
		for _, link := range links {
			edits.Mounts = append(edits.Mounts, in.Host.mount(files.links[link], link))
		}
		return
	}
	var linkArgs, folderArgs, folders []string
	for _, link := range links {
		linkArgs = append(linkArgs, "--link", path.Base(files.links[link])+"::"+link)
	}
	for _, file := range files.libraries {
		folders = append(folders, path.Dir(file))
	}
	slices.Sort(folders)
	for _, dir := range slices.Compact(folders) {
		folderArgs = append(folderArgs, "--folder", dir)
	}
	if len(linkArgs) > 0 {
		edits.Hooks = append(edits.Hooks, in.Config.hook("create-symlinks", linkArgs))
	}
	edits.Hooks = append(edits.Hooks, in.Config.hook("update-ldcache", folderArgs))
}

func (c Config) hook(name string, args []string) *specs.Hook {
	command := []string{path.Base(c.HookPath)}
	if command[0] == hookCTK {
		command = append(command, "hook")
	}
	return &specs.Hook{HookName: "createContainer", Path: c.HookPath, Args: slices.Concat(command, []string{name}, args)}
}

func (h Host) specNodes(nodes []string) (out []*specs.DeviceNode) {
	for _, node := range nodes {
		n := &specs.DeviceNode{Path: node}
		if host := h.HostPath(node); host != node {
			n.HostPath = host
		}
		out = append(out, n)
	}
	return out
}

// mount mounts a file below the driver's root.
func (h Host) mount(file, to string) *specs.Mount {
	return &specs.Mount{HostPath: path.Join(h.DriverRoot, file), ContainerPath: to, Options: []string{"ro", "nosuid", "nodev", "bind"}}
}
