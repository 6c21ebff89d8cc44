package plugin

import (
	"maps"
	"sync"
	"time"

	"github.com/gpu-node-agent/gpu-node-agent/health/wait"
)

// streams counts the open ListAndWatch streams. It separates the streams of the newest registration from older ones, because
// the kubelet can drop a new stream and keep an old one.
type streams struct {
	changed chan struct{} // receives a token when a stream opens or ends

	mu           sync.Mutex    // guards the fields below
	dropped      chan struct{} // closed to end the open streams
	registration uint64        // the newest
	count        streamCount
}

type streamCount struct {
	open          int  // of all registrations
	openCurrent   int  // of the newest registration
	openedCurrent bool // the newest registration has had a stream
	lastEnd       time.Time
	lastSent      time.Time // last message on any stream
}

// enter counts a new stream. leave counts its end; dropped is closed when the stream must end.
func (s *streams) enter() (leave func(), dropped <-chan struct{}) {
	s.mu.Lock()
	defer s.mu.Unlock()
	registration := s.registration
	s.count.open++
	s.count.openCurrent++
	s.count.openedCurrent = true
	s.notify()
	return func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.count.open--
		if registration == s.registration {
			s.count.openCurrent--
		}
		s.count.lastEnd = time.Now()
		s.notify()
	}, s.dropped
}

// drop ends the open streams.
func (s *streams) drop() {
	s.mu.Lock()
	defer s.mu.Unlock()
	close(s.dropped)
	s.dropped = make(chan struct{})
}

func (s *streams) noteSent() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.count.lastSent = time.Now()
}

// beginRegistration precedes the Register call, because the kubelet opens its stream before that call returns.
func (s *streams) beginRegistration() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.registration++
	s.count.openCurrent, s.count.openedCurrent = 0, false
}

func (s *streams) notify() {
	wait.Signal(s.changed)
}

func (s *streams) counts() streamCount {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.count
}

// allocationCounts are the counters of a server.
type allocationCounts struct {
	mu        sync.Mutex // guards the fields below
	allocated uint64     // containers
	refused   map[string]uint64
}

func (c *allocationCounts) allocate(containers int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.allocated += uint64(max(0, containers))
}

func (c *allocationCounts) refuse(err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.refused[refusalReason(err)]++
}

func (c *allocationCounts) read() (allocated uint64, refused map[string]uint64) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.allocated, maps.Clone(c.refused)
}
