package monitor

import (
	"os"
	"strconv"
	"syscall"
)

// DriverLoad identifies the loaded NVIDIA kernel module, "" if none is loaded. A reload within a boot changes it: it is the
// inode number of the module's directory in sysfs, which the kernel creates at each load and numbers upwards (Linux,
// fs/kernfs/dir.c: __kernfs_new_node). This follows from the kernel's source and was not tried with NVIDIA's module. If the
// number did not change, the agent would overlook a reload, which is the safe error.
func DriverLoad() string { return inode("/sys/module/nvidia") }

func inode(path string) string {
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
