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
	"github.com/gpu-node-agent/gpu-node-agent/health/logonce"
	"github.com/gpu-node-agent/gpu-node-agent/health/wait"
)

// Limits of metrics.hpcJobDir. Each job adds a copy of all series of its GPU.
const (
	maxJobFiles = 512
	maxJobBytes = 16 << 10
	maxJobs     = 64 // per GPU; MPS allows 48 processes per GPU
	maxJobID    = 256
)

// jobsInterval is how often the directory is read. Its files have a few bytes, so reading them is as cheap as checking
// them for changes.
const jobsInterval = time.Second

// Jobs follows the files in which the prolog and epilog of an HPC job scheduler record the jobs on each GPU.
//
// The format is dcgm-exporter's: the name of a file is the index of a GPU, optionally with the ID of a GPU instance
// (2.7), and each line is the ID of a job. A GPU instance without a file has the jobs of its GPU.
type Jobs struct {
	config *health.Latest[Config]
	log    *zap.Logger
	byFile health.Latest[map[string][]string] // job IDs by file name
}

// NewJobs returns a Jobs for metrics.hpcJobDir, which is empty until Run.
func NewJobs(config *health.Latest[Config], log *zap.Logger) *Jobs {
	return &Jobs{config: config, log: log}
}

// Of returns the IDs of the jobs on a GPU, or on the GPU instance with the ID gi ("" for a whole GPU), in the order of
// the file. It reads no file. The caller must not modify the result.
func (j *Jobs) Of(gpu int, gi string) []string {
	byFile := j.byFile.Load()
	if byFile == nil {
		return nil
	}
	index := strconv.Itoa(gpu)
	if gi != "" {
		if ids, ok := (*byFile)[index+"."+gi]; ok {
			return ids
		}
	}
	return (*byFile)[index]
}

// Run follows the configuration and the directory until ctx ends.
func (j *Jobs) Run(ctx context.Context) error {
	for ctx.Err() == nil {
		dir, unchanged, cancel := health.WatchPart(ctx, j.config, func(c *Config) string { return c.HPCJobDir })
		j.byFile.Store(nil)
		if dir == "" {
			<-unchanged.Done()
		} else {
			j.follow(unchanged, dir)
		}
		cancel()
	}
	return nil
}

// follow reads a directory until ctx ends.
func (j *Jobs) follow(ctx context.Context, dir string) {
	tick := time.NewTicker(jobsInterval)
	defer tick.Stop()
	var logged logonce.State
	for {
		byFile, err := readJobs(dir)
		if last := j.byFile.Load(); last == nil || !maps.EqualFunc(*last, byFile, slices.Equal) {
			j.byFile.Store(&byFile)
		}
		switch {
		case !logged.ErrorChanged(err):
		case err != nil:
			j.log.Warn("cannot read all job files", zap.Error(err), zap.String("key", "metrics.hpcJobDir"))
		default:
			j.log.Info("reading all job files again", zap.String("key", "metrics.hpcJobDir"))
		}
		if !wait.For(ctx, tick.C) {
			return
		}
	}
}

// jobFile matches the names of dcgm-exporter's files, except those with leading zeros, which it never finds.
var jobFile = regexp.MustCompile(`^(0|[1-9][0-9]{0,3})(\.(0|[1-9][0-9]{0,3}))?$`)

// readJobs returns the job IDs by file name. The error describes the files that it could not read completely.
func readJobs(dir string) (map[string][]string, error) {
	byFile := make(map[string][]string)
	root, err := os.OpenRoot(dir)
	if err != nil {
		return byFile, err
	}
	defer func() { _ = root.Close() }() // opened for reading
	names, err := jobFiles(root)
	errs := []error{err}
	for _, name := range names {
		ids, err := readJobFile(root, name)
		if errors.Is(err, fs.ErrNotExist) {
			continue // the job has just ended
		}
		if err != nil {
			errs = append(errs, fmt.Errorf("%s/%s: %w", dir, name, err))
		}
		if len(ids) > 0 {
			byFile[name] = ids
		}
	}
	return byFile, errors.Join(errs...)
}

var errTooManyJobFiles = errors.New("too many job files")

// jobFiles returns the sorted names of the job files.
func jobFiles(root *os.Root) ([]string, error) {
	entries, err := fs.ReadDir(root.FS(), ".")
	var names []string
	for _, e := range entries {
		if jobFile.MatchString(e.Name()) && !e.IsDir() {
			names = append(names, e.Name())
		}
	}
	if len(names) > maxJobFiles {
		err = errors.Join(err, fmt.Errorf("%s: %w: got %d, reading only the first %d", root.Name(), errTooManyJobFiles, len(names), maxJobFiles))
		names = names[:maxJobFiles]
	}
	return names, err
}

// readJobFile returns the job IDs of a file. The error describes what it could not read.
func readJobFile(root *os.Root, name string) ([]string, error) {
	f, err := root.OpenFile(name, os.O_RDONLY|syscall.O_NONBLOCK, 0) // opening a named pipe could block
	if err != nil {
		return nil, err
	}
	defer func() { _ = f.Close() }() // opened for reading
	info, err := f.Stat()
	if err != nil {
		return nil, err
	}
	if !info.Mode().IsRegular() {
		return nil, errors.New("not a regular file")
	}
	text, err := io.ReadAll(io.LimitReader(f, maxJobBytes+1))
	if err != nil {
		return nil, err
	}
	if len(text) > maxJobBytes {
		return nil, fmt.Errorf("larger than %d bytes; expected one job ID per line", maxJobBytes)
	}
	return parseJobs(text)
}

// parseJobs returns the distinct job IDs of a file in order.
func parseJobs(text []byte) ([]string, error) {
	var ids []string
	var tooLong error
	seen := make(map[string]bool)
	for lines := bufio.NewScanner(bytes.NewReader(text)); lines.Scan(); {
		id := strings.ToValidUTF8(strings.TrimSpace(lines.Text()), "�")
		switch {
		case id == "" || seen[id]:
		case len(id) > maxJobID:
			tooLong = fmt.Errorf("line of %d bytes; a job ID has at most %d", len(id), maxJobID)
		case len(ids) == maxJobs:
			return ids, fmt.Errorf("more than %d jobs; using the first ones", maxJobs)
		default:
			seen[id] = true
			ids = append(ids, id)
		}
	}
	return ids, tooLong
}
