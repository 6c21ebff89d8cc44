package health

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
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

// LoadMemory reads the state file. No file is an empty memory. One that cannot be understood is set aside,
// so that it is neither believed nor lost, and the error says where.
func LoadMemory(path string) (Memory, error) {
	text, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) || path == "" {
		return Memory{}, nil
	}
	if err != nil {
		return Memory{}, err
	}
	var m Memory
	if err := json.Unmarshal(text, &m); err != nil {
		aside := path + ".damaged"
		return Memory{}, errors.Join(&fs.PathError{Op: "understand", Path: path, Err: err}, os.Rename(path, aside))
	}
	return m, nil
}

// Keeper writes the state file whenever what is worth keeping has changed. Nobody waits for it: a disk that
// is full or hangs costs the memory, not the health.
type Keeper struct {
	config    *Latest[Config]
	snapshots *Latest[Snapshot]
	bootID    string
	log       *zap.Logger
}

// NewKeeper returns a keeper of the snapshots' findings.
func NewKeeper(config *Latest[Config], snapshots *Latest[Snapshot], bootID string, log *zap.Logger) *Keeper {
	return &Keeper{config, snapshots, bootID, log}
}

// retryWrite is the pause after a write that failed.
const retryWrite = 10 * time.Second

// Run keeps the file until ctx ends.
func (k *Keeper) Run(ctx context.Context) error {
	var written []byte // the gist of what the file holds
	var path, said string
	for {
		config, configChanged := k.config.Watch()
		s, changed := k.snapshots.Watch()
		if config.StateFile != path {
			path, written = config.StateFile, nil
		}
		var retry <-chan time.Time
		if s.Polled() && path != "" {
			gist, err := k.write(path, Remember(s, k.bootID), written)
			written = gist
			if err != nil {
				changed, retry = nil, time.After(retryWrite) // not at every poll
				if err.Error() != said {
					said = err.Error()
					k.log.Warn("findings cannot be kept: a restart would forget them", zap.String("key", "health.stateFile"), zap.Error(err))
				}
			} else {
				said = ""
			}
		}
		select {
		case <-ctx.Done():
			return nil
		case <-configChanged:
		case <-changed:
		case <-retry:
		}
	}
}

// write writes the memory if its gist is not the one written before, and returns the gist of what the file
// holds.
func (k *Keeper) write(path string, m Memory, written []byte) ([]byte, error) {
	gist, err := json.Marshal(m.gist())
	if err != nil || bytes.Equal(gist, written) {
		return written, err
	}
	text, err := json.Marshal(m)
	if err == nil {
		err = writeFile(path, text)
	}
	if err != nil {
		return written, err
	}
	return gist, nil
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
