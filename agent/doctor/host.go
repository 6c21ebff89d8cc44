package doctor

import (
	"os"
	"path/filepath"
	"strings"
)

// host is the root directory of a node.
type host string

func (h host) path(p string) string { return filepath.Join(string(h), p) }

func (h host) exists(p string) bool {
	_, err := os.Lstat(h.path(p))
	return err == nil
}

// read returns the trimmed content of a small file, "" if it is unreadable.
func (h host) read(p string) string {
	text, err := os.ReadFile(h.path(p))
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(text))
}

// glob returns the matching paths on the node.
func (h host) glob(patterns ...string) (found []string) {
	for _, pattern := range patterns {
		matches, err := filepath.Glob(h.path(pattern))
		if err != nil {
			continue // not with constant patterns
		}
		for _, m := range matches {
			if rel, err := filepath.Rel(string(h), m); err == nil {
				found = append(found, "/"+rel)
			}
		}
	}
	return found
}
