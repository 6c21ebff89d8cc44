package cdi

import (
	"fmt"
	"io/fs"
	"path"
	"slices"
	"strings"
)

// driverFiles are the driver's user-space files that a container needs. Paths are absolute, below the driver's root.
type driverFiles struct {
	libraries []string          // by path
	links     map[string]string // libraries by link: libcuda.so.580.95.05 by libcuda.so.1
	others    []string          // programs, firmware and files for graphics
	sockets   []string
}

// libraryDirs returns where distributions, driver containers and Google's installer put the driver's libraries.
func libraryDirs() []string {
	return []string{
		"usr/lib/x86_64-linux-gnu", "usr/lib/aarch64-linux-gnu", "usr/lib64", "lib64", "usr/lib",
		"usr/lib/x86_64-linux-gnu/nvidia/current", "usr/lib/aarch64-linux-gnu/nvidia/current", "usr/lib64/nvidia",
		"lib/x86_64-linux-gnu", "lib/aarch64-linux-gnu", "lib",
	}
}

// otherFiles returns patterns for the rest of what nvidia-ctk cdi generate finds on a machine with the full driver
// (NVIDIA/nvidia-container-toolkit#434, #1720).
func otherFiles(version string) []string {
	files := []string{
		"lib/firmware/nvidia/" + version + "/gsp*.bin",
		"etc/vulkan/icd.d/nvidia_icd.json", "usr/share/vulkan/icd.d/nvidia_icd.json",
		"etc/vulkan/implicit_layer.d/nvidia_layers.json", "usr/share/vulkan/implicit_layer.d/nvidia_layers.json",
		"usr/share/egl/egl_external_platform.d/*_nvidia_*.json", "usr/share/glvnd/egl_vendor.d/10_nvidia.json",
		"usr/share/nvidia/nvoptix.bin",
	}
	for _, program := range []string{
		"nvidia-smi", "nvidia-debugdump", "nvidia-persistenced", "nvidia-cuda-mps-control",
		"nvidia-cuda-mps-server",
	} {
		files = append(files, "usr/bin/"+program, "bin/"+program)
	}
	return files
}

// sockets returns the sockets of the driver's services that exist.
func sockets(root fs.FS) []string {
	all := []string{"/run/nvidia-persistenced/socket", "/run/nvidia-fabricmanager/socket", "/tmp/nvidia-mps"}
	return slices.DeleteFunc(all, func(name string) bool { return !exists(root, name) })
}

// driverSockets returns the sockets below the driver's root.
func (h Host) driverSockets() []string {
	root, err := h.driverFS()
	if err != nil {
		return nil
	}
	return sockets(root)
}

// findDriverFiles searches a driver root for the driver of that version. As in the container toolkit, a library belongs
// to the driver if its name ends in the version.
func findDriverFiles(root fs.FS, version string) (*driverFiles, error) {
	dir, err := findLibraryDir(root, version)
	if err != nil {
		return nil, err
	}
	f := &driverFiles{links: map[string]string{}, sockets: sockets(root)}
	for _, d := range []string{dir, dir + "/vdpau"} {
		if err := f.addLibraries(root, d, version); err != nil {
			return nil, err
		}
	}
	for _, pattern := range otherFiles(version) {
		found, err := fs.Glob(root, pattern)
		if err != nil {
			return nil, fmt.Errorf("driver version %q: %w", version, err)
		}
		for _, name := range found {
			// On most systems /bin links to /usr/bin.
			if !slices.Contains(f.others, "/usr/"+name) {
				f.others = append(f.others, "/"+name)
			}
		}
	}
	return f, nil
}

// findLibraryDir returns the directory with libcuda.so.<version>.
func findLibraryDir(root fs.FS, version string) (string, error) {
	var others []string
	for _, dir := range libraryDirs() {
		if _, err := fs.Stat(root, dir+"/libcuda.so."+version); err == nil {
			return dir, nil
		}
		if found, err := fs.Glob(root, dir+"/libcuda.so.[0-9]*.[0-9]*"); err == nil {
			others = append(others, found...)
		}
	}
	if len(others) > 0 {
		return "", fmt.Errorf("expected libcuda.so.%s, found only /%s", version, strings.Join(others, ", /"))
	}
	return "", fmt.Errorf("libcuda.so.%s not found in the usual directories, such as /usr/lib64", version)
}

// addLibraries adds the libraries of a directory and the links to them.
func (f *driverFiles) addLibraries(root fs.FS, dir, version string) error {
	entries, err := fs.ReadDir(root, dir)
	if err != nil {
		if dir = path.Base(dir); dir == "vdpau" {
			return nil // optional
		}
		return err
	}
	links := map[string]string{}
	for _, e := range entries {
		name := e.Name()
		switch {
		case !strings.HasPrefix(name, "lib") || !strings.Contains(name, ".so"):
		case strings.HasSuffix(name, ".so."+version):
			f.libraries = append(f.libraries, "/"+dir+"/"+name)
		case e.Type()&fs.ModeSymlink != 0:
			if to, err := fs.ReadLink(root, dir+"/"+name); err == nil && path.Base(to) == strings.TrimPrefix(to, "./") {
				links[name] = path.Base(to)
			}
		}
	}
	for name, to := range links {
		// libcuda.so links to libcuda.so.1, which links to the library.
		for range len(links) {
			next, ok := links[to]
			if !ok {
				break
			}
			to = next
		}
		if slices.Contains(f.libraries, "/"+dir+"/"+to) {
			f.links["/"+dir+"/"+name] = "/" + dir + "/" + to
		}
	}
	return nil
}
