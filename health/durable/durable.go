// Package durable reads and replaces small files, so that a reader never finds a part of one, also after a crash: the state file, the
// checkpoint of claims, CDI specs, the labels of the node. No other package replaces files.
package durable

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/gpu-node-agent/gpu-node-agent/health/filelock"
)

// Limit is the size of the largest file, in bytes.
const Limit = 128 << 20

// block is the unit of a file's size, in bytes.
const block = 4 << 10

// maxSetAside limits the files that are set aside for one path and suffix.
const maxSetAside = 100

// readAttempts limits how often Read begins anew because the file was replaced meanwhile.
const readAttempts = 10

// The errors of Read that time does not end.
var (
	ErrNotRegular = errors.New("not a regular file") // but a directory, a fifo, a socket or a device
	ErrTooLarge   = errors.New("too large")
)

// sizeError is an ErrTooLarge.
type sizeError struct{ limit, found int64 }

func (e *sizeError) Error() string {
	return fmt.Sprintf("expected at most %d bytes, found %d", e.limit, e.found)
}

func (e *sizeError) Is(target error) bool { return target == ErrTooLarge }

// Options are how a file is replaced and read.
type Options struct {
	DirMode fs.FileMode // of the directories, which are made if they do not exist; 0: the directory must exist
	Limit   int64       // of the size in bytes; 0: Limit

	// Spare keeps a spare file beside the file: see Replace. Its mode is 0600. Without it, Replace makes a temporary file each time.
	Spare   bool
	Reserve int // space in bytes that the disk keeps for the text at least, twice

	// Without Spare:

	Mode     fs.FileMode                  // 0: 0600
	TempDirs []string                     // the first of these that can have the temporary file has it; nil: the directory of the file
	Check    func(temporary string) error // returns why what was written must not replace the file
}

// WithSpare are the options of a file that must be written on a full disk too.
func WithSpare(reserve int) Options { return Options{DirMode: 0o750, Spare: true, Reserve: reserve} }

func (o *Options) limit() int64 { return cmp.Or(o.Limit, Limit) }

// SparePath returns the path of the spare file of a file.
func SparePath(path string) string { return path + ".spare" }

// Written is the outcome of Replace.
type Written struct {
	Info fs.FileInfo // of the file
	// Aside is the new name of what was at the path and was no regular file; "" if nothing was. Only with Options.Spare.
	Aside string
	// Unreserved is why the next text may not fit on a full disk; nil if space for twice the largest text so far is reserved, and without
	// Options.Spare.
	Unreserved error
}

// Replace replaces the content of a file: a later reader finds the old or the new text, also if the process or the node ends at any moment.
// After an error it has one of them. Only one process may replace a file with a spare file at a time.
//
// Without a spare file, Replace writes a temporary file and renames it. It first removes the temporary files of writers that were killed.
//
// With Options.Spare, it writes into a spare file, beside the file, and exchanges the two (renameat2(2), RENAME_EXCHANGE), so that it needs
// no free space: the old file is the next spare file. While there is space, both are twice as large as the largest text so far, at least
// Options.Reserve bytes: spaces follow the text, which must not end with any. Where the file system cannot exchange files, Replace renames
// the spare file and makes another one.
func (o Options) Replace(path string, text []byte) (Written, error) {
	return newDisk().replace(path, text, o)
}

// disk has the system calls of Replace whose order matters.
type disk struct {
	writeAt   func(f *os.File, b []byte, offset int64) (int, error)
	truncate  func(f *os.File, size int64) error
	chmod     func(f *os.File, mode fs.FileMode) error
	sync      func(f *os.File) error
	rename    func(from, to string) error
	renameat2 func(from, to string, flags uint) error
}

func newDisk() disk {
	return disk{
		writeAt:  (*os.File).WriteAt,
		truncate: (*os.File).Truncate,
		chmod:    (*os.File).Chmod,
		sync:     (*os.File).Sync,
		rename:   os.Rename,
		renameat2: func(from, to string, flags uint) error {
			if err := unix.Renameat2(unix.AT_FDCWD, from, unix.AT_FDCWD, to, flags); err != nil {
				return &os.LinkError{Op: "rename", Old: from, New: to, Err: err}
			}
			return nil
		},
	}
}

func (d disk) replace(path string, text []byte, o Options) (w Written, err error) {
	limit := o.limit()
	if o.Spare {
		limit--
	}
	if size := int64(len(text)); size > limit {
		return w, fmt.Errorf("%s: expected at most %d bytes, got %d", path, limit, size)
	}
	if o.DirMode != 0 {
		if err := os.MkdirAll(filepath.Dir(path), o.DirMode); err != nil {
			return w, err
		}
	}
	defer func() { err = withPath(err, path) }() // the path that people know
	if o.Spare {
		return d.replaceBySpare(path, text, o)
	}
	w.Info, err = d.replaceByTemporary(path, text, o)
	return w, err
}

func (d disk) replaceBySpare(path string, text []byte, o Options) (w Written, err error) {
	if info, err := os.Lstat(path); err == nil && !replaceable(info) {
		if w.Aside, err = SetAside(path, ".unread"); err != nil {
			return w, fmt.Errorf("%s: %w; cannot set it aside: %w", path, ErrNotRegular, err)
		}
	}
	// The exchange of an earlier process may not have reached the disk. After a crash, the file that is the spare file now would be the file.
	if err := d.syncDirectory(path); err != nil {
		return w, err
	}
	spare, size, err := openSpare(path)
	if err != nil {
		return w, err
	}
	want := min(max(size, blocks(max(o.Reserve, 2*(len(text)+1)))), o.limit())
	w.Unreserved, err = d.fill(spare, text, size, want)
	if err == nil {
		err = d.sync(spare)
	}
	info, statErr := spare.Stat()
	if err = errors.Join(err, statErr, spare.Close()); err != nil {
		return w, err
	}
	w.Info = info
	unsupported, err := d.exchange(path)
	if err == nil {
		err = d.syncDirectory(path)
	}
	if err != nil {
		return w, err
	}
	w.Unreserved = errors.Join(w.Unreserved, unsupported, d.extendSpare(path, want))
	return w, nil
}

// replaceable reports whether a rename may replace what is at a path.
func replaceable(info fs.FileInfo) bool {
	return info.Mode().IsRegular() || info.Mode().Type() == fs.ModeSymlink
}

// blocks returns a size in whole blocks.
func blocks(size int) int64 { return int64(size+block-1) / block * block }

// openSpare opens the spare file for writing, or makes one, and returns its size.
func openSpare(path string) (f *os.File, size int64, err error) {
	name := SparePath(path)
	if info, err := os.Lstat(name); err == nil {
		switch stat, ok := info.Sys().(*syscall.Stat_t); {
		case !replaceable(info):
			if _, err := SetAside(name, ".unread"); err != nil {
				return nil, 0, err
			}
		case !info.Mode().IsRegular(), ok && stat.Nlink > 1: // its content belongs to somebody else too
			if err := os.Remove(name); err != nil {
				return nil, 0, err
			}
		}
	}
	f, err = os.OpenFile(name, os.O_RDWR|os.O_CREATE|syscall.O_NOFOLLOW|syscall.O_NONBLOCK, 0o600)
	if err != nil {
		return nil, 0, err
	}
	info, err := f.Stat()
	if lockErr := filelock.Lock(f); err == nil && errors.Is(lockErr, filelock.ErrLocked) {
		err = &fs.PathError{Op: "lock", Path: name, Err: lockErr}
	}
	if err != nil {
		_ = f.Close() // nothing was written
		return nil, 0, err
	}
	return f, info.Size(), nil
}

// fill writes a text and spaces into the spare file, and extends it to want bytes. unreserved is why that has no space.
func (d disk) fill(f *os.File, text []byte, size, want int64) (unreserved, err error) {
	needed := max(size, int64(len(text)+1))
	content := spaces(0, needed)
	content[copy(content, text)] = '\n'
	if _, err := d.writeAt(f, content, 0); err != nil {
		return nil, errors.Join(err, d.truncate(f, size)) // what is reserved stays
	}
	return d.extend(f, needed, want), nil
}

// extend writes spaces between two sizes, or nothing.
func (d disk) extend(f *os.File, from, to int64) error {
	if from >= to {
		return nil
	}
	if _, err := d.writeAt(f, spaces(from, to), from); err != nil {
		return errors.Join(err, d.truncate(f, from))
	}
	return nil
}

func spaces(from, to int64) []byte { return bytes.Repeat([]byte(" "), int(to-from)) }

// extendSpare makes sure that there is a spare file of a size, with any content.
func (d disk) extendSpare(path string, want int64) error {
	f, size, err := openSpare(path)
	if err != nil {
		return err
	}
	defer func() { _ = f.Close() }() // nothing that matters is written
	return d.extend(f, size, want)
}

// exchange exchanges a file and its spare file. unsupported is why the old file is not the new spare file.
func (d disk) exchange(path string) (unsupported, err error) {
	spare := SparePath(path)
	switch err := d.renameat2(spare, path, unix.RENAME_EXCHANGE); {
	case err == nil:
		return nil, nil
	case errors.Is(err, fs.ErrNotExist): // there is no file yet
		return nil, d.renameat2(spare, path, 0)
	case errors.Is(err, syscall.EINVAL), errors.Is(err, errors.ErrUnsupported):
		// EINVAL also comes from a file system without flags; see rename(2). A kernel without renameat2 has the other call.
		return fmt.Errorf("the file system cannot exchange files: %w", errors.Unwrap(err)), d.rename(spare, path)
	default:
		return nil, err
	}
}

// syncDirectory makes the renames in the directory of a file durable. Some file systems have nothing to do for that, and say so.
func (d disk) syncDirectory(path string) error {
	dir, err := os.Open(filepath.Dir(path))
	if err != nil {
		return err
	}
	defer func() { _ = dir.Close() }() // it is only read
	if err := d.sync(dir); !errors.Is(err, syscall.EINVAL) && !errors.Is(err, errors.ErrUnsupported) {
		return err
	}
	return nil
}

// Read reads a file that another process may replace meanwhile; with Options.Spare without the spaces behind the text. It opens nothing
// but a regular file: anything else is ErrNotRegular. info identifies the content.
func (o Options) Read(path string) (text []byte, info fs.FileInfo, err error) {
	for range readAttempts {
		var replaced bool
		if text, info, replaced, err = o.readOnce(path); err != nil || !replaced {
			if o.Spare {
				text = bytes.TrimRight(text, " \n")
			}
			return text, info, err
		}
	}
	return nil, nil, &fs.PathError{Op: "read", Path: path, Err: errors.New("it was replaced each time that it was read")}
}

// readOnce reports whether the file was replaced meanwhile, so that the text may be one that is being written.
func (o *Options) readOnce(path string) (text []byte, info fs.FileInfo, replaced bool, err error) {
	if info, err = os.Stat(path); err != nil { // to open a device may have an effect
		return nil, nil, false, err
	}
	if !info.Mode().IsRegular() {
		return nil, nil, false, &fs.PathError{Op: "open", Path: path, Err: ErrNotRegular}
	}
	f, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NONBLOCK|syscall.O_NOCTTY, 0)
	if errors.Is(err, syscall.EAGAIN) { // another process has a lease on it, and ends that; see fcntl(2)
		f, err = os.OpenFile(path, os.O_RDONLY|syscall.O_NOCTTY, 0)
	}
	if err != nil {
		return nil, nil, false, err
	}
	defer func() { _ = f.Close() }() // it is only read
	if info, err = f.Stat(); err != nil {
		return nil, nil, false, err
	}
	switch {
	case !info.Mode().IsRegular():
		return nil, nil, false, &fs.PathError{Op: "open", Path: path, Err: ErrNotRegular}
	case info.Size() > o.limit():
		return nil, nil, false, &fs.PathError{Op: "read", Path: path, Err: &sizeError{o.limit(), info.Size()}}
	}
	if text, err = io.ReadAll(io.LimitReader(f, o.limit())); err != nil {
		return nil, nil, false, err
	}
	after, err := f.Stat()
	if err != nil {
		return nil, nil, false, err
	}
	current, err := os.Stat(path)
	return text, info, err != nil || !Same(info, after) || !Same(info, current), nil
}

// Same reports whether two results of Stat are of one file with one content.
func Same(a, b fs.FileInfo) bool {
	return os.SameFile(a, b) && a.ModTime().Equal(b.ModTime()) && a.Size() == b.Size()
}

// withPath returns an error of a file with the path of another one, which people know.
func withPath(err error, path string) error {
	if pathErr, ok := errors.AsType[*fs.PathError](err); ok {
		return fmt.Errorf("%s %s: %w", pathErr.Op, path, pathErr.Err)
	}
	if linkErr, ok := errors.AsType[*os.LinkError](err); ok {
		return fmt.Errorf("%s %s: %w", linkErr.Op, path, linkErr.Err)
	}
	return err
}

// SetAside renames what is at a path to an unused name with the suffix, and returns the name. A device of the node stays.
func SetAside(path, suffix string) (string, error) {
	info, err := os.Lstat(path)
	if err != nil {
		return "", err
	}
	if info.Mode()&fs.ModeDevice != 0 && strings.HasPrefix(path, "/dev/") {
		return "", errors.New("it is a device of the node")
	}
	for n := range maxSetAside {
		aside := path + suffix
		if n > 0 {
			aside += "." + strconv.Itoa(n)
		}
		if _, err := os.Lstat(aside); errors.Is(err, fs.ErrNotExist) {
			return aside, os.Rename(path, aside)
		} else if err != nil {
			return "", err
		}
	}
	return "", fmt.Errorf("%d files %s%s* exist already; remove some", maxSetAside, path, suffix)
}
