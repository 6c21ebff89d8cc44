package mounts

import (
	"context"
	"errors"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
	"go.uber.org/zap/zaptest/observer"
)

// links is the metadata of a directory by its number of links.
type links uint64

func (links) Name() string       { return "" }
func (links) Size() int64        { return 0 }
func (links) Mode() fs.FileMode  { return fs.ModeDir }
func (links) ModTime() time.Time { return time.Time{} }
func (links) IsDir() bool        { return true }
func (l links) Sys() any {
	var s syscall.Stat_t
	if l > 0 {
		s.Nlink++ // its type depends on the platform
	}
	return &s
}

// disk has the directories of a node. A path without an entry does not exist.
type disk struct {
	mu    sync.Mutex // guards dirs and calls
	dirs  map[string]links
	calls map[string]int
	hangs map[string]chan struct{} // until which a call hangs
}

func newDisk(dirs ...string) *disk {
	d := &disk{dirs: map[string]links{"/": 2}, calls: make(map[string]int), hangs: make(map[string]chan struct{})}
	for _, dir := range dirs {
		d.dirs[dir] = 2
	}
	return d
}

func (d *disk) stat(path string) (fs.FileInfo, error) {
	if hangs := d.hangs[path]; hangs != nil {
		<-hangs
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.calls[path]++
	if l, exists := d.dirs[path]; exists {
		return l, nil
	}
	return nil, &fs.PathError{Op: "stat", Path: path, Err: syscall.ENOENT}
}

func (d *disk) change(f func(dirs map[string]links)) {
	d.mu.Lock()
	defer d.mu.Unlock()
	f(d.dirs)
}

const (
	plugins = "/var/lib/kubelet/device-plugins"
	state   = "/var/lib/gpu-node-agent"
)

// rig is a Watcher that runs.
type rig struct {
	*disk
	w      *Watcher
	logged *observer.ObservedLogs
	done   chan error
}

func start(t *testing.T, d *disk, note string, dirs ...string) *rig {
	t.Helper()
	core, logged := observer.New(zapcore.ErrorLevel)
	r := &rig{disk: d, logged: logged, done: make(chan error, 1)}
	r.w = New(Options{
		Dirs: func() []string { return dirs }, StateDir: func() string { return state }, Note: func() string { return note }, Log: zap.New(core),
	})
	r.w.stat = d.stat
	ctx, cancel := context.WithCancel(t.Context())
	t.Cleanup(func() { cancel(); synctest.Wait() })
	go func() { r.done <- r.w.Run(ctx) }()
	return r
}

// ended reports whether Run has returned, and its error.
func (r *rig) ended() (bool, error) {
	synctest.Wait()
	select {
	case err := <-r.done:
		return true, err
	default:
		return false, nil
	}
}

// A directory without a link, seen twice, ends the process with one error in the log.
func TestDeletedDirectoryEndsRun(t *testing.T) {
	for name, change := range map[string]func(map[string]links){
		"itself":                   func(all map[string]links) { all[plugins] = 0 },
		"the mount above it":       func(all map[string]links) { delete(all, plugins); all["/var/lib/kubelet"] = 0 },
		"a mount further above it": func(all map[string]links) { delete(all, plugins); delete(all, "/var/lib/kubelet"); all["/var/lib"] = 0 },
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				r := start(t, newDisk("/var/lib", "/var/lib/kubelet", plugins, state), "", plugins, state)
				<-time.After(time.Minute)
				if ended, err := r.ended(); ended {
					t.Fatal("it ended without a reason: ", err)
				}
				r.change(change)
				<-time.After(2 * interval)
				ended, err := r.ended()
				if !ended || err == nil || !strings.HasPrefix(err.Error(), plugins+": ") {
					t.Fatalf("ended %v, %v", ended, err)
				}
				if all := r.logged.All(); len(all) != 1 || all[0].ContextMap()["directory"] != plugins {
					t.Errorf("logged %v", all)
				}
			})
		})
	}
}

// Nothing else ends it: neither a path that is missing for a minute and made again, as on the host, nor one that was just being deleted
// when it was examined, nor a file system that counts one link for each directory, nor an error.
func TestOtherDirectoriesDoNotEndRun(t *testing.T) {
	for name, steps := range map[string][]func(map[string]links){
		"removed and made again": {
			func(all map[string]links) { delete(all, plugins) },
			func(all map[string]links) { all[plugins] = 2 },
		},
		"one link":                   {func(all map[string]links) { all[plugins] = 1 }},
		"nothing exists but /":       {func(all map[string]links) { clear(all); all["/"] = 2 }},
		"not even /":                 {func(all map[string]links) { clear(all) }},
		"the kubelet's whole folder": {func(all map[string]links) { delete(all, plugins); delete(all, "/var/lib/kubelet") }},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				r := start(t, newDisk("/var/lib", "/var/lib/kubelet", plugins, state), "", plugins, state)
				for _, step := range steps {
					r.change(step)
					<-time.After(time.Minute)
				}
				if ended, err := r.ended(); ended {
					t.Errorf("ended: %v", err)
				}
			})
		})
	}
	t.Run("deleted at the moment of an examination", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			r := start(t, newDisk(plugins, state), "", plugins, state)
			<-time.After(interval / 2)
			for range 10 {
				r.change(func(all map[string]links) { all[plugins] = 0 })
				<-time.After(interval)
				r.change(func(all map[string]links) { all[plugins] = 2 })
				<-time.After(interval)
			}
			if ended, err := r.ended(); ended {
				t.Errorf("ended: %v", err)
			}
		})
	})
}

// A disk that hangs delays neither the other directories nor the end, and is asked once.
func TestHangingDisk(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := newDisk(plugins, state)
		hangs := make(chan struct{})
		d.hangs[state] = hangs
		r := start(t, d, "", state, plugins)
		<-time.After(time.Minute)
		synctest.Wait()
		d.change(func(all map[string]links) { all[plugins] = 0 })
		before := time.Now()
		if err := <-r.done; err == nil || !strings.HasPrefix(err.Error(), plugins) {
			t.Errorf("ended: %v", err)
		}
		if took := time.Since(before); took > 2*interval+recordTimeout {
			t.Errorf("it took %v", took)
		}
		close(hangs)
		synctest.Wait()
		if n := d.calls[state]; n > 2 { // one examination, and one for the note
			t.Errorf("the disk was asked %d times while it hung", n)
		}
	})
}

// The note of a lost state directory is written at once, or at the end of the process if the directory was deleted after another one.
func TestLossIsRecorded(t *testing.T) {
	for _, first := range []string{state, plugins} {
		synctest.Test(t, func(t *testing.T) {
			note := filepath.Join(t.TempDir(), "run", NoteName)
			r := start(t, newDisk(plugins, state), note, plugins, state)
			r.change(func(all map[string]links) { all[first] = 0 })
			if err := <-r.done; err == nil || !strings.HasPrefix(err.Error(), first) {
				t.Errorf("ended: %v", err)
			}
			l, err := ReadLoss(note, time.Now())
			if err != nil || (l != nil) != (first == state) {
				t.Errorf("after the end of Run: %v, %v", l, err)
			}
			r.w.RecordLoss()
			if l, err := ReadLoss(note, time.Now()); err != nil || (l != nil) != (first == state) {
				t.Errorf("nothing else was deleted: %v, %v", l, err)
			}
			noticed := time.Now().UTC().Truncate(time.Second)
			r.change(func(all map[string]links) { all[state] = 0 })
			r.w.RecordLoss()
			r.w.RecordLoss() // once
			l, err = ReadLoss(note, time.Now())
			if err != nil || l == nil || *l != (Loss{state, noticed}) ||
				!strings.HasPrefix(l.String(), "the directory mounted at "+state+" was deleted on the host at 2000-01-01T00:00:0") {
				t.Errorf("%v, %v", l, err)
			}
			if n := r.logged.FilterMessageSnippet("findings are lost").Len(); n != 1 {
				t.Errorf("logged %d times: %v", n, r.logged.All())
			}
		})
	}
}

// Without a place for the note, or if it cannot be written, the log has the loss.
func TestLossWithoutNote(t *testing.T) {
	for _, note := range []string{"", "/proc/no such directory/" + NoteName} {
		synctest.Test(t, func(t *testing.T) {
			r := start(t, newDisk(plugins, state), note, plugins, state)
			r.change(func(all map[string]links) { all[state] = 0 })
			if err := <-r.done; err == nil {
				t.Error("it ended without an error")
			}
			all := r.logged.FilterMessageSnippet("findings are lost").All()
			if len(all) != 1 || slices.Contains(slices.Collect(maps.Keys(all[0].ContextMap())), "error") != (note != "") {
				t.Errorf("logged %v", all)
			}
		})
	}
}

// Each process of the day after the loss learns of it, whatever the clock was when it was noticed.
func TestReadLoss(t *testing.T) {
	note := filepath.Join(t.TempDir(), NoteName)
	now := time.Date(2026, 11, 24, 12, 0, 0, 0, time.UTC)
	if l, err := ReadLoss(note, now); l != nil || err != nil {
		t.Fatalf("no note: %v, %v", l, err)
	}
	if l, err := ReadLoss("", now); l != nil || err != nil {
		t.Fatalf("no place for one: %v, %v", l, err)
	}
	if err := writeNote(note, Loss{state, now}); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if l, err := ReadLoss(note, now.Add(lossLifetime)); err != nil || l == nil || *l != (Loss{state, now}) {
			t.Errorf("a day later: %v, %v", l, err)
		}
	}
	early := now.Add(-time.Hour) // the clock was set back
	for _, at := range []time.Time{early, early.Add(time.Minute)} {
		if l, err := ReadLoss(note, at); err != nil || l == nil || *l != (Loss{state, early}) {
			t.Errorf("at %v: %v, %v", at, l, err)
		}
	}
	if l, err := ReadLoss(note, early.Add(lossLifetime+time.Second)); l != nil || err != nil {
		t.Errorf("more than a day later: %v, %v", l, err)
	}
	if _, err := os.Stat(note); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("the old note: %v", err)
	}
	if err := os.WriteFile(note, []byte("{"), 0o600); err != nil {
		t.Fatal(err)
	}
	if l, err := ReadLoss(note, now); l != nil || err == nil || !strings.Contains(err.Error(), note) {
		t.Errorf("damaged: %v, %v", l, err)
	}
}
