package plugin

import (
	"fmt"
	"io/fs"
	"path"
	"slices"
	"strings"
)

// driverFiles are the files of the driver's user side that a container needs. All paths are absolute, below
// the driver's root.
type driverFiles struct {
	libraries []string          // by path
	links     map[string]string // link to library: libcuda.so.1 to libcuda.so.580.95.05
	others    []string          // programs, firmware and what graphics need
	sockets   []string
}

// Where distributions, driver containers and Google's installer put the driver's libraries.
func libraryDirs() []string {
	return []string{
		"usr/lib/x86_64-linux-gnu", "usr/lib/aarch64-linux-gnu", "usr/lib64", "lib64", "usr/lib",
		"usr/lib/x86_64-linux-gnu/nvidia/current", "usr/lib/aarch64-linux-gnu/nvidia/current", "usr/lib64/nvidia",
		"lib/x86_64-linux-gnu", "lib/aarch64-linux-gnu", "lib",
	}
}

// otherFiles are the rest: what nvidia-ctk cdi generate finds on a machine with the full driver
// (NVIDIA/nvidia-container-toolkit#434, #1720). Those that the host lacks are left out.
func otherFiles(version string) []string {
	files := []string{
		"lib/firmware/nvidia/" + version + "/gsp*.bin",
		"etc/vulkan/icd.d/nvidia_icd.json", "usr/share/vulkan/icd.d/nvidia_icd.json",
		"etc/vulkan/implicit_layer.d/nvidia_layers.json", "usr/share/vulkan/implicit_layer.d/nvidia_layers.json",
		"usr/share/egl/egl_external_platform.d/*_nvidia_*.json", "usr/share/glvnd/egl_vendor.d/10_nvidia.json",
		"usr/share/nvidia/nvoptix.bin",
	}
	for _, program := range []string{"nvidia-smi", "nvidia-debugdump", "nvidia-persistenced", "nvidia-cuda-mps-control", "nvidia-cuda-mps-server"} {
		files = append(files, "usr/bin/"+program, "bin/"+program)
	}
	return files
}

func driverSockets() []string {
	return []string{"run/nvidia-persistenced/socket", "run/nvidia-fabricmanager/socket", "tmp/nvidia-mps"}
}

// findDriverFiles looks for the driver of that version below a driver root. As with the container toolkit, a
// library belongs to it if its name ends in the version.
func findDriverFiles(root fs.FS, version string) (*driverFiles, error) {
	dir, err := findLibraryDir(root, version)
	if err != nil {
		return nil, err
	}
	f := &driverFiles{links: map[string]string{}}
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
			// On most systems /bin is a link to /usr/bin.
			if !slices.Contains(f.others, "/usr/"+name) {
				f.others = append(f.others, "/"+name)
			}
		}
	}
	for _, name := range driverSockets() {
		if _, err := fs.Stat(root, name); err == nil {
			f.sockets = append(f.sockets, "/"+name)
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
		return "", fmt.Errorf("the driver is version %s, and its root has only /%s", version, strings.Join(others, ", /"))
	}
	return "", fmt.Errorf("libcuda.so.%s is in none of the usual directories, such as /usr/lib64", version)
}

// addLibraries adds the libraries of a directory and the links to them.
func (f *driverFiles) addLibraries(root fs.FS, dir, version string) error {
	entries, err := fs.ReadDir(root, dir)
	if err != nil {
		if dir = path.Base(dir); dir == "vdpau" {
			return nil // an optional part
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
		// libcuda.so leads to libcuda.so.1, and that to the library.
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
