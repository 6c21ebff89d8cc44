// Package containers finds the names of the node's pods and containers, and their control groups.
package containers

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
)

// Pod identifies a pod by name.
type Pod struct{ Namespace, Name string }

// Container is a container of a pod.
type Container struct{ Namespace, Pod, Name string }

// Names are the names of the node's pods and containers, by the kubelet's directories of logs.
type Names struct {
	Pods       map[string]Pod       // by UID
	Containers map[string]Container // by the runtime's ID

	ContainersErr error // why Containers is incomplete
}

// maxNames limits the entries that are read of a directory. A node has some hundred pods, and the kubelet removes the logs of others.
const maxNames = 10_000

// readNames reads podLogs, whose entries are named NAMESPACE_POD_UID, and the directory `containers` beside it, in which the kubelet
// keeps a link POD_NAMESPACE_CONTAINER-ID.log for each container. It reads names only, no log. Without `containers` the names of
// containers are missing, which is no error: the path of that directory is not configured.
func readNames(podLogs string) (Names, error) {
	if podLogs == "" {
		return Names{}, nil
	}
	dirs, err := readDir(podLogs)
	links, linksErr := readDir(filepath.Join(filepath.Dir(filepath.Clean(podLogs)), "containers"))
	n := Names{Pods: make(map[string]Pod, len(dirs)), Containers: make(map[string]Container, len(links)), ContainersErr: linksErr}
	for _, dir := range dirs {
		if pod, uid, ok := parsePodDir(dir); ok {
			n.Pods[uid] = pod
		}
	}
	for _, link := range links {
		if c, id, ok := parseContainerLink(link); ok {
			n.Containers[id] = c
		}
	}
	return n, err
}

// readDir returns the names of a directory's entries in no particular order.
func readDir(path string) ([]string, error) {
	d, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer func() { _ = d.Close() }() // opened for reading
	list, err := d.Readdirnames(maxNames)
	if errors.Is(err, io.EOF) {
		err = nil // it is empty
	}
	if len(list) == maxNames {
		err = fmt.Errorf("%s: more than %d entries; the pods of the others are unknown", path, maxNames-1)
	}
	return list, err
}

// parsePodDir parses NAMESPACE_POD_UID. The names of Kubernetes contain no underscore.
func parsePodDir(name string) (pod Pod, uid string, ok bool) {
	parts := strings.Split(name, "_")
	if len(parts) != 3 || parts[0] == "" || parts[1] == "" || parts[2] == "" {
		return Pod{}, "", false
	}
	return Pod{parts[0], parts[1]}, parts[2], true
}

// idLength is the number of characters of a container runtime's ID.
const idLength = 64

// parseContainerLink parses POD_NAMESPACE_CONTAINER-ID.log. The kubelet truncates a longer name than ext4 allows, which then is none.
func parseContainerLink(name string) (c Container, id string, ok bool) {
	name, ok = strings.CutSuffix(name, ".log")
	parts := strings.Split(name, "_")
	if !ok || len(parts) != 3 || parts[0] == "" || parts[1] == "" {
		return Container{}, "", false
	}
	last := parts[2]
	dash := len(last) - idLength - 1
	if dash < 1 || last[dash] != '-' {
		return Container{}, "", false
	}
	return Container{Namespace: parts[1], Pod: parts[0], Name: last[:dash]}, last[dash+1:], true
}
