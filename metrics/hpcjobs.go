package metrics

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"go.uber.org/zap"

	"github.com/gpu-node-agent/gpu-node-agent/health"
)

// What a directory of jobs may hold at most. Each job is a copy of all series of its GPU.
const (
	maxJobFiles = 512
	maxJobBytes = 16 << 10
	maxJobs     = 64 // on one GPU; with MPS, 48 processes may share one
	maxJobID    = 256
)

// jobsEvery is how often the directory is looked at. Its files are a few bytes: to read them is as cheap as to
// find out whether they have changed, and misses nothing.
const jobsEvery = time.Second

// Jobs follows the files in which a job scheduler's prolog and epilog say which jobs run on a GPU.
//
// They are dcgm-exporter's: a file is named as the GPU's index, or as that and the id of a GPU instance (2.7),
// and has the id of a job in each line. A GPU instance without a file of its own has the jobs of its GPU.
type Jobs struct {
	config *health.Latest[Config]
	log    *zap.Logger
	known  health.Latest[map[string][]string] // by file name
}

// NewJobs returns a follower of metrics.hpcJobDir. It knows of no jobs until it runs.
func NewJobs(config *health.Latest[Config], log *zap.Logger) *Jobs {
	return &Jobs{config: config, log: log}
}

// Of returns the jobs on a GPU, or on a GPU instance (gi is its id, "" for a whole GPU), in the order of the
// file. It reads no file, and the caller does not modify what it gets.
func (j *Jobs) Of(gpu int, gi string) []string {
	known := j.known.Load()
	if known == nil {
		return nil
	}
	index := strconv.Itoa(gpu)
	if gi != "" {
		if jobs, ok := (*known)[index+"."+gi]; ok {
			return jobs
		}
	}
	return (*known)[index]
}

// Run follows the configuration and the directory until ctx ends.
func (j *Jobs) Run(ctx context.Context) error {
	for ctx.Err() == nil {
		dir, same, cancel := health.WatchPart(ctx, j.config, func(c *Config) string { return c.HPCJobDir })
		j.known.Store(nil)
		if dir == "" {
			<-same.Done()
		} else {
			j.follow(same, dir)
		}
		cancel()
	}
	return nil
}

// follow looks at a directory until ctx ends.
func (j *Jobs) follow(ctx context.Context, dir string) {
	tick := time.NewTicker(jobsEvery)
	defer tick.Stop()
	said := ""
	for {
		jobs, err := readJobs(dir)
		if known := j.known.Load(); known == nil || !maps.EqualFunc(*known, jobs, slices.Equal) {
			j.known.Store(&jobs)
		}
		now := ""
		if err != nil {
			now = err.Error()
		}
		switch {
		case now == said:
		case err != nil:
			j.log.Warn("jobs are missing", zap.Error(err), zap.String("key", "metrics.hpcJobDir"))
		default:
			j.log.Info("all jobs can be read again", zap.String("key", "metrics.hpcJobDir"))
		}
		said = now
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
	}
}

// jobFile is how dcgm-exporter has its files named, but for zeros in front, which it would never find.
var jobFile = regexp.MustCompile(`^(0|[1-9][0-9]{0,3})(\.(0|[1-9][0-9]{0,3}))?$`)

// readJobs returns the jobs by file name, as far as they can be read, and what is wrong with the others.
func readJobs(dir string) (map[string][]string, error) {
	jobs := make(map[string][]string)
	root, err := os.OpenRoot(dir)
	if err != nil {
		return jobs, err
	}
	defer func() { _ = root.Close() }() // nothing was written
	names, err := jobFiles(root)
	errs := []error{err}
	for _, name := range names {
		ids, err := readJobFile(root, name)
		if errors.Is(err, fs.ErrNotExist) {
			continue // its job has just ended
		}
		if err != nil {
			errs = append(errs, fmt.Errorf("%s/%s: %w", dir, name, err))
		}
		if len(ids) > 0 {
			jobs[name] = ids
		}
	}
	return jobs, errors.Join(errs...)
}

// jobFiles returns the names of the files for GPUs, sorted.
func jobFiles(root *os.Root) ([]string, error) {
	entries, err := fs.ReadDir(root.FS(), ".")
	var names []string
	for _, e := range entries {
		if jobFile.MatchString(e.Name()) && !e.IsDir() {
			names = append(names, e.Name())
		}
	}
	if len(names) > maxJobFiles {
		err = errors.Join(err, fmt.Errorf("%s: %d files are too many; the first %d are used", root.Name(), len(names), maxJobFiles))
		names = names[:maxJobFiles]
	}
	return names, err
}

// readJobFile returns the jobs of a file, as far as they are good, and what is wrong with the others.
func readJobFile(root *os.Root, name string) ([]string, error) {
	// To open a named pipe, or a device, may wait for somebody.
	f, err := root.OpenFile(name, os.O_RDONLY|syscall.O_NONBLOCK, 0)
	if err != nil {
		return nil, err
	}
	defer func() { _ = f.Close() }() // nothing was written
	info, err := f.Stat()
	if err != nil {
		return nil, err
	}
	if !info.Mode().IsRegular() {
		return nil, errors.New("is no regular file")
	}
	text, err := io.ReadAll(io.LimitReader(f, maxJobBytes+1))
	if err != nil {
		return nil, err
	}
	if len(text) > maxJobBytes {
		return nil, fmt.Errorf("is larger than %d bytes; put the id of a job in each line", maxJobBytes)
	}
	return parseJobs(text)
}

// parseJobs returns the ids of a file's jobs, each once and in order.
func parseJobs(text []byte) ([]string, error) {
	var ids []string
	var bad error
	seen := make(map[string]bool)
	for lines := bufio.NewScanner(bytes.NewReader(text)); lines.Scan(); {
		id := strings.ToValidUTF8(strings.TrimSpace(lines.Text()), "�")
		switch {
		case id == "" || seen[id]:
		case len(id) > maxJobID:
			bad = fmt.Errorf("has a line of %d bytes, which is no id of a job", len(id))
		case len(ids) == maxJobs:
			return ids, fmt.Errorf("has more jobs than %d; the first ones are used", maxJobs)
		default:
			seen[id] = true
			ids = append(ids, id)
		}
	}
	return ids, bad
}
