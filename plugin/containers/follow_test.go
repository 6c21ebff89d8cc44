package containers

import (
	"context"
	"errors"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/gpu-node-agent/gpu-node-agent/health"
)

// hang replaces a directory by one that hangs until the function is called: nobody writes to the FIFO.
func hang(t *testing.T, dir string) (end func()) {
	t.Helper()
	if err := errors.Join(os.Rename(dir, dir+".away"), syscall.Mkfifo(dir, 0o600)); err != nil {
		t.Fatal(err)
	}
	return func() {
		t.Helper()
		f, err := os.OpenFile(dir, os.O_WRONLY|syscall.O_NONBLOCK, 0) // wakes the reader
		for errors.Is(err, syscall.ENXIO) {                           // there is none yet
			<-time.After(time.Millisecond)
			f, err = os.OpenFile(dir, os.O_WRONLY|syscall.O_NONBLOCK, 0)
		}
		if err != nil {
			t.Fatal(err)
		}
		if err := errors.Join(f.Close(), os.Remove(dir), os.Rename(dir+".away", dir)); err != nil {
			t.Fatal(err)
		}
	}
}

// A directory that hangs costs one goroutine, and the names that were read before stay.
func TestNamesReaderOfHangingDirectory(t *testing.T) {
	dir := t.TempDir()
	writeFiles(t, dir, map[string]string{"pods/team_one_" + podUID + "/x": "", "other/team_two_" + otherUID + "/x": ""})
	pods, other := filepath.Join(dir, "pods"), filepath.Join(dir, "other")
	want := map[string]Pod{podUID: {"team", "one"}}
	r := NewNamesReader()
	r.calls.Limit = 20 * time.Millisecond
	end := hang(t, pods)
	if n, err := r.Read(t.Context(), pods); !errors.Is(err, health.ErrLate) || n.Pods != nil {
		t.Errorf("hangs from the start: %v, %v", n, err)
	}
	end()
	r.calls.Wait()
	r.calls.Limit = time.Minute
	// The late result, which may be old by now, is dropped: a pipe is no directory.
	if n, err := r.Read(t.Context(), pods); err != nil || !maps.Equal(n.Pods, want) {
		t.Errorf("hangs no more: %v, %v", n, err)
	}
	r.calls.Limit = 20 * time.Millisecond
	end = hang(t, pods)
	for range 2 {
		if n, err := r.Read(t.Context(), pods); !errors.Is(err, health.ErrLate) || !maps.Equal(n.Pods, want) {
			t.Errorf("hangs: %v, %v", n, err)
		}
	}
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	if n, err := r.Read(ended, pods); err == nil || !maps.Equal(n.Pods, want) {
		t.Errorf("at the end: %v, %v", n, err)
	}
	end()
	r.calls.Wait()
	r.calls.Limit = time.Minute
	writeFiles(t, dir, map[string]string{"file": ""})
	if err := os.Rename(pods, pods+".away"); err != nil {
		t.Fatal(err)
	}
	if err := os.Rename(filepath.Join(dir, "file"), pods); err != nil {
		t.Fatal(err)
	}
	if n, err := r.Read(t.Context(), pods); !errors.Is(err, syscall.ENOTDIR) || len(n.Pods) > 0 {
		t.Errorf("not a directory: %v, %v", n, err)
	}
	if err := errors.Join(os.Remove(pods), os.Rename(pods+".away", pods)); err != nil {
		t.Fatal(err)
	}
	r.calls.Limit = 20 * time.Millisecond
	end = hang(t, pods)
	if n, err := r.Read(t.Context(), pods); !errors.Is(err, health.ErrLate) || !maps.Equal(n.Pods, want) {
		t.Errorf("hangs after an error: %v, %v", n, err)
	}
	end2 := hang(t, other)
	if n, err := r.Read(t.Context(), other); !errors.Is(err, health.ErrLate) || n.Pods != nil {
		t.Errorf("another directory hangs: %v, %v", n, err)
	}
	end2()
	end()
	r.calls.Wait()
}

// examiner makes a pass an hour, which takes a time.
type examiner struct {
	takes  time.Duration
	events *events
	passed bool
}

// events are what an examiner was asked for.
type events struct {
	mu   sync.Mutex // guards list
	list []string
}

func (e *events) add(event string) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.list = append(e.list, event)
}

func (e *events) take() (list []string) {
	e.mu.Lock()
	defer e.mu.Unlock()
	list, e.list = e.list, nil
	return list
}

func (e *examiner) Next(ctx context.Context) bool {
	if e.passed {
		select {
		case <-ctx.Done():
		case <-time.After(time.Hour):
		}
	}
	e.passed = true
	return ctx.Err() == nil
}

func (e *examiner) Pass(context.Context) string {
	<-time.After(e.takes)
	return "result"
}
func (e *examiner) Late() string     { return "late" }
func (e *examiner) Publish(r string) { e.events.add(r) }
func (e *examiner) Clear()           { e.events.add("clear") }
func (e *examiner) Close()           { e.events.add("close " + time.Now().Format("15:04:05")) }

// Follow examines with one configuration at a time. It withdraws the results of one at once when it ends, and releases the driver when no
// pass runs any more. The configuration is how long a pass takes; with 0 it is off.
func TestFollow(t *testing.T) {
	synctest.Test(t, func(t *testing.T) { // from 00:00:00
		var config health.Latest[time.Duration]
		var events events
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan struct{})
		go func() {
			defer close(done)
			Follow(ctx, &config, 10*time.Second, func(takes time.Duration) (Examiner[string], bool) {
				return &examiner{takes: takes, events: &events}, takes > 0
			})
		}()
		expect := func(after time.Duration, want ...string) {
			t.Helper()
			<-time.After(after)
			synctest.Wait()
			if got := events.take(); !slices.Equal(got, want) {
				t.Errorf("%q, want %q", got, want)
			}
		}
		expect(0)
		config.Store(new(time.Second))
		expect(time.Minute, "result") // 00:01:00
		config.Store(new(time.Duration))
		expect(time.Minute, "clear", "close 00:01:00") // 00:02:00
		config.Store(new(time.Minute))
		expect(10*time.Second, "late")
		config.Store(new(time.Second))
		expect(time.Second, "clear")
		expect(time.Minute, "close 00:03:00", "result") // a late result is dropped
		cancel()
		<-done
		expect(0, "clear", "close 00:03:11")
	})
}
