package durable

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
)

const apart = "DURABLE_TEST_APART"

// TestMain runs the tests again in a mount namespace of their own, in which they can mount a disk of a few bytes. It also runs the writers
// that a test kills.
func TestMain(m *testing.M) {
	if text := os.Getenv(writer); text != "" {
		runWriter(text)
		os.Exit(0)
	}
	if os.Getenv(apart) != "" {
		os.Exit(m.Run())
	}
	flags := []uintptr{syscall.CLONE_NEWNS}
	if os.Getuid() != 0 {
		flags = []uintptr{syscall.CLONE_NEWNS | syscall.CLONE_NEWUSER}
	}
	for _, f := range flags {
		cmd := exec.Command(os.Args[0], os.Args[1:]...)
		cmd.Env = append(os.Environ(), apart+"=1")
		cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
		cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: f, Pdeathsig: syscall.SIGKILL}
		if f&syscall.CLONE_NEWUSER != 0 {
			cmd.SysProcAttr.UidMappings = []syscall.SysProcIDMap{{HostID: os.Getuid(), Size: 1}}
			cmd.SysProcAttr.GidMappings = []syscall.SysProcIDMap{{HostID: os.Getgid(), Size: 1}}
		}
		if cmd.Start() == nil {
			_ = cmd.Wait()
			os.Exit(cmd.ProcessState.ExitCode())
		}
	}
	os.Exit(m.Run()) // not permitted here
}

// smallDisk returns a directory on a file system of a size. Where that is not permitted, ok is false.
func smallDisk(t *testing.T, size int) (dir string, ok bool) {
	t.Helper()
	dir = t.TempDir()
	if err := syscall.Mount("durable", dir, "tmpfs", 0, fmt.Sprintf("size=%d", size)); err != nil {
		t.Logf("cannot mount: %v", err)
		return dir, false
	}
	t.Cleanup(func() { _ = syscall.Unmount(dir, syscall.MNT_DETACH) })
	return dir, true
}

// fill fills a disk to its last byte.
func fill(t *testing.T, dir string) {
	t.Helper()
	f, err := os.Create(filepath.Join(dir, "filler"))
	must(t, err)
	defer func() { _ = f.Close() }()
	for _, size := range []int{block, 1} {
		for content := make([]byte, size); err == nil; {
			_, err = f.Write(content)
		}
		if !errors.Is(err, syscall.ENOSPC) {
			t.Fatal(err)
		}
		err = nil
	}
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func wantText(t *testing.T, path, want string) {
	t.Helper()
	if text, _, err := WithSpare(0).Read(path); err != nil || string(text) != want {
		t.Errorf("%s: %.80q, %v; want %.80q", path, text, err, want)
	}
}

// text returns the i-th text. Their lengths differ by as much as the reserve allows.
func text(i int) string {
	return fmt.Sprintf("text %d of %s.", i, strings.Repeat("x", i%7*100))
}

// crash counts the system calls of a disk and ends the process before one of them, as SIGKILL does: no later call has an effect.
type crash struct {
	disk
	at, calls int
	torn      bool   // a write that is ended has written the half
	kill      func() // ends the process; nil: the calls fail instead
}

var errKilled = errors.New("killed")

func newCrash(at int, torn bool) *crash {
	c, real := &crash{at: at, torn: torn}, newDisk()
	killed := func() bool { c.calls++; return c.at > 0 && c.calls >= c.at }
	end := func() error {
		if c.kill != nil {
			c.kill()
		}
		return errKilled
	}
	c.disk = disk{
		writeAt: func(f *os.File, b []byte, offset int64) (int, error) {
			if killed() {
				if c.torn && c.calls == c.at {
					_, _ = real.writeAt(f, b[:len(b)/2], offset)
				}
				return 0, end()
			}
			return real.writeAt(f, b, offset)
		},
		truncate: func(f *os.File, size int64) error {
			if killed() {
				return end()
			}
			return real.truncate(f, size)
		},
		chmod: func(f *os.File, mode fs.FileMode) error {
			if killed() {
				return end()
			}
			return real.chmod(f, mode)
		},
		sync: func(f *os.File) error {
			if killed() {
				return end()
			}
			return real.sync(f)
		},
		rename: func(from, to string) error {
			if killed() {
				return end()
			}
			return real.rename(from, to)
		},
		renameat2: func(from, to string, flags uint) error {
			if killed() {
				return end()
			}
			return real.renameat2(from, to, flags)
		},
	}
	return c
}

// On a full disk 50 changes are saved, and a kill before any system call of any change leaves the last text or the one that is being saved.
func TestReplaceOnFullDiskKilledAnywhere(t *testing.T) {
	dir, mounted := smallDisk(t, 64<<10)
	if !mounted {
		t.Skip("needs the permission to mount; TestReplaceWithoutSpace plays the same without")
	}
	path := filepath.Join(dir, "state.json")
	const reserve = 4 * block
	w, err := WithSpare(reserve).Replace(path, []byte(text(0)))
	if err != nil || w.Unreserved != nil {
		t.Fatal(err, w.Unreserved)
	}
	fill(t, dir)
	for _, torn := range []bool{false, true} {
		for i := 1; i <= 50; i++ {
			at := 1
			for ; changeKilledBefore(t, path, i, newCrash(at, torn), reserve); at++ {
				// The next process saves the text before, so that each call is tried from the same beginning.
				if _, err := WithSpare(reserve).Replace(path, []byte(text(i-1))); err != nil {
					t.Fatalf("change %d, after a kill before call %d: %v", i, at, err)
				}
			}
			if at <= 5 {
				t.Fatalf("%d calls only: is the seam complete?", at)
			}
		}
		_, err := WithSpare(reserve).Replace(path, []byte(text(0)))
		must(t, err)
	}
	entries, err := os.ReadDir(dir)
	if err != nil || len(entries) != 3 { // the file, its spare file, the filler
		t.Errorf("left %v, %v", entries, err)
	}
}

// changeKilledBefore saves the i-th text in a process that c kills, and checks what the next process reads. It reports whether the process
// was killed before it had saved the text.
func changeKilledBefore(t *testing.T, path string, i int, c *crash, reserve int) bool {
	t.Helper()
	_, err := c.replace(path, []byte(text(i)), WithSpare(reserve))
	found, _, readErr := WithSpare(0).Read(path) // the next process
	if readErr != nil {
		t.Fatalf("change %d killed before call %d: %v", i, c.at, readErr)
	}
	switch got := string(found); {
	case err == nil && got == text(i):
	case err != nil && errors.Is(err, errKilled) && (got == text(i-1) || got == text(i)):
	default:
		t.Fatalf("change %d killed before call %d: %v, the file has %.80q", i, c.at, err, got)
	}
	return err != nil
}

// A text that the reserve does not hold is refused on a full disk, and the one before stays; with space again all is as before.
func TestReplaceWithTooLargeText(t *testing.T) {
	dir, mounted := smallDisk(t, 64<<10)
	if !mounted {
		t.Skip("needs the permission to mount; TestReplaceWithoutSpace plays the same without")
	}
	path := filepath.Join(dir, "state.json")
	_, err := WithSpare(block).Replace(path, []byte("one"))
	must(t, err)
	fill(t, dir)
	large := strings.Repeat("x", 3*block)
	_, err = WithSpare(block).Replace(path, []byte(large))
	if !errors.Is(err, syscall.ENOSPC) || !strings.Contains(err.Error(), path+":") {
		t.Errorf("%v", err)
	}
	wantText(t, path, "one")
	w, err := WithSpare(block).Replace(path, []byte("two")) // the reserve is still there
	if err != nil || w.Unreserved != nil {
		t.Errorf("%v, %v", err, w.Unreserved)
	}
	wantText(t, path, "two")
	must(t, os.Remove(filepath.Join(dir, "filler")))
	w, err = WithSpare(block).Replace(path, []byte(large))
	if err != nil || w.Unreserved != nil {
		t.Errorf("%v, %v", err, w.Unreserved)
	}
	fill(t, dir)
	w, err = WithSpare(block).Replace(path, []byte(large+large)) // twice the largest was reserved
	if err != nil || !errors.Is(w.Unreserved, syscall.ENOSPC) {
		t.Errorf("%v, %v", err, w.Unreserved)
	}
	wantText(t, path, large+large)
}

// The same by a disk that refuses to let a file grow, for where mounting is not permitted.
func TestReplaceWithoutSpace(t *testing.T) {
	path := filepath.Join(t.TempDir(), "state.json")
	_, err := WithSpare(block).Replace(path, []byte("one"))
	must(t, err)
	d := newDisk()
	full := true
	d.writeAt = func(f *os.File, b []byte, offset int64) (int, error) {
		info, err := f.Stat()
		must(t, err)
		if room := max(0, info.Size()-offset); full && int64(len(b)) > room {
			n, _ := f.WriteAt(b[:room], offset)
			return n, &fs.PathError{Op: "write", Path: f.Name(), Err: syscall.ENOSPC}
		}
		return f.WriteAt(b, offset)
	}
	for i := range 50 {
		if w, err := d.replace(path, []byte(text(i)), WithSpare(block)); err != nil || w.Unreserved != nil {
			t.Fatal(i, err, w.Unreserved)
		}
		wantText(t, path, text(i))
	}
	large := strings.Repeat("x", block-1) // fits without a reserve
	if w, err := d.replace(path, []byte(large), WithSpare(block)); err != nil || w.Unreserved == nil {
		t.Errorf("%v, %v", err, w.Unreserved)
	}
	if _, err := d.replace(path, []byte(large+"x"), WithSpare(block)); !errors.Is(err, syscall.ENOSPC) {
		t.Errorf("%v", err)
	}
	wantText(t, path, large)
	full = false
	if w, err := d.replace(path, []byte(large+"x"), WithSpare(block)); err != nil || w.Unreserved != nil {
		t.Errorf("%v, %v", err, w.Unreserved)
	}
}

// A file system without exchange gets the text too, and the outcome says so.
func TestReplaceWithoutExchange(t *testing.T) {
	for _, errno := range []syscall.Errno{syscall.EINVAL, syscall.ENOSYS, syscall.EOPNOTSUPP} {
		path := filepath.Join(t.TempDir(), "state.json")
		d := newDisk()
		d.renameat2 = func(from, to string, flags uint) error {
			if flags == unix.RENAME_EXCHANGE {
				return &os.LinkError{Op: "rename", Old: from, New: to, Err: errno}
			}
			return newDisk().renameat2(from, to, flags)
		}
		for i := range 3 {
			w, err := d.replace(path, []byte(text(i)), WithSpare(block))
			if err != nil || !errors.Is(w.Unreserved, errno) {
				t.Errorf("%v: %v, %v", errno, err, w.Unreserved)
			}
			wantText(t, path, text(i))
		}
	}
}

// The directory is synced between each exchange and the next write into the file that was exchanged: on the disk it may still be the file.
func TestReplaceSyncsBeforeItWritesAgain(t *testing.T) {
	path := filepath.Join(t.TempDir(), "state.json")
	real := newDisk()
	exchanged := true // by an earlier process, perhaps
	d := real
	d.writeAt = func(f *os.File, b []byte, offset int64) (int, error) {
		if exchanged {
			t.Error("written before the directory was synced")
		}
		return real.writeAt(f, b, offset)
	}
	d.sync = func(f *os.File) error {
		if f.Name() == filepath.Dir(path) {
			exchanged = false
		}
		return real.sync(f)
	}
	d.renameat2 = func(from, to string, flags uint) error { exchanged = true; return real.renameat2(from, to, flags) }
	for i := range 3 {
		_, err := d.replace(path, []byte(text(i)), WithSpare(block))
		must(t, err)
		if exchanged {
			t.Error("returned before the directory was synced")
		}
	}
	failing := errors.New("I/O error")
	d.sync = func(f *os.File) error {
		if f.Name() == filepath.Dir(path) {
			return failing
		}
		return real.sync(f)
	}
	d.writeAt = func(*os.File, []byte, int64) (int, error) {
		t.Error("written although the directory is not synced")
		return 0, nil
	}
	if _, err := d.replace(path, []byte("x"), WithSpare(block)); !errors.Is(err, failing) {
		t.Errorf("%v", err)
	}
	d.sync = func(f *os.File) error {
		if f.Name() == filepath.Dir(path) {
			return syscall.EINVAL // FUSE and others
		}
		return real.sync(f)
	}
	d.writeAt = real.writeAt
	_, err := d.replace(path, []byte("y"), WithSpare(block))
	must(t, err)
	wantText(t, path, "y")
}

// What is in the place of the spare file never loses its content: a link to it, a fifo, a directory.
func TestReplaceKeepsWhatIsInTheWay(t *testing.T) {
	for name, c := range map[string]struct {
		place func(dir, spare string) error
		left  func(t *testing.T, dir, spare string)
	}{
		"hard link to the state": {
			func(dir, spare string) error { return os.Link(spare, filepath.Join(dir, "backup")) },
			func(t *testing.T, dir, _ string) { wantText(t, filepath.Join(dir, "backup"), "one") },
		},
		"symbolic link": {
			func(dir, spare string) error {
				return errors.Join(os.Remove(spare), os.WriteFile(filepath.Join(dir, "other"), []byte("other"), 0o600), os.Symlink("other", spare))
			},
			func(t *testing.T, dir, _ string) { wantText(t, filepath.Join(dir, "other"), "other") },
		},
		"fifo": {
			func(_, spare string) error { return errors.Join(os.Remove(spare), syscall.Mkfifo(spare, 0o600)) },
			func(t *testing.T, _, spare string) {
				if info, err := os.Lstat(spare + ".unread"); err != nil || info.Mode().Type() != fs.ModeNamedPipe {
					t.Errorf("%v, %v", info, err)
				}
			},
		},
		"directory": {
			func(_, spare string) error { return errors.Join(os.Remove(spare), os.MkdirAll(spare+"/theirs", 0o700)) },
			func(t *testing.T, _, spare string) {
				if _, err := os.Stat(spare + ".unread/theirs"); err != nil {
					t.Error(err)
				}
			},
		},
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			path := filepath.Join(dir, "state.json")
			for _, text := range []string{"one", "two"} {
				_, err := WithSpare(block).Replace(path, []byte(text))
				must(t, err)
			}
			must(t, c.place(dir, SparePath(path)))
			for _, text := range []string{"three", "four"} {
				_, err := WithSpare(block).Replace(path, []byte(text))
				must(t, err)
				wantText(t, path, text)
			}
			c.left(t, dir, SparePath(path))
		})
	}
}

// notRegular makes what is not a regular file.
func notRegular(t *testing.T) map[string]func(path string) error {
	t.Helper()
	all := map[string]func(string) error{
		"fifo":      func(path string) error { return syscall.Mkfifo(path, 0o600) },
		"directory": func(path string) error { return os.MkdirAll(filepath.Join(path, "theirs"), 0o700) },
		"socket": func(path string) error {
			fd, err := syscall.Socket(syscall.AF_UNIX, syscall.SOCK_STREAM, 0)
			return errors.Join(err, syscall.Bind(fd, &syscall.SockaddrUnix{Name: path}), syscall.Close(fd))
		},
		"device": func(path string) error { return syscall.Mknod(path, syscall.S_IFCHR|0o600, 1<<8|5) }, // /dev/zero
	}
	if err := all["device"](filepath.Join(t.TempDir(), "zero")); err != nil {
		t.Logf("a device cannot be made here: %v", err)
		delete(all, "device")
	}
	return all
}

// Reading refuses what is not a regular file, and replacing sets it aside; neither waits for it.
func TestNotRegular(t *testing.T) {
	for name, make := range notRegular(t) {
		t.Run(name, func(t *testing.T) {
			dir, err := os.MkdirTemp("", "d") // a socket's path is short
			must(t, err)
			defer func() { _ = os.RemoveAll(dir) }()
			path := filepath.Join(dir, "s")
			must(t, make(path))
			if _, _, err := WithSpare(0).Read(path); !errors.Is(err, ErrNotRegular) || !strings.Contains(err.Error(), path) {
				t.Errorf("read: %v", err)
			}
			w, err := WithSpare(block).Replace(path, []byte("x"))
			if err != nil || w.Aside != path+".unread" {
				t.Errorf("%+v, %v", w, err)
			}
			if info, err := os.Lstat(w.Aside); err != nil || info.Mode().IsRegular() {
				t.Errorf("aside: %v, %v", info, err)
			}
			wantText(t, path, "x")
		})
	}
	if w, err := WithSpare(0).Replace("/dev/null", nil); !errors.Is(err, ErrNotRegular) {
		t.Errorf("/dev/null was set aside: %+v, %v", w, err)
	}
}

// Reading has a limit, which no file that Replace writes exceeds.
func TestLimit(t *testing.T) {
	path := filepath.Join(t.TempDir(), "state.json")
	must(t, os.WriteFile(path, nil, 0o600))
	must(t, os.Truncate(path, Limit+1))
	_, _, err := WithSpare(0).Read(path)
	if err == nil || !strings.Contains(err.Error(), "expected at most 134217728 bytes, found 134217729") {
		t.Errorf("%v", err)
	}
	if _, err := WithSpare(0).Replace(path, make([]byte, Limit)); err == nil {
		t.Error("a text of Limit bytes was written")
	}
}

// A reader finds one of the texts while a writer replaces them as fast as it can.
func TestReadDuringReplace(t *testing.T) {
	path := filepath.Join(t.TempDir(), "state.json")
	large := func(i int) []byte { return []byte(strings.Repeat(string(rune('a'+i%26)), 64<<10)) }
	_, err := WithSpare(0).Replace(path, large(0))
	must(t, err)
	done := make(chan error, 1)
	go func() {
		for i := range 200 {
			if _, err := WithSpare(0).Replace(path, large(i)); err != nil {
				done <- err
				return
			}
		}
		done <- nil
	}()
	for {
		select {
		case err := <-done:
			must(t, err)
			return
		default:
		}
		text, _, err := WithSpare(0).Read(path)
		if err != nil {
			continue // it was replaced each time; the caller tries again
		}
		if len(text) != 64<<10 || strings.Trim(string(text), string(text[0])) != "" {
			t.Fatalf("torn: %d bytes", len(text))
		}
	}
}
