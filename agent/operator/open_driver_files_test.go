package operator

import (
	"os"
	"path/filepath"
	"slices"
	"testing"
)

func TestDriverFiles(t *testing.T) {
	for name, c := range map[string]struct {
		fds  map[string]string
		maps string
		want []string
	}{
		"no files": {},
		"files of others": {
			fds: map[string]string{"0": "/dev/null", "1": "pipe:[77]", "5": "socket:[78]", "6": "/dev/nvram", "7": "/var/dev/nvidia0"},
			maps: "7f0000000000-7f0000001000 r--p 00000000 08:01 1 /usr/lib/x86_64-linux-gnu/libnvidia-ml.so.1\n7f0000002000-7f0000003000 rw-p " +
				"00000000 00:00 0 \n",
		},
		"open files": {
			fds: map[string]string{
				"3": "/dev/nvidiactl", "4": "/dev/nvidia0", "12": "/dev/nvidia0", "13": "/dev/nvidia-uvm",
				"14": "/dev/nvidia-caps/nvidia-cap1", "15": "/dev/nvidia1 (deleted)", "16": "/proc/driver/nvidia/capabilities/mig/monitor",
			},
			want: []string{
				"/dev/nvidia-caps/nvidia-cap1", "/dev/nvidia-uvm", "/dev/nvidia0", "/dev/nvidia1 (deleted)", "/dev/nvidiactl",
				"/proc/driver/nvidia/capabilities/mig/monitor",
			},
		},
		"mapped after close": {
			maps: "7f0000000000-7f0000001000 rw-s 00010000 00:05 442 /dev/nvidiactl\n7f0000001000-7f0000002000 rw-s 00020000 00:05 442            " +
				"           /dev/nvidiactl\n",
			want: []string{"/dev/nvidiactl"},
		},
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			if err := os.Mkdir(filepath.Join(dir, "fd"), 0o750); err != nil {
				t.Fatal(err)
			}
			for fd, target := range c.fds {
				if err := os.Symlink(target, filepath.Join(dir, "fd", fd)); err != nil {
					t.Fatal(err)
				}
			}
			if err := os.WriteFile(filepath.Join(dir, "maps"), []byte(c.maps), 0o600); err != nil {
				t.Fatal(err)
			}
			if got, err := driverFiles(dir); err != nil || !slices.Equal(got, c.want) {
				t.Errorf("%q, %v, want %q", got, err, c.want)
			}
		})
	}
	if got, err := driverFiles(t.TempDir()); err == nil {
		t.Errorf("no directory fd: %q", got)
	}
	if got, err := driverFiles("/proc/self"); err != nil || len(got) != 0 {
		t.Errorf("this process: %q, %v", got, err)
	}
}
