package plugin

import (
	"errors"
	"maps"
	"sync"
	"time"
)

// streams counts the open ListAndWatch streams, and tells those that came with the newest registration
// from older ones: the kubelet can drop a new stream and keep an old one.
type streams struct {
	changed chan struct{} // has a token when a stream has opened or ended

	mu           sync.Mutex    // guards everything below
	dropped      chan struct{} // closed to end the streams that are open
	registration uint64        // the newest
	open         int           // of any registration
	openNow      int           // of the newest registration
	everNow      bool          // whether the newest registration ever had one
	lastEnd      time.Time     // of any stream
	lastTold     time.Time     // when a message was sent last, on any stream
}

// enter counts a new stream and returns what counts its end, and what closes when it is to end.
func (s *streams) enter() (leave func(), dropped <-chan struct{}) {
	s.mu.Lock()
	defer s.mu.Unlock()
	registration := s.registration
	s.open++
	s.openNow++
	s.everNow = true
	s.wake()
	return func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.open--
		if registration == s.registration {
			s.openNow--
		}
		s.lastEnd = time.Now()
		s.wake()
	}, s.dropped
}

// drop ends the streams that are open now.
func (s *streams) drop() {
	s.mu.Lock()
	defer s.mu.Unlock()
	close(s.dropped)
	s.dropped = make(chan struct{})
}

// told notes that the kubelet was sent a message.
func (s *streams) told() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.lastTold = time.Now()
}

// next begins a registration, before the call: the kubelet opens its stream before the call returns.
func (s *streams) next() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.registration++
	s.openNow, s.everNow = 0, false
}

func (s *streams) wake() {
	select {
	case s.changed <- struct{}{}:
	default: // there is a token already
	}
}

// streamCount is what streams knows at one moment.
type streamCount struct {
	open, openNow int
	everNow       bool
	lastEnd       time.Time
	lastTold      time.Time
}

func (s *streams) count() streamCount {
	s.mu.Lock()
	defer s.mu.Unlock()
	return streamCount{s.open, s.openNow, s.everNow, s.lastEnd, s.lastTold}
}

// counts are the counters of a server.
type counts struct {
	mu        sync.Mutex // guards everything below
	allocated uint64     // containers
	refused   map[string]uint64
}

func (c *counts) allocate(containers int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.allocated += uint64(max(0, containers))
}

func (c *counts) refuse(err error) {
	reason := reasonOther
	if r, ok := errors.AsType[*refusal](err); ok {
		reason = r.reason
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.refused[reason]++
}

func (c *counts) read() (allocated uint64, refused map[string]uint64) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.allocated, maps.Clone(c.refused)
}
