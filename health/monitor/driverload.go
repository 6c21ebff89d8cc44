package monitor

import (
	"os"
	"strconv"
	"syscall"
)

// DriverLoad identifies the load of NVIDIA's kernel module that is in force, "" if none is. Within a boot another load has
// another identity: the inode number of the module's directory in sysfs, which the kernel makes anew with each load and
// numbers upwards (Linux, fs/kernfs/dir.c: __kernfs_new_node). That was read and not tried with NVIDIA's module; if the number
// stayed, a reload would not be noticed, which is the safe way to be wrong.
func DriverLoad() string { return inodeOf("/sys/module/nvidia") }

func inodeOf(path string) string {
	info, err := os.Stat(path)
	if err != nil {
		return ""
	}
	stat, ok := info.Sys().(*syscall.Stat_t)
	if !ok {
		return ""
	}
	return strconv.FormatUint(stat.Ino, 10)
}
