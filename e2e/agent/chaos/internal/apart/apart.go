// Package apart runs a test program in a mount namespace of its own, with disks that can be full.
package apart

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
)

const env = "CHAOS_APART"

// Run runs this program again in a separate mount namespace, if permitted, and returns its exit code. The kernel unmounts the file systems
// however the program ends.
func Run() (code int, started bool) {
	self, err := os.Executable()
	if err != nil || os.Getenv(env) != "" {
		return 0, false
	}
	cmd := exec.Command(self, os.Args[1:]...) //nolint:noctx // it ends with this program
	cmd.Env = append(os.Environ(), env+"=1")
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Unshareflags: syscall.CLONE_NEWNS, Pdeathsig: syscall.SIGKILL}
	if err := cmd.Start(); err != nil {
		return 0, false
	}
	_ = cmd.Wait() // its exit code is the result
	return cmd.ProcessState.ExitCode(), true
}

// Disk is a directory that can be full. If mounting is permitted it is a file system; otherwise the directory is moved away.
type Disk struct {
	Dir     string
	Mounted bool
}

// NewDisk makes a directory.
func NewDisk(dir string) (*Disk, error) {
	if err := os.Mkdir(dir, 0o750); err != nil {
		return nil, err
	}
	err := syscall.Mount("chaos", dir, "tmpfs", 0, "size=8m")
	return &Disk{Dir: dir, Mounted: err == nil}, nil
}

// Fill fills the disk to the last byte.
func (d *Disk) Fill() error {
	if !d.Mounted {
		return errors.Join(os.Rename(d.Dir, d.Dir+".away"), os.WriteFile(d.Dir, nil, 0o600))
	}
	f, err := os.Create(filepath.Join(d.Dir, "filler"))
	if err != nil {
		return err
	}
	defer func() { _ = f.Close() }()
	for _, size := range []int{64 << 10, 4 << 10, 1} {
		for block := make([]byte, size); err == nil; {
			_, err = f.Write(block)
		}
		if !errors.Is(err, syscall.ENOSPC) {
			return err
		}
		err = nil
	}
	return nil
}

// Free ends Fill.
func (d *Disk) Free() error {
	if !d.Mounted {
		return errors.Join(os.Remove(d.Dir), os.Rename(d.Dir+".away", d.Dir))
	}
	return os.Remove(filepath.Join(d.Dir, "filler"))
}

// End unmounts the disk.
func (d *Disk) End() error {
	if !d.Mounted {
		return nil
	}
	return syscall.Unmount(d.Dir, syscall.MNT_DETACH)
}
