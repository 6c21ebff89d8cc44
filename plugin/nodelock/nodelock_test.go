package nodelock

import (
	"context"
	"errors"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"
	"go.uber.org/zap"

	"github.com/gpu-node-agent/gpu-node-agent/health/filelock"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// agent is a process that wants to serve.
type agent struct {
	*Lock
	end func() // as the end of the process
}

func start(t *testing.T, name, kubeletDir string, change ...func(*Lock)) *agent {
	t.Helper()
	l := New(Holder{Pod: name, Config: "/etc/" + name, PID: 17}, zap.NewNop()).Faster(20)
	for _, c := range change {
		c(l)
	}
	l.Request(kubeletDir)
	ctx, cancel := context.WithCancel(t.Context())
	var running sync.WaitGroup
	running.Go(func() { _ = l.Run(ctx) })
	a := &agent{l, sync.OnceFunc(func() {
		cancel()
		running.Wait()
		l.Close()
	})}
	t.Cleanup(a.end)
	return a
}

// await waits for a state.
func (a *agent) await(t *testing.T, what string, ok func(State) bool) State {
	t.Helper()
	timeout := time.After(30 * time.Second)
	for {
		s, changed := a.State().Watch()
		if ok(*s) {
			return *s
		}
		select {
		case <-changed:
		case <-timeout:
			t.Fatalf("%s: still %+v", what, *s)
		}
	}
}

func held(s State) bool { return s.Held }

// waitsFor accepts a state that names the holder.
func waitsFor(name string) func(State) bool {
	return func(s State) bool {
		return !s.Held && s.Waits && s.Holder != nil && s.Holder.Pod == name && strings.Contains(s.Reason, name)
	}
}

// shortDir returns a kubelet's directory whose path is short enough for a socket.
func shortDir(t *testing.T) string {
	dir, err := os.MkdirTemp("", "gna")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	if err := os.Mkdir(filepath.Join(dir, Directory), 0o750); err != nil {
		t.Fatal(err)
	}
	return dir
}

// The second agent waits, also if it finds the directory by another path and the kubelet has wiped the directory, until the first ends.
func TestOneHolder(t *testing.T) {
	t.Parallel()
	dir := shortDir(t)
	link := filepath.Join(shortDir(t), "kubelet")
	if err := os.Symlink(dir, link); err != nil {
		t.Fatal(err)
	}
	first := start(t, "first", dir)
	first.await(t, "the first", held)
	second := start(t, "second", link)
	s := second.await(t, "the second", waitsFor("first"))
	if want := (Holder{"first", "/etc/first", 17}); *s.Holder != want {
		t.Errorf("%+v, want %+v", *s.Holder, want)
	}
	socket := filepath.Join(dir, Directory, Socket)
	if err := os.Remove(socket); err != nil { // a kubelet starts
		t.Fatal(err)
	}
	for ask := time.Tick(time.Millisecond); Ask(t.Context(), filepath.Dir(socket)) == nil; <-ask { // until the first has made it again
	}
	if second.State().Load().Held {
		t.Error("the second has the lock too")
	}
	first.end()
	second.await(t, "the end of the first", held)
	third := start(t, "third", dir)
	third.await(t, "the third", waitsFor("second"))
}

// A socket that nobody accepts on, as of a killed process, is nobody. The lock alone decides.
func TestSocketOfNobody(t *testing.T) {
	t.Parallel()
	dir := shortDir(t)
	path := filepath.Join(dir, Directory)
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: filepath.Join(path, Socket), Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	l.SetUnlinkOnClose(false)
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	if h := Ask(t.Context(), path); h != nil {
		t.Errorf("%+v", *h)
	}
	start(t, "first", dir).await(t, "the lock", held)
	second := start(t, "second", dir)
	second.await(t, "the holder", waitsFor("first"))
}

// A directory that is missing for a moment changes nothing.
func TestDirectoryMissing(t *testing.T) {
	t.Parallel()
	dir := shortDir(t)
	l := New(Holder{}, zap.NewNop())
	defer l.Close()
	for _, change := range []func() error{func() error { return nil }, func() error { return os.Remove(filepath.Join(dir, Directory)) }} {
		if err := change(); err != nil {
			t.Fatal(err)
		}
		if l.step(t.Context(), dir); !l.State().Load().Held {
			t.Errorf("%+v", l.State().Load())
		}
	}
}

// A directory that was replaced is locked anew. An agent that had the former directory stops serving if another one has the new one.
func TestDirectoryReplaced(t *testing.T) {
	t.Parallel()
	first, dir, other := startReplaced(t)
	first.await(t, "another one has the new directory, and does not answer", func(s State) bool { return s.Waits && s.Holder == nil })
	other.Release()
	first.await(t, "the new directory", held)
	start(t, "second", dir).await(t, "the second", func(s State) bool { return s.Waits })
}

// startReplaced starts an agent that has the lock, and then replaces its directory by one that another process has locked.
func startReplaced(t *testing.T) (a *agent, dir string, other *filelock.Held) {
	t.Helper()
	dir = shortDir(t)
	path := filepath.Join(dir, Directory)
	a = start(t, "first", dir)
	a.await(t, "the lock", held)
	fresh := path + ".new"
	if err := os.Mkdir(fresh, 0o750); err != nil {
		t.Fatal(err)
	}
	other, err := filelock.Acquire(fresh, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(other.Release)
	if err := errors.Join(os.Rename(path, path+".old"), os.Rename(fresh, path)); err != nil {
		t.Fatal(err)
	}
	return a, dir, other
}

// The directory that this process has locked may come back.
func TestDirectoryAgain(t *testing.T) {
	t.Parallel()
	a, dir, _ := startReplaced(t)
	path := filepath.Join(dir, Directory)
	a.await(t, "another one has the new directory", func(s State) bool { return s.Waits })
	if err := os.RemoveAll(path); err != nil {
		t.Fatal(err)
	}
	if err := os.Rename(path+".old", path); err != nil {
		t.Fatal(err)
	}
	a.await(t, "the directory back", held)
}

// An agent that no longer wants the lock does not take it when the holder ends.
func TestWithdrawnRequest(t *testing.T) {
	t.Parallel()
	dir := shortDir(t)
	first, second := start(t, "first", dir), start(t, "second", dir)
	first.await(t, "one of them", func(s State) bool { return s.Held || s.Waits })
	if !first.State().Load().Held {
		first, second = second, first
		first.await(t, "the lock", held)
	}
	second.await(t, "the holder", func(s State) bool { return s.Waits })
	second.Request("")
	second.await(t, "no wait", func(s State) bool { return !s.Waits && !s.Held })
	first.end()
	start(t, "third", dir).await(t, "the lock", held)
	if s := second.State().Load(); s.Held {
		t.Errorf("%+v", s)
	}
}

// Without the kubelet's directory the reason names the key.
func TestNoDirectory(t *testing.T) {
	t.Parallel()
	dir := shortDir(t)
	if err := os.Remove(filepath.Join(dir, Directory)); err != nil {
		t.Fatal(err)
	}
	a := start(t, "first", dir)
	a.await(t, "the reason", func(s State) bool { return !s.Held && !s.Waits && strings.Contains(s.Reason, "plugin.kubeletDir") })
	if err := os.Mkdir(filepath.Join(dir, Directory), 0o750); err != nil {
		t.Fatal(err)
	}
	a.await(t, "the directory", held)
}

// On a file system without locks the agent serves, and says that nothing keeps another one from it. Other errors keep it from serving.
func TestUnsupported(t *testing.T) {
	t.Parallel()
	acquire := func(err error) func(*Lock) {
		return func(l *Lock) {
			l.acquire = func(path string, flag int) (*filelock.Held, error) {
				if err != nil {
					return nil, err
				}
				return filelock.AcquireUnlocked(path, flag)
			}
		}
	}
	s := start(t, "first", shortDir(t), acquire(nil)).await(t, "serving", held)
	if !strings.Contains(s.Warning, "no locks") {
		t.Errorf("warning %q", s.Warning)
	}
	start(t, "second", shortDir(t), acquire(errors.New("input/output error"))).await(t, "the error", func(s State) bool {
		return !s.Held && !s.Waits && strings.Contains(s.Reason, "input/output error")
	})
}
