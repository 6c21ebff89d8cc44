package operator

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
)

// isDriverFile reports whether a path is a file of the driver, such as /dev/nvidia0, /dev/nvidiactl or /dev/nvidia-uvm.
// With nv_cap_enable_devfs=0 the driver's capabilities are in /proc, and files open there keep it in use too.
func isDriverFile(path string) bool {
	return strings.HasPrefix(path, "/dev/nvidia") || strings.HasPrefix(path, "/proc/driver/nvidia")
}

// driverFiles returns the files of the driver that a process has open or mapped, each once. proc is the process's
// directory in /proc. One such file prevents a GPU reset and the unloading of the driver.
func driverFiles(proc string) ([]string, error) {
	fds, err := os.ReadDir(filepath.Join(proc, "fd"))
	if err != nil {
		return nil, err
	}
	var open []string
	for _, fd := range fds {
		target, err := os.Readlink(filepath.Join(proc, "fd", fd.Name()))
		switch {
		case errors.Is(err, fs.ErrNotExist): // closed meanwhile, like the descriptor of the directory itself
		case err != nil:
			return nil, err
		case isDriverFile(target):
			open = append(open, target)
		}
	}
	maps, err := os.ReadFile(filepath.Join(proc, "maps"))
	if err != nil {
		return nil, err
	}
	for line := range strings.Lines(string(maps)) { // the path is the last column (proc_pid_maps(5))
		if i := strings.IndexByte(line, '/'); i >= 0 && isDriverFile(line[i:]) {
			open = append(open, strings.TrimSpace(line[i:]))
		}
	}
	slices.Sort(open)
	return slices.Compact(open), nil
}
