// Package kernellog reads XIDs from the kernel log.
//
// The driver prints each XID with what NVML and DCGM do not report: the process, the MIG device, and a message. The package
// reports XIDs only. The line of XID 154 names the driver's recovery action, but a line that is read late would be false
// evidence of a reset; the source and NVML read the action itself.
package kernellog

import (
	"bufio"
	"context"
	"errors"
	"io"
	"syscall"
	"time"

	"go.uber.org/zap"
	"golang.org/x/time/rate"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/health/backoff"
)

// The bounds of the pause before the log is opened again; see backoff.Backoff. It is never less than a second.
const (
	minPause = 2 * time.Second
	maxPause = time.Minute
)

// maxRecord is the size of the longest record that is read. The kernel's limit is 8 KiB, escapes included.
const maxRecord = 16 << 10

// maxFailures is how many reads in a row may find that the kernel has overwritten the next record.
const maxFailures = 100

// Events returns an event source of the XIDs in the kernel log, /dev/kmsg. For tests and the simulation it may be a FIFO with records in
// the same form.
//
// It reports the records from its start on, because a reset may have followed an earlier XID. After an error it continues behind the last
// record that it read.
func Events(path string, log *zap.Logger) func(context.Context, health.EventReceiver) {
	return func(ctx context.Context, to health.EventReceiver) {
		(&reader{path: path, to: to, log: log}).run(ctx)
	}
}

// reader reads the kernel log. One goroutine uses it.
type reader struct {
	path string
	to   health.EventReceiver
	log  *zap.Logger

	device        bool        // the log is /dev/kmsg, whose records are numbered, and not a FIFO
	last          uint64      // device: the sequence number of the newest record
	hasLast       bool        // a record of the device was read
	skipped, lost occurrences // records in an unknown form, and records that the kernel overwrote before they were read
}

// occurrences counts what is logged at most once a minute.
type occurrences struct {
	total  uint64
	logged rate.Sometimes
}

func (o *occurrences) add(n uint64, log func(total uint64)) {
	o.total += n
	o.logged.First, o.logged.Interval = 1, time.Minute
	o.logged.Do(func() { log(o.total) })
}

// run reads the log until ctx ends.
func (r *reader) run(ctx context.Context) {
	retry := backoff.Backoff{Min: minPause, Max: maxPause}
	for ctx.Err() == nil {
		begun := time.Now()
		err := r.follow(ctx)
		if ctx.Err() != nil {
			return
		}
		r.to.SetEvents(err)
		if time.Since(begun) > maxPause {
			retry.Reset()
		}
		retry.Wait(ctx)
	}
}

// follow opens the log and reads it until ctx ends or an error occurs.
func (r *reader) follow(ctx context.Context) error {
	f, err := r.open()
	if err != nil {
		return err
	}
	defer f.Close() //nolint:errcheck // it was only read
	defer context.AfterFunc(ctx, func() { _ = f.Close() })()
	r.to.SetEvents(nil)
	return r.readRecords(f)
}

// readRecords reads records until an error occurs. A read of /dev/kmsg returns one record.
func (r *reader) readRecords(from io.Reader) error {
	lines := bufio.NewReaderSize(from, maxRecord)
	failures := 0
	for tooLong := false; ; {
		line, err := lines.ReadSlice('\n')
		switch {
		case errors.Is(err, bufio.ErrBufferFull):
			tooLong = true
		case errors.Is(err, syscall.EPIPE) || errors.Is(err, syscall.EINVAL):
			// The kernel overwrote the next record, or the record exceeds the buffer. The next read returns the one after it.
			if failures++; failures > maxFailures {
				return readError(err)
			}
			if errors.Is(err, syscall.EINVAL) {
				r.skip("record is longer than the buffer", nil)
			}
		case err != nil:
			return readError(err)
		case tooLong:
			tooLong = false
			r.skip("record is longer than the buffer", nil)
		default:
			failures = 0
			r.take(line)
		}
	}
}

// take reports the XID of a record.
func (r *reader) take(line []byte) {
	if line[0] == ' ' {
		return // a property of the record before, such as SUBSYSTEM=pci
	}
	rec, ok := parseRecord(line)
	if !ok {
		r.skip("expected a record as from /dev/kmsg (PRIORITY,SEQUENCE,MICROSECONDS,FLAGS;MESSAGE)", line)
		return
	}
	if r.device {
		if r.hasLast && rec.sequence <= r.last {
			return // read before the log was opened again
		}
		if r.hasLast && rec.sequence > r.last+1 {
			r.lost.add(rec.sequence-r.last-1, func(total uint64) {
				r.log.Warn("the kernel overwrote records before the agent read them; XIDs may be missing", zap.Uint64("lost", total))
			})
		}
		r.last, r.hasLast = rec.sequence, true
	}
	if rec.facility != 0 || !isXID(rec.message) {
		return // a process wrote it, or it is no XID
	}
	e, ok := parseXID(unescape(rec.message))
	if !ok {
		r.skip("XID in an unknown form", line)
		return
	}
	e.XID.At = time.Now()
	r.to.Receive(e)
}

// skip logs that a record was skipped.
func (r *reader) skip(why string, line []byte) {
	r.skipped.add(1, func(total uint64) {
		r.log.Warn("skipped a record", zap.String("reason", why), zap.ByteString("record", line[:min(len(line), maxText)]),
			zap.Uint64("skipped", total))
	})
}
