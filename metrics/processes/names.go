package processes

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"strings"
)

// podName identifies a pod by name.
type podName struct{ namespace, name string }

// names are the names of the node's pods and containers, by the kubelet's directories of logs.
type names struct {
	pods       map[string]podName   // by UID
	containers map[string]Container // by the runtime's ID
}

// maxNames limits the entries that are read of a directory. A node has some hundred pods, and the kubelet removes the logs of others.
const maxNames = 10_000

// readNames reads podLogs, whose entries are named NAMESPACE_POD_UID, and the directory `containers` beside it, in which the kubelet
// keeps a link POD_NAMESPACE_CONTAINER-ID.log for each container. It reads names only, no log. Without `containers` the names of
// containers are missing, which is no error: the path of that directory is not configured.
func readNames(podLogs string) (names, error) {
	if podLogs == "" {
		return names{}, nil
	}
	dirs, err := readDir(podLogs)
	links, _ := readDir(filepath.Join(filepath.Dir(filepath.Clean(podLogs)), "containers"))
	n := names{pods: make(map[string]podName, len(dirs)), containers: make(map[string]Container, len(links))}
	for _, dir := range dirs {
		if pod, uid, ok := parsePodDir(dir); ok {
			n.pods[uid] = pod
		}
	}
	for _, link := range links {
		if c, id, ok := parseContainerLink(link); ok {
			n.containers[id] = c
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
func parsePodDir(name string) (pod podName, uid string, ok bool) {
	parts := strings.Split(name, "_")
	if len(parts) != 3 || parts[0] == "" || parts[1] == "" || parts[2] == "" {
		return podName{}, "", false
	}
	return podName{parts[0], parts[1]}, parts[2], true
}

// containerLink matches the end of a link's name. The kubelet truncates a longer one than ext4 allows, which then does not match.
var containerLink = regexp.MustCompile(`^([^_]+)_([^_]+)_([^_]+)-([0-9a-f]{64})\.log$`)

// parseContainerLink parses POD_NAMESPACE_CONTAINER-ID.log.
func parseContainerLink(name string) (c Container, id string, ok bool) {
	m := containerLink.FindStringSubmatch(name)
	if m == nil {
		return Container{}, "", false
	}
	return Container{Namespace: m[2], Pod: m[1], Name: m[3]}, m[4], true
}
