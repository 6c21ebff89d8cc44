// Package statefile keeps in a file what outlives the process.
package statefile

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"go.uber.org/zap"

	"github.com/gpu-node-agent/gpu-node-agent/health"
)

// File keeps the state file: it reads it at the start, and writes it whenever what is worth keeping has changed, or the
// file is not as it was written. Only the holder of the lock beside it writes it; another agent on the node reads it at
// its start, and takes it over when it is free. Then its own findings are in force: it has measured the same GPUs, and has
// read the same XIDs. Nobody waits for the File: a disk that is full or hangs costs the memory, not the health.
type File struct {
	config    *health.Latest[health.Config]
	snapshots *health.Latest[health.Snapshot]
	bootID    string
	log       *zap.Logger

	// Load's, then Run's own.
	lock     *stateLock  // nil while it is not held
	path     string      // that may be written: what was there was read, or is set aside
	refused  string      // that may not
	held     Saved       // what the file holds, or should
	written  *Saved      // the gist of what was written last; nil if nothing was
	file     fs.FileInfo // as it was read or written last; nil if it should not be there
	said     string      // the last trouble that was logged
	repaired time.Time   // when a repair was logged last

	kept health.Latest[kept]

	mu     sync.Mutex // guards status and begun
	status Status
	begun  time.Time // when the file was last turned to; zero while nothing is done with it
}

// kept is how the last attempt to keep a snapshot has ended.
type kept struct {
	seq uint64
	err error
}

// Status is how it goes with the state file.
type Status struct {
	Path    string    // "": findings are not kept
	Err     string    // why findings would be forgotten by a restart now, in words; empty if they are kept
	Since   time.Time // of Err
	Written time.Time // when the file was last written by this process; zero if it was not
}

// New returns a keeper of the snapshots' findings.
func New(config *health.Latest[health.Config], snapshots *health.Latest[health.Snapshot], bootID string, log *zap.Logger) *File {
	return &File{config: config, snapshots: snapshots, bootID: bootID, log: log}
}

const (
	// retryWrite is the pause after a write that failed.
	retryWrite = 10 * time.Second

	// retryLock is the pause after another agent was found to have the lock.
	retryLock = time.Second

	// lookAgain is how often the file is looked at though nothing has changed, and how often XIDs that make no finding are
	// written: to count one twice after a crash does no harm, and they may come in floods.
	lookAgain = 10 * time.Second

	// slowWrite is how long a write may take before it is taken to hang.
	slowWrite = 10 * time.Second

	// repairLogged is the least time between two log lines of files that others have changed.
	repairLogged = time.Minute
)

// Load reads the state file. It must come before Run. No file is an empty memory. One that cannot be read or
// understood is set aside, so that it is neither believed nor lost; the error says what was done. If it cannot
// even be set aside, Run writes nothing until it can. A file of a newer version is set aside too, and what can be understood
// of it is returned with the error. While another agent has the lock, the file is only read.
func (k *File) Load(path string) (Saved, error) {
	if path == "" {
		return Saved{}, nil
	}
	if locked := k.hold(path); locked != nil {
		k.report(path, locked)
		m, _, err := readMemoryFile(path)
		if err != nil {
			err = fmt.Errorf("%s: %w; it stays as it is: %w", path, err, locked)
		}
		return m, err
	}
	m, err := k.claim(path)
	k.report(path, k.refusal(path, err))
	return m, err
}

// hold makes sure that we have the lock of the path, also if its file was removed.
func (k *File) hold(path string) error {
	if k.lock.is(path) {
		return nil
	}
	same := k.lock != nil && k.lock.path == path
	k.unlock()
	l, err := lockState(path)
	if err != nil {
		k.path = ""
		return err
	}
	k.lock = l
	if !same {
		k.path = ""
	}
	return nil
}

func (k *File) unlock() {
	k.lock.release()
	k.lock = nil
}

// readMemoryFile reads a file as it is. No file is an empty memory, and nil.
func readMemoryFile(path string) (m Saved, text []byte, err error) {
	text, err = os.ReadFile(path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return Saved{}, nil, nil
	case err == nil:
		if err = json.Unmarshal(text, &m); err != nil {
			err = fmt.Errorf("cannot be understood: %w", err)
		}
	default:
		text, err = nil, fmt.Errorf("cannot be read: %w", err)
	}
	return m, text, err
}

// claim makes a path ours to write: what is there is read, or set aside. The lock is held.
func (k *File) claim(path string) (Saved, error) {
	info, statErr := os.Stat(path) // before it is read, so that a change meanwhile is seen
	if statErr != nil {
		info = nil
	}
	m, text, err := readMemoryFile(path)
	suffix := ".damaged"
	switch {
	case err != nil && text == nil:
		suffix = ".unread"
	case text != nil && path == k.refused:
		// It was not to be read when that was of use, and the devices were judged without it.
		m, err, suffix = Saved{}, errors.New("can be read too late: it was needed at the start"), ".unread"
	case err == nil && m.newer > 0:
		err, suffix = fmt.Errorf("is of version %d, which only a newer release understands in full", m.newer), fmt.Sprintf(".version%d", m.newer)
	}
	var aside string
	if err != nil {
		info = nil
		var asideErr error
		if aside, asideErr = setAside(path, suffix); asideErr != nil {
			k.refused = path
			return m, fmt.Errorf("%s %w; it cannot be set aside either: %w; it stays as it is, and nothing is written there",
				path, err, asideErr)
		}
	}
	k.path, k.written, k.file, k.held = path, nil, info, m
	if path == k.refused {
		k.refused = ""
	}
	k.sweep(path)
	if err == nil {
		return m, nil
	}
	return m, fmt.Errorf("%s %w; it is kept as %s", path, err, aside)
}

// sweep removes what writes have left behind that were killed. The lock is held, so nobody writes now.
func (k *File) sweep(path string) {
	entries, err := os.ReadDir(filepath.Dir(path))
	if err != nil {
		return // then nothing can be written either, which is said
	}
	for _, e := range entries {
		if e.Type().IsRegular() && leftover(filepath.Base(path), e.Name()) {
			if err := os.Remove(filepath.Join(filepath.Dir(path), e.Name())); err != nil {
				k.log.Warn("cannot remove a temporary file", zap.Error(err))
			}
		}
	}
}

// leftover reports whether a file is a temporary one of writeFile. Before memoryMinor 1 such a file had no infix, and
// os.CreateTemp's number, which mostly has nine or ten digits.
func leftover(base, name string) bool {
	rest, ours := strings.CutPrefix(name, base+".")
	number, infix := strings.CutPrefix(rest, tempInfix)
	digits := number != "" && strings.Trim(number, "0123456789") == ""
	return ours && digits && (infix || len(number) == 9 || len(number) == 10)
}

// tempInfix is between the name of the state file and the number of a temporary file.
const tempInfix = "tmp-"

// refusal is the error if the path is not ours, nil if it is.
func (k *File) refusal(path string, err error) error {
	if k.path == path {
		return nil
	}
	return err
}

// maxAside is how many files are set aside at one path.
const maxAside = 100

// setAside gives a file another name, one that no other has, and returns it.
func setAside(path, suffix string) (string, error) {
	info, err := os.Lstat(path)
	if err != nil {
		return "", err
	}
	if !info.Mode().IsRegular() && info.Mode().Type() != fs.ModeSymlink {
		return "", errors.New("it is no file")
	}
	for n := range maxAside {
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
	return "", fmt.Errorf("%s%s and %d more are there already; remove some", path, suffix, maxAside-1)
}

// Run keeps the file until ctx ends, and writes a last time then: what the last poll has found is not lost if
// the monitor has ended before.
func (k *File) Run(ctx context.Context) error {
	defer k.unlock()
	for {
		config, configChanged := k.config.Watch()
		s, changed := k.snapshots.Watch()
		again, ok := k.keep(config.StateFile, s, false)
		if !ok {
			changed = nil // not at every poll
		}
		timer := time.NewTimer(again)
		select {
		case <-ctx.Done():
			timer.Stop()
			k.keep(k.config.Load().StateFile, k.snapshots.Load(), true)
			return nil
		case <-configChanged:
		case <-changed:
		case <-timer.C:
		}
		timer.Stop()
	}
}

// keep brings the file to what the snapshot tells. It returns whether it is there, and after how long to look again though
// nothing has changed.
func (k *File) keep(path string, s *health.Snapshot, last bool) (again time.Duration, ok bool) {
	if path == "" {
		k.unlock()
		k.path, k.said = "", ""
		k.report("", nil)
		k.note(s, nil)
		return lookAgain, true
	}
	k.begin()
	err := k.hold(path)
	if err == nil && path != k.path {
		if _, err = k.claim(path); err != nil && path == k.path {
			k.log.Warn("a state file was in the way", zap.String("key", "health.stateFile"), zap.Error(err))
		}
		err = k.refusal(path, err)
	}
	if err == nil {
		err = k.write(path, s, last)
	}
	k.report(path, err)
	k.note(s, err)
	switch {
	case err == nil && k.said != "":
		k.said = ""
		k.log.Info("findings are kept again", zap.String("file", path))
	case err != nil && err.Error() != k.said:
		k.said = err.Error()
		k.log.Warn("findings cannot be kept: a restart would forget them", zap.String("key", "health.stateFile"), zap.Error(err))
	}
	switch _, locked := errors.AsType[*lockedError](err); {
	case locked:
		return retryLock, false
	case err != nil:
		return retryWrite, false
	}
	return lookAgain, true
}

// note tells WaitWritten how it has gone with a snapshot.
func (k *File) note(s *health.Snapshot, err error) {
	n := kept{err: err}
	if s != nil {
		n.seq = s.Seq
	}
	k.kept.Store(&n)
}

// WaitWritten waits until the file holds what a snapshot tells, and returns nil, or why it does not: it cannot be written, or ctx
// has ended before.
func (k *File) WaitWritten(ctx context.Context, s *health.Snapshot) error {
	for {
		n, changed := k.kept.Watch()
		if n != nil && (n.seq >= s.Seq || n.err != nil) {
			return n.err
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("health.stateFile: not written in time: %w", ctx.Err())
		case <-changed:
		}
	}
}

// write writes what the snapshot tells if its gist is not the one written before, or the file is not as it was written.
func (k *File) write(path string, s *health.Snapshot, last bool) error {
	changed := k.changed(path)
	if changed != "" {
		k.adopt(path)
	}
	var gist *Saved
	if s.Polled() || s != nil && s.Source.Detachment.InForce() {
		m := FromSnapshot(s, k.bootID)
		g := m.gist()
		due := last || time.Since(k.Status().Written) >= lookAgain
		if changed == "" && k.written != nil && reflect.DeepEqual(g, *k.written) && (!due || sameSeen(m.Devices, k.held.Devices)) {
			return nil
		}
		if k.written != nil && m.Source != k.held.Source {
			k.held.Detachment = health.Detachment{} // it goes on in this process, with the new source
		}
		k.held, gist = m.with(k.held), &g
	} else if k.held.Source == "" || changed == "" {
		return nil // nothing is known that is not there
	}
	text, err := json.Marshal(k.held)
	if err != nil {
		return err
	}
	file, err := writeFile(path, text)
	if err != nil {
		return err
	}
	if changed != "" && k.written != nil && time.Since(k.repaired) >= repairLogged {
		k.repaired = time.Now()
		k.log.Warn("the state file was not as it was written, and is written again", zap.String("file", path), zap.String("found", changed))
	}
	k.file, k.written = file, gist
	k.mu.Lock()
	defer k.mu.Unlock()
	k.status.Written = time.Now()
	return nil
}

// changed tells how the file differs from what we have read or written, "" if it does not.
func (k *File) changed(path string) string {
	now, err := os.Stat(path)
	switch {
	case err != nil && k.file == nil && k.held.Source == "":
		return "" // it was not there, and there was nothing to write
	case err != nil:
		return "it is not there"
	case k.file == nil || !os.SameFile(k.file, now):
		return "another file"
	case !k.file.ModTime().Equal(now.ModTime()) || k.file.Size() != now.Size():
		return "its content was changed"
	}
	return ""
}

// adopt keeps what somebody else has written there of kinds of source that we know nothing of.
func (k *File) adopt(path string) {
	m, _, err := readMemoryFile(path)
	if err != nil {
		return
	}
	theirs := Saved{}.with(m).others
	delete(theirs, k.held.Source)
	maps.Copy(theirs, k.held.others)
	k.held.others = theirs
}

// sameSeen reports whether two lists of devices have the same XIDs.
func sameSeen(a, b []health.DeviceState) bool {
	return slices.EqualFunc(a, b, func(a, b health.DeviceState) bool {
		return a.Device.ID == b.Device.ID &&
			slices.EqualFunc(a.Seen, b.Seen, func(x, y health.XID) bool { return x.Code == y.Code && x.At.Equal(y.At) })
	})
}

// Status may be called from any goroutine.
func (k *File) Status() Status {
	k.mu.Lock()
	defer k.mu.Unlock()
	s := k.status
	if s.Err == "" && !k.begun.IsZero() && time.Since(k.begun) > slowWrite {
		s.Err, s.Since = fmt.Sprintf("%s: the disk has not answered for %v", s.Path, time.Since(k.begun).Round(time.Second)), k.begun
	}
	return s
}

func (k *File) begin() {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.begun = time.Now()
}

func (k *File) report(path string, err error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.begun = time.Time{}
	if path != k.status.Path {
		k.status = Status{Path: path}
	}
	switch {
	case err == nil:
		k.status.Err, k.status.Since = "", time.Time{}
	case k.status.Err == "":
		k.status.Since = time.Now()
		fallthrough
	default:
		k.status.Err = err.Error()
	}
}

// gist leaves out what changes with every poll though nothing happens, and what need not be written at once.
func (m Saved) gist() Saved {
	m.Polled = time.Time{}
	m.Devices = slices.Clone(m.Devices)
	for i := range m.Devices {
		m.Devices[i].Seen, m.Devices[i].Verdict = nil, m.Devices[i].Verdict.Stable()
	}
	return m
}

// writeFile replaces a file so that a reader, or a crash, finds the old text or the new.
func writeFile(path string, text []byte) (fs.FileInfo, error) {
	dir := filepath.Dir(path)
	if err := os.MkdirAll(dir, 0o750); err != nil {
		return nil, err
	}
	f, err := os.CreateTemp(dir, filepath.Base(path)+"."+tempInfix+"*")
	if err != nil {
		return nil, err
	}
	_, err = f.Write(append(text, '\n'))
	err = errors.Join(err, f.Sync())
	info, statErr := f.Stat()
	err = errors.Join(err, statErr, f.Close())
	if err == nil {
		err = os.Rename(f.Name(), path)
	}
	if err != nil {
		return nil, errors.Join(err, os.Remove(f.Name()))
	}
	return info, nil
}
