package mps

import (
	"bytes"
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/zap"
)

// pausesBetween has keepRunning run processes. It returns the pause before each but the first, and the end of the last.
func pausesBetween(
	ctx context.Context, restart chan struct{}, ran []time.Duration, errs []error,
) (pauses []time.Duration, ended time.Time) {
	ctx, cancel := context.WithCancel(ctx)
	i := 0
	keepRunning(ctx, func(context.Context) (time.Duration, error) {
		if i > 0 {
			pauses = append(pauses, time.Since(ended))
		}
		<-time.After(ran[i])
		ended, i = time.Now(), i+1
		if i == len(ran) {
			cancel()
		}
		if i <= len(errs) {
			return ran[i-1], errs[i-1]
		}
		return ran[i-1], errors.New("ended")
	}, restart, func(error, time.Duration) {})
	return pauses, ended
}

func TestBackoff(t *testing.T) {
	const s = time.Second
	for name, test := range map[string]struct {
		ran     []time.Duration // of each process
		errs    []error         // any other error if absent
		restart time.Duration   // after the start; 0 for none
		want    []time.Duration // the most between the end of a process and the next start; the least is half of it
	}{
		"cannot be started":     {ran: make([]time.Duration, 8), want: []time.Duration{s, 2 * s, 4 * s, 8 * s, 16 * s, 30 * s, 30 * s}},
		"runs for a while":      {ran: []time.Duration{59 * s, 59 * s, 59 * s}, want: []time.Duration{s, 2 * s}},
		"settles":               {ran: []time.Duration{0, 0, time.Minute, 0, 0}, want: []time.Duration{s, 2 * s, s, 2 * s}},
		"request":               {ran: []time.Duration{s, s, 0}, errs: []error{errRestart}, want: []time.Duration{0, 2 * s}},
		"request while waiting": {ran: make([]time.Duration, 4), restart: 3*s + s/4, want: []time.Duration{s, 2 * s}},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				restart := make(chan struct{}, 1)
				begun := time.Now()
				if test.restart > 0 {
					time.AfterFunc(test.restart, func() { restart <- struct{}{} })
				}
				got, ended := pausesBetween(t.Context(), restart, test.ran, test.errs)
				for i, most := range test.want {
					if got[i] < most/2 || got[i] > most {
						t.Errorf("pauses %v, want %v", got, test.want)
					}
				}
				if test.restart > 0 && ended.Sub(begun) != test.restart { // during the third pause, which would last until 3.5 s at least
					t.Errorf("started %v after the first start, want %v", ended.Sub(begun), test.restart)
				}
			})
		})
	}
}

// A process that does not end although it was killed keeps its successor from starting, and is killed until it ends.
func TestDaemonThatDoesNotEnd(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		cmd := exec.Command("sleep", "600")
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		p := &controlProcess{Process: cmd.Process, began: time.Now(), ended: make(chan struct{})} // as if its end were never seen
		d := &daemon{process: p, root: Root(t.TempDir()), device: gpuA, orphans: &orphans{}, restart: make(chan struct{}, 1), log: zap.NewNop()}
		time.AfterFunc(time.Second, func() { d.restart <- struct{}{} })
		const hung = "does not end although it was killed"
		if ran, err := d.watch(t.Context(), false); err == nil || !strings.Contains(err.Error(), hung) || ran < killTimeout {
			t.Errorf("restart: %v after %v", err, ran)
		}
		if s := d.current(); s.PID != p.Pid {
			t.Errorf("%+v", s)
		}
		if ran, err := d.serve(t.Context()); err == nil || !strings.Contains(err.Error(), hung) || ran != 0 || d.process != p {
			t.Errorf("next start: %v after %v", err, ran)
		}
		var before DaemonStatus
		time.AfterFunc(time.Minute, func() {
			before = d.current()
			_ = cmd.Wait()
			close(p.ended)
		})
		start := time.Now()
		d.stop = func(error) {}
		d.leave(errShutdown)
		if err := d.end(t.Context(), errShutdown); err != nil || time.Since(start) < time.Minute || time.Since(start) > 2*time.Minute {
			t.Errorf("%v after %v", err, time.Since(start))
		}
		if !before.Stopping || before.PID != p.Pid || !strings.Contains(before.Error, hung) || d.current().PID != 0 {
			t.Errorf("%+v, then %+v", before, d.current())
		}
	})
}

// A restart tells how long the process ran, with its end: the backoff begins anew after a process that has settled.
func TestDaemonRestart(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		cmd := exec.Command("sleep", "600")
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		p := &controlProcess{Process: cmd.Process, began: time.Now(), ended: make(chan struct{})}
		d := &daemon{process: p, root: Root(t.TempDir()), device: gpuA, orphans: &orphans{}, restart: make(chan struct{}, 1), log: zap.NewNop()}
		time.AfterFunc(time.Minute, func() { d.restart <- struct{}{} })
		time.AfterFunc(time.Minute+time.Second, func() { // the driver ends it
			_ = cmd.Wait()
			close(p.ended)
		})
		if ran, err := d.watch(t.Context(), false); !errors.Is(err, errRestart) || ran != time.Minute+time.Second || d.current().PID != 0 {
			t.Errorf("%v after %v: %+v", err, ran, d.current())
		}
	})
}

func TestBoundLog(t *testing.T) {
	root := Root(t.TempDir())
	if err := os.MkdirAll(root.LogDir(gpuA), 0o700); err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(root.LogDir(gpuA), "control.log")
	f, err := os.Create(path) // without O_APPEND
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close() //nolint:errcheck // for reading only
	line := append(bytes.Repeat([]byte("x"), 1023), '\n')
	for range 3 { // the writer continues after each
		for range maxLog/len(line) + 8 {
			if _, err := f.Write(line); err != nil {
				t.Fatal(err)
			}
		}
		if _, err := f.WriteString("last line\n"); err != nil {
			t.Fatal(err)
		}
		if err := root.boundLogsOnce(); err != nil {
			t.Fatal(err)
		}
		if size := fileSize(path); size != 0 {
			t.Errorf("%d bytes", size)
		}
		kept, err := os.ReadFile(path + ".1")
		if err != nil || len(kept) != keptLog || !bytes.HasSuffix(kept, []byte("x\nlast line\n")) {
			t.Fatalf("kept %d bytes, %v", len(kept), err)
		}
		if info, err := os.Stat(path + ".1"); err != nil || info.Mode()&^0o044 != 0o600 {
			t.Errorf("mode %v, %v", info.Mode(), err)
		}
	}
	if _, err := f.WriteString("small\n"); err != nil { // behind a hole
		t.Fatal(err)
	}
	if err := root.boundLogsOnce(); err != nil || fileSize(path) == 0 {
		t.Errorf("a small log was truncated, %v", err)
	}
	if err := errors.Join(os.Remove(path+".1"), os.Mkdir(path+".1", 0o700), os.WriteFile(path, make([]byte, maxLog+8192), 0o600)); err != nil {
		t.Fatal(err)
	}
	if err := root.boundLogsOnce(); err == nil || !strings.Contains(err.Error(), path+".1") {
		t.Errorf("nothing kept: %v", err)
	}
}

func TestLastLines(t *testing.T) {
	for name, test := range map[string]struct {
		text string
		from int64
		want string
	}{
		"empty":             {},
		"one":               {text: "usage\n", want: "usage"},
		"of this process":   {text: "old\nnew\n", from: 4, want: "new"},
		"truncated":         {text: "new\n", from: 4000, want: "new"},
		"five":              {text: "1\n2\n3\n4\n5\n6\n7", want: "3; 4; 5; 6; 7"},
		"control codes":     {text: "a\x1b[31mb\x00\xff\n", want: "a; [31mb"},
		"more than is read": {text: strings.Repeat("x", 5000) + "\nend\n", want: strings.Repeat("x", 995) + "; end"},
	} {
		t.Run(name, func(t *testing.T) {
			path := filepath.Join(t.TempDir(), "log")
			if err := os.WriteFile(path, []byte(test.text), 0o600); err != nil {
				t.Fatal(err)
			}
			if got := lastLines(path, test.from); got != test.want {
				t.Errorf("got %q, want %q", got, test.want)
			}
		})
	}
	if got := lastLines(filepath.Join(t.TempDir(), "none"), 0); got != "" {
		t.Errorf("no file: %q", got)
	}
}
