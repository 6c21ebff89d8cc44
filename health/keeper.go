package health

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"go.uber.org/zap"
)

// BootID returns the identity of the node's boot, "" if it cannot be known.
func BootID() string {
	text, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(text))
}

// Keeper keeps the state file: it reads it at the start, and writes it whenever what is worth keeping has changed.
// Nobody waits for it: a disk that is full or hangs costs the memory, not the health.
type Keeper struct {
	config    *Latest[Config]
	snapshots *Latest[Snapshot]
	bootID    string
	log       *zap.Logger

	// Load's, then Run's own.
	path    string // that may be written: what was there was read, or is set aside
	refused string // that may not
	written []byte // the gist of what the file holds
	said    string // the last trouble that was logged

	mu     sync.Mutex // guards status and begun
	status KeeperStatus
	begun  time.Time // when the file was last turned to; zero while nothing is done with it
}

// KeeperStatus is how it goes with the state file.
type KeeperStatus struct {
	Path    string    // "": findings are not kept
	Err     string    // why findings would be forgotten by a restart now, in words; empty if they are kept
	Since   time.Time // of Err
	Written time.Time // when the file was last written by this process; zero if it was not
}

// NewKeeper returns a keeper of the snapshots' findings.
func NewKeeper(config *Latest[Config], snapshots *Latest[Snapshot], bootID string, log *zap.Logger) *Keeper {
	return &Keeper{config: config, snapshots: snapshots, bootID: bootID, log: log}
}

const (
	// retryWrite is the pause after a write that failed.
	retryWrite = 10 * time.Second

	// slowWrite is how long a write may take before it is taken to hang.
	slowWrite = 10 * time.Second
)

// Load reads the state file. It must come before Run. No file is an empty memory. One that cannot be read or
// understood is set aside, so that it is neither believed nor lost; the error says what was done. If it cannot
// even be set aside, Run writes nothing until it can.
func (k *Keeper) Load(path string) (Memory, error) {
	if path == "" {
		return Memory{}, nil
	}
	m, err := k.claim(path)
	k.report(path, k.refusal(path, err))
	return m, err
}

// claim makes a path ours to write: what is there is read, or set aside.
func (k *Keeper) claim(path string) (Memory, error) {
	var m Memory
	text, err := os.ReadFile(path)
	what, suffix := "cannot be read", ".unread"
	switch {
	case errors.Is(err, fs.ErrNotExist):
		err = nil
	case err != nil:
	case path == k.refused:
		// It was not to be read when that was of use, and the devices were judged without it.
		err, what = errors.New("it was needed at the start"), "can be read too late"
	default:
		if err = json.Unmarshal(text, &m); err != nil {
			what, suffix = "cannot be understood", ".damaged"
		}
	}
	var aside string
	if err != nil {
		var asideErr error
		if aside, asideErr = setAside(path, suffix); asideErr != nil {
			k.refused = path
			return Memory{}, fmt.Errorf("%s %s: %w; it cannot be set aside either: %w; it stays as it is, and nothing is written there",
				path, what, err, asideErr)
		}
	}
	k.path, k.written = path, nil
	if path == k.refused {
		k.refused = ""
	}
	if err == nil {
		return m, nil
	}
	return Memory{}, fmt.Errorf("%s %s: %w; it is kept as %s", path, what, err, aside)
}

// refusal is the error if the path is not ours, nil if it is.
func (k *Keeper) refusal(path string, err error) error {
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
func (k *Keeper) Run(ctx context.Context) error {
	for {
		config, configChanged := k.config.Watch()
		s, changed := k.snapshots.Watch()
		var retry <-chan time.Time
		if !k.keep(config.StateFile, s) {
			changed, retry = nil, time.After(retryWrite) // not at every poll
		}
		select {
		case <-ctx.Done():
			k.keep(k.config.Load().StateFile, k.snapshots.Load())
			return nil
		case <-configChanged:
		case <-changed:
		case <-retry:
		}
	}
}

// keep brings the file to what the snapshot tells, and returns whether it is.
func (k *Keeper) keep(path string, s *Snapshot) bool {
	if path == "" {
		k.path, k.said = "", ""
		k.report("", nil)
		return true
	}
	if path == k.path && !s.Polled() {
		return true
	}
	k.begin()
	var err error
	if path != k.path {
		if _, err = k.claim(path); err != nil && path == k.path {
			k.log.Warn("a state file was in the way", zap.String("key", "health.stateFile"), zap.Error(err))
		}
		err = k.refusal(path, err)
	}
	if err == nil && s.Polled() {
		err = k.write(path, Remember(s, k.bootID))
	}
	k.report(path, err)
	switch {
	case err == nil:
		k.said = ""
	case err.Error() != k.said:
		k.said = err.Error()
		k.log.Warn("findings cannot be kept: a restart would forget them", zap.String("key", "health.stateFile"), zap.Error(err))
	}
	return err == nil
}

// write writes the memory if its gist is not the one written before.
func (k *Keeper) write(path string, m Memory) error {
	gist, err := json.Marshal(m.gist())
	if err != nil || bytes.Equal(gist, k.written) {
		return err
	}
	text, err := json.Marshal(m)
	if err == nil {
		err = writeFile(path, text)
	}
	if err != nil {
		return err
	}
	k.written = gist
	k.mu.Lock()
	defer k.mu.Unlock()
	k.status.Written = time.Now()
	return nil
}

// Status may be called from any goroutine.
func (k *Keeper) Status() KeeperStatus {
	k.mu.Lock()
	defer k.mu.Unlock()
	s := k.status
	if s.Err == "" && !k.begun.IsZero() && time.Since(k.begun) > slowWrite {
		s.Err, s.Since = fmt.Sprintf("%s: the disk has not answered for %v", s.Path, time.Since(k.begun).Round(time.Second)), k.begun
	}
	return s
}

func (k *Keeper) begin() {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.begun = time.Now()
}

func (k *Keeper) report(path string, err error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.begun = time.Time{}
	if path != k.status.Path {
		k.status = KeeperStatus{Path: path}
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

// gist leaves out what changes with every poll though nothing happens.
func (m Memory) gist() Memory {
	devices := slices.Clone(m.Devices)
	for i := range devices {
		findings := slices.Clone(devices[i].Verdict.Findings)
		for j := range findings {
			if findings[j].condition() {
				findings[j].Last, findings[j].Reason = time.Time{}, ""
			}
		}
		devices[i].Verdict.Findings = findings
	}
	m.Devices = devices
	return m
}

// writeFile replaces a file so that a reader, or a crash, finds the old text or the new.
func writeFile(path string, text []byte) error {
	dir := filepath.Dir(path)
	if err := os.MkdirAll(dir, 0o750); err != nil {
		return err
	}
	f, err := os.CreateTemp(dir, filepath.Base(path)+".*")
	if err != nil {
		return err
	}
	_, err = f.Write(append(text, '\n'))
	err = errors.Join(err, f.Sync(), f.Close())
	if err == nil {
		err = os.Rename(f.Name(), path)
	}
	if err != nil {
		err = errors.Join(err, os.Remove(f.Name()))
	}
	return err
}
