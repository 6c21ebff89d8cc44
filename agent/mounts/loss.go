package mounts

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"time"

	"go.uber.org/zap"

	"github.com/gpu-node-agent/gpu-node-agent/health/durable"
)

// NoteName is the name of the note in the directory of health.socket, which outlives a container but not its pod.
const NoteName = "state-lost.json"

// lossLifetime is how long a loss is reported.
const lossLifetime = 24 * time.Hour

// Loss is the loss of the state directory under an earlier process.
type Loss struct {
	Directory string    `json:"directory"`
	At        time.Time `json:"at"` // when it was noticed
}

// String describes the loss.
func (l *Loss) String() string {
	return fmt.Sprintf("the directory mounted at %s was deleted on the host at %s: the findings from before are lost, and GPUs that were "+
		"unhealthy or detached may be offered to pods",
		l.Directory, l.At.Format(time.RFC3339))
}

// Expired reports whether the loss is no longer reported.
func (l *Loss) Expired(now time.Time) bool { return now.Sub(l.At) > lossLifetime }

// RecordLoss leaves a note for the next process if StateDir was deleted under a mount. At the end of the process it finds what was deleted
// after Run has returned.
func (w *Watcher) RecordLoss() {
	dir, note := w.StateDir(), w.Note()
	if w.recorded || dir == "" {
		return
	}
	o, err := w.recording.Call(nil, dir, func() (o outcome) {
		if o.lost = w.deleted(dir); o.lost && note != "" {
			o.err = writeNote(note, Loss{dir, time.Now().UTC().Truncate(time.Second)})
		}
		return o
	}, nil)
	if w.recorded = err == nil && o.lost; w.recorded {
		w.Log.Error("the directory of --state-dir was deleted on the host; the findings are lost", zap.String("directory", dir),
			zap.String("note", note), zap.Error(o.err))
	}
}

// outcome is the result of an examination of StateDir and, if it is lost, of the note.
type outcome struct {
	lost bool
	err  error
}

func writeNote(note string, l Loss) error {
	text, err := json.Marshal(l)
	if err == nil {
		_, err = durable.WithSpare(0).Replace(note, text)
	}
	return err
}

// ReadLoss returns the loss that a note records, for a day after it; nil if there is none. The note stays until then: each process of this
// time reports the loss. It removes an older one.
func ReadLoss(note string, now time.Time) (*Loss, error) {
	if note == "" {
		return nil, nil
	}
	text, _, err := durable.WithSpare(0).Read(note)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	var l Loss
	if err == nil {
		err = json.Unmarshal(text, &l)
	}
	if err != nil {
		return nil, fmt.Errorf("%s: expected the note of a lost directory: %w", note, err)
	}
	if l.Expired(now) {
		return nil, os.Remove(note)
	}
	if l.At.After(now) { // the clock was ahead
		l.At = now.UTC().Truncate(time.Second)
		return &l, writeNote(note, l)
	}
	return &l, nil
}
