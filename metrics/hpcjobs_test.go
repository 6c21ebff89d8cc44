package metrics

import (
	"context"
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
		// What dcgm-exporter does not take for a GPU's file, and what it would not find.
		"1e5": "x", "NaN": "x", "+3": "x", "-2": "x", ".5": "x", "1.2.3": "x", "foo": "x", ".gitkeep": "x", "01": "x", "7.": "x", "12345": "x", "0 ": "x",
	})
	if err := os.Mkdir(filepath.Join(dir, "20"), 0o700); err != nil {
		t.Fatal(err)
	}
	outside := filepath.Join(t.TempDir(), "secret")
	writeJobs(t, filepath.Dir(outside), map[string]string{"secret": "secret\n"})
	for name, to := range map[string]string{"21": outside, "22": "../" + filepath.Base(filepath.Dir(outside)) + "/secret", "23": "0", "24": "nowhere", "25": "25"} {
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
			t.Errorf("%s: %q, want %q", name, ids, want[name])
		}
	}
	if len(got) != len(want) {
		t.Errorf("%d files, want %d: %v", len(got), len(want), got)
	}
	for _, said := range []string{"/9: has more jobs", "/10: is larger", "/11: has a line of 257 bytes", "/21: ", "/22: ", "/25: ", "/26: is no regular file"} {
		if err == nil || !strings.Contains(err.Error(), said) {
			t.Errorf("the error lacks %q: %v", said, err)
		}
	}
	if err == nil || strings.Count(err.Error(), "\n") != 6 {
		t.Errorf("there is more wrong than that: %v", err)
	}
}

func TestReadJobsIsBounded(t *testing.T) {
	dir := t.TempDir()
	files := make(map[string]string)
	for i := range maxJobFiles + 10 {
		files[fmt.Sprint(i)] = "job\n"
	}
	writeJobs(t, dir, files)
	if jobs, err := readJobs(dir); len(jobs) != maxJobFiles || err == nil || !strings.Contains(err.Error(), "too many") {
		t.Errorf("%d files, %v", len(jobs), err)
	}
}

func TestFollowJobs(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "jobs")
	synctest.Test(t, func(t *testing.T) {
		core, said := observer.New(zap.InfoLevel)
		var config health.Latest[Config]
		configure := func(dir string) {
			c := DefaultConfig()
			c.HPCJobDir = dir
			config.Store(&c)
			synctest.Wait()
		}
		pass := func() { // what a scrape after the next look shows
			time.Sleep(jobsEvery) //nolint:forbidigo // synctest's time
			synctest.Wait()
		}
		configure("")
		j := NewJobs(&config, zap.New(core))
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error, 1)
		go func() { done <- j.Run(ctx) }()
		has := func(gpu int, gi string, want ...string) {
			t.Helper()
			if got := j.Of(gpu, gi); !slices.Equal(got, want) {
				t.Errorf("GPU %d instance %q has %q, want %q", gpu, gi, got, want)
			}
		}
		pass()
		has(0, "")

		// The directory comes later than the agent.
		configure(dir)
		pass()
		pass()
		if n := said.FilterLevelExact(zap.WarnLevel).Len(); n != 1 {
			t.Errorf("that there is no directory was said %d times: %v", n, said.All())
		}
		if err := os.Mkdir(dir, 0o700); err != nil {
			t.Fatal(err)
		}
		writeJobs(t, dir, map[string]string{"0": "5\n", "1": "6\n", "1.7": "7\n"})
		pass()
		has(0, "", "5")
		has(1, "", "6")
		has(1, "7", "7")
		has(1, "8", "6") // an instance without a file has its GPU's
		has(2, "")
		if n := said.FilterMessage("all jobs can be read again").Len(); n != 1 {
			t.Errorf("that there is one was said %d times: %v", n, said.All())
		}
		before := j.known.Load()
		pass()
		if j.known.Load() != before {
			t.Error("it has changed, and nothing has")
		}

		// A job ends, another begins, one more comes.
		if err := os.Remove(filepath.Join(dir, "1.7")); err != nil {
			t.Fatal(err)
		}
		writeJobs(t, dir, map[string]string{"0": "9\n", "1": "6\n8\n"})
		pass()
		has(0, "", "9")
		has(1, "7", "6", "8")

		// The directory is replaced, and goes.
		if err := os.RemoveAll(dir); err != nil {
			t.Fatal(err)
		}
		pass()
		has(0, "")
		if err := os.Mkdir(dir, 0o700); err != nil {
			t.Fatal(err)
		}
		writeJobs(t, dir, map[string]string{"3": "10\n"})
		pass()
		has(3, "", "10")
		configure("")
		pass()
		has(3, "")
		cancel()
		if err := <-done; err != nil {
			t.Fatal(err)
		}
	})
}

func FuzzParseJobs(f *testing.F) {
	for _, text := range []string{"1\n2\n", "", "\n\n", "\xff\n", "a\r\nb", strings.Repeat("x\n", 200), strings.Repeat("y", 70000), "\x00\x1b[31m"} {
		f.Add([]byte(text))
	}
	f.Fuzz(func(t *testing.T, text []byte) {
		ids, err := parseJobs(text[:min(len(text), maxJobBytes)])
		if len(ids) > maxJobs {
			t.Errorf("%d jobs", len(ids))
		}
		for i, id := range ids {
			if id == "" || len(id) > maxJobID || strings.ToValidUTF8(id, "") != id || strings.Contains(id, "\n") || slices.Contains(ids[:i], id) {
				t.Errorf("id %q", id)
			}
		}
		_ = err
	})
}
