package containers

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"testing"
)

func makeDirs(t *testing.T, root string, dirs ...string) {
	t.Helper()
	for _, dir := range dirs {
		if err := os.MkdirAll(filepath.Join(root, dir), 0o700); err != nil {
			t.Fatal(err)
		}
	}
}

func TestCgroupDir(t *testing.T) {
	slice := "kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod" + systemdUID + ".slice/"
	for name, test := range map[string]struct {
		dir  string // of the container
		more []string
	}{
		"systemd containerd":        {dir: slice + "cri-containerd-" + id + ".scope"},
		"systemd CRI-O":             {dir: slice + "crio-" + id + ".scope"},
		"systemd guaranteed":        {dir: "kubepods.slice/kubepods-pod" + systemdUID + ".slice/cri-containerd-" + id + ".scope"},
		"cgroupfs":                  {dir: "kubepods/burstable/pod" + podUID + "/" + id},
		"cgroupfs guaranteed":       {dir: "kubepods/pod" + podUID + "/" + id},
		"cgroupfs CRI-O":            {dir: "kubepods/besteffort/pod" + podUID + "/crio-" + id},
		"cgroupfs runtime, systemd": {dir: "system.slice/containerd.service/kubepods-burstable-pod" + systemdUID + ".slice:cri-containerd:" + id},
		"kind": {
			dir: "kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-besteffort.slice/kubelet-kubepods-besteffort-pod" + systemdUID +
				".slice/cri-containerd-" + id + ".scope",
		},
		"kind, from outside": {dir: "docker/" + otherID + "/kubelet/kubepods/besteffort/pod" + podUID + "/" + id},
		"beside the pod's sandbox": {
			dir:  slice + "cri-containerd-" + id + ".scope",
			more: []string{slice + "cri-containerd-" + otherID + ".scope"},
		},
		"beside CRI-O's monitor": {dir: slice + "crio-" + id + ".scope", more: []string{slice + "crio-conmon-" + id + ".scope"}},
		"cgroupfs, CRI-O's monitor": {
			dir:  "kubepods/pod" + podUID + "/crio-" + id,
			more: []string{"kubepods/pod" + podUID + "/crio-conmon-" + id},
		},
		"group made by a container": {
			dir: slice + "cri-containerd-" + id + ".scope",
			more: []string{"kubepods.slice/kubepods-pod" + otherUID + ".slice/cri-containerd-" + otherID + ".scope/kubepods/pod" + podUID + "/" +
				id},
		},
	} {
		t.Run(name, func(t *testing.T) {
			c := &Cgroups{Root: t.TempDir()}
			makeDirs(t, c.Root, "system.slice/ssh.service", "user.slice", "kubepods.slice/kubepods-besteffort.slice")
			makeDirs(t, c.Root, test.more...)
			if dir, err := c.Dir(id); !errors.Is(err, ErrNoCgroup) {
				t.Errorf("before it exists: %q, %v", dir, err)
			}
			makeDirs(t, c.Root, test.dir)
			for range 2 {
				if dir, err := c.Dir(id); err != nil || dir != filepath.Join(c.Root, test.dir) {
					t.Errorf("%q, %v", dir, err)
				}
			}
			if err := c.CheckVisible(); err != nil {
				t.Error(err)
			}
			if err := os.RemoveAll(filepath.Join(c.Root, test.dir)); err != nil {
				t.Fatal(err)
			}
			if dir, err := c.Dir(id); !errors.Is(err, ErrNoCgroup) {
				t.Errorf("after its end: %q, %v", dir, err)
			}
		})
	}
}

// A container that restarts has another ID. The groups of ended containers are forgotten.
func TestCgroupsForgetContainers(t *testing.T) {
	c := &Cgroups{Root: t.TempDir()}
	makeDirs(t, c.Root, "kubepods/pod"+podUID+"/"+id, "kubepods/burstable/pod"+otherUID+"/"+otherID)
	for _, id := range []string{id, otherID, id} {
		if _, err := c.Dir(id); err != nil {
			t.Fatal(err)
		}
	}
	if len(c.dirs) != 2 || len(c.parents) != 2 {
		t.Errorf("%d directories below %q", len(c.dirs), c.parents)
	}
	c.Keep(func(have string) bool { return have == id })
	if len(c.dirs) != 1 {
		t.Errorf("%v", c.dirs)
	}
	for i := range 3 * maxParents {
		in := fmt.Sprintf("kubepods/%d", i)
		makeDirs(t, c.Root, filepath.Join(in, "pod"+podUID, fmt.Sprintf("%064d", i)))
		if _, err := c.Dir(fmt.Sprintf("%064d", i)); err != nil {
			t.Fatal(err)
		}
	}
	if len(c.parents) > maxParents {
		t.Errorf("%d parents", len(c.parents))
	}
}

func TestCgroupsVersion(t *testing.T) {
	for name, test := range map[string]struct {
		dirs             []string
		version, visible bool
	}{
		"v2 host": {[]string{"cgroup.controllers", "kubepods.slice", "system.slice"}, true, true},
		"v2 kind": {[]string{"cgroup.controllers", "kubelet.slice/kubelet-kubepods.slice"}, true, true},
		"v2 with pods only": {[]string{"cgroup.controllers", "system.slice/containerd.service/kubepods-pod" + systemdUID +
			".slice:cri-containerd:" + id}, true, true},
		"v2 own namespace":    {[]string{"cgroup.controllers"}, true, false},
		"v1":                  {[]string{"devices/kubepods", "memory/kubepods"}, false, true},
		"hybrid":              {[]string{"unified", "devices"}, false, false},
		"not a control group": {[]string{"x"}, false, false},
	} {
		t.Run(name, func(t *testing.T) {
			c := &Cgroups{Root: t.TempDir()}
			makeDirs(t, c.Root, test.dirs...)
			if err := c.CheckVersion(); (err == nil) != test.version {
				t.Errorf("version: %v", err)
			}
			if err := c.CheckVisible(); (err == nil) != test.visible {
				t.Errorf("visible: %v", err)
			}
		})
	}
	if err := (&Cgroups{Root: "/does/not/exist"}).CheckVersion(); err == nil {
		t.Error("no error without control groups")
	}
}

func TestProcessDir(t *testing.T) {
	for name, test := range map[string]struct {
		files map[string]string
		want  string
	}{
		"runc":                        {map[string]string{"cgroup.procs": "42\n"}, ""},
		"crun":                        {map[string]string{"cgroup.procs": "", "container/cgroup.procs": "42\n"}, "container"},
		"before the first process":    {map[string]string{"cgroup.procs": ""}, ""},
		"group made by the container": {map[string]string{"cgroup.procs": "42\n", "container/cgroup.procs": ""}, ""},
		"no files":                    {map[string]string{"container/cgroup.procs": ""}, ""},
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			writeFiles(t, dir, test.files)
			if got := ProcessDir(dir); got != filepath.Join(dir, test.want) {
				t.Error(got)
			}
		})
	}
}
