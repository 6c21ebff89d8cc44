package mps

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"syscall"

	"github.com/prometheus/procfs"
	"golang.org/x/sys/unix"
)

// devShm is where the processes of MPS share memory.
const devShm = "/dev/shm"

// checkShm returns an error if dir is not the directory that the processes of MPS have at /dev/shm.
func checkShm(dir string) error {
	same, err := isSameFile(dir, devShm)
	if err == nil && !same {
		err = fmt.Errorf("%s is not the file system at %s; run mps-daemon with --mount-shm in a container, else mount --bind %[2]s %[1]s", dir,
			devShm)
	}
	return err
}

func isSameFile(a, b string) (bool, error) {
	first, err := os.Stat(a)
	if err != nil {
		return false, err
	}
	second, err := os.Stat(b)
	if err != nil {
		return false, err
	}
	return os.SameFile(first, second), nil
}

// mountShm mounts a tmpfs at dir, unless one is there, and dir at /dev/shm of this mount namespace, unless it is there. It never
// unmounts: clients may use both.
func mountShm(dir string) error {
	if host, err := isSameFile("/proc/self/ns/mnt", "/proc/1/ns/mnt"); err == nil && host && os.Getpid() != 1 {
		return errors.New("--mount-shm: would hide the /dev/shm of the node; " +
			"mount --bind " + devShm + " " + dir + " instead, and leave out the option")
	}
	mounted, err := isMountPoint(dir)
	if err != nil {
		return err
	}
	if !mounted {
		options := fmt.Sprintf("mode=1777,size=%dk", shmSize(procfs.DefaultMountPoint))
		if err := unix.Mount("shm", dir, "tmpfs", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC|unix.MS_RELATIME, options); err != nil {
			return fmt.Errorf("cannot mount a tmpfs at %s: %w; mps-daemon must be privileged", dir, err)
		}
	}
	if err := os.MkdirAll(devShm, 0o1777); err != nil {
		return err
	}
	if err := unix.Mount(dir, devShm, "", unix.MS_BIND, ""); err != nil {
		return fmt.Errorf("cannot mount %s at %s: %w", dir, devShm, err)
	}
	return nil
}

// isMountPoint reports whether another file system than the parent's is at dir.
func isMountPoint(dir string) (bool, error) {
	var devices [2]uint64
	for i, path := range []string{dir, filepath.Dir(dir)} {
		info, err := os.Stat(path)
		if err != nil {
			return false, err
		}
		if stat, ok := info.Sys().(*syscall.Stat_t); ok {
			devices[i] = stat.Dev
		}
	}
	return devices[0] != devices[1], nil
}

// shmSize returns half of the node's memory, in KiB, as NVIDIA's plugin does.
func shmSize(proc string) uint64 {
	const fallback = 65536
	fs, err := procfs.NewFS(proc)
	if err != nil {
		return fallback
	}
	info, err := fs.Meminfo()
	if err != nil || info.MemTotal == nil {
		return fallback
	}
	return *info.MemTotal / 2
}
