//go:build cluster

package cluster

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"
)

// cgroupEnv names the group in which the kubelet creates its own.
const cgroupEnv = "GPU_NODE_AGENT_E2E_CGROUP"

const (
	cgroupRoot   = "/sys/fs/cgroup"
	cgroupPrefix = "gpu-node-agent-e2e-" // of every run's group
)

// cgroups is one group per cgroup hierarchy: several for cgroup v1, one for v2. A run locks its groups; the kernel
// unlocks them when it ends.
type cgroups struct {
	name  string
	locks []*os.File
}

// unified reports whether this machine has only cgroup v2.
func unified() bool {
	_, err := os.Stat(filepath.Join(cgroupRoot, "cgroup.controllers"))
	return err == nil
}

// hierarchies returns the roots of the hierarchies.
func hierarchies() ([]string, error) {
	if unified() {
		return []string{cgroupRoot}, nil
	}
	// Every directory of v1 has the file tasks, the v2 directory beside them does not.
	tasks, err := filepath.Glob(filepath.Join(cgroupRoot, "*", "tasks"))
	if err == nil && len(tasks) == 0 {
		err = fmt.Errorf("no cgroups are mounted on %s", cgroupRoot)
	}
	var dirs []string
	for _, t := range tasks {
		if dir, err := filepath.EvalSymlinks(filepath.Dir(t)); err == nil && !slices.Contains(dirs, dir) {
			dirs = append(dirs, dir)
		}
	}
	return dirs, err
}

func (g *cgroups) create() error {
	dirs, err := hierarchies()
	if err != nil {
		return err
	}
	for _, dir := range dirs {
		group := filepath.Join(dir, g.name)
		if unified() {
			if err := enableControllers(dir); err != nil {
				return err
			}
		}
		if err := os.MkdirAll(group, 0o755); err != nil {
			return err
		}
		lock, err := os.Open(group)
		if err != nil {
			return err
		}
		g.locks = append(g.locks, lock)
		if err := syscall.Flock(int(lock.Fd()), syscall.LOCK_EX|syscall.LOCK_NB); err != nil {
			return fmt.Errorf("%s: %w", group, err)
		}
		if unified() {
			if err := enableControllers(group); err != nil {
				return err
			}
		}
		// A new group of v1 has no CPUs and no memory.
		for _, file := range []string{"cpuset.cpus", "cpuset.mems"} {
			all, err := os.ReadFile(filepath.Join(dir, file))
			if errors.Is(err, fs.ErrNotExist) || unified() {
				continue
			}
			if err == nil {
				err = os.WriteFile(filepath.Join(group, file), all, 0o644)
			}
			if err != nil {
				return err
			}
		}
	}
	return nil
}

// enableControllers enables the controllers of a v2 group for its children.
func enableControllers(dir string) error {
	all, err := os.ReadFile(filepath.Join(dir, "cgroup.controllers"))
	for c := range strings.FieldsSeq(string(all)) {
		err = errors.Join(err, os.WriteFile(filepath.Join(dir, "cgroup.subtree_control"), []byte("+"+c), 0o644))
	}
	return err
}

// runs returns the groups of all runs on this machine, and the names of live runs.
func runs() (groups []string, alive map[string]bool, err error) {
	groups, err = filepath.Glob(filepath.Join(cgroupRoot, cgroupPrefix+"*"))
	below, err2 := filepath.Glob(filepath.Join(cgroupRoot, "*", cgroupPrefix+"*"))
	groups, alive = append(groups, below...), make(map[string]bool)
	for _, group := range groups {
		f, err := os.Open(group)
		if err != nil {
			continue // its run has just removed it
		}
		if syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB) != nil {
			alive[filepath.Base(group)] = true
		}
		_ = f.Close() // releases the lock
	}
	return groups, alive, errors.Join(err, err2)
}

// removeLeftovers removes the groups of killed runs.
func removeLeftovers() error {
	groups, alive, err := runs()
	for _, group := range groups {
		if !alive[filepath.Base(group)] {
			removeGroup(group)
		}
	}
	return err
}

// remove removes the groups.
func (g *cgroups) remove() {
	// Beside the v1 hierarchies there may be a v2 hierarchy in which runc creates a group.
	created, err := filepath.Glob(filepath.Join(cgroupRoot, "*", g.name))
	if err != nil {
		return
	}
	for _, group := range append(created, filepath.Join(cgroupRoot, g.name)) {
		removeGroup(group)
	}
	for _, lock := range g.locks {
		_ = lock.Close()
	}
}

// removeGroup removes a group with its children. It retries while killed processes exit.
func removeGroup(group string) {
	for range 50 {
		var groups []string
		_ = filepath.WalkDir(group, func(path string, d fs.DirEntry, err error) error { // it may disappear meanwhile
			if err == nil && d.IsDir() {
				groups = append(groups, path)
			}
			return nil
		})
		if len(groups) == 0 {
			return
		}
		slices.Reverse(groups) // children first
		for _, path := range groups {
			_ = syscall.Rmdir(path) // retried; reported below
		}
		<-time.After(100 * time.Millisecond)
	}
	if _, err := os.Stat(group); err == nil {
		fmt.Fprintln(os.Stderr, "the cgroup", group, "was not removed")
	}
}
