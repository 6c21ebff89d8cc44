package plugin

import (
	"fmt"
	"io/fs"
	"maps"
	"path"
	"slices"

	cdispecs "tags.cncf.io/container-device-interface/specs-go"
)

// cdiVersion is the oldest version of CDI that has all that is used here: device names that begin with a
// digit and hostPath of a device node came with 0.5.0 (its SPEC.md).
const cdiVersion = "0.5.0"

// newCDISpec writes down what a container needs for each device: the device nodes, and the files of the
// driver, which are the same for all. There is no device "all": with it a container could have GPUs that
// nobody allocated to it. A device whose nodes are not known is left out and named in a warning: one broken
// GPU must not take the others with it. Allocate refuses it.
//
// The files are looked for here, and not by NVIDIA's library for it (nvidia-container-toolkit/pkg/nvcdi), which
// would be the better judge: v1.20.1 of it does not compile without cgo, as this agent does, and it opens NVML
// in the process that DCGM is in already. Whoever wants its judgement leaves generate off and
// uses the spec that the toolkit itself keeps.
func newCDISpec(cfg *Config, h host, driver string, devices []Device) (spec *cdispecs.Spec, warnings []string, err error) {
	root, err := fs.Sub(h.root, below(cfg.driverRootHere()))
	if err != nil {
		return nil, nil, err
	}
	files, err := findDriverFiles(root, driver)
	if err != nil {
		return nil, nil, fmt.Errorf("%w (plugin.driverRoot %s, seen by the agent at %s)", err, cfg.DriverRoot, cfg.driverRootHere())
	}
	// NVIDIA_VISIBLE_DEVICES of the image must not add GPUs where NVIDIA's runtime is used as well.
	common := cdispecs.ContainerEdits{Env: []string{envDevices + "=" + noDevices}}
	for _, node := range h.controlNodes() {
		common.DeviceNodes = append(common.DeviceNodes, cfg.cdiNode(node))
	}
	for _, file := range slices.Concat(files.libraries, files.others) {
		common.Mounts = append(common.Mounts, cfg.cdiMount(file, file))
	}
	for _, file := range files.sockets {
		m := cfg.cdiMount(file, file)
		m.Options = append(m.Options, "noexec")
		common.Mounts = append(common.Mounts, m)
	}
	cfg.linkLibraries(&common, files)
	spec = &cdispecs.Spec{Version: cdiVersion, Kind: cfg.cdiKind(), ContainerEdits: common}
	without := map[string][]string{} // devices by what is wrong
	for _, d := range devices {
		nodes, err := h.deviceNodes(&d.State.Device)
		if err != nil {
			without[err.Error()] = append(without[err.Error()], string(d.State.Device.ID))
			continue
		}
		var edits cdispecs.ContainerEdits
		for _, node := range nodes {
			edits.DeviceNodes = append(edits.DeviceNodes, cfg.cdiNode(node))
		}
		spec.Devices = append(spec.Devices, cdispecs.Device{Name: cfg.idOf(d), ContainerEdits: edits})
	}
	for _, why := range slices.Sorted(maps.Keys(without)) {
		warnings = append(warnings, fmt.Sprintf("not in the CDI spec: %s: %s", some(without[why]), why))
	}
	return spec, warnings, nil
}

// linkLibraries makes libcuda.so.1 and the like lead to the libraries. The hooks of the container toolkit do it
// whatever distribution the image is of. Without them the links are mounted as further copies of the
// library, which serves images that look for libraries where the host does.
func (c *Config) linkLibraries(edits *cdispecs.ContainerEdits, files *driverFiles) {
	links := slices.Sorted(maps.Keys(files.links))
	if c.CDI.HookPath == "" {
		for _, link := range links {
			edits.Mounts = append(edits.Mounts, c.cdiMount(files.links[link], link))
		}
		return
	}
	var create, update []string
	for _, link := range links {
		create = append(create, "--link", path.Base(files.links[link])+"::"+link)
	}
	for _, dir := range libraryDirsOf(files) {
		update = append(update, "--folder", dir)
	}
	if len(create) > 0 {
		edits.Hooks = append(edits.Hooks, c.cdiHook("create-symlinks", create))
	}
	edits.Hooks = append(edits.Hooks, c.cdiHook("update-ldcache", update))
}

func libraryDirsOf(files *driverFiles) []string {
	var dirs []string
	for _, f := range files.libraries {
		dirs = append(dirs, path.Dir(f))
	}
	slices.Sort(dirs)
	return slices.Compact(dirs)
}

func (c *Config) cdiHook(name string, args []string) *cdispecs.Hook {
	program := path.Base(c.CDI.HookPath)
	all := []string{program}
	if program == hookCTK {
		all = append(all, "hook")
	}
	return &cdispecs.Hook{HookName: "createContainer", Path: c.CDI.HookPath, Args: slices.Concat(all, []string{name}, args)}
}

func (c *Config) cdiNode(node string) *cdispecs.DeviceNode {
	n := &cdispecs.DeviceNode{Path: node}
	if on := path.Join(c.devRoot(), node); on != node {
		n.HostPath = on
	}
	return n
}

// cdiMount mounts a file of the driver root.
func (c *Config) cdiMount(file, to string) *cdispecs.Mount {
	return &cdispecs.Mount{
		HostPath: path.Join(c.DriverRoot, file), ContainerPath: to,
		Options: []string{"ro", "nosuid", "nodev", "bind"},
	}
}
