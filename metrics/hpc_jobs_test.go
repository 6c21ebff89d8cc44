package metrics

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"

	"github.com/gpu-node-agent/gpu-node-agent/health"
)

func writeJobs(t *testing.T, dir string, files map[string]string) {
	t.Helper()
	for name, text := range files {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
}

func TestReadJobs(t *testing.T) {
	dir := t.TempDir()
	many := ""
	for i := range maxJobs + 1 {
		many += fmt.Sprintf("job-%d\n", i)
	}
	writeJobs(t, dir, map[string]string{
		"0": "1234\n", "1": "b\na\nb\n", "2": "", "3": "\n  \n", "4": "no newline", "5": "dos\r\nlines\r\n", "6": "a b\tc\n\"x\\\"\n",
		"7.3": "mig\n", "7.0": "gi 0\n", "8": "\xff\xfe\nok\n", "9": many, "10": strings.Repeat("x", maxJobBytes+1),
		"11": strings.Repeat("y", maxJobID+1) + "\nfine\n", "12": "\x00\n",
		// Names that dcgm-exporter ignores or never looks up.
		"1e5": "x", "NaN": "x", "+3": "x", "-2": "x", ".5": "x", "1.2.3": "x", "foo": "x", ".gitkeep": "x", "01": "x", "7.": "x", "12345": "x",
		"0 ": "x",
	})
	if err := os.Mkdir(filepath.Join(dir, "20"), 0o700); err != nil {
		t.Fatal(err)
	}
	outside := filepath.Join(t.TempDir(), "secret")
	writeJobs(t, filepath.Dir(outside), map[string]string{"secret": "secret\n"})
	for name, to := range map[string]string{
		"21": outside, "22": "../" + filepath.Base(filepath.Dir(outside)) + "/secret", "23": "0",
		"24": "nowhere", "25": "25",
	} {
		if err := os.Symlink(to, filepath.Join(dir, name)); err != nil {
			t.Fatal(err)
		}
	}
	if err := syscall.Mkfifo(filepath.Join(dir, "26"), 0o600); err != nil {
		t.Fatal(err)
	}

	got, err := readJobs(dir)
	want := map[string][]string{
		"0": {"1234"}, "1": {"b", "a"}, "4": {"no newline"}, "5": {"dos", "lines"}, "6": {"a b\tc", `"x\"`}, "7.3": {"mig"}, "7.0": {"gi 0"},
		"8": {"�", "ok"}, "9": strings.Fields(many)[:maxJobs], "11": {"fine"}, "12": {"\x00"}, "23": {"1234"},
	}
	for name, ids := range got {
		if !slices.Equal(ids, want[name]) {
			t.Errorf("%s: got %q, want %q", name, ids, want[name])
		}
	}
	if len(got) != len(want) {
		t.Errorf("got %d files, want %d: %v", len(got), len(want), got)
	}
	if err == nil {
		t.Fatal("no error for invalid files")
	}
	lines := strings.Split(err.Error(), "\n")
	for _, name := range []string{"9", "10", "11", "21", "22", "25", "26"} {
		if n := len(slices.DeleteFunc(slices.Clone(lines), func(l string) bool { return !strings.HasPrefix(l, dir+"/"+name+": ") })); n != 1 {
			t.Errorf("%d errors for file %s in %q", n, name, lines)
		}
	}
	if len(lines) != 7 {
		t.Errorf("errors for other files in %q", lines)
	}
}

func TestReadJobsLimitsFiles(t *testing.T) {
	dir := t.TempDir()
	files := make(map[string]string)
	for i := range maxJobFiles + 10 {
		files[fmt.Sprint(i)] = "job\n"
	}
	writeJobs(t, dir, files)
	if jobs, err := readJobs(dir); len(jobs) != maxJobFiles || !errors.Is(err, errTooManyJobFiles) {
		t.Errorf("%d files, %v", len(jobs), err)
	}
}

func TestJobsRun(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "jobs")
	synctest.Test(t, func(t *testing.T) {
		core, logs := observer.New(zap.InfoLevel)
		var config health.Latest[Config]
		configure := func(dir string) {
			c := DefaultConfig()
			c.HPCJobDir = dir
			config.Store(&c)
			synctest.Wait()
		}
		nextRead := func() {
			time.Sleep(jobsInterval) //nolint:forbidigo // synctest's time
			synctest.Wait()
		}
		configure("")
		j := NewJobs(&config, zap.New(core))
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error, 1)
		go func() { done <- j.Run(ctx) }()
		expectJobs := func(gpu int, gi string, want ...string) {
			t.Helper()
			if got := j.Of(gpu, gi); !slices.Equal(got, want) {
				t.Errorf("GPU %d instance %q has %q, want %q", gpu, gi, got, want)
			}
		}
		nextRead()
		expectJobs(0, "")

		// The agent starts before the directory exists.
		configure(dir)
		nextRead()
		nextRead()
		if n := logs.FilterLevelExact(zap.WarnLevel).Len(); n != 1 {
			t.Errorf("%d warnings about the missing directory: %v", n, logs.All())
		}
		if err := os.Mkdir(dir, 0o700); err != nil {
			t.Fatal(err)
		}
		writeJobs(t, dir, map[string]string{"0": "5\n", "1": "6\n", "1.7": "7\n"})
		nextRead()
		expectJobs(0, "", "5")
		expectJobs(1, "", "6")
		expectJobs(1, "7", "7")
		expectJobs(1, "8", "6") // a GPU instance without a file has its GPU's jobs
		expectJobs(2, "")
		if n := logs.FilterLevelExact(zap.InfoLevel).Len(); n != 1 {
			t.Errorf("%d messages about the directory: %v", n, logs.All())
		}
		before := j.byFile.Load()
		nextRead()
		if j.byFile.Load() != before {
			t.Error("the jobs have been stored without a change")
		}

		// Jobs end and start.
		if err := os.Remove(filepath.Join(dir, "1.7")); err != nil {
			t.Fatal(err)
		}
		writeJobs(t, dir, map[string]string{"0": "9\n", "1": "6\n8\n"})
		nextRead()
		expectJobs(0, "", "9")
		expectJobs(1, "7", "6", "8")

		// The directory is replaced, then disabled.
		if err := os.RemoveAll(dir); err != nil {
			t.Fatal(err)
		}
		nextRead()
		expectJobs(0, "")
		if err := os.Mkdir(dir, 0o700); err != nil {
			t.Fatal(err)
		}
		writeJobs(t, dir, map[string]string{"3": "10\n"})
		nextRead()
		expectJobs(3, "", "10")
		configure("")
		nextRead()
		expectJobs(3, "")
		cancel()
		if err := <-done; err != nil {
			t.Fatal(err)
		}
	})
}
