// Package logsink writes log entries without ever blocking the goroutine that logs.
package logsink

import (
	"errors"
	"io"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/gpu-node-agent/gpu-node-agent/health/wait"
)

const (
	// capacity limits the queue, in bytes: about a thousand lines.
	capacity = 256 << 10

	// syncTimeout is how long Sync waits for a blocked writer, and so delays the exit of the process.
	syncTimeout = 500 * time.Millisecond
)

var errBlocked = errors.New("log: the writer is blocked")

// Sink is a zapcore.WriteSyncer in front of a writer that may block, such as a standard error whose reader is stuck.
// Write queues the entry and returns; one goroutine writes the queue. An entry that does not fit into the queue, or whose
// write fails, is dropped and counted. When the writer works again, it gets a notice with the number of entries missing
// at that position.
//
// The agent logs while it holds mutexes that Allocate, a probe or a poll needs, such as the mutexes of the DCGM session and of the device
// plugin. That is safe only because Write never waits for the writer. zapcore.BufferedWriteSyncer cannot be used here: it writes in the
// caller's goroutine when its buffer is full.
type Sink struct {
	out    io.Writer
	notice func(missing uint64) []byte

	work    chan struct{}      // has a token when the queue is not empty
	flush   chan chan struct{} // makes the writing goroutine close the channel when the queue is written
	stop    chan struct{}
	dropped atomic.Uint64 // since New

	mu      sync.Mutex // guards all below; never held while out writes
	queue   [][]byte
	size    int    // bytes in queue
	missing uint64 // entries dropped after those in queue

	unreported uint64 // missing entries without a notice yet; only the writing goroutine uses it
}

// New returns a sink for out and starts its goroutine, which Close ends. The notice function returns the entry that
// reports missing entries; if it is nil, the sink writes none.
func New(out io.Writer, notice func(missing uint64) []byte) *Sink {
	s := &Sink{
		out: out, notice: notice,
		work: make(chan struct{}, 1), flush: make(chan chan struct{}), stop: make(chan struct{}),
	}
	go s.run()
	return s
}

// Write queues a copy of an entry. It never blocks and never fails.
func (s *Sink) Write(entry []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	// After a drop, nothing is queued until the writer has taken the queue, so that one notice marks the gap.
	if s.missing > 0 || s.size+len(entry) > capacity {
		s.missing++
		s.dropped.Add(1)
	} else {
		s.queue = append(s.queue, slices.Clone(entry))
		s.size += len(entry)
	}
	wait.Signal(s.work)
	return len(entry), nil
}

// Sync waits until all entries are written, at most syncTimeout: a blocked writer must not keep the process from exiting.
func (s *Sink) Sync() error {
	timeout := time.NewTimer(syncTimeout)
	defer timeout.Stop()
	done := make(chan struct{})
	select {
	case s.flush <- done:
	case <-timeout.C:
		return errBlocked
	}
	select {
	case <-done:
		return nil
	case <-timeout.C:
		return errBlocked
	}
}

// Close syncs and ends the goroutine, unless the writer blocks it. Later entries are lost.
func (s *Sink) Close() error {
	err := s.Sync()
	close(s.stop)
	return err
}

// Dropped returns how many entries were dropped.
func (s *Sink) Dropped() uint64 { return s.dropped.Load() }

func (s *Sink) run() {
	for {
		select {
		case <-s.stop:
			return
		case <-s.work:
			s.drain()
		case done := <-s.flush:
			s.drain()
			close(done)
		}
	}
}

// drain writes until the queue is empty.
func (s *Sink) drain() {
	for {
		entries, missing := s.take()
		if len(entries) == 0 && missing == 0 {
			return
		}
		for _, entry := range entries {
			s.report()
			if _, err := s.out.Write(entry); err != nil {
				s.unreported++
				s.dropped.Add(1)
			}
		}
		s.unreported += missing
		s.report()
	}
}

func (s *Sink) take() (entries [][]byte, missing uint64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	entries, missing = s.queue, s.missing
	s.queue, s.size, s.missing = nil, 0, 0
	return entries, missing
}

// report writes the notice if entries are missing. If the write fails, the next notice includes them.
func (s *Sink) report() {
	if s.unreported == 0 || s.notice == nil {
		return
	}
	if _, err := s.out.Write(s.notice(s.unreported)); err == nil {
		s.unreported = 0
	}
}
