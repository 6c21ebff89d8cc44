package durable

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
)

// writer is the variable with a writerRun for a process that a test kills.
const writer = "DURABLE_TEST_WRITER"

// writerRun is a call of Replace by a process that is killed before its At-th system call.
type writerRun struct {
	Path, Text string
	Spare      bool
	At         int
	Torn       bool
}

func (r writerRun) options() Options {
	if r.Spare {
		return WithSpare(block)
	}
	return Options{Mode: 0o644}
}

func runWriter(text string) {
	var r writerRun
	if err := json.Unmarshal([]byte(text), &r); err != nil {
		panic(err)
	}
	c := newCrash(r.At, r.Torn)
	c.kill = func() {
		_ = syscall.Kill(os.Getpid(), syscall.SIGKILL)
		select {}
	}
	if _, err := c.replace(r.Path, []byte(r.Text), r.options()); err != nil {
		panic(err)
	}
}

// killed runs a writer, and reports whether it was killed.
func (r writerRun) killed(t *testing.T) bool {
	t.Helper()
	text, err := json.Marshal(r)
	must(t, err)
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), writer+"="+string(text))
	out, err := cmd.CombinedOutput()
	if exit, ok := errors.AsType[*exec.ExitError](err); ok && exit.Sys().(syscall.WaitStatus).Signal() == syscall.SIGKILL {
		return true
	}
	if err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	return false
}

// A writer that is killed before any of its system calls, also in the middle of a write, leaves the old text or the new one. The next
// writer removes what it has left.
func TestKilledWriter(t *testing.T) {
	for _, r := range []writerRun{{}, {Torn: true}, {Spare: true}, {Spare: true, Torn: true}} {
		t.Run(fmt.Sprintf("spare %t, torn %t", r.Spare, r.Torn), func(t *testing.T) {
			r.Path = filepath.Join(t.TempDir(), "file.json")
			left := 0
			for killed := true; killed; {
				r.At++
				var found []string
				killed, found = r.play(t)
				if !killed && r.At <= 5 {
					t.Errorf("%d calls: is the seam complete?", r.At-1)
				}
				if slices.ContainsFunc(found, func(name string) bool { return strings.HasSuffix(name, ".tmp") }) {
					left++
				}
			}
			if wantLeft := !r.Spare; left < 3 == wantLeft {
				t.Errorf("%d times with a temporary file", left)
			}
		})
	}
}

// play runs a writer that may be killed, and the next one after it. It returns which files the first one has left.
func (r writerRun) play(t *testing.T) (killed bool, left []string) {
	t.Helper()
	before := strings.Repeat("before ", 500) + "."
	_, err := r.options().Replace(r.Path, []byte(before))
	must(t, err)
	r.Text = fmt.Sprintf("text %d.", r.At)
	killed = r.killed(t)
	got, _, err := r.options().Read(r.Path)
	if text := string(got); err != nil || text != r.Text && (!killed || text != before) {
		t.Fatalf("killed before call %d: %.80q, %v", r.At, text, err)
	}
	left = names(t, filepath.Dir(r.Path))
	_, err = r.options().Replace(r.Path, []byte(before))
	must(t, err)
	want := []string{"file.json"}
	if r.Spare {
		want = append(want, "file.json.spare")
	}
	if got := names(t, filepath.Dir(r.Path)); !slices.Equal(got, want) {
		t.Fatalf("killed before call %d: the next writer leaves %q", r.At, got)
	}
	return killed, left
}

func names(t *testing.T, dir string) (all []string) {
	t.Helper()
	entries, err := os.ReadDir(dir)
	must(t, err)
	for _, e := range entries {
		all = append(all, e.Name())
	}
	return all
}

// The text is on the disk before the file is replaced, and the file before Replace returns.
func TestReplaceSyncs(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "file.json")
	var calls []string
	d := newDisk()
	d.writeAt = func(f *os.File, b []byte, offset int64) (int, error) {
		calls = append(calls, "write")
		return f.WriteAt(b, offset)
	}
	d.sync = func(f *os.File) error {
		what := "sync the file"
		if f.Name() == dir {
			what = "sync the directory"
		}
		calls = append(calls, what)
		return f.Sync()
	}
	d.rename = func(from, to string) error {
		calls = append(calls, "rename")
		return os.Rename(from, to)
	}
	_, err := d.replace(path, []byte("text"), Options{})
	must(t, err)
	if want := []string{"write", "sync the file", "rename", "sync the directory"}; !slices.Equal(calls, want) {
		t.Errorf("%q, want %q", calls, want)
	}
	failing := errors.New("I/O error")
	d.sync = func(f *os.File) error {
		if f.Name() == dir {
			return failing
		}
		return f.Sync()
	}
	if _, err := d.replace(path, []byte("next"), Options{}); !errors.Is(err, failing) {
		t.Errorf("the directory cannot be synced: %v", err)
	}
	d.sync = func(*os.File) error { return failing }
	if _, err := d.replace(path, []byte("third"), Options{}); !errors.Is(err, failing) {
		t.Errorf("the file cannot be synced: %v", err)
	}
	if text, _, err := (Options{}).Read(path); err != nil || string(text) != "next" {
		t.Errorf("%q, %v", text, err)
	}
}

// Options without a spare file: the mode, directories that do not exist, what the file must not have, and a limit.
func TestReplaceByTemporary(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "new", "file")
	o := Options{Mode: 0o644, Limit: 5}
	if _, err := o.Replace(path, []byte("one\n")); !errors.Is(err, fs.ErrNotExist) || strings.Contains(err.Error(), ".tmp") {
		t.Errorf("without a directory: %v", err)
	}
	o.DirMode = 0o750
	w, err := o.Replace(path, []byte("one\n"))
	must(t, err)
	if info, err := os.Stat(path); err != nil || info.Mode() != 0o644 || !Same(info, w.Info) {
		t.Errorf("%v, %v; written %v", info, err, w.Info)
	}
	if info, err := os.Stat(filepath.Dir(path)); err != nil || info.Mode().Perm() != 0o750 {
		t.Errorf("%v, %v", info, err)
	}
	refused := errors.New("refused")
	o.Check = func(temporary string) error {
		if text, err := os.ReadFile(temporary); err != nil || string(text) != "two\n" { //nolint:gosec // a test's
			t.Errorf("%q, %v", text, err)
		}
		return refused
	}
	if _, err := o.Replace(path, []byte("two\n")); !errors.Is(err, refused) {
		t.Errorf("%v", err)
	}
	o.Check = nil
	if _, err := o.Replace(path, []byte("123456")); err == nil || !strings.Contains(err.Error(), path) {
		t.Errorf("beyond the limit: %v", err)
	}
	if text, _, err := o.Read(path); err != nil || string(text) != "one\n" { // as it was written
		t.Errorf("%q, %v", text, err)
	}
	must(t, os.WriteFile(path, []byte("123456"), 0o600))
	if _, _, err := o.Read(path); !errors.Is(err, ErrTooLarge) || !strings.Contains(err.Error(), path) {
		t.Errorf("%v", err)
	}
	if _, err := o.Replace(path, []byte("12345")); err != nil {
		t.Error(err)
	}
	must(t, errors.Join(os.Remove(path), os.MkdirAll(filepath.Join(path, "theirs"), 0o750)))
	if _, err := o.Replace(path, []byte("x")); err == nil || strings.Contains(err.Error(), ".tmp") || !strings.Contains(err.Error(), path) {
		t.Errorf("replaced a directory: %v", err)
	}
	if got := names(t, filepath.Dir(path)); !slices.Equal(got, []string{"file"}) {
		t.Errorf("left: %q", got)
	}
}

// The first directory that can have the temporary file has it, and what killed writers left in any of them goes.
func TestTemporaryDirectories(t *testing.T) {
	dir := t.TempDir()
	path, above := filepath.Join(dir, "features.d", "file"), filepath.Join(dir, "above")
	must(t, errors.Join(os.Mkdir(filepath.Dir(path), 0o750), os.Mkdir(above, 0o750)))
	left := func(dir string) string { return filepath.Join(dir, ".gpu-node-agent-1.tmp") }
	for _, d := range []string{above, filepath.Dir(path)} {
		must(t, os.WriteFile(left(d), nil, 0o600))
	}
	var used string
	o := Options{
		TempDirs: []string{filepath.Join(dir, "missing"), above, filepath.Dir(path)},
		Check:    func(temporary string) error { used = filepath.Dir(temporary); return nil },
	}
	_, err := o.Replace(path, []byte("text"))
	must(t, err)
	if got := append(names(t, above), names(t, filepath.Dir(path))...); used != above || !slices.Equal(got, []string{"file"}) {
		t.Errorf("by %s; left: %q", used, got)
	}
}

// The files of killed writers are removed, however young, and no file of a writer that still runs or of another program.
func TestRemoveTemporaries(t *testing.T) {
	dir := t.TempDir()
	running, err := createTemporary(dir)
	must(t, err)
	killed, err := createTemporary(dir)
	must(t, err)
	must(t, killed.Close()) // so does the kernel
	must(t, os.WriteFile(filepath.Join(dir, "other.tmp"), nil, 0o600))
	remains := func() []string {
		must(t, RemoveTemporaries(filepath.Join(dir, "missing"), dir))
		return names(t, dir)
	}
	if got, want := remains(), []string{filepath.Base(running.Name()), "other.tmp"}; !slices.Equal(got, want) {
		t.Errorf("got %q, want %q", got, want)
	}
	must(t, running.Close())
	if got, want := remains(), []string{"other.tmp"}; !slices.Equal(got, want) {
		t.Errorf("got %q, want %q", got, want)
	}
	in := filepath.Join(dir, ".gpu-node-agent-x.tmp")
	must(t, os.MkdirAll(filepath.Join(in, "theirs"), 0o750))
	if err := RemoveTemporaries(dir); err == nil || !strings.Contains(err.Error(), in) {
		t.Errorf("what cannot be removed: %v", err)
	}
	if _, err := (Options{}).Replace(filepath.Join(dir, "file"), nil); err != nil {
		t.Errorf("beside what cannot be removed: %v", err)
	}
}

// A process that starts while another one writes does not disturb it.
func TestRemoveTemporariesWhileWriting(t *testing.T) {
	dir := t.TempDir()
	stop, stopped := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(stopped)
		for {
			select {
			case <-stop:
				return
			default:
			}
			if err := RemoveTemporaries(dir); err != nil {
				t.Error(err)
				return
			}
		}
	}()
	for range 200 {
		if _, err := (Options{}).Replace(filepath.Join(dir, "file"), []byte("text")); err != nil {
			t.Error(err)
			break
		}
	}
	close(stop)
	<-stopped
	if got := names(t, dir); len(got) != 1 {
		t.Errorf("left: %q", got)
	}
}
