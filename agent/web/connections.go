package web

import (
	"container/list"
	"crypto/tls"
	"errors"
	"net"
	"net/http"
	"net/netip"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"go.uber.org/zap"
)

const (
	// maxConnections bounds the descriptors and the memory of the web server. Prometheus and the kubelet need a few.
	maxConnections = 256

	// maxStreams is the number of concurrent requests of one HTTP/2 connection. A scraper has one, a browser few.
	maxStreams = 2

	// sendBuffer is how much of its responses the kernel keeps for a client that does not read. Linux doubles it. The default
	// grows to megabytes, and filling it takes time from other clients. A page with gzip fits. It must exceed a segment of the
	// loopback interface, 64 KiB: with less, a local client acknowledges each part of a larger page after 40 ms only.
	sendBuffer = 64 << 10

	// graceTime is how long a connection is kept at least after it was accepted, so that its request can arrive and be read. A
	// full server accepts at most maxConnections per graceTime: with more, a probe would be dropped before the server has read it.
	graceTime = 20 * time.Millisecond

	dropLogInterval = time.Minute
)

// connections is the set of open connections of a web server. A new connection that exceeds the limit takes the place of another one. The
// connections of one client's address form two groups: one group waits for a request, the other handles one. The largest group of all loses
// its longest member. Therefore clients that open many connections take them from each other, and a probe or a scrape always gets one.
//
// No address is exempt, because the agent cannot tell which one is the kubelet's.
type connections struct {
	limit   int
	dropped *atomic.Uint64
	log     *zap.Logger
	closing chan struct{} // a slot for each dropped connection that is not closed yet

	mu     sync.Mutex // guards open, groups and the fields of the connections
	open   int
	groups map[group]*list.List // of *conn, the longest member first

	// For dropLongest only.
	loggedAt      time.Time // of the last log entry
	loggedDropped uint64    // value of dropped then
}

// group identifies a group of connections.
type group struct {
	client netip.Addr
	active bool // handles a request; else it is idle, or its TLS handshake or its request's header is incomplete
}

// conn is a member of connections until it is closed.
type conn struct {
	*net.TCPConn
	all *connections

	accepted time.Time

	group   group
	since   time.Time     // when it joined its group
	element *list.Element // in its group; nil if it is in none
}

func newConnections(limit int, dropped *atomic.Uint64, log *zap.Logger) *connections {
	return &connections{
		limit: limit, dropped: dropped, log: log, closing: make(chan struct{}, max(1, limit/4)), groups: make(map[group]*list.List),
	}
}

// connectionLimit returns maxConnections, or less to leave half of the descriptors to the rest of the agent.
func connectionLimit() int {
	var files syscall.Rlimit
	if err := syscall.Getrlimit(syscall.RLIMIT_NOFILE, &files); err != nil {
		return maxConnections
	}
	return int(max(1, min(maxConnections, files.Cur/2)))
}

// add returns a member for a connection.
func (s *connections) add(tcp *net.TCPConn) *conn {
	_ = tcp.SetWriteBuffer(sendBuffer) // the server works without it
	c := &conn{TCPConn: tcp, all: s}
	if remote, ok := tcp.RemoteAddr().(*net.TCPAddr); ok {
		c.group.client = remote.AddrPort().Addr().Unmap()
	}
	return s.addConn(c)
}

// addConn adds a connection, and drops another one if it exceeds the limit. Only one goroutine may call it.
func (s *connections) addConn(c *conn) *conn {
	for !s.tryJoin(c) {
		if wait := s.graceLeft(); wait > 0 {
			<-time.After(wait)
		} else {
			s.dropLongest()
		}
	}
	return c
}

// tryJoin adds a connection and reports success, unless the limit is reached.
func (s *connections) tryJoin(c *conn) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.open >= s.limit {
		return false
	}
	s.join(c)
	c.accepted = c.since
	return true
}

// join adds a connection to its group. The caller holds mu.
func (s *connections) join(c *conn) {
	members, ok := s.groups[c.group]
	if !ok {
		members = list.New()
		s.groups[c.group] = members
	}
	s.open++
	c.since, c.element = time.Now(), members.PushBack(c)
}

// leave removes a connection from its group and reports whether it was in one. The caller holds mu.
func (s *connections) leave(c *conn) bool {
	if c.element == nil {
		return false
	}
	s.open--
	members := s.groups[c.group]
	members.Remove(c.element)
	c.element = nil
	if members.Len() == 0 {
		delete(s.groups, c.group)
	}
	return true
}

// longest returns the longest member of the largest group, and the size of the group. It returns nil if no connection is
// open. The caller holds mu.
func (s *connections) longest() (longest *conn, size int) {
	for _, members := range s.groups {
		first, n := members.Front().Value.(*conn), members.Len()
		if n > size || n == size && first.since.Before(longest.since) {
			longest, size = first, n
		}
	}
	return longest, size
}

// graceLeft returns how long dropLongest has to wait. The time since a connection joined its group would not do: busy
// clients join another one with every request, so the wait would have no end.
func (s *connections) graceLeft() time.Duration {
	s.mu.Lock()
	defer s.mu.Unlock()
	if c, _ := s.longest(); c != nil {
		return graceTime - time.Since(c.accepted)
	}
	return 0
}

// dropLongest removes the longest member of the largest group and closes it. It returns a channel that is closed after
// that, or nil if no connection is open.
func (s *connections) dropLongest() (closed <-chan struct{}) {
	s.mu.Lock()
	c, size := s.longest()
	if c == nil {
		s.mu.Unlock()
		return nil
	}
	s.leave(c)
	s.mu.Unlock()
	dropped := s.dropped.Add(1)
	if now := time.Now(); s.loggedAt.IsZero() || now.Sub(s.loggedAt) >= dropLogInterval {
		s.log.Warn("too many connections; each new one takes the place of another", zap.String("key", "metrics.listen"),
			zap.Int("limit", s.limit),
			zap.Uint64("dropped", dropped-s.loggedDropped), zap.Stringer("client", c.group.client), zap.Int("clientConnections", size))
		s.loggedAt, s.loggedDropped = now, dropped
	}
	done := make(chan struct{})
	s.closing <- struct{}{}
	go func() { // Close waits until the goroutine that serves the connection runs
		_ = c.SetLinger(0) // else the kernel keeps a response that the client does not read
		_ = c.TCPConn.Close()
		<-s.closing
		close(done)
	}()
	return done
}

// Close implements net.Conn.
func (c *conn) Close() error {
	c.all.mu.Lock()
	c.all.leave(c)
	c.all.mu.Unlock()
	return c.TCPConn.Close()
}

// follow moves a connection between its groups. It is the ConnState of a server.
func (s *connections) follow(nc net.Conn, state http.ConnState) {
	if t, ok := nc.(*tls.Conn); ok {
		nc = t.NetConn()
	}
	c, ok := nc.(*conn)
	if !ok || state != http.StateActive && state != http.StateIdle {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.leave(c) { // else it has been dropped
		c.group.active = state == http.StateActive
		s.join(c)
	}
}

// boundedListener adds the connections that it accepts to a set.
type boundedListener struct {
	reusableListener
	conns *connections
}

// Accept drops a connection if no descriptor is left for a new one.
func (l boundedListener) Accept() (net.Conn, error) {
	for {
		tcp, err := l.AcceptTCP()
		if err == nil {
			return l.conns.add(tcp), nil
		}
		if !errors.Is(err, syscall.EMFILE) && !errors.Is(err, syscall.ENFILE) {
			return nil, err
		}
		closed := l.conns.dropLongest()
		if closed == nil {
			return nil, err
		}
		<-closed
	}
}
