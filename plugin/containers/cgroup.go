package containers

import (
	"fmt"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
)

// Ref identifies a container by what the path of a control group contains.
type Ref struct {
	Pod string // UID
	ID  string // of the container runtime; empty if the path does not contain it
}

// podElement matches the element of a path that the kubelet creates for a pod: pod<UID> with the cgroupfs driver,
// kubepods-burstable-pod<UID>.slice with systemd's, which escapes each - of the UID. The UID of a static pod is a hash. A
// runtime with the cgroupfs driver below a kubelet with systemd's appends :cri-containerd:<ID>.
var podElement = regexp.MustCompile(
	`^(?:.*-)?pod([0-9a-f]{8}(?:[-_][0-9a-f]{4}){3}[-_][0-9a-f]{12}|[0-9a-f]{32})(?:\.slice)?(?::[^:]*:([0-9a-f]{64}))?$`)

// containerElement matches the element below the pod's: <ID>, or <runtime>-<ID>.scope with systemd's driver.
var containerElement = regexp.MustCompile(`^(?:[a-z-]+-)?([0-9a-f]{64})(?:\.scope)?$`)

// ParseCgroup returns the container of a process by its /proc/PID/cgroup, which has a line per hierarchy; with version 2
// only one. ok is false if no line or if two lines name different pods.
//
// A path starts at the root of the reader's cgroup namespace. For a process outside it begins with /.., and the elements that both
// have in common are missing, such as kubepods. The first pod of a path counts: a container can create what follows.
func ParseCgroup(text string) (c Ref, ok bool) {
	for line := range strings.Lines(text) {
		parts := strings.SplitN(strings.TrimSuffix(line, "\n"), ":", 3)
		if len(parts) != 3 {
			continue
		}
		switch found, exists := parsePath(parts[2]); {
		case !exists:
		case !ok:
			c, ok = found, true
		case found.Pod != c.Pod:
			return Ref{}, false
		case c.ID == "":
			c.ID = found.ID
		case found.ID != "" && found.ID != c.ID:
			return Ref{}, false
		}
	}
	return c, ok
}

func parsePath(path string) (c Ref, ok bool) {
	elements := strings.Split(path, "/")
	for i, e := range elements {
		m := podElement.FindStringSubmatch(e)
		if m == nil {
			continue
		}
		c = Ref{Pod: strings.ReplaceAll(m[1], "_", "-"), ID: m[2]}
		if c.ID == "" && i+1 < len(elements) {
			if m := containerElement.FindStringSubmatch(elements[i+1]); m != nil {
				c.ID = m[1]
			}
		}
		return c, true
	}
	return Ref{}, false
}

// maxCgroupBytes limits /proc/PID/cgroup, which has about 13 lines with version 1, each with a path of up to 4 KiB.
const maxCgroupBytes = 64 << 10

// ReadCgroup returns the content of /proc/PID/cgroup.
func ReadCgroup(proc string, pid int) (string, error) {
	f, err := os.Open(filepath.Join(proc, strconv.Itoa(pid), "cgroup"))
	if err != nil {
		return "", err
	}
	defer func() { _ = f.Close() }() // opened for reading
	text, err := io.ReadAll(io.LimitReader(f, maxCgroupBytes+1))
	if err == nil && len(text) > maxCgroupBytes {
		err = fmt.Errorf("%s: larger than %d bytes", f.Name(), maxCgroupBytes)
	}
	return string(text), err
}
