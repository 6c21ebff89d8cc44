package mps

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"go.uber.org/zap"
	"golang.org/x/sys/unix"

	"github.com/gpu-node-agent/gpu-node-agent/health"
)

// prepareDirectories makes the directories of a device. clean removes what a dead daemon left, but not the lock, which a daemon may
// hold that does not listen. Containers may have the pipe directory mounted, so it is never replaced.
func (r Root) prepareDirectories(id health.DeviceID, clean bool, log *zap.Logger) error {
	pipe := r.PipeDir(id)
	for _, dir := range []string{pipe, r.LogDir(id)} {
		if err := makeDirectory(dir, 0o755); err != nil {
			return err
		}
		if err := labelForContainers(dir); err != nil {
			log.Warn("cannot set the SELinux label; containers may be unable to use MPS", zap.Error(err))
		}
	}
	if !clean {
		return nil
	}
	entries, err := os.ReadDir(pipe)
	for _, e := range entries {
		if e.Name() == controlLock && e.Type().IsRegular() {
			continue
		}
		err = errors.Join(err, os.RemoveAll(filepath.Join(pipe, e.Name())))
	}
	return err
}

// makeDirectory makes a directory with a mode, whatever the umask.
func makeDirectory(dir string, mode os.FileMode) error {
	if err := os.MkdirAll(dir, mode); err != nil {
		return err
	}
	if info, err := os.Stat(dir); err == nil && info.Mode() == mode|os.ModeDir {
		return nil
	}
	return os.Chmod(dir, mode)
}

// labelForContainers lets containers use a directory if SELinux is in use.
func labelForContainers(dir string) error {
	if _, err := os.Stat("/sys/fs/selinux/enforce"); err != nil {
		return nil //nolint:nilerr // no SELinux
	}
	if err := unix.Lsetxattr(dir, "security.selinux", []byte("system_u:object_r:container_file_t:s0"), 0); err != nil {
		return fmt.Errorf("%s: %w", dir, err)
	}
	return nil
}
