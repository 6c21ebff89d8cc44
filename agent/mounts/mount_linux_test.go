package mounts

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
)

// TestRealMounts tests deleted with bind mounts on a disk, a tmpfs and an overlay. It runs itself again in a mount namespace.
func TestRealMounts(t *testing.T) {
	const apart = "GNA_TEST_MOUNTS"
	if top := os.Getenv(apart); top != "" {
		testRealMounts(t, top)
		return
	}
	cmd := exec.CommandContext(t.Context(), os.Args[0], "-test.run=^TestRealMounts$", "-test.v")
	cmd.Env = append(os.Environ(), apart+"="+t.TempDir())
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags:  syscall.CLONE_NEWUSER | syscall.CLONE_NEWNS,
		UidMappings: []syscall.SysProcIDMap{{HostID: os.Getuid(), Size: 1}}, GidMappings: []syscall.SysProcIDMap{{HostID: os.Getgid(), Size: 1}},
	}
	out, err := cmd.CombinedOutput()
	switch {
	case errors.Is(err, syscall.EPERM), strings.Contains(string(out), "--- SKIP: TestRealMounts"):
		t.Skipf("no user namespaces with mounts here: %v\n%s", err, out)
	case err != nil || !strings.Contains(string(out), "--- PASS: TestRealMounts"):
		t.Errorf("%v\n%s", err, out)
	}
}

func testRealMounts(t *testing.T, top string) {
	mkdir := func(names ...string) string {
		t.Helper()
		path := filepath.Join(append([]string{top}, names...)...)
		if err := os.MkdirAll(path, 0o700); err != nil {
			t.Fatal(err)
		}
		return path
	}
	mount := func(source, target, kind string, flags uintptr, data string) {
		t.Helper()
		switch err := syscall.Mount(source, target, kind, flags, data); {
		case errors.Is(err, syscall.EPERM):
			t.Skip(err)
		case err != nil:
			t.Fatal(err)
		}
	}
	disk := mkdir("disk")
	memory := mkdir("memory")
	mount("tmpfs", memory, "tmpfs", 0, "")
	overlay := mkdir("overlay")
	mount("overlay", overlay, "overlay", 0, "userxattr,lowerdir="+mkdir("memory", "lower")+",upperdir="+mkdir("memory", "upper")+",workdir="+
		mkdir("memory", "work"))
	for name, dir := range map[string]string{"disk": disk, "tmpfs": memory, "overlay": overlay} {
		w := New(Options{})
		host, container := filepath.Join(dir, "host"), filepath.Join(dir, "container")
		for _, d := range []string{host, container} {
			if err := os.Mkdir(d, 0o700); err != nil {
				t.Fatal(err)
			}
		}
		mount(host, container, "", syscall.MS_BIND, "")
		state := container + "/below/it"
		check := func(what string, wantHost, wantContainer bool) {
			t.Helper()
			for path, want := range map[string]bool{host: wantHost, container: wantContainer, state: wantContainer} {
				if got := w.deleted(path); got != want {
					t.Errorf("%s, %s: %s is deleted: %v, want %v", name, what, path, got, want)
				}
			}
		}
		check("at first", false, false)
		if err := os.Remove(host); err != nil {
			t.Fatal(err)
		}
		check("removed", false, true)
		if err := os.Mkdir(host, 0o700); err != nil {
			t.Fatal(err)
		}
		check("made again", false, true)
		if err := syscall.Unmount(container, 0); err != nil {
			t.Fatal(err)
		}
		mount(host, container, "", syscall.MS_BIND, "")
		check("mounted again", false, false)
		other := filepath.Join(dir, "other")
		if err := errors.Join(os.Mkdir(other, 0o700), syscall.Rename(other, host)); err != nil {
			t.Fatal(err)
		}
		check("replaced by a rename", false, true)
	}
}
