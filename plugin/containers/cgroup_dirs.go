package containers

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"
)

// ErrNoCgroup is the error of a container without a control group: it has ended.
var ErrNoCgroup = errors.New("the container has no control group")

// Cgroups finds the control groups of containers, in version 2 of control groups. It belongs to one goroutine.
type Cgroups struct {
	Root string // where the host's hierarchy is mounted, such as /sys/fs/cgroup

	parents []string          // directories in which control groups of pods were found, the most recent first
	dirs    map[string]string // by the container's ID
}

// The limits of a search. A pod is below /kubepods.slice/kubepods-burstable.slice; where the node is a container itself, some groups
// deeper. The largest nodes have some thousand groups.
const (
	maxSearchDepth = 6
	maxSearchDirs  = 10_000
	maxParents     = 8
)

// CheckVersion returns an error unless the hierarchy at Root has version 2.
func (c *Cgroups) CheckVersion() error {
	switch {
	case exists(filepath.Join(c.Root, "cgroup.controllers")):
		return nil
	case exists(filepath.Join(c.Root, "unified")):
		return fmt.Errorf("the control groups at %s are of version 1 and 2; expected version 2 only, as with the kernel parameter "+
			"systemd.unified_cgroup_hierarchy=1", c.Root)
	case exists(filepath.Join(c.Root, "devices")), exists(filepath.Join(c.Root, "memory")):
		return fmt.Errorf("the control groups at %s are of version 1; expected version 2", c.Root)
	}
	return fmt.Errorf("no control groups at %s; expected a mount of version 2", c.Root)
}

func exists(path string) bool {
	_, err := os.Lstat(path)
	return err == nil
}

// podsElement matches the element of a path below which the kubelet creates the groups of all pods.
var podsElement = regexp.MustCompile(`^(?:.*-)?kubepods(?:\.slice)?$`)

// CheckVisible returns an error unless the groups of pods are visible below Root. They are not in a container with a cgroup namespace
// of its own, unless the host's hierarchy is mounted.
func (c *Cgroups) CheckVisible() error {
	visible := len(c.parents) > 0 && exists(c.parents[0]) || c.search(c.Root, func(_, name string) (found, descend bool) {
		found = podsElement.MatchString(name) || podElement.MatchString(name)
		return found, !found
	})
	if !visible {
		return fmt.Errorf("no control groups of pods below %s; expected the host's hierarchy", c.Root)
	}
	return nil
}

// Dir returns the directory of the control group of the container with a runtime's ID, ErrNoCgroup if there is none.
func (c *Cgroups) Dir(id string) (string, error) {
	if dir := c.dirs[id]; dir != "" && exists(dir) {
		return dir, nil
	}
	delete(c.dirs, id)
	var dir, parent string
	find := func(in, name string) (found, descend bool) {
		m := podElement.FindStringSubmatch(name)
		if m == nil {
			return false, true
		}
		switch m[2] {
		case id:
			dir = filepath.Join(in, name)
		case "":
			dir = containerDir(filepath.Join(in, name), id)
		}
		parent = in
		return dir != "", false // containers can create any group below their pods' groups
	}
	for _, p := range c.parents {
		if c.search(p, find) {
			break
		}
	}
	if dir == "" && !c.search(c.Root, find) {
		return "", ErrNoCgroup
	}
	c.remember(id, dir, parent)
	return dir, nil
}

func (c *Cgroups) remember(id, dir, parent string) {
	if c.dirs == nil {
		c.dirs = make(map[string]string)
	}
	c.dirs[id] = dir
	parents := []string{parent}
	for _, p := range c.parents {
		if p != parent && len(parents) < maxParents {
			parents = append(parents, p)
		}
	}
	c.parents = parents
}

// Keep forgets the containers that keep does not report.
func (c *Cgroups) Keep(keep func(id string) bool) {
	for id := range c.dirs {
		if !keep(id) {
			delete(c.dirs, id)
		}
	}
}

// containerDir returns the group of a container among the groups of a pod, "" if there is none. CRI-O's monitor of a container can have a
// group beside it, crio-conmon-<ID>.scope, as on OpenShift.
func containerDir(pod, id string) string {
	for _, name := range subdirs(pod) {
		if m := containerElement.FindStringSubmatch(name); m != nil && m[1] == id && !strings.Contains(name, "-conmon-") {
			return filepath.Join(pod, name)
		}
	}
	return ""
}

// search visits the groups below a directory level by level, until visit has found one. A directory that vanishes meanwhile has no groups.
func (c *Cgroups) search(top string, visit func(in, name string) (found, descend bool)) bool {
	level, searched := []string{top}, 0
	for range maxSearchDepth {
		var next []string
		for _, dir := range level {
			if searched++; searched > maxSearchDirs {
				return false
			}
			for _, name := range subdirs(dir) {
				found, descend := visit(dir, name)
				if found {
					return true
				}
				if descend {
					next = append(next, filepath.Join(dir, name))
				}
			}
		}
		level = next
	}
	return false
}

func subdirs(dir string) (names []string) {
	entries, _ := os.ReadDir(dir)
	for _, e := range entries {
		if e.Type()&fs.ModeType == fs.ModeDir {
			names = append(names, e.Name())
		}
	}
	return names
}

// ProcessDir returns the group in which the processes of a container are. crun creates the group "container" below the container's
// and keeps them there.
func ProcessDir(dir string) string {
	below := filepath.Join(dir, "container")
	procs, err := os.ReadFile(filepath.Join(dir, "cgroup.procs"))
	if err == nil && len(procs) == 0 && exists(filepath.Join(below, "cgroup.procs")) {
		return below
	}
	return dir
}
