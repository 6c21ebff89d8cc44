package statefile

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
	"go.uber.org/zap/zaptest/observer"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/health/durable"
	"github.com/gpu-node-agent/gpu-node-agent/internal/healthtest"
)

func advance(d time.Duration) { healthtest.Advance(d) }

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func write(t *testing.T, path, text string) {
	t.Helper()
	must(t, os.WriteFile(path, []byte(text), 0o600))
}

func wantContent(t *testing.T, path, want string) {
	t.Helper()
	if text, _, err := fileOptions().Read(path); err != nil || string(text) != strings.TrimSpace(want) {
		t.Errorf("%s has %q, %v; want %q", path, text, err, want)
	}
}

// snapshotOf returns a snapshot of a kind of source with three devices.
func snapshotOf(t *testing.T, kind string) *health.Snapshot {
	return &health.Snapshot{Seq: 1, At: healthtest.Epoch, Source: health.Source{Kind: kind, Inventory: kind + " x"}, Devices: faultyDevices(t)}
}

// writeSaved writes the state of a kind of source.
func writeSaved(t *testing.T, dir, kind string) {
	t.Helper()
	text, err := json.Marshal(FromSnapshot(snapshotOf(t, kind), "boot"))
	must(t, err)
	write(t, filepath.Join(dir, stateName(kind)), string(text))
}

// wantDevices checks how many devices a directory has for each kind of source.
func wantDevices(t *testing.T, dir string, want map[string]int) {
	t.Helper()
	c, err := Read(dir)
	must(t, err)
	for kind, n := range want {
		src := health.SourceID{Kind: kind, Inventory: kind + " x", Simulated: kind == "sim"}
		if got := len(c.Restore("boot", src, healthtest.At(100)).Devices); got != n {
			t.Errorf("%s: %d devices, want %d", kind, got, n)
		}
	}
}

// keepInPlace takes every name to which what is at a path could be set aside.
func keepInPlace(t *testing.T, path string) {
	t.Helper()
	write(t, path+".unread", "")
	for i := 1; i < 100; i++ {
		write(t, fmt.Sprintf("%s.unread.%d", path, i), "")
	}
}

// load reads the state of DCGM like the next process.
func load(dir string) (Saved, error) {
	d := New(dir, nil, nil, "", zap.NewNop())
	defer d.release()
	c, err := d.Load()
	return c.States["dcgm"], err
}

// stateFile returns the path of the state of DCGM in a directory of the test.
func stateFile(t *testing.T) (dir, path string) {
	dir = t.TempDir()
	return dir, filepath.Join(dir, "state.json")
}

// harness runs a Dir in a synctest bubble.
type harness struct {
	*Dir
	path string // of the state of DCGM
	out  *health.Latest[health.Snapshot]
	logs *observer.ObservedLogs
	stop func() // may be called again
}

func newHarness(dir string) *harness {
	core, logs := observer.New(zapcore.WarnLevel)
	h := &harness{path: filepath.Join(dir, "state.json"), out: new(health.Latest[health.Snapshot]), logs: logs}
	h.Dir = New(dir, h.out, new(health.Latest[[]byte]), "boot", zap.New(core))
	return h
}

func (h *harness) start(t *testing.T) { h.stop = healthtest.Run(t, h.Run) }

// loadAndStart returns a running harness that has loaded the directory.
func loadAndStart(t *testing.T, dir string) *harness {
	t.Helper()
	h := newHarness(dir)
	_, err := h.Load()
	must(t, err)
	h.start(t)
	return h
}

func (h *harness) store(s *health.Snapshot) {
	h.out.Store(s)
	synctest.Wait()
}

// wantFailuresLogged checks how often a failure of the state directory was logged.
func (h *harness) wantFailuresLogged(t *testing.T, want int) {
	t.Helper()
	n := 0
	for _, e := range h.logs.All() {
		if e.ContextMap()["flag"] == "--state-dir" {
			n++
		}
	}
	if n != want {
		t.Errorf("%d failures logged, want %d: %v", n, want, h.logs.All())
	}
}

func TestLoadSetsDamagedFileAside(t *testing.T) {
	dir, path := stateFile(t)
	if s, err := load(dir); err != nil || len(s.Devices) != 0 {
		t.Fatalf("no file: %v %v", s, err)
	}
	for i, name := range []string{"state.json.damaged", "state.json.damaged.1", "state.json.damaged.2"} {
		text := strings.Repeat("{", i+1)
		write(t, path, text)
		aside := filepath.Join(filepath.Dir(path), name)
		if _, err := load(dir); err == nil || !strings.Contains(err.Error(), path+" ") || !strings.HasSuffix(err.Error(), aside) {
			t.Errorf("error %v does not name the file and %s", err, aside)
		}
		wantContent(t, aside, text)
		if _, err := os.Stat(path); !errors.Is(err, os.ErrNotExist) {
			t.Error("the damaged file was not moved")
		}
	}
	wantContent(t, path+".damaged", "{") // the later files did not replace it
}

func TestLoadSetsUnreadableFileAside(t *testing.T) {
	dir, path := stateFile(t)
	if os.Getuid() == 0 { // root reads every file, but not a link to itself
		must(t, os.Symlink(path, path))
	} else {
		must(t, os.WriteFile(path, []byte("secret"), 0o000))
	}
	if _, err := load(dir); err == nil || !strings.HasSuffix(err.Error(), path+".unread") {
		t.Errorf("%v", err)
	}
	if _, err := os.Lstat(path + ".unread"); err != nil {
		t.Error(err)
	}
}

// A file of a newer version is set aside, and what this release can read of it is used.
func TestLoadNewerVersion(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		dir, path := stateFile(t)
		text := strings.Replace(otherRelease, `"version":1`, `"version":3`, 1)
		write(t, path, text)
		h := newHarness(dir)
		c, err := h.Load()
		if err == nil || !strings.HasSuffix(err.Error(), path+".version3") || len(c.States["dcgm"].Devices) != 1 {
			t.Errorf("%+v, %v", c, err)
		}
		wantContent(t, path+".version3", text)
		h.start(t)
		h.stop() // before the first poll
		wantDevices(t, dir, map[string]int{"dcgm": 1})
	})
}

// A file of another format is set aside, which is a problem for a day, also while the state is saved.
func TestSetAsideIsProblem(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		dir, path := stateFile(t)
		write(t, path, strings.Replace(otherRelease, "gpu-node-agent state", "gpu-node-agent findings", 1))
		h := newHarness(dir)
		if c, err := h.LoadInTime(t.Context(), nil); err == nil || len(c.States["dcgm"].Devices) > 0 {
			t.Fatalf("%+v, %v", c, err)
		}
		h.start(t)
		h.store(snapshotOf(t, "dcgm"))
		advance(setAsideShown - time.Minute)
		all := h.Status().Problems()
		if len(all) != 1 || !strings.Contains(all[0], `"gpu-node-agent findings"`) ||
			!strings.HasSuffix(all[0], "set aside as "+path+".damaged; findings may be lost") {
			t.Errorf("%q", all)
		}
		wantDevices(t, dir, map[string]int{"dcgm": 3})
		advance(2 * time.Minute)
		if all := h.Status().Problems(); len(all) > 0 {
			t.Errorf("a day later: %q", all)
		}
		h.stop()
	})
}

// What is not a regular file is set aside, and nothing waits for it.
func TestLoadSetsIrregularFileAside(t *testing.T) {
	for name, place := range map[string]func(path string) error{
		"fifo":      func(path string) error { return syscall.Mkfifo(path, 0o600) },
		"directory": func(path string) error { return os.MkdirAll(filepath.Join(path, "theirs"), 0o750) },
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				dir, path := stateFile(t)
				must(t, place(path))
				h := newHarness(dir)
				_, err := h.LoadInTime(t.Context(), nil)
				if err == nil || !strings.Contains(err.Error(), "not a regular file; set aside as "+path+".unread") {
					t.Errorf("%v", err)
				}
				h.start(t)
				h.store(snapshotOf(t, "dcgm"))
				wantDevices(t, dir, map[string]int{"dcgm": 3})
				must(t, os.Remove(path))
				must(t, place(path)) // at run time
				advance(checkInterval)
				wantDevices(t, dir, map[string]int{"dcgm": 3})
				if _, err := os.Lstat(path + ".unread.1"); err != nil {
					t.Error(err)
				}
				if s := h.Status(); s.Err != "" || !s.Unread.IsZero() {
					t.Errorf("%+v", s)
				}
				h.stop()
			})
		})
	}
}

// Run never overwrites a file that could be neither read nor set aside. When it can be read, its content is restored late.
func TestRunKeepsUnreadFile(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		dir, path := stateFile(t)
		must(t, os.Symlink(path, path)) // to itself, so that it cannot be read
		keepInPlace(t, path)
		h := newHarness(dir)
		var late []Contents
		_, err := h.LoadInTime(t.Context(), func(c Contents, _ error) { late = append(late, c) })
		if err == nil || !strings.Contains(err.Error(), path) {
			t.Fatalf("%v", err)
		}
		if s := h.Status(); s.Path != dir || s.Err != err.Error() || s.Since.IsZero() || s.Unread.IsZero() {
			t.Errorf("status %+v", s)
		}
		h.start(t)
		next := snapshotOf(t, "dcgm")
		next.Devices = next.Devices[:2]
		h.store(next)
		advance(time.Minute)
		h.wantFailuresLogged(t, 1)
		if _, err := os.Readlink(path); err != nil {
			t.Fatal(err)
		}
		if len(late) > 0 {
			t.Errorf("restored %+v", late)
		}
		must(t, os.Remove(path))
		writeSaved(t, dir, "dcgm")
		advance(retryWriteAfter + time.Second)
		if len(late) != 1 || len(late[0].States["dcgm"].Devices) != 3 {
			t.Errorf("restored %+v", late)
		}
		wantDevices(t, dir, map[string]int{"dcgm": 2})
		if s := h.Status(); s.Err != "" || s.Written.IsZero() || !s.Unread.IsZero() {
			t.Errorf("status %+v", s)
		}
		h.stop()
	})
}

// hang makes the disk of a harness answer only when the returned function is called.
func (h *harness) hang() (answer func()) {
	answered := make(chan struct{})
	h.read = func(path string) ([]byte, fs.FileInfo, error) {
		<-answered
		return fileOptions().Read(path)
	}
	return sync.OnceFunc(func() { close(answered) })
}

// A disk that does not answer delays the start by readTimeout. What it has is restored late, and before that nothing is written.
func TestLoadInTime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		dir, path := stateFile(t)
		writeSaved(t, dir, "dcgm")
		before, err := os.ReadFile(path)
		must(t, err)
		h := newHarness(dir)
		answer := h.hang()
		var late []Saved
		begin := time.Now()
		_, err = h.LoadInTime(t.Context(), func(c Contents, err error) {
			must(t, err)
			s := c.States["dcgm"]
			late = append(late, s)
			// merged
			h.out.Store(&health.Snapshot{
				Seq: 9, At: healthtest.Epoch, Source: health.Source{Kind: "dcgm", Inventory: "dcgm x"},
				Devices: s.Devices[:2],
			})
		})
		if !errors.Is(err, ErrUnread) || !strings.Contains(err.Error(), dir) || time.Since(begin) != readTimeout {
			t.Fatalf("%v after %v", err, time.Since(begin))
		}
		h.start(t)
		h.store(&health.Snapshot{Seq: 1, At: healthtest.Epoch, Source: health.Source{Kind: "dcgm", Inventory: "dcgm x"}})
		advance(time.Minute)
		s := h.Status()
		if !s.Unread.Equal(begin) || !strings.Contains(s.Err, "has not responded for 1m10s") || !s.Since.Equal(begin) || len(late) > 0 {
			t.Errorf("status %+v", s)
		}
		if err := h.WaitWritten(t.Context(), h.out.Load()); !errors.Is(err, ErrUnread) {
			t.Errorf("%v", err)
		}
		if h.LacksSection("served") {
			t.Error("an unread file lacks a section")
		}
		if text, err := os.ReadFile(path); err != nil || string(text) != string(before) {
			t.Errorf("written before it was read: %v", err)
		}
		answer()
		synctest.Wait()
		if s := h.Status(); len(late) != 1 || len(late[0].Devices) != 3 || !s.Unread.IsZero() || s.Err != "" {
			t.Errorf("restored %+v, status %+v", late, s)
		}
		wantDevices(t, dir, map[string]int{"dcgm": 2})
		must(t, h.WaitWritten(t.Context(), h.out.Load()))
		h.stop()
	})
}

// The end of the process waits for no disk, neither in Load nor in Run.
func TestLoadInTimeEnds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newHarness(t.TempDir())
		defer h.hang()()
		ctx, cancel := context.WithCancel(t.Context())
		time.AfterFunc(time.Second, cancel)
		begin := time.Now()
		if _, err := h.LoadInTime(ctx, nil); !errors.Is(err, ErrUnread) {
			t.Errorf("%v", err)
		}
		if err := h.Run(ctx); err != nil || time.Since(begin) != time.Second {
			t.Errorf("%v after %v", err, time.Since(begin))
		}
	})
}

// Without a directory nothing is kept, nothing waits, and Run lasts as long as the process.
func TestRunWithoutDirectory(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newHarness("")
		if c, err := h.LoadInTime(t.Context(), nil); err != nil || len(c.States) > 0 {
			t.Errorf("%+v, %v", c, err)
		}
		ctx, cancel := context.WithCancel(t.Context())
		var ended atomic.Bool
		go func() { ended.Store(h.Run(ctx) == nil) }()
		h.store(snapshotOf(t, "dcgm"))
		must(t, h.WaitWritten(t.Context(), h.out.Load()))
		advance(time.Hour)
		if ended.Load() || h.Status().Path != "" || len(h.Status().Problems()) > 0 {
			t.Errorf("ended: %v, %+v", ended.Load(), h.Status())
		}
		cancel()
		synctest.Wait()
		if !ended.Load() {
			t.Error("did not end")
		}
	})
}

// A snapshot that is stored while Run ends is written, without a pause.
func TestRunWritesAtTheEnd(t *testing.T) {
	for name, broken := range map[string]bool{"disk works": false, "disk worked again only now": true} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				dir := filepath.Join(t.TempDir(), "dir")
				h := newHarness(dir)
				_, err := h.Load()
				must(t, err)
				if broken {
					must(t, os.RemoveAll(dir))
					write(t, dir, "")
				}
				h.start(t)
				h.store(&health.Snapshot{At: healthtest.Epoch, Source: health.Source{Kind: "dcgm"}})
				advance(time.Second)
				if broken {
					if s := h.Status(); s.Err == "" {
						t.Error("the failure is not in the status")
					}
					must(t, os.Remove(dir))
				}
				begin := time.Now()
				h.out.Store(snapshotOf(t, "dcgm"))
				h.stop()
				if took := time.Since(begin); took > 0 {
					t.Errorf("Run took %v to end", took)
				}
				wantDevices(t, dir, map[string]int{"dcgm": 3})
			})
		})
	}
}

func TestRunWritesChangesOnly(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		dir := filepath.Join(t.TempDir(), "dir")
		write(t, dir, "") // so that the directory cannot be created
		path := filepath.Join(dir, "state.json")
		h := newHarness(dir)
		h.start(t)
		s := snapshotOf(t, "dcgm")
		h.store(s)
		advance(time.Minute)
		h.wantFailuresLogged(t, 1)
		must(t, os.Remove(dir))
		another := *s
		h.store(&another) // the write is tried again after a while, not at every poll
		if _, err := os.Stat(path); err == nil {
			t.Error("written at a poll")
		}
		advance(retryWriteAfter + time.Second)
		wantDevices(t, dir, map[string]int{"dcgm": 3})

		before, err := os.Stat(path)
		must(t, err)
		again := *s
		again.Devices = slices.Clone(s.Devices)
		findings := slices.Clone(again.Devices[0].Memory.Findings)
		for i := range findings {
			if findings[i].Cause == health.CauseTemperature {
				findings[i].Last, findings[i].Reason = healthtest.At(50), "another temperature"
			}
		}
		again.Devices[0].Memory.Findings = findings
		h.store(&again)
		after, err := os.Stat(path)
		must(t, err)
		if !os.SameFile(before, after) {
			t.Error("written although only a measured value changed")
		}

		h.store(&health.Snapshot{At: healthtest.Epoch, Source: health.Source{Kind: "dcgm", Inventory: "dcgm x"}})
		wantDevices(t, dir, map[string]int{"dcgm": 0})
		files, err := filepath.Glob(dir + "/*")
		if err != nil || len(files) != 3 { // with the spare file and the lock
			t.Errorf("files %v, %v", files, err)
		}
		h.stop()
	})
}

// Each kind of source keeps its state while another one is used.
func TestRunKeepsOtherSources(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		dir := t.TempDir()
		for _, kind := range []string{"dcgm", "sim"} {
			h := loadAndStart(t, dir)
			h.store(snapshotOf(t, kind))
			h.stop()
		}
		h := loadAndStart(t, dir)
		for _, kind := range []string{"sim", "dcgm", "sim", "dcgm"} {
			s := snapshotOf(t, kind)
			if s.Devices = s.Devices[:2]; kind != "dcgm" {
				s.Devices = nil
			}
			h.store(s)
		}
		h.stop()
		wantDevices(t, dir, map[string]int{"dcgm": 2, "sim": 0})
	})
	synctest.Test(t, func(t *testing.T) {
		dir, path := stateFile(t)
		write(t, path, otherRelease)
		h := loadAndStart(t, dir)
		h.store(snapshotOf(t, "sim"))
		wantDevices(t, dir, map[string]int{"dcgm": 1, "sim": 3})
		h.stop()
	})
}

// The state that a source had when another replaced it is saved, also if no snapshot was stored after it.
func TestRunSavesExchangedState(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		dir := t.TempDir()
		h := newHarness(dir)
		c, err := h.Load()
		must(t, err)
		h.start(t)
		h.store(snapshotOf(t, "dcgm"))
		last := snapshotOf(t, "dcgm")
		last.Devices = last.Devices[:2]
		sim := health.SourceID{Kind: "sim", Inventory: "sim x", Simulated: true}
		c.Restore("boot", sim, healthtest.Epoch).Exchange(last, true, sim, healthtest.Epoch)
		h.store(snapshotOf(t, "sim"))
		wantDevices(t, dir, map[string]int{"dcgm": 2, "sim": 3})
		h.stop()
	})
}

// A detach continues with the source that replaces another, so the state of the replaced source has none. A source that no process has used
// since keeps its detach.
func TestDetachmentMovesToNewSource(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		dir := t.TempDir()
		detached := func(kind string) *health.Snapshot {
			s := snapshotOf(t, kind)
			s.Source.Detachment = health.Detachment{Since: healthtest.Epoch, Until: healthtest.At(1000), For: 1000 * time.Second}
			return s
		}
		want := func(when, kind string, inForce bool) {
			t.Helper()
			s, err := Read(dir)
			must(t, err)
			d := s.Restore("boot", health.SourceID{Kind: kind, Inventory: kind + " x"}, healthtest.At(100)).Detachment
			if d.InForce() != inForce || d.Over {
				t.Errorf("%s: detachment of %s: %+v", when, kind, d)
			}
		}
		h := loadAndStart(t, dir)
		h.store(detached("dcgm"))
		h.store(detached("sim"))
		want("replaced", "dcgm", false)
		want("replaced", "sim", true)
		h.stop()
		h = loadAndStart(t, dir)
		h.store(snapshotOf(t, "dcgm"))
		want("after a restart", "dcgm", false)
		want("after a restart", "sim", true)
		h.stop()
	})
}

// A lock that Load found held may be free when Run saves, so Load reports no outcome.
func TestWaitWrittenAfterLoadOfLockedFile(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		dir := t.TempDir()
		first := loadAndStart(t, dir)
		second := newHarness(dir)
		_, err := second.Load()
		must(t, err)
		first.stop()
		snapshot := snapshotOf(t, "dcgm")
		done := make(chan error, 1)
		go func() { done <- second.WaitWritten(t.Context(), snapshot) }()
		synctest.Wait()
		second.out.Store(snapshot)
		second.start(t)
		if err := <-done; err != nil {
			t.Error(err)
		}
		second.stop()
	})
}

// A second agent only reads the file, even if it is damaged, and takes over when the first agent ends.
func TestRunWaitsForLock(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		dir, path := stateFile(t)
		first := loadAndStart(t, dir)
		first.store(snapshotOf(t, "dcgm"))

		second := newHarness(dir)
		s, err := second.Load()
		if err != nil || len(s.States["dcgm"].Devices) != 3 {
			t.Fatalf("%+v, %v", s, err)
		}
		snapshot := snapshotOf(t, "dcgm")
		snapshot.Devices = snapshot.Devices[:1]
		second.start(t)
		second.store(snapshot)
		advance(time.Minute)
		wantDevices(t, dir, map[string]int{"dcgm": 3})
		if s := second.Status(); s.Err == "" || s.Since.IsZero() {
			t.Errorf("status %+v", s)
		}
		if _, locked := errors.AsType[*lockedError](second.WaitWritten(t.Context(), snapshot)); !locked {
			t.Error("WaitWritten does not report the lock")
		}
		second.wantFailuresLogged(t, 1)

		write(t, path, "{")
		if _, err := load(dir); err == nil {
			t.Error("no error for a damaged file")
		}
		wantContent(t, path, "{")
		advance(checkInterval + time.Second) // the first agent writes it again
		first.stop()
		another := *snapshot
		second.store(&another) // the lock is tried again after a while, not at every poll
		wantDevices(t, dir, map[string]int{"dcgm": 3})
		advance(retryLockAfter + time.Millisecond)
		wantDevices(t, dir, map[string]int{"dcgm": 1})
		if s := second.Status(); s.Err != "" || second.WaitWritten(t.Context(), snapshot) != nil {
			t.Errorf("status %+v", s)
		}
		second.stop()
	})
}

// Run rewrites a file that another process changed, also without a new snapshot and before the first poll.
func TestRunRepairsFile(t *testing.T) {
	for name, change := range map[string]func(t *testing.T, path string){
		"removed":                    func(t *testing.T, path string) { must(t, os.Remove(path)) },
		"removed with its directory": func(t *testing.T, path string) { must(t, os.RemoveAll(filepath.Dir(path))) },
		"truncated":                  func(t *testing.T, path string) { must(t, os.Truncate(path, 10)) },
		"replaced by nonsense":       func(t *testing.T, path string) { must(t, os.Remove(path)); write(t, path, "nonsense") },
		"replaced by a rename": func(t *testing.T, path string) {
			write(t, path+".new", otherRelease)
			must(t, os.Rename(path+".new", path))
		},
		"replaced by another agent": func(t *testing.T, path string) { write(t, path, otherRelease) },
	} {
		for when, polled := range map[string]bool{"after the first poll": true, "before the first poll": false} {
			t.Run(name+", "+when, func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					dir := filepath.Join(t.TempDir(), "dir")
					must(t, os.Mkdir(dir, 0o750))
					writeSaved(t, dir, "sim")
					h := loadAndStart(t, dir)
					h.store(snapshotOf(t, "dcgm"))
					if !polled {
						h.stop()
						h = loadAndStart(t, dir)
					}
					change(t, h.path)
					advance(checkInterval)
					wantDevices(t, dir, map[string]int{"dcgm": 3, "sim": 3})
					info, err := os.Stat(h.path)
					must(t, err)
					advance(time.Minute)
					if now, err := os.Stat(h.path); err != nil || !os.SameFile(info, now) {
						t.Error("written more than once")
					}
					want := 0
					if polled {
						want = 1 // before, this process has written nothing that could differ
					}
					if logged := h.logs.FilterMessageSnippet("another process changed").Len(); logged != want {
						t.Errorf("logged %d times that another process changed the file, want %d", logged, want)
					}
					h.stop()
				})
			})
		}
	}
}

// What another process writes before this one has anything to save stays.
func TestRunKeepsFileOfOtherProcess(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		dir := t.TempDir()
		h := loadAndStart(t, dir)
		advance(checkInterval)
		if _, err := os.Stat(h.path); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("written without a state: %v", err)
		}
		writeSaved(t, dir, "sim")
		other := filepath.Join(dir, "state.sim.json")
		before, err := os.Stat(other)
		must(t, err)
		advance(2 * checkInterval)
		h.store(snapshotOf(t, "dcgm"))
		wantDevices(t, dir, map[string]int{"dcgm": 3, "sim": 3})
		h.stop()

		// The next process does not write what it has only read.
		h = loadAndStart(t, dir)
		advance(2 * checkInterval)
		if after, err := os.Stat(other); err != nil || !durable.Same(before, after) {
			t.Errorf("written without a change: %v", err)
		}
		h.stop()
	})
}

// A file that cannot be written is a problem until it can.
func TestStatusProblems(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		dir, path := stateFile(t)
		h := loadAndStart(t, dir)
		h.store(snapshotOf(t, "dcgm"))
		if all := h.Status().Problems(); len(all) > 0 {
			t.Errorf("%q", all)
		}
		must(t, errors.Join(os.Remove(path), os.Mkdir(path, 0o750))) // what is there cannot be set aside
		keepInPlace(t, path)
		advance(checkInterval + time.Second)
		all := h.Status().Problems()
		if len(all) != 1 || !strings.Contains(all[0], path) || !strings.Contains(all[0], "findings will be lost on restart") {
			t.Errorf("%q", all)
		}
		if err := h.WaitWritten(t.Context(), h.out.Load()); err == nil {
			t.Error("written")
		}
		must(t, os.Remove(path))
		advance(retryWriteAfter + time.Second)
		if all := h.Status().Problems(); len(all) > 0 {
			t.Errorf("%q", all)
		}
		wantDevices(t, dir, map[string]int{"dcgm": 3})
		h.stop()
	})
	s := Status{Path: "/state", Unread: healthtest.At(0), Err: "it hangs"}
	if all := s.Problems(); len(all) != 2 || !strings.Contains(all[0], "/state could not be read since 2026-01-02T03:04:05Z") ||
		!strings.Contains(all[1], "it hangs") {
		t.Errorf("%q", all)
	}
	if f := s.Failure(); f.Path != "/state" || f.Err != "it hangs" {
		t.Errorf("%+v", f)
	}
}

// The lock's file names its holder, whatever was in it.
func TestLockNamesHolder(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		dir := filepath.Join(t.TempDir(), "new")
		path := filepath.Join(dir, "state.json")
		first := loadAndStart(t, dir)
		if info, err := os.Stat(dir); err != nil || info.Mode() != fs.ModeDir|0o750 {
			t.Errorf("%v, %v", info, err)
		}
		first.stop()
		write(t, lockPath(dir), strings.Repeat("an earlier holder ", 100))
		second := newHarness(dir)
		lock, err := acquireLock(dir)
		must(t, err)
		host, err := os.Hostname()
		must(t, err)
		holder := fmt.Sprintf("pid %d on %s", os.Getpid(), host)
		wantContent(t, lockPath(dir), holder)
		_, err = second.Load()
		must(t, err)
		if s := second.Status(); s.Path != dir || !strings.Contains(s.Err, "locked by another agent ("+holder+")") {
			t.Errorf("%+v", s)
		}
		write(t, path, "{")
		if _, err := second.Load(); err == nil || !strings.HasPrefix(err.Error(), path+" cannot be parsed") ||
			!strings.Contains(err.Error(), "left in place") {
			t.Errorf("%v", err)
		}
		write(t, lockPath(dir), strings.Repeat("x", 300)) // by whom ever
		if _, err := acquireLock(dir); err == nil || strings.Count(err.Error(), "x") != 200 {
			t.Errorf("%v", err)
		}
		lock.Release()
	})
}

// Read needs no lock, and its error names the file.
func TestRead(t *testing.T) {
	dir, path := stateFile(t)
	for _, none := range []string{"", dir} {
		if c, err := Read(none); err != nil || c.States["dcgm"].Source != "" || c.Node.Sections != nil {
			t.Errorf("%q: %+v, %v", none, c, err)
		}
	}
	writeSaved(t, dir, "dcgm")
	for _, damaged := range []string{filepath.Join(dir, "node.json"), filepath.Join(dir, "state.sim.json")} {
		write(t, damaged, "{")
		if c, err := Read(dir); err == nil || !strings.HasPrefix(err.Error(), damaged+" cannot be parsed") || len(c.States["dcgm"].Devices) != 3 {
			t.Errorf("%+v, %v", c, err)
		}
		must(t, os.Remove(damaged))
	}
	must(t, errors.Join(os.Remove(path), os.Mkdir(path, 0o750)))
	if _, err := Read(dir); err == nil || !strings.HasPrefix(err.Error(), path+" cannot be read") {
		t.Errorf("%v", err)
	}
	boot, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if id := BootID(); err == nil && id != strings.TrimSpace(string(boot)) {
		t.Errorf("boot %q, want %q", id, boot)
	}
}

// XIDs without a finding are written every checkInterval and at the end.
func TestRunDelaysXIDs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		dir := t.TempDir()
		h := loadAndStart(t, dir)
		xids := func() int {
			s, err := load(dir)
			must(t, err)
			return len(s.Devices[0].XIDs.Rows)
		}
		writes := 0
		var last time.Time
		for i := range 19 { // the next write is not due at the end
			s := snapshotOf(t, "dcgm")
			s.Devices[0].XIDs.Rows = make([]health.LedgerRow, i+1)
			h.out.Store(s)
			advance(time.Second)
			if w := h.Status().Written; !w.Equal(last) {
				writes, last = writes+1, w
			}
		}
		if writes != 2 || xids() != 11 {
			t.Errorf("%d writes, %d XIDs", writes, xids())
		}
		h.stop()
		if xids() != 19 {
			t.Errorf("%d XIDs at the end", xids())
		}
	})
}

func TestWaitWritten(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		dir := t.TempDir()
		h := loadAndStart(t, dir)
		defer h.stop()
		s := snapshotOf(t, "dcgm")
		s.Seq = 7
		done := make(chan error, 1)
		go func() { done <- h.WaitWritten(t.Context(), s) }()
		advance(time.Minute)
		select {
		case err := <-done:
			t.Fatalf("returned before the write: %v", err)
		default:
		}
		h.out.Store(s)
		if err := <-done; err != nil {
			t.Error(err)
		}
		wantDevices(t, dir, map[string]int{"dcgm": 3})
		later := *s
		later.Seq = 8
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		if err := h.WaitWritten(ctx, &later); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("%v", err)
		}
	})
}

// The removal of the lock's file leads to no second writer, whether that waits for the lock or comes later.
func TestLockFileRemoved(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		dir := t.TempDir()
		first := loadAndStart(t, dir)
		first.store(snapshotOf(t, "dcgm"))
		must(t, os.Remove(lockPath(dir)))
		advance(checkInterval)
		second := loadAndStart(t, dir)
		second.store(snapshotOf(t, "dcgm"))
		advance(2 * checkInterval)
		if a, b := first.Status().Err, second.Status().Err; a != "" || b == "" {
			t.Errorf("first: %q, second: %q", a, b)
		}
		first.stop()
		second.stop()
	})
	synctest.Test(t, func(t *testing.T) {
		dir := t.TempDir()
		first, second := loadAndStart(t, dir), loadAndStart(t, dir)
		first.store(snapshotOf(t, "dcgm"))
		second.store(snapshotOf(t, "dcgm"))
		advance(time.Second)
		must(t, os.Remove(lockPath(dir)))
		advance(2 * checkInterval)
		if a, b := first.Status().Err, second.Status().Err; (a == "") == (b == "") {
			t.Errorf("first: %q, second: %q", a, b)
		}
		first.stop()
		second.stop()
	})
}

// XIDs that event sources report before the first poll are saved, if the file is of the same devices.
func TestSaveXIDsBeforeFirstPoll(t *testing.T) {
	for name, c := range map[string]struct {
		inventory string
		xid       int
		saved     bool
	}{
		"no XID":            {"dcgm x", 0, false},
		"XID":               {"dcgm x", 79, true},
		"another inventory": {"dcgm y", 79, false},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				dir := t.TempDir()
				writeSaved(t, dir, "dcgm")
				h := loadAndStart(t, dir)
				saved, err := Read(dir)
				must(t, err)
				s := &health.Snapshot{Seq: 1, Source: health.Source{Kind: "dcgm", Inventory: c.inventory}}
				s.Devices = saved.Restore("boot", health.SourceID{Kind: "dcgm", Inventory: "dcgm x"}, healthtest.At(100)).Devices
				if c.xid != 0 {
					s.Devices = judgeEvent(s.Devices, 101, c.xid)
				}
				h.store(s)
				h.stop()
				if written := !h.Status().Written.IsZero(); written != c.saved {
					t.Errorf("written: %v", written)
				}
				read, err := Read(dir)
				must(t, err)
				after := read.States["dcgm"]
				d := after.Devices[0]
				if d.Verdict.Has("xid-79") != c.saved || (len(d.XIDs.Owed) > 0) != c.saved || after.Inventory != "dcgm x" || !after.History ||
					after.Polled.IsZero() {
					t.Errorf("%+v", after)
				}
			})
		})
	}
}

// XIDs that DCGM owes are saved when their number changes, but not at every poll.
func TestSaveOwedXIDs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		dir := t.TempDir()
		h := loadAndStart(t, dir)
		defer h.stop()
		s := &health.Snapshot{
			At: healthtest.Epoch, Source: health.Source{Kind: "dcgm"},
			Devices: judged(nil, 0, gpu0(xidAt(31, 0)), healthtest.GPU0),
		}
		writes := 0
		for i := range 5 {
			next := *s
			next.Seq, next.Devices = uint64(i), slices.Clone(s.Devices)
			if i > 0 {
				next.Devices[0].XIDs.Owed = []health.OwedXIDs{owed(31, 1, time.Minute-time.Duration(i)*time.Second)}
			}
			before := h.Status().Written
			h.store(&next)
			advance(checkInterval + time.Second)
			if !h.Status().Written.Equal(before) {
				writes++
			}
		}
		read, err := Read(dir)
		must(t, err)
		saved := read.States["dcgm"]
		if writes != 2 || len(saved.Devices[0].XIDs.Owed) != 1 {
			t.Errorf("%d writes, want 2; %+v", writes, saved)
		}
	})
}

// Nothing is written in an hour in which nothing happens: the source measures, conditions last, XIDs are owed, and time passes.
func TestNoWriteWhileNothingHappens(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		dir := t.TempDir()
		h, text := newHarness(dir), new(health.Latest[[]byte])
		text.Store(new([]byte(`{"a":1}`)))
		h.AddSection("idle", text)
		_, err := h.Load()
		must(t, err)
		h.start(t)
		h.keep("configuration")
		all := []health.Device{healthtest.GPU0, healthtest.MIG0, healthtest.GPU1}
		devices, writes := faultyDevices(t), 0
		files := func() (all []string) {
			for _, name := range []string{"state.json", "node.json", "last-good-config.json"} {
				info, err := os.Stat(filepath.Join(dir, name))
				must(t, err)
				all = append(all, fmt.Sprint(name, info.ModTime(), info.Sys().(*syscall.Stat_t).Ino))
			}
			return all
		}
		var before []string
		const warmUp = 3700 // until the faults of faultyDevices are over that end by themselves, and their trips
		for second := 0; second < warmUp+3600; second += 2 {
			hot := gpu0(healthtest.Value(health.FieldRemapFailed, 1), healthtest.Value(health.FieldGPUTemp, float64(95+second%3)))
			devices = judged(devices, 2+second, hot, all...)
			devices = slices.Clone(devices)
			devices[0].XIDs.Owed = []health.OwedXIDs{owed(31, 1, 2*time.Hour-time.Duration(second)*time.Millisecond)}
			h.store(&health.Snapshot{
				Seq: uint64(second), At: healthtest.At(second), Devices: devices, Source: health.Source{Kind: "dcgm", Inventory: "dcgm x"},
			})
			advance(2 * time.Second)
			switch now := files(); {
			case second < warmUp:
			case before != nil && !slices.Equal(now, before):
				writes++
				fallthrough
			default:
				before = now
			}
		}
		if writes > 0 {
			t.Errorf("%d writes", writes)
		}
		devices = slices.Clone(devices)
		devices[0].XIDs.Owed = append(slices.Clone(devices[0].XIDs.Owed), owed(43, 1, time.Minute))
		h.store(&health.Snapshot{Seq: 8000, At: healthtest.At(8000), Devices: devices, Source: health.Source{Kind: "dcgm", Inventory: "dcgm x"}})
		if slices.Equal(files(), before) {
			t.Error("not written after something happened")
		}
		h.stop()
	})
}
