package mps

import (
	"context"
	"errors"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"time"

	"go.uber.org/zap"
	"golang.org/x/sys/unix"

	"github.com/gpu-node-agent/gpu-node-agent/health/logonce"
	"github.com/gpu-node-agent/gpu-node-agent/health/wait"
)

// outputLog is the file in a log directory with the output of the control daemon.
const outputLog = "output.log"

// logInterval is the time between checks of the size of the logs.
const logInterval = time.Minute

// boundLogs limits the size of the logs of all devices until ctx ends.
func (r Root) boundLogs(ctx context.Context, log *zap.Logger) {
	tick := time.NewTicker(logInterval)
	defer tick.Stop()
	for logged := (logonce.State{}); ; {
		if err := r.boundLogsOnce(); logged.ErrorChanged(err) && err != nil {
			log.Warn("cannot limit the size of the logs of MPS", zap.Error(err))
		}
		if !wait.For(ctx, tick.C) {
			return
		}
	}
}

func (r Root) boundLogsOnce() error {
	var errs []error
	for _, id := range r.devices() {
		for _, name := range []string{"control.log", "server.log", outputLog} {
			if err := boundLog(filepath.Join(r.LogDir(id), name)); !errors.Is(err, fs.ErrNotExist) {
				errs = append(errs, err)
			}
		}
	}
	return errors.Join(errs...)
}

// Limits of a log.
const (
	maxLog  = 8 << 20 // bytes, at which it is truncated
	keptLog = 1 << 20 // bytes of it that its .1 keeps
)

// boundLog truncates a log that is too large, and keeps its end in a second file. The process that writes the log has it open, so it
// cannot be renamed. What counts is the space: if the process does not append, the file has a hole after it was truncated.
func boundLog(path string) error {
	var stat unix.Stat_t
	if err := unix.Stat(path, &stat); err != nil {
		return &os.PathError{Op: "stat", Path: path, Err: err}
	}
	if stat.Blocks*512 <= maxLog {
		return nil
	}
	end, err := readFrom(path, stat.Size-keptLog, keptLog)
	if err != nil {
		return err
	}
	return errors.Join(os.WriteFile(path+".1", end, 0o644), os.Truncate(path, 0))
}

// readFrom reads at most n bytes of a file from an offset.
func readFrom(path string, offset, n int64) ([]byte, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer func() { _ = f.Close() }()
	return io.ReadAll(io.NewSectionReader(f, max(offset, 0), n))
}

// fileSize returns the size of a file, 0 if there is none.
func fileSize(path string) int64 {
	info, err := os.Stat(path)
	if err != nil {
		return 0
	}
	return info.Size()
}

// lastLines returns the last lines of a file from an offset, joined, as text for an error.
func lastLines(path string, from int64) string {
	const maxText, maxLines = 1000, 5
	size := fileSize(path)
	if from > size { // truncated meanwhile
		from = 0
	}
	text, err := readFrom(path, max(from, size-maxText), maxText)
	if err != nil {
		return ""
	}
	lines := strings.FieldsFunc(strings.ToValidUTF8(string(text), ""), func(r rune) bool { return r < ' ' || r == 0x7f })
	return strings.Join(lines[max(0, len(lines)-maxLines):], "; ")
}
