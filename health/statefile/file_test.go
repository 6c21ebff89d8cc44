package statefile

import (
	"encoding/json"
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

// of is a snapshot of a kind of source.
func of(t *testing.T, kind string) *health.Snapshot {
	return &health.Snapshot{Seq: 1, At: healthtest.Epoch, Source: health.Source{Kind: kind, Inventory: kind + " x"}, Devices: bad(t)}
}

func devicesOf(t *testing.T, path, kind string) int {
	t.Helper()
	m, _, err := readMemoryFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return len(m.Restore("boot", health.SourceID{Kind: kind, Inventory: kind + " x", Simulated: kind == "sim"}, healthtest.At(100)).Devices)
}

func write(t *testing.T, path, text string) {
	t.Helper()
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
}

// started is a rig that has loaded the file and runs.
func started(t *testing.T, path string) *keeperRig {
	t.Helper()
	r := newKeeperRig(t, path)
	if _, err := r.Load(path); err != nil {
		t.Fatal(err)
	}
	r.start(t)
	return r
}

// A start with another kind of source, or a reload to it, sets the findings aside, and they are back with it.
func TestKeeperSetsOtherSourcesAside(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		path := filepath.Join(t.TempDir(), "state.json")
		for _, kind := range []string{"dcgm", "sim", "nvml"} {
			r := started(t, path)
			r.out.Store(of(t, kind))
			synctest.Wait()
			r.stop()
		}
		r := started(t, path)
		for _, kind := range []string{"sim", "dcgm", "nvml", "dcgm"} {
			s := of(t, kind)
			if s.Devices = s.Devices[:2]; kind != "dcgm" {
				s.Devices = nil
			}
			r.out.Store(s)
			synctest.Wait()
		}
		r.stop()
		for kind, want := range map[string]int{"dcgm": 2, "sim": 0, "nvml": 0} {
			if got := devicesOf(t, path, kind); got != want {
				t.Errorf("%s: %d devices, want %d", kind, got, want)
			}
		}
	})
	synctest.Test(t, func(t *testing.T) {
		path := filepath.Join(t.TempDir(), "state.json")
		write(t, path, oldFile)
		r := started(t, path)
		r.out.Store(of(t, "sim"))
		synctest.Wait()
		if devicesOf(t, path, "dcgm") != 1 || devicesOf(t, path, "sim") != 3 {
			t.Error("one start with another source has wiped the findings")
		}
		r.stop()
	})
}

// The second of two agents reads the file and leaves it alone, also if it cannot understand it, and takes it over when the first
// has ended. Then its own findings are in force.
func TestTwoKeepers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		path := filepath.Join(t.TempDir(), "state.json")
		first := started(t, path)
		first.out.Store(of(t, "dcgm"))
		synctest.Wait()

		second := newKeeperRig(t, path)
		m, err := second.Load(path)
		if err != nil || len(m.Devices) != 3 {
			t.Fatalf("%+v, %v", m, err)
		}
		mine := of(t, "dcgm")
		mine.Devices = mine.Devices[:1]
		second.out.Store(mine)
		second.start(t)
		pass(time.Minute)
		if got := devicesOf(t, path, "dcgm"); got != 3 {
			t.Errorf("the second agent has overwritten the first one's file: %d devices", got)
		}
		if s := second.Status(); !strings.Contains(s.Err, path+": locked by another agent (pid ") || s.Since.IsZero() {
			t.Errorf("status %+v", s)
		}
		if err := second.WaitWritten(t.Context(), mine); err == nil {
			t.Error("what was not written is said to be saved")
		}
		if n := second.logs.FilterMessageSnippet("findings cannot be kept").Len(); n != 1 {
			t.Errorf("logged %d times", n)
		}

		write(t, path, "{")
		if _, err := New(nil, nil, "", zap.NewNop()).Load(path); err == nil || !strings.Contains(err.Error(), "it stays as it is: ") {
			t.Errorf("%v", err)
		}
		holds(t, path, "{")
		pass(lookAgain + time.Second) // the first one writes it again
		first.stop()
		pass(retryLock + time.Millisecond)
		if got := devicesOf(t, path, "dcgm"); got != 1 {
			t.Errorf("%d devices after the take-over", got)
		}
		if s := second.Status(); s.Err != "" || second.WaitWritten(t.Context(), mine) != nil {
			t.Errorf("status %+v", s)
		}
		second.stop()
	})
}

// A file that somebody has removed, replaced or changed is written again, also when nothing happens and before the first poll, and
// what is there of other kinds of source is kept.
func TestKeeperRepairsTheFile(t *testing.T) {
	for name, c := range map[string]struct {
		harm  func(t *testing.T, path string)
		adopt bool
	}{
		"removed":                     {harm: func(t *testing.T, path string) { must(t, os.Remove(path)) }},
		"removed with its directory":  {harm: func(t *testing.T, path string) { must(t, os.RemoveAll(filepath.Dir(path))) }},
		"truncated":                   {harm: func(t *testing.T, path string) { must(t, os.Truncate(path, 10)) }},
		"replaced by nonsense":        {harm: func(t *testing.T, path string) { must(t, os.Remove(path)); write(t, path, "nonsense") }},
		"replaced by another agent's": {harm: func(t *testing.T, path string) { writeMemory(t, path, "nvml") }, adopt: true},
	} {
		for _, polled := range []bool{true, false} {
			t.Run(name, func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					path := filepath.Join(t.TempDir(), "in", "state.json")
					must(t, os.Mkdir(filepath.Dir(path), 0o750))
					writeMemory(t, path, "sim")
					r := started(t, path)
					r.out.Store(of(t, "dcgm"))
					synctest.Wait()
					if !polled {
						r.stop()
						r = started(t, path)
						synctest.Wait()
					}
					c.harm(t, path)
					pass(lookAgain)
					for kind, want := range map[string]bool{"dcgm": true, "sim": true, "nvml": c.adopt} {
						if got := devicesOf(t, path, kind); (got == 3) != want {
							t.Errorf("polled %v, %s: %d devices", polled, kind, got)
						}
					}
					info, err := os.Stat(path)
					must(t, err)
					pass(time.Minute)
					if now, err := os.Stat(path); err != nil || !os.SameFile(info, now) {
						t.Error("written again and again")
					}
					r.stop()
				})
			})
		}
	}
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func writeMemory(t *testing.T, path, kind string) {
	t.Helper()
	text, err := json.Marshal(FromSnapshot(of(t, kind), "boot"))
	must(t, err)
	write(t, path, string(text))
}

// XIDs that make no finding may come in floods, and are written every 10 s and at the end.
func TestKeeperWritesHistoryLater(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		path := filepath.Join(t.TempDir(), "state.json")
		r := started(t, path)
		seen := func() int {
			m, err := readMemory(path)
			must(t, err)
			return len(m.Devices[0].Seen)
		}
		writes := 0
		var last time.Time
		for i := range 20 {
			s := of(t, "dcgm")
			s.Devices[0].Seen = make([]health.XID, i+1)
			r.out.Store(s)
			pass(time.Second)
			if w := r.Status().Written; !w.Equal(last) {
				writes, last = writes+1, w
			}
		}
		if writes != 2 || seen() != 11 {
			t.Errorf("%d writes, %d rows", writes, seen())
		}
		r.stop()
		if seen() != 20 {
			t.Errorf("%d rows at the end", seen())
		}
	})
}

// A file of a newer version is kept, and what can be understood of it is used.
func TestLoadOfANewerVersion(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		path := filepath.Join(t.TempDir(), "state.json")
		text := strings.Replace(oldFile, `"version":1`, `"version":3`, 1)
		write(t, path, text)
		r := newKeeperRig(t, path)
		m, err := r.Load(path)
		if err == nil || !strings.Contains(err.Error(), "is of version 3, ") || !strings.HasSuffix(err.Error(), "it is kept as "+path+".version3") || len(m.Devices) != 1 {
			t.Errorf("%+v, %v", m, err)
		}
		holds(t, path+".version3", text)
		r.start(t)
		synctest.Wait()
		r.stop() // before it has ever polled
		if got := devicesOf(t, path, "dcgm"); got != 1 {
			t.Errorf("%d devices for the next process", got)
		}
	})
}

// Only what a killed write has left behind is removed, and only by the holder of the lock.
func TestKeeperSweeps(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "state.json")
	ours := []string{"state.json.tmp-1", "state.json.tmp-4012345678", "state.json.1234567890", "state.json.123456789"}
	others := []string{
		"state.json.1", "state.json.20261122", "state.json.damaged", "state.json.damaged.1", "state.json.unread", "state.json.tmp-", "state.json.tmp-x",
		"state.json.tmp-1.bak", "other.json.tmp-1", "other.json.1234567890", "state.json", "state.json.lock",
	}
	for _, name := range slices.Concat(ours, others) {
		text := name
		if name == "state.json" {
			text = oldFile
		}
		write(t, filepath.Join(dir, name), text)
	}
	must(t, os.Mkdir(filepath.Join(dir, "state.json.tmp-2"), 0o750))
	left := func() (names []string) {
		entries, err := os.ReadDir(dir)
		must(t, err)
		for _, e := range entries {
			names = append(names, e.Name())
		}
		return names
	}
	before := left()
	lock, err := lockState(path)
	must(t, err)
	if _, err := readMemory(path); err != nil || !slices.Equal(left(), before) {
		t.Errorf("without the lock: %v, %v", left(), err)
	}
	lock.release()
	core, logs := observer.New(zapcore.WarnLevel)
	k := New(nil, nil, "", zap.New(core))
	defer k.unlock()
	if _, err := k.Load(path); err != nil || logs.Len() > 0 {
		t.Errorf("%v, %v", err, logs.All())
	}
	want := slices.Sorted(slices.Values(append(others, "state.json.tmp-2")))
	if got := left(); !slices.Equal(got, want) {
		t.Errorf("left: %v, want %v", got, want)
	}
}

// WaitWritten returns when the snapshot, or a later one, is in the file.
func TestKeeperSaved(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		path := filepath.Join(t.TempDir(), "state.json")
		r := started(t, path)
		defer func() { r.stop() }()
		s := of(t, "dcgm")
		s.Seq = 7
		done := make(chan error, 1)
		go func() { done <- r.WaitWritten(t.Context(), s) }()
		pass(time.Minute)
		select {
		case err := <-done:
			t.Fatalf("saved before it was there: %v", err)
		default:
		}
		r.out.Store(s)
		if err := <-done; err != nil || devicesOf(t, path, "dcgm") != 3 {
			t.Errorf("%v", err)
		}
	})
}

// Whoever removes the lock's file makes no second writer.
func TestLockFileRemoved(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		path := filepath.Join(t.TempDir(), "state.json")
		first := started(t, path)
		first.out.Store(of(t, "dcgm"))
		synctest.Wait()
		second := started(t, path)
		second.out.Store(of(t, "dcgm"))
		pass(time.Second)
		must(t, os.Remove(path+".lock"))
		pass(2 * lookAgain)
		if a, b := first.Status().Err, second.Status().Err; (a == "") == (b == "") {
			t.Errorf("first: %q, second: %q", a, b)
		}
		first.stop()
		second.stop()
	})
}
