package kernellog

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

const (
	// kmsgDevice is the device number of /dev/kmsg, 1:11 (Linux, Documentation/admin-guide/devices.txt).
	kmsgDevice = 1<<8 | 11

	// checkInterval is how often the path is checked for another file.
	checkInterval = time.Second

	// growInterval is how often a regular file is read: it cannot be waited for.
	growInterval = 100 * time.Millisecond
)

// errReplaced means that the path names another file now.
var errReplaced = errors.New("replaced by another file")

func isDevice(f os.FileInfo) bool { return f.Mode()&fs.ModeCharDevice != 0 }

// open opens the log behind the records that were read before, for reads that a close ends.
func (r *reader) open() (f *os.File, err error) {
	info, err := os.Stat(r.path)
	if errors.Is(err, fs.ErrNotExist) {
		r.absent = true
		return nil, fmt.Errorf("source.kernelLogPath: %s does not exist; a container needs the node's /dev/kmsg", r.path)
	}
	if err != nil {
		return nil, openError(err)
	}
	flag := os.O_RDONLY | syscall.O_NONBLOCK
	switch mode := info.Mode(); {
	case isDevice(info):
		if id := info.Sys().(*syscall.Stat_t).Rdev; id != kmsgDevice {
			return nil, fmt.Errorf("source.kernelLogPath: expected the kernel log, character device 1:11, at %s, got %d:%d", r.path, id>>8&0xfff,
				id&0xff)
		}
	case mode&fs.ModeNamedPipe != 0:
		flag = os.O_RDWR | syscall.O_NONBLOCK // so that it does not end with its last writer
	case !mode.IsRegular():
		return nil, fmt.Errorf("source.kernelLogPath: expected /dev/kmsg, a FIFO or a regular file at %s, got %v", r.path, mode)
	case inProcfs(r.path):
		return nil, fmt.Errorf("source.kernelLogPath: expected /dev/kmsg, a FIFO or a regular file at %s, got a file of procfs; "+
			"set /dev/kmsg: its records have another form, and other readers get them too", r.path)
	}
	f, err = os.OpenFile(r.path, flag, 0)
	if err != nil {
		return nil, openError(err)
	}
	if err := r.seek(f); err != nil {
		_ = f.Close()
		return nil, readError(err)
	}
	return f, nil
}

// inProcfs reports whether a file is in procfs, like /proc/kmsg, which gives each record to one reader only.
func inProcfs(path string) bool {
	var fs unix.Statfs_t
	return unix.Statfs(path, &fs) == nil && fs.Type == unix.PROC_SUPER_MAGIC
}

// Check reports why Events could not read the log now, nil if it could. It takes no record.
func Check(path string) error {
	f, err := (&reader{path: path}).open()
	if err != nil {
		return err
	}
	return f.Close()
}

// seek continues behind the records that were read.
func (p *position) seek(f *os.File) error {
	info, err := f.Stat()
	if err != nil || info.Mode()&fs.ModeNamedPipe != 0 {
		p.file = info
		return err
	}
	same, first := p.file != nil && os.SameFile(p.file, info), p.file == nil && !p.absent
	p.file = info
	switch {
	case isDevice(info) && !p.hasLast || first:
		p.offset, err = f.Seek(0, io.SeekEnd)
	case isDevice(info):
		// The device begins with its oldest record; records that were read have an old sequence number.
	case same:
		_, err = f.Seek(p.offset, io.SeekStart)
	default:
		p.offset = 0
	}
	return err
}

// tail reads a file that grows. Its reads wait for more.
type tail struct {
	ctx  context.Context //nolint:containedctx // Read has none
	f    *os.File
	path string
	*position

	ended error // why the file does not grow any more, once it has been read to its end
}

// Read returns errReplaced if the path names another file.
func (t *tail) Read(p []byte) (int, error) {
	for {
		_ = t.f.SetReadDeadline(time.Now().Add(checkInterval)) // a regular file has none
		n, err := t.f.Read(p)
		switch {
		case n > 0:
			t.offset += int64(n)
			return n, nil
		case t.ended != nil:
			return 0, t.ended
		case errors.Is(err, io.EOF):
			wait(t.ctx, growInterval)
		case err != nil && !errors.Is(err, os.ErrDeadlineExceeded):
			return 0, err
		}
		regular := t.file.Mode().IsRegular()
		if t.ended = t.check(); t.ended != nil && !regular {
			return 0, t.ended
		}
	}
}

// check returns an error if the path has lost its file or names another one. A regular file that was truncated begins anew.
func (t *tail) check() error {
	info, err := os.Stat(t.path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		t.absent, t.file = true, nil
		return fmt.Errorf("source.kernelLogPath: %s was removed", t.path)
	case err != nil:
		return err
	case !os.SameFile(info, t.file):
		return errReplaced
	case info.Mode().IsRegular() && info.Size() < t.offset:
		t.offset, err = t.f.Seek(0, io.SeekStart)
	}
	return err
}

// openError says what the agent needs to open the log.
func openError(err error) error {
	if errors.Is(err, fs.ErrPermission) {
		return fmt.Errorf("source.kernelLogPath: %w; reading /dev/kmsg needs root with CAP_SYSLOG, and in a container privileged mode "+
			"(chart: kernelLog.enabled)", err)
	}
	return fmt.Errorf("source.kernelLogPath: %w", err)
}

func readError(err error) error {
	if errors.Is(err, errReplaced) {
		return err
	}
	return fmt.Errorf("source.kernelLogPath: %w", err)
}
