package operator

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
)

// isDriver tells of a file of the driver: /dev/nvidia0, /dev/nvidiactl, /dev/nvidia-uvm and so on. Where the driver has
// its capabilities in /proc (nv_cap_enable_devfs=0), what is open there holds it too.
func isDriver(path string) bool {
	return strings.HasPrefix(path, "/dev/nvidia") || strings.HasPrefix(path, "/proc/driver/nvidia")
}

// driverFiles returns the files of the driver that a process has open or mapped, each once, by its directory in /proc:
// one of them is enough to keep a GPU from being reset and the driver from being unloaded.
func driverFiles(proc string) ([]string, error) {
	fds, err := os.ReadDir(filepath.Join(proc, "fd"))
	if err != nil {
		return nil, err
	}
	var open []string
	for _, fd := range fds {
		target, err := os.Readlink(filepath.Join(proc, "fd", fd.Name()))
		switch {
		case errors.Is(err, fs.ErrNotExist): // closed since, as that of the directory itself
		case err != nil:
			return nil, err
		case isDriver(target):
			open = append(open, target)
		}
	}
	maps, err := os.ReadFile(filepath.Join(proc, "maps"))
	if err != nil {
		return nil, err
	}
	for line := range strings.Lines(string(maps)) { // the path comes last (proc_pid_maps(5))
		if i := strings.IndexByte(line, '/'); i >= 0 && isDriver(line[i:]) {
			open = append(open, strings.TrimSpace(line[i:]))
		}
	}
	slices.Sort(open)
	return slices.Compact(open), nil
}
