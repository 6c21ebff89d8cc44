package node

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"
	"golang.org/x/sys/unix"

	"github.com/gpu-node-agent/gpu-node-agent/internal/healthtest"
)

// fileHarness is a writer of DIR/features.d/labels, whose wall clock can step.
type fileHarness struct {
	*fileWriter
	t    *testing.T
	dir  string
	path string
	step atomic.Int64                  // of the wall clock, in nanoseconds
	hang atomic.Pointer[chan struct{}] // an access hangs until this is closed; nil: it does not
	logs *observer.ObservedLogs
}

func newFileHarness(t *testing.T) *fileHarness {
	t.Helper()
	core, logs := observer.New(zap.InfoLevel)
	h := &fileHarness{t: t, dir: t.TempDir(), logs: logs}
	h.path = filepath.Join(h.dir, "features.d", "labels")
	if err := os.Mkdir(filepath.Dir(h.path), 0o750); err != nil {
		t.Fatal(err)
	}
	h.fileWriter = &fileWriter{log: zap.New(core), wall: func() time.Time {
		if hang := h.hang.Load(); hang != nil {
			<-*hang
		}
		return time.Now().Add(time.Duration(h.step.Load()))
	}}
	return h
}

// run runs the writer with these labels.
func (h *fileHarness) run(labels map[string]string) (stop func()) {
	h.want.Store(&fileWant{path: h.path, labels: labels})
	ctx, cancel := newContext(h.t)
	ended := make(chan struct{})
	go func() { defer close(ended); h.fileWriter.run(ctx) }()
	synctest.Wait()
	return func() { cancel(); <-ended }
}

// version identifies the file as it was written: by its inode too, because a kernel before 6.13 gives files that are written within a few
// milliseconds the same time, and the bubble's clock passes an hour in one.
func (h *fileHarness) version() string {
	info, err := os.Stat(h.path)
	if err != nil {
		return "none"
	}
	return fmt.Sprint(info.ModTime().UnixNano(), " ", info.Sys().(*syscall.Stat_t).Ino)
}

func (h *fileHarness) wantFile(labels map[string]string) {
	h.t.Helper()
	content, err := os.ReadFile(h.path)
	if err != nil {
		h.t.Fatal(err)
	}
	found, err := readFile(h.path)
	if left := found.expiry.Sub(h.wall()); err != nil || !found.own || left <= fileLife/2 || left > fileLife {
		h.t.Errorf("own %v, %v left, %v:\n%s", found.own, left, err, content)
	}
	if !strings.HasPrefix(string(content), "# +expiry-time=") || found.body != fileBody(labels) {
		h.t.Errorf("got\n%s\nwant\n%s", content, fileBody(labels))
	}
	if info, err := os.Stat(h.path); err != nil || info.Mode().Perm() != 0o644 {
		h.t.Errorf("mode %v, %v", info.Mode(), err)
	}
	h.wantOnly(h.path)
}

// wantOnly fails if there is another file than these.
func (h *fileHarness) wantOnly(paths ...string) {
	h.t.Helper()
	var want, found []string
	for _, p := range paths {
		want = append(want, strings.TrimPrefix(p, h.dir+"/"))
	}
	_ = filepath.WalkDir(h.dir, func(path string, d os.DirEntry, _ error) error {
		if !d.IsDir() {
			found = append(found, strings.TrimPrefix(path, h.dir+"/"))
		}
		return nil
	})
	if fmt.Sprint(found) != fmt.Sprint(want) {
		h.t.Errorf("files %q, want %q", found, want)
	}
}

var someLabels = map[string]string{"nvidia.com/gpu.count": "8", "nvidia.com/gpu.product": "NVIDIA-L4"}

func TestFileIsNotTouchedUntilHalfOfItsLife(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newFileHarness(t)
		defer h.run(someLabels)()
		h.wantFile(someLabels)
		first := h.version()
		h.want.Store(&fileWant{path: h.path, labels: maps.Clone(someLabels)})
		healthtest.Advance(fileLife/2 - time.Second)
		if h.version() != first {
			t.Error("written again too early")
		}
		healthtest.Advance(fileCheck + time.Second)
		if h.version() == first {
			t.Error("not renewed")
		}
		h.wantFile(someLabels)
		healthtest.Advance(10 * fileLife)
		h.wantFile(someLabels)
		if h.logs.Len() != 1 {
			t.Errorf("log: %v", h.logs.All())
		}
	})
}

func TestFileFollowsLabelsAndPath(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newFileHarness(t)
		defer h.run(nil)()
		h.wantOnly() // while they are unknown
		h.want.Store(&fileWant{path: h.path, labels: someLabels})
		synctest.Wait()
		h.wantFile(someLabels)
		first := h.version()
		h.want.Store(&fileWant{path: h.path})
		healthtest.Advance(time.Minute)
		if h.version() != first {
			t.Error("changed while the labels are unknown")
		}
		others := map[string]string{"nvidia.com/gpu.count": "7"}
		h.want.Store(&fileWant{path: h.path, labels: others})
		synctest.Wait()
		h.wantFile(others)
		old := h.path
		h.want.Store(&fileWant{path: filepath.Join(h.dir, "missing", "renamed"), labels: others, remove: []string{old}})
		synctest.Wait()
		h.wantFile(others) // until they are written elsewhere
		h.path = filepath.Join(filepath.Dir(old), "renamed")
		want := &fileWant{path: h.path, labels: others, remove: []string{old}}
		h.want.Store(want)
		synctest.Wait()
		h.wantFile(others)
		if r := h.result.Load(); r == nil || r.want != want || len(r.absent) != 1 || r.absent[0] != old {
			t.Errorf("result %+v", r)
		}
		h.want.Store(&fileWant{path: h.path, labels: map[string]string{}})
		synctest.Wait()
		h.wantOnly() // without a GPU
		h.want.Store(want)
		synctest.Wait()
		h.wantFile(others)
		if log := h.logs.FilterMessageSnippet("another process"); log.Len() > 0 {
			t.Errorf("log: %v", log.All())
		}
	})
}

func TestFileIsRestored(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newFileHarness(t)
		defer h.run(someLabels)()
		body := fileBody(someLabels)
		for name, damage := range map[string]func(){
			"removed":          func() { _ = os.Remove(h.path) },
			"empty":            func() { _ = os.WriteFile(h.path, nil, 0o600) },
			"truncated":        func() { _ = os.Truncate(h.path, 120) },
			"other label":      func() { _ = os.WriteFile(h.path, []byte(expiryDirective+"2027-01-01T00:00:00Z\n"+body+"x=y\n"), 0o600) },
			"no expiry":        func() { _ = os.WriteFile(h.path, []byte(body), 0o600) },
			"bad expiry":       func() { _ = os.WriteFile(h.path, []byte(expiryDirective+"tomorrow\n"+body), 0o600) },
			"wall clock ahead": func() { h.step.Add(int64(2 * time.Hour)) },
			"wall clock back":  func() { h.step.Add(-int64(48 * time.Hour)) },
		} {
			damage()
			healthtest.Advance(fileCheck)
			if t.Failed() {
				t.Fatal(name)
			}
			h.wantFile(someLabels)
		}
	})
}

func TestFileOfOthersStays(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newFileHarness(t)
		foreign := []byte("nvidia.com/gpu.count=4\n")
		if err := os.WriteFile(h.path, foreign, 0o600); err != nil {
			t.Fatal(err)
		}
		defer h.run(someLabels)()
		healthtest.Advance(time.Minute)
		if content, _ := os.ReadFile(h.path); !bytes.Equal(content, foreign) || !strings.Contains(h.Err(), h.path) || h.logs.Len() != 1 {
			t.Errorf("%s; error %q, log %v", content, h.Err(), h.logs.All())
		}
		h.want.Store(&fileWant{remove: []string{h.path}})
		synctest.Wait()
		if h.version() == "none" || h.Err() != "" || len(h.result.Load().absent) != 1 {
			t.Errorf("removed, or not forgotten: %q", h.Err())
		}
		_ = os.Remove(h.path)
		h.want.Store(&fileWant{path: h.path, labels: someLabels})
		synctest.Wait()
		h.wantFile(someLabels)
	})
}

// A file that somebody else changes again and again is written each time, and logged once a minute.
func TestFileOfTwoWriters(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newFileHarness(t)
		defer h.run(someLabels)()
		for range 30 {
			if err := os.Remove(h.path); err != nil {
				t.Fatal(err)
			}
			healthtest.Advance(fileCheck)
			h.wantFile(someLabels)
		}
		if n := h.logs.FilterMessageSnippet("another process").Len(); n != 5 {
			t.Errorf("%d log lines in five minutes", n)
		}
	})
}

func (h *fileHarness) countFiles() (n int) {
	_ = filepath.WalkDir(h.dir, func(string, os.DirEntry, error) error { n++; return nil })
	return n
}

// checkRemoved checks that a file is absent, that there is an error unless the other is absent too, and how many files are left.
func (h *fileHarness) checkRemoved(file string, left int) {
	h.t.Helper()
	absent, n := h.result.Load().absent, h.countFiles()
	if (h.Err() == "") != (len(absent) == 2) || !slices.Contains(absent, file) || n != left {
		h.t.Errorf("absent %q; %d files, want %d; error %q", absent, n, left, h.Err())
	}
}

// What is at the path and not a file of the agent stays, and nothing is left beside it.
func TestFileWhereItCannotBe(t *testing.T) {
	for name, c := range map[string]struct {
		prepare func(h *fileHarness) error
		want    string
	}{
		"directory": {func(h *fileHarness) error { return os.Mkdir(h.path, 0o750) }, "has not written it"},
		"large file": {
			func(h *fileHarness) error { return os.WriteFile(h.path, bytes.Repeat([]byte(fileMark), 1000), 0o600) },
			"has not written it",
		},
		"in a file": {func(h *fileHarness) error { h.path += "/x"; return os.WriteFile(filepath.Dir(h.path), nil, 0o600) }, "not a directory"},
		"loop":      {func(h *fileHarness) error { return os.Symlink(h.path, h.path) }, "symbolic links"},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				h := newFileHarness(t)
				if err := c.prepare(h); err != nil {
					t.Fatal(err)
				}
				before := h.countFiles()
				old := filepath.Join(h.dir, "old")
				if err := replaceFile(old, []byte(fileMark)); err != nil {
					t.Fatal(err)
				}
				defer h.run(someLabels)()
				h.want.Store(&fileWant{path: h.path, labels: someLabels, remove: []string{old}})
				healthtest.Advance(time.Minute)
				if !strings.Contains(h.Err(), c.want) || !strings.Contains(h.Err(), h.path) || h.logs.Len() != 1 {
					t.Errorf("error %q, log %v", h.Err(), h.logs.All())
				}
				if _, err := os.Stat(old); err != nil {
					t.Errorf("removed although the other is not written: %v", err)
				}
				h.want.Store(&fileWant{path: h.path, labels: map[string]string{}, remove: []string{old}}) // no GPU
				synctest.Wait()
				if known := c.want == "has not written it"; (h.Err() == "") != known || (h.countFiles() == before) != known {
					t.Errorf("%d files, had %d; error %q", h.countFiles(), before, h.Err())
				}
				h.want.Store(&fileWant{remove: []string{h.path, old}})
				synctest.Wait()
				h.checkRemoved(old, before)
				h.want.Store(new(fileWant)) // nothing is configured or left
				if synctest.Wait(); h.Err() != "" {
					t.Error(h.Err())
				}
			})
		})
	}
}

// A directory at the path fails the last step. The temporary file is removed, and the error does not name it, so that it is logged once.
func TestReplaceFileFails(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "features.d", "labels")
	if err := os.MkdirAll(path, 0o750); err != nil {
		t.Fatal(err)
	}
	err := replaceFile(path, []byte("text"))
	if err == nil || !strings.Contains(err.Error(), path) || strings.Contains(err.Error(), ".tmp") {
		t.Error(err)
	}
	for _, d := range temporaryDirs(path) {
		if entries, err := os.ReadDir(d); err != nil || len(entries) != 1 {
			t.Errorf("%s: %v, %v", d, entries, err)
		}
	}
}

// The status shows a disk that hangs, and the last error meanwhile.
func TestFileOnDiskThatHangs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newFileHarness(t)
		hang := make(chan struct{})
		h.hang.Store(&hang)
		stop := h.run(someLabels)
		healthtest.Advance(fileSlow)
		if h.Err() != "" {
			t.Errorf("too early: %s", h.Err())
		}
		healthtest.Advance(50 * time.Second)
		if h.Err() != "disk has not responded for 60s" {
			t.Error(h.Err())
		}
		h.hang.Store(nil)
		close(hang)
		synctest.Wait()
		h.wantFile(someLabels)
		healthtest.Advance(time.Minute)
		if h.Err() != "" {
			t.Error(h.Err())
		}
		if err := os.RemoveAll(filepath.Dir(h.path)); err != nil {
			t.Fatal(err)
		}
		healthtest.Advance(fileCheck)
		again := make(chan struct{})
		h.hang.Store(&again)
		healthtest.Advance(time.Minute)
		if !strings.Contains(h.Err(), "no such directory") {
			t.Error(h.Err())
		}
		close(again)
		h.hang.Store(nil)
		stop()
	})
}

// At its end the writer writes and removes what is due, and touches nothing else.
func TestFileAtTheEnd(t *testing.T) {
	for range 10 { // after a slow access the writer sees the end or the change first
		synctest.Test(t, func(t *testing.T) {
			h := newFileHarness(t)
			hang := make(chan struct{})
			h.hang.Store(&hang)
			stop := h.run(someLabels)
			h.want.Store(&fileWant{remove: []string{h.path}})
			h.hang.Store(nil)
			time.AfterFunc(time.Second, func() { close(hang) })
			stop()
			h.wantOnly()
			stop = h.run(someLabels)
			_ = os.Remove(h.path)
			stop()
			h.wantOnly()
		})
	}
}

func TestFileWithoutDirectory(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newFileHarness(t)
		dir := filepath.Dir(h.path)
		_ = os.Remove(dir)
		defer h.run(someLabels)()
		healthtest.Advance(time.Minute)
		if !strings.Contains(h.Err(), dir) || h.logs.Len() != 1 {
			t.Errorf("error %q, log %v", h.Err(), h.logs.All())
		}
		h.wantOnly()
		_ = os.Mkdir(dir, 0o750)
		healthtest.Advance(fileCheck)
		h.wantFile(someLabels)
		if h.Err() != "" {
			t.Error(h.Err())
		}
	})
}

// The agent keeps the file of an earlier process as its own, also if that process was killed while it wrote.
func TestFileOfEarlierProcess(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newFileHarness(t)
		h.run(someLabels)()
		first := h.version()
		for _, dir := range temporaryDirs(h.path) {
			if err := os.WriteFile(filepath.Join(dir, ".gpu-node-agent-123.tmp"), []byte("half"), 0o600); err != nil {
				t.Fatal(err)
			}
		}
		next := &fileHarness{fileWriter: &fileWriter{log: nop, wall: time.Now}, t: t, dir: h.dir, path: h.path}
		defer next.run(someLabels)()
		if h.version() != first {
			t.Error("written again")
		}
		next.wantFile(someLabels)
	})
}

// Node Feature Discovery ignores a larger file than 64 KiB (MaxFeatureFileSize), so none is written.
func TestFileSize(t *testing.T) {
	const limit = 65536
	for name, c := range map[string]struct {
		size  int
		fails bool
	}{"largest": {limit, false}, "too large": {limit + 1, true}} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				h := newFileHarness(t)
				rest := len(expiryDirective + "2000-01-01T00:00:00Z\n" + fileBody(map[string]string{"x": ""}))
				labels := map[string]string{"x": strings.Repeat("x", c.size-rest)}
				defer h.run(labels)()
				if c.fails {
					h.wantOnly()
				} else {
					h.wantFile(labels)
				}
				if failed := strings.Contains(h.Err(), fmt.Sprint(limit)); failed != c.fails {
					t.Error(h.Err())
				}
				healthtest.Advance(fileLife) // and is found again
				if !c.fails {
					h.wantFile(labels)
				}
			})
		})
	}
}

// Nothing but the whole file appears in the directory that Node Feature Discovery reads.
func TestFileAppearsWhole(t *testing.T) {
	h := newFileHarness(t)
	fd, err := unix.InotifyInit1(unix.IN_CLOEXEC | unix.IN_NONBLOCK)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd) //nolint:errcheck // only read
	if _, err := unix.InotifyAddWatch(fd, filepath.Dir(h.path), unix.IN_CREATE|unix.IN_MODIFY|unix.IN_MOVED_TO); err != nil {
		t.Fatal(err)
	}
	for range 2 { // a new file, then a replaced one
		if err := h.write(h.path, fileBody(someLabels)); err != nil {
			t.Fatal(err)
		}
		events := make([]byte, 4096)
		n, err := unix.Read(fd, events)
		mask, length := binary.NativeEndian.Uint32(events[4:]), int(binary.NativeEndian.Uint32(events[12:])) // struct inotify_event
		if err != nil || n != unix.SizeofInotifyEvent+length || mask != unix.IN_MOVED_TO {
			t.Errorf("%d bytes of events, the first with mask %#x, %v", n, mask, err)
		}
		if err := os.WriteFile(h.path, nil, 0o600); err != nil {
			t.Fatal(err)
		}
		if _, err := unix.Read(fd, events); err != nil { // of that
			t.Fatal(err)
		}
	}
}

// If the directory above cannot have the temporary file, the directory itself has it.
func TestFileInMountedDirectory(t *testing.T) {
	dir := t.TempDir()
	d, err := os.Open(dir) //nolint:gosec // a test's
	if err != nil {
		t.Fatal(err)
	}
	defer d.Close() //nolint:errcheck // only read
	path := fmt.Sprintf("/proc/self/fd/%d/labels", d.Fd())
	if _, err := os.CreateTemp(filepath.Dir(filepath.Dir(path)), "x"); err == nil {
		t.Skip("files can be created in /proc/self/fd")
	}
	if err := replaceFile(path, []byte("text")); err != nil {
		t.Fatal(err)
	}
	if content, err := os.ReadFile(filepath.Join(dir, "labels")); err != nil || string(content) != "text" { //nolint:gosec // a test's
		t.Errorf("%q, %v", content, err)
	}
	if entries, _ := os.ReadDir(dir); len(entries) != 1 {
		t.Errorf("%v", entries)
	}
}
