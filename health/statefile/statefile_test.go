package statefile

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
	"go.uber.org/zap/zaptest/observer"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/internal/healthtest"
)

// pass lets time pass in a synctest bubble.
func pass(d time.Duration) {
	time.Sleep(d)   //nolint:forbidigo // the bubble's time
	synctest.Wait() // what was due at that moment too has been done
}

// readMemory reads the file as the next process would.
func readMemory(path string) (Saved, error) {
	k := New(nil, nil, "", zap.NewNop())
	defer k.unlock()
	return k.Load(path)
}

func holds(t *testing.T, path, want string) {
	t.Helper()
	if text, err := os.ReadFile(path); err != nil || string(text) != want {
		t.Errorf("%s holds %q, %v; want %q", path, text, err, want)
	}
}

func TestLoadSetsAsideWhatItCannotUse(t *testing.T) {
	path := filepath.Join(t.TempDir(), "state.json")
	if m, err := readMemory(path); err != nil || len(m.Devices) != 0 {
		t.Fatalf("no file: %v %v", m, err)
	}
	for i, name := range []string{"state.json.damaged", "state.json.damaged.1", "state.json.damaged.2"} {
		text := strings.Repeat("{", i+1)
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		aside := filepath.Join(filepath.Dir(path), name)
		if _, err := readMemory(path); err == nil || !strings.Contains(err.Error(), path+" cannot be understood: ") || !strings.HasSuffix(err.Error(), "it is kept as "+aside) {
			t.Errorf("got %v, want an error that names the file and where it is kept", err)
		}
		holds(t, aside, text)
		if _, err := os.Stat(path); !errors.Is(err, os.ErrNotExist) {
			t.Error("the damaged file is still in the way")
		}
	}
	holds(t, path+".damaged", "{") // the first is not lost to the later ones
}

// keeperRig is a keeper with a snapshot to keep, in a synctest bubble.
type keeperRig struct {
	*File
	path   string
	config *health.Latest[health.Config]
	out    *health.Latest[health.Snapshot]
	logs   *observer.ObservedLogs
	stop   func()
}

func newKeeperRig(t *testing.T, path string) *keeperRig {
	t.Helper()
	core, logs := observer.New(zapcore.WarnLevel)
	r := &keeperRig{path: path, config: new(health.Latest[health.Config]), out: new(health.Latest[health.Snapshot]), logs: logs}
	r.use(path)
	r.File = New(r.config, r.out, "boot", zap.New(core))
	return r
}

func (r *keeperRig) use(path string) {
	c := health.DefaultConfig()
	c.StateFile = path
	r.config.Store(&c)
}

func (r *keeperRig) start(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- r.Run(ctx) }()
	r.stop = func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	}
}

// What was not read, and is not safe elsewhere, is never written over.
func TestKeeperLeavesWhatItCouldNotRead(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		// What reads as no file is not even set aside: it may be anybody's.
		path := filepath.Join(t.TempDir(), "state.json")
		if err := os.MkdirAll(filepath.Join(path, "theirs"), 0o750); err != nil {
			t.Fatal(err)
		}
		r := newKeeperRig(t, path)
		_, err := r.Load(path)
		if err == nil || !strings.Contains(err.Error(), path+" cannot be read: ") || !strings.Contains(err.Error(), "it stays as it is, and nothing is written there") {
			t.Fatalf("got %v", err)
		}
		if s := r.Status(); s.Path != path || s.Err != err.Error() || s.Since.IsZero() {
			t.Errorf("status %+v", s)
		}
		r.out.Store(&health.Snapshot{At: healthtest.Epoch, Source: health.Source{Kind: "dcgm"}, Devices: bad(t)})
		r.start(t)
		pass(time.Minute)
		if n := r.logs.FilterMessageSnippet("findings cannot be kept").Len(); n != 1 {
			t.Errorf("the refusal was logged %d times in a minute, want once", n)
		}
		if _, err := os.Stat(filepath.Join(path, "theirs")); err != nil {
			t.Fatalf("it was touched: %v", err)
		}

		// By now it can be read. But nobody judged with it, so it is not to be lost.
		if err := errors.Join(os.RemoveAll(path), os.WriteFile(path, []byte("later"), 0o600)); err != nil {
			t.Fatal(err)
		}
		pass(retryWrite + time.Second)
		holds(t, path+".unread", "later")
		if m, err := readMemory(path); err != nil || len(m.Devices) != 3 {
			t.Errorf("the file holds %+v, %v", m, err)
		}
		if s := r.Status(); s.Err != "" || s.Written.IsZero() {
			t.Errorf("status %+v", s)
		}
		r.stop()
	})
}

func TestKeeperSetsAsideWhatCannotBeRead(t *testing.T) {
	if os.Getuid() == 0 {
		// Root reads everything, so a link that leads nowhere but round stands in for a disk that is broken.
		path := filepath.Join(t.TempDir(), "state.json")
		if err := os.Symlink(path, path); err != nil {
			t.Fatal(err)
		}
		if _, err := readMemory(path); err == nil || !strings.HasSuffix(err.Error(), "it is kept as "+path+".unread") {
			t.Errorf("got %v", err)
		}
		if _, err := os.Lstat(path + ".unread"); err != nil {
			t.Error(err)
		}
		return
	}
	path := filepath.Join(t.TempDir(), "state.json")
	if err := os.WriteFile(path, []byte("secret"), 0o000); err != nil {
		t.Fatal(err)
	}
	if _, err := readMemory(path); err == nil || !strings.HasSuffix(err.Error(), "permission denied; it is kept as "+path+".unread") {
		t.Errorf("got %v", err)
	}
	if err := os.Chmod(path+".unread", 0o600); err != nil {
		t.Fatal(err)
	}
	holds(t, path+".unread", "secret")
}

// A reload may name a file that another process has left.
func TestKeeperFollowsThePath(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		dir := t.TempDir()
		r := newKeeperRig(t, filepath.Join(dir, "a"))
		if _, err := r.Load(r.path); err != nil {
			t.Fatal(err)
		}
		r.out.Store(&health.Snapshot{At: healthtest.Epoch, Source: health.Source{Kind: "dcgm"}, Devices: bad(t)})
		r.start(t)
		synctest.Wait()
		if err := os.WriteFile(filepath.Join(dir, "b"), []byte("foreign"), 0o600); err != nil {
			t.Fatal(err)
		}
		r.use(filepath.Join(dir, "b"))
		synctest.Wait()
		holds(t, filepath.Join(dir, "b.damaged"), "foreign")
		if n := r.logs.FilterMessageSnippet("was in the way").Len(); n != 1 {
			t.Errorf("said %d times, want once: %v", n, r.logs.All())
		}
		for _, name := range []string{"a", "b"} {
			if m, err := readMemory(filepath.Join(dir, name)); err != nil || len(m.Devices) != 3 {
				t.Errorf("%s holds %+v, %v", name, m, err)
			}
		}
		r.use("")
		synctest.Wait()
		if s := r.Status(); s.Path != "" || s.Err != "" {
			t.Errorf("status %+v of no file", s)
		}
		r.stop()
	})
}

// What the monitor stores while the keeper is asked to end is written, and without a wait.
func TestKeeperWritesALastTime(t *testing.T) {
	for _, broken := range []bool{false, true} { // whether the disk refused until then
		synctest.Test(t, func(t *testing.T) {
			dir := t.TempDir()
			path := filepath.Join(dir, "in", "state.json")
			r := newKeeperRig(t, path)
			if _, err := r.Load(path); err != nil {
				t.Fatal(err)
			}
			if broken {
				if err := errors.Join(os.RemoveAll(filepath.Join(dir, "in")), os.WriteFile(filepath.Join(dir, "in"), nil, 0o600)); err != nil {
					t.Fatal(err)
				}
			}
			r.out.Store(&health.Snapshot{At: healthtest.Epoch, Source: health.Source{Kind: "dcgm"}})
			r.start(t)
			pass(time.Second)
			if broken {
				if s := r.Status(); s.Err == "" {
					t.Error("a disk that refuses is not shown")
				}
				if err := os.Remove(filepath.Join(dir, "in")); err != nil {
					t.Fatal(err)
				}
			}
			begin := time.Now()
			r.out.Store(&health.Snapshot{At: healthtest.Epoch, Source: health.Source{Kind: "dcgm"}, Devices: bad(t)})
			r.stop()
			if took := time.Since(begin); took > 0 {
				t.Errorf("the end took %v", took)
			}
			if m, err := readMemory(path); err != nil || len(m.Devices) != 3 {
				t.Errorf("the file holds %+v, %v", m, err)
			}
		})
	}
}

func TestKeeper(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		core, logs := observer.New(zapcore.WarnLevel)
		dir := t.TempDir()
		config, out := new(health.Latest[health.Config]), new(health.Latest[health.Snapshot])
		c := health.DefaultConfig()
		c.StateFile = filepath.Join(dir, "in", "the", "way", "state.json")
		config.Store(&c)
		// A file where the directory should be: the disk refuses.
		if err := os.WriteFile(filepath.Join(dir, "in"), nil, 0o600); err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error, 1)
		go func() { done <- New(config, out, "boot", zap.New(core)).Run(ctx) }()

		s := &health.Snapshot{At: healthtest.Epoch, Source: health.Source{Kind: "dcgm"}, Devices: bad(t)}
		out.Store(s)
		pass(time.Minute)
		if logs.Len() != 1 {
			t.Fatalf("a refusal was logged %d times in a minute, want once", logs.Len())
		}
		if err := os.Remove(filepath.Join(dir, "in")); err != nil {
			t.Fatal(err)
		}
		pass(retryWrite + time.Second)
		m, err := readMemory(c.StateFile)
		if err != nil || len(m.Devices) != 3 || m.BootID != "boot" {
			t.Fatalf("the file holds %+v, %v", m, err)
		}

		// The next poll finds the same: nothing is written.
		before, err := os.Stat(c.StateFile)
		if err != nil {
			t.Fatal(err)
		}
		again := *s
		again.Devices = slices.Clone(s.Devices)
		fs := slices.Clone(again.Devices[0].Verdict.Findings)
		for i := range fs {
			if fs[i].Cause == health.CauseTemperature {
				fs[i].Last, fs[i].Reason = healthtest.At(50), "another temperature"
			}
		}
		again.Devices[0].Verdict.Findings = fs
		out.Store(&again)
		synctest.Wait()
		after, err := os.Stat(c.StateFile)
		if err != nil {
			t.Fatal(err)
		}
		if !os.SameFile(before, after) {
			t.Error("the file was written anew though nothing has happened")
		}

		out.Store(&health.Snapshot{At: healthtest.Epoch, Source: health.Source{Kind: "dcgm"}})
		synctest.Wait()
		if m, err := readMemory(c.StateFile); err != nil || len(m.Devices) != 0 {
			t.Errorf("the file still holds %+v, %v", m, err)
		}
		left, err := filepath.Glob(filepath.Dir(c.StateFile) + "/*")
		if err != nil || len(left) != 2 { // it and its lock
			t.Errorf("left behind: %v %v", left, err)
		}
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
}
