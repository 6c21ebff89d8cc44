package mps

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"go.uber.org/zap"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/health/driver"
)

// fakeComputeModes returns access to the mode of one GPU.
func fakeComputeModes(t *testing.T, id health.DeviceID, mode *driver.ComputeMode, getErr, setErr error) *ComputeModes {
	return &ComputeModes{
		Get: func(gpu health.DeviceID) (driver.ComputeMode, error) {
			if gpu != id {
				t.Errorf("read of %s", gpu)
			}
			return *mode, getErr
		},
		Set: func(gpu health.DeviceID, to driver.ComputeMode) error {
			if gpu != id {
				t.Errorf("set of %s", gpu)
			}
			if setErr == nil {
				*mode = to
			}
			return setErr
		},
	}
}

// The former compute mode of a GPU is recorded before the mode changes, and stays recorded until it is set back.
func TestComputeModes(t *testing.T) {
	const (
		normal    = driver.ComputeModeDefault
		thread    = driver.ComputeModeExclusiveThread
		exclusive = driver.ComputeModeExclusiveProcess
	)
	errDriver := errors.New("GPU is lost")
	for name, c := range map[string]struct {
		record         string // before; "-": it cannot be read or written
		mode           driver.ComputeMode
		getErr, setErr error
		back           bool // setBack, not makeExclusive

		want       driver.ComputeMode
		wantRecord string
		err        string // a part; empty for none
	}{
		"made exclusive":         {mode: normal, want: exclusive, wantRecord: "0\n"},
		"another mode":           {mode: thread, want: exclusive, wantRecord: "1\n"},
		"exclusive before":       {mode: exclusive, want: exclusive},
		"exclusive and recorded": {record: "1\n", mode: exclusive, want: exclusive, wantRecord: "1\n"},
		"prohibited":             {mode: driver.ComputeModeProhibited, want: driver.ComputeModeProhibited, err: "nvidia-smi -i GPU-a -c DEFAULT"},
		"not read":               {getErr: errDriver, err: "cannot read the compute mode: GPU is lost"},
		"not set":                {setErr: errDriver, wantRecord: "0\n", err: "cannot set the compute mode"},
		"not recorded":           {record: "-", err: "cannot record the compute mode", wantRecord: "-"},

		"nothing recorded":    {back: true, mode: exclusive, want: exclusive},
		"set back":            {back: true, record: "1\n", mode: exclusive, want: thread},
		"changed by somebody": {back: true, record: "1\n", mode: normal, want: normal},
		"not read, to set back": {
			back: true, record: "1\n", mode: exclusive, getErr: errDriver, want: exclusive, wantRecord: "1\n",
			err: "cannot set the compute mode back to",
		},
		"not set back": {
			back: true, record: "1\n", mode: exclusive, setErr: errDriver, want: exclusive, wantRecord: "1\n",
			err: "cannot set the compute mode back to",
		},
		"bad record":             {back: true, record: "x", mode: exclusive, want: normal, err: "expected a compute mode from 0 to 3"},
		"record of another mode": {back: true, record: "4", mode: exclusive, want: normal, err: "expected a compute mode from 0 to 3"},
		"record cannot be read": {
			back: true, record: "-", mode: exclusive, want: exclusive, wantRecord: "-",
			err: "cannot read what the compute mode was",
		},
	} {
		t.Run(name, func(t *testing.T) {
			root, id := Root(t.TempDir()), health.DeviceID("GPU-a")
			path := root.computeModeFile(id)
			if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o700), prepareRecord(path, c.record)); err != nil {
				t.Fatal(err)
			}
			mode := c.mode
			m := fakeComputeModes(t, id, &mode, c.getErr, c.setErr)
			set := m.makeExclusive
			if c.back {
				set = m.setBack
			}
			if err := set(root, id); (err == nil) != (c.err == "") || err != nil && !strings.Contains(err.Error(), c.err) {
				t.Errorf("%v, want %q", err, c.err)
			}
			if mode != c.want {
				t.Errorf("mode %v, want %v", mode, c.want)
			}
			text, err := os.ReadFile(path)
			if got := string(text); c.wantRecord != "-" && (got != c.wantRecord || errors.Is(err, fs.ErrNotExist) != (c.wantRecord == "")) {
				t.Errorf("record %q, %v, want %q", got, err, c.wantRecord)
			}
		})
	}
}

// prepareRecord writes a file, or makes a directory that is in its way.
func prepareRecord(path, text string) error {
	switch text {
	case "":
		return nil
	case "-":
		return os.MkdirAll(filepath.Join(path, "x"), 0o700)
	}
	return os.WriteFile(path, []byte(text), 0o600)
}

// What a dead daemon has left goes, but not the lock, and not the directory, which containers have mounted.
func TestPrepareDirectories(t *testing.T) {
	root, id := Root(t.TempDir()), gpuA
	old := syscall.Umask(0o077)
	defer syscall.Umask(old)
	for _, dir := range []string{root.PipeDir(id) + "/dir", root.LogDir(id)} {
		if err := os.MkdirAll(dir, 0o700); err != nil {
			t.Fatal(err)
		}
	}
	for _, file := range []string{
		root.PipeDir(id) + "/control", root.PipeDir(id) + "/" + controlLock, root.PipeDir(id) + "/dir/x",
		root.LogDir(id) + "/control.log",
	} {
		if err := os.WriteFile(file, nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	before, err := os.Stat(root.PipeDir(id))
	if err != nil {
		t.Fatal(err)
	}
	for _, clean := range []bool{false, true} {
		if err := root.prepareDirectories(id, clean, zap.NewNop()); err != nil {
			t.Fatal(err)
		}
		for path, want := range map[string]bool{
			"pipe/control": !clean, "pipe/dir/x": !clean, "pipe/" + controlLock: true,
			"log/control.log": true,
		} {
			if _, err := os.Stat(filepath.Join(string(root), string(id), path)); (err == nil) != want {
				t.Errorf("clean %v: %s: %v", clean, path, err)
			}
		}
		for _, dir := range []string{root.PipeDir(id), root.LogDir(id)} {
			if info, err := os.Stat(dir); err != nil || info.Mode() != os.ModeDir|0o755 {
				t.Errorf("%s: %v, %v", dir, info.Mode(), err)
			}
		}
	}
	if after, err := os.Stat(root.PipeDir(id)); err != nil || !os.SameFile(before, after) {
		t.Errorf("the pipe directory was replaced: %v", err)
	}
	if err := errors.Join(os.Remove(root.PipeDir(id)+"/"+controlLock), os.MkdirAll(root.PipeDir(id)+"/"+controlLock+"/x", 0o700),
		root.prepareDirectories(id, true, zap.NewNop())); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(root.PipeDir(id) + "/" + controlLock); err == nil {
		t.Error("a directory at the path of the lock is kept")
	}
	// A file in the place of either directory is an error.
	for _, dir := range []string{root.PipeDir(gpuB), root.LogDir(mig)} {
		if err := errors.Join(os.MkdirAll(filepath.Dir(dir), 0o700), os.WriteFile(dir, nil, 0o600)); err != nil {
			t.Fatal(err)
		}
		if err := root.prepareDirectories(health.DeviceID(filepath.Base(filepath.Dir(dir))), true, zap.NewNop()); err == nil {
			t.Errorf("%s is a file", dir)
		}
	}
}

func TestRootDevices(t *testing.T) {
	root := Root(t.TempDir())
	for _, dir := range []string{"GPU-a", "MIG-b", "shm", "gpu-c", "GPU-a (old)"} {
		if err := os.Mkdir(filepath.Join(string(root), dir), 0o700); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.WriteFile(filepath.Join(string(root), "GPU-file"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if got := root.devices(); !slices.Equal(got, []health.DeviceID{"GPU-a", "MIG-b"}) {
		t.Errorf("%q", got)
	}
}

func TestShm(t *testing.T) {
	if err := checkShm(devShm); err != nil {
		t.Error(err)
	}
	dir := t.TempDir()
	if err := checkShm(dir); err == nil || !strings.Contains(err.Error(), "mount --bind /dev/shm "+dir) {
		t.Error(err)
	}
	if err := checkShm(filepath.Join(dir, "absent")); !errors.Is(err, fs.ErrNotExist) {
		t.Error(err)
	}
	if same, err := isSameFile(dir, filepath.Join(dir, "absent")); same || !errors.Is(err, fs.ErrNotExist) {
		t.Error(err)
	}
	if same, err := isSameFile(filepath.Join(dir, "absent"), dir); same || !errors.Is(err, fs.ErrNotExist) {
		t.Error(err)
	}
	if err := os.Mkdir(filepath.Join(dir, "sub"), 0o700); err != nil {
		t.Fatal(err)
	}
	for path, want := range map[string]bool{"/proc": true, filepath.Join(dir, "sub"): false} {
		if got, err := isMountPoint(path); err != nil || got != want {
			t.Errorf("%s is a mount point: %v, %v", path, got, err)
		}
	}
	if _, err := isMountPoint(filepath.Join(dir, "absent")); !errors.Is(err, fs.ErrNotExist) {
		t.Error(err)
	}
	for text, want := range map[string]uint64{
		"MemTotal: 4000 kB\nMemFree: 1000 kB\n": 2000, "MemFree: 1000 kB\n": 64 << 10, "": 64 << 10,
		"-": 64 << 10,
	} {
		proc := t.TempDir()
		if text != "-" {
			if err := os.WriteFile(filepath.Join(proc, "meminfo"), []byte(text), 0o600); err != nil {
				t.Fatal(err)
			}
		}
		if got := shmSize(proc); got != want {
			t.Errorf("%q: %d KiB, want %d", text, got, want)
		}
	}
	if got := shmSize(filepath.Join(dir, "absent")); got != 64<<10 {
		t.Errorf("%d KiB without /proc", got)
	}
}

func TestStartTime(t *testing.T) {
	if at := startTime(os.Getpid()); time.Since(at) < 0 || time.Since(at) > time.Hour {
		t.Errorf("this process started at %v", at)
	}
	if at := startTime(1 << 30); !at.IsZero() {
		t.Errorf("no process started at %v", at)
	}
	d := &daemon{}
	if text := d.foreignStart(1 << 30); text != "an unknown time" {
		t.Error(text)
	}
	if at, err := time.Parse(time.RFC3339, d.foreignStart(os.Getpid())); err != nil || time.Since(at) > time.Hour {
		t.Errorf("%v, %v", at, err)
	}
}
