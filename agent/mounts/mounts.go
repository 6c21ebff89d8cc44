// Package mounts ends the agent when the host has deleted a directory that its container mounts.
//
// The mount keeps the deleted directory. Its path still exists in the container, and nothing that the host makes at that path again appears
// there. Only a new container mounts the new directory, and the kubelet starts one when the process has ended.
package mounts

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"syscall"
	"time"

	"go.uber.org/zap"

	"github.com/gpu-node-agent/gpu-node-agent/health"
)

const (
	// interval is how often the directories are examined.
	interval = time.Second

	// recordTimeout is how long RecordLoss waits for a disk.
	recordTimeout = time.Second
)

// Options configure a Watcher. The functions return what the configuration in force says.
type Options struct {
	Dirs     func() []string // the directories of the host that the agent uses
	StateDir func() string   // the directory of the state file; "" if there is none
	Note     func() string   // the file by which the next process learns that StateDir was deleted; "" for none
	Log      *zap.Logger
}

// Watcher notices deleted directories under mounts.
type Watcher struct {
	Options
	stat      func(path string) (fs.FileInfo, error)
	recording health.Guard[string, outcome]
	recorded  bool // RecordLoss has recorded the loss; one goroutine at a time calls it
}

// New returns a Watcher.
func New(o Options) *Watcher {
	return &Watcher{Options: o, stat: os.Stat, recording: health.Guard[string, outcome]{Limit: recordTimeout}}
}

// answer is the result of an examination.
type answer struct {
	dir     string
	deleted bool
}

// Run returns an error when a directory was deleted under a mount, and nil when ctx ends. A disk that hangs delays the examination of its
// own directories only.
func (w *Watcher) Run(ctx context.Context) error {
	tick := time.NewTicker(interval)
	defer tick.Stop()
	answers := make(chan answer)
	examining := make(map[string]bool)
	suspected := make(map[string]bool)
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
			for _, dir := range w.Dirs() {
				if examining[dir] {
					continue
				}
				examining[dir] = true
				go func() { // abandoned if the disk hangs
					a := answer{dir, w.deleted(dir)}
					select {
					case answers <- a:
					case <-ctx.Done():
					}
				}()
			}
		case a := <-answers:
			delete(examining, a.dir)
			if a.deleted && suspected[a.dir] {
				w.RecordLoss()
				w.Log.Error("the host has deleted a directory that this container mounts; ending, so that the next container mounts the new one",
					zap.String("directory", a.dir))
				return fmt.Errorf("%s: the mounted directory was deleted on the host", a.dir)
			}
			suspected[a.dir] = a.deleted
		}
	}
}

// deleted reports whether a directory was deleted under a mount: then it has no link. A file system may report one link for every directory
// (btrfs, FUSE, overlays), but none for a directory with a name. Without a mount the path never leads to a deleted directory, because the
// kernel looks the path up by name each time: while nothing has the name the path does not exist, and after a rename or mkdir it is the new
// directory. The one exception is a deletion between the lookup and the count of the links, so that Run requires two examinations.
//
// If the path does not exist, the nearest directory above it counts: the mount may be that one.
func (w *Watcher) deleted(path string) bool {
	info, err := w.stat(path)
	for errors.Is(err, fs.ErrNotExist) && path != filepath.Dir(path) {
		path = filepath.Dir(path)
		info, err = w.stat(path)
	}
	if err != nil {
		return false
	}
	s, ok := info.Sys().(*syscall.Stat_t)
	return ok && s.Nlink == 0
}
