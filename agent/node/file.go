package node

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"go.uber.org/zap"
	"k8s.io/apimachinery/pkg/util/duration"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/health/durable"
	"github.com/gpu-node-agent/gpu-node-agent/health/logonce"
)

const (
	// fileLife is how long Node Feature Discovery keeps the labels of the file after it was last written. It is written again after half
	// of that time.
	fileLife = time.Hour

	// fileCheck is how often the file and the wall clock are checked, and the time until a failed write is repeated.
	fileCheck = 10 * time.Second

	// fileSlow is how long an access to the disk may take before it is reported.
	fileSlow = 10 * time.Second

	// repairLogInterval is the shortest time between two log lines about a file that another process changed.
	repairLogInterval = time.Minute

	maxFileSize = 64 << 10 // of Node Feature Discovery
)

// The beginning of the file: a directive of Node Feature Discovery's local source, and a comment by which the agent recognizes its own
// file.
const (
	expiryDirective = "# +expiry-time="
	fileMark        = "# Written by gpu-node-agent, which restores it when it is changed.\n"
)

// fileWant is what the disk must have.
type fileWant struct {
	path   string            // of the file; empty if none is to be written
	labels map[string]string // nil: unknown, and the file stays as it is; empty: there must be no file
	remove []string          // other files, which the agent may have written
}

// fileResult is what the disk has.
type fileResult struct {
	want   *fileWant
	absent []string // of want.remove, the ones that no longer exist
}

// fileWriter writes the labels to a file of Node Feature Discovery's local source. The file never has only a part of the labels, even after
// a crash. It is not touched while nothing changes and its expiry is far.
type fileWriter struct {
	log    *zap.Logger
	wall   func() time.Time // the wall clock
	want   health.Latest[fileWant]
	result health.Latest[fileResult]

	// Only run uses these.
	written        writtenFile
	logged         logonce.State
	repairLoggedAt time.Time

	mu        sync.Mutex // guards the fields below
	err       string     // of the last access; empty after success
	busySince time.Time  // start of the current access; zero if there is none
}

// writtenFile is the file as it was written or found last.
type writtenFile struct{ path, body string }

// Err returns why the disk is not as wanted; empty if it is. It may be called from any goroutine.
func (w *fileWriter) Err() string {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.err == "" && !w.busySince.IsZero() && time.Since(w.busySince) > fileSlow {
		return "disk has not responded for " + duration.HumanDuration(time.Since(w.busySince))
	}
	return w.err
}

// run writes and removes files until ctx ends, and a last time then.
func (w *fileWriter) run(ctx context.Context) {
	for {
		want, changed := w.want.Watch()
		if want != nil {
			w.apply(want)
		}
		select {
		case <-ctx.Done():
			if last := w.want.Load(); last != want {
				w.apply(last)
			}
			return
		case <-changed:
		case <-time.After(fileCheck):
		}
	}
}

// apply makes the disk as wanted, and reports the result.
func (w *fileWriter) apply(want *fileWant) {
	if want.path == "" && len(want.remove) == 0 {
		w.report(nil)
		return
	}
	w.mu.Lock()
	w.busySince = time.Now()
	w.mu.Unlock()
	result := &fileResult{want: want}
	var errs []error
	switch {
	case want.path == "" || want.labels == nil:
	case len(want.labels) == 0:
		w.written = writtenFile{}
		errs = append(errs, removeFile(want.path))
	default:
		errs = append(errs, w.write(want.path, fileBody(want.labels)))
	}
	remove := want.remove
	if errors.Join(errs...) != nil {
		remove = nil // Node Feature Discovery always finds one of the files
	}
	for _, path := range remove {
		if err := removeFile(path); err != nil {
			errs = append(errs, err)
		} else {
			result.absent = append(result.absent, path)
		}
	}
	w.report(errors.Join(errs...))
	if len(want.remove) > 0 {
		w.result.Store(result)
	}
}

// report logs and keeps the result of an access.
func (w *fileWriter) report(err error) {
	text := ""
	if err != nil {
		text = err.Error()
	}
	w.mu.Lock()
	w.busySince, w.err = time.Time{}, text
	w.mu.Unlock()
	switch {
	case !w.logged.Changed(text):
	case err == nil:
		w.log.Info("the file with labels is as configured again")
	default:
		w.log.Warn("cannot write the file with labels", zap.String("key", "node.labels.file"), zap.Error(err))
	}
}

// write makes sure that the file has the labels and expires late enough.
func (w *fileWriter) write(path, body string) error {
	now := w.wall()
	if w.written.path != path {
		_ = durable.RemoveTemporaries(temporaryDirs(path)...) // they do no harm
	}
	found, err := readFile(path)
	switch {
	case err != nil:
		return err
	case found.exists && !found.own:
		return fmt.Errorf("%s: exists, and gpu-node-agent has not written it; remove it or use another path", path)
	case found.body == body && !found.due(now):
		w.written = writtenFile{path, body}
		return nil
	}
	text := []byte(expiryDirective + now.Add(fileLife).UTC().Format(time.RFC3339) + "\n" + body)
	if len(text) > maxFileSize {
		return fmt.Errorf("%s: %d bytes of labels; Node Feature Discovery reads at most %d", path, len(text), maxFileSize)
	}
	if err := replaceFile(path, text); err != nil {
		return err
	}
	changed := w.written.path == path && w.written.body == body && found.body != body
	switch {
	case !changed && found.body != body:
		w.log.Info("wrote the labels", zap.String("file", path))
	case changed && time.Since(w.repairLoggedAt) >= repairLogInterval:
		w.repairLoggedAt = time.Now()
		w.log.Warn("another process changed the file with labels; wrote it again", zap.String("file", path))
	}
	w.written = writtenFile{path, body}
	return nil
}

// due reports whether the file must be written for its expiry: after half of its life, and when a step of the wall clock has moved the
// expiry too close or too far.
func (f *foundFile) due(wall time.Time) bool {
	left := f.expiry.Sub(wall)
	return left <= fileLife/2 || left > fileLife+time.Minute
}

// fileBody returns the content of the file without its expiry.
func fileBody(labels map[string]string) string {
	var b strings.Builder
	b.WriteString(fileMark)
	for _, key := range slices.Sorted(maps.Keys(labels)) {
		fmt.Fprintf(&b, "%s=%s\n", key, labels[key])
	}
	return b.String()
}

// foundFile is what a path has.
type foundFile struct {
	body        string    // without its expiry
	expiry      time.Time // zero if it has none; body is empty then
	exists, own bool      // own: the agent wrote it, or it is empty
}

// readFile reads what a path has.
func readFile(path string) (f foundFile, err error) {
	text, _, err := durable.Options{Limit: maxFileSize}.Read(path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return f, nil
	case errors.Is(err, durable.ErrNotRegular), errors.Is(err, durable.ErrTooLarge):
		return foundFile{exists: true}, nil
	case err != nil:
		return f, err
	}
	f.exists = true
	f.own = len(text) == 0 || bytes.Contains(text, []byte(fileMark))
	first, body, _ := strings.Cut(string(text), "\n")
	if expiry, err := time.Parse(time.RFC3339, strings.TrimPrefix(first, expiryDirective)); err == nil {
		f.body, f.expiry = body, expiry
	}
	return f, nil
}

// removeFile removes a file of the agent. A missing file, and one that the agent did not write, is no error.
func removeFile(path string) error {
	if f, err := readFile(path); err != nil || !f.own {
		return err
	}
	err := os.Remove(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return err
}

// replaceFile replaces the file. Its errors do not contain the name of the temporary file, so that a repeated failure has the same text.
func replaceFile(path string, text []byte) error {
	if _, err := os.Stat(filepath.Dir(path)); errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("%s: no such directory; is Node Feature Discovery installed, and the directory mounted?", filepath.Dir(path))
	}
	_, err := durable.Options{Mode: 0o644, TempDirs: temporaryDirs(path)}.Replace(path, text) // other users read it
	return err
}

// temporaryDirs are the directories where the temporary file may be. It is in the directory above the file's, because beside the file it
// could be read half written. If the directory above is read-only or on another file system, it is beside the file, where Node Feature
// Discovery skips it as a hidden file.
func temporaryDirs(path string) []string {
	dir := filepath.Dir(path)
	return []string{filepath.Dir(dir), dir}
}
