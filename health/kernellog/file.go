package kernellog

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"syscall"
)

// kmsgDevice is the device number of /dev/kmsg, 1:11 (Linux, Documentation/admin-guide/devices.txt).
const kmsgDevice = 1<<8 | 11

// open opens the log behind the records that were read before, for reads that a close ends.
func (r *reader) open() (f *os.File, err error) {
	info, err := os.Stat(r.path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("source.kernelLogPath: %s does not exist; a container needs the node's /dev/kmsg", r.path)
	}
	if err != nil {
		return nil, openError(err)
	}
	flag, mode := os.O_RDONLY|syscall.O_NONBLOCK, info.Mode()
	switch r.device = mode&fs.ModeCharDevice != 0; {
	case r.device:
		if id := info.Sys().(*syscall.Stat_t).Rdev; id != kmsgDevice {
			return nil, fmt.Errorf("source.kernelLogPath: expected the kernel log, character device 1:11, at %s, got %d:%d", r.path, id>>8&0xfff,
				id&0xff)
		}
	case mode&fs.ModeNamedPipe != 0:
		flag = os.O_RDWR | syscall.O_NONBLOCK // so that it does not end with its last writer
	case mode.IsRegular():
		return nil, fmt.Errorf("source.kernelLogPath: expected /dev/kmsg at %s, got a regular file", r.path)
	default:
		return nil, fmt.Errorf("source.kernelLogPath: expected /dev/kmsg at %s, got %v", r.path, mode)
	}
	if f, err = os.OpenFile(r.path, flag, 0); err != nil {
		return nil, openError(err)
	}
	if r.device && !r.hasLast { // the device begins with its oldest record; records that were read have an old sequence number
		if _, err := f.Seek(0, io.SeekEnd); err != nil {
			_ = f.Close()
			return nil, readError(err)
		}
	}
	return f, nil
}

// Check reports why Events could not read the log now, nil if it could. It takes no record.
func Check(path string) error {
	f, err := (&reader{path: path}).open()
	if err != nil {
		return err
	}
	return f.Close()
}

// openError says what the agent needs to open the log.
func openError(err error) error {
	if errors.Is(err, fs.ErrPermission) {
		return fmt.Errorf("source.kernelLogPath: %w; reading /dev/kmsg needs root with CAP_SYSLOG, and in a container privileged mode "+
			"(chart: kernelLog.enabled)", err)
	}
	return readError(err)
}

func readError(err error) error { return fmt.Errorf("source.kernelLogPath: %w", err) }
