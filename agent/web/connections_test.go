package web

import (
	"context"
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"
)

// set is a set of connections without sockets.
type set struct {
	*connections
	logs *observer.ObservedLogs
}

func newSet(limit int) set {
	core, logs := observer.New(zap.WarnLevel)
	return set{newConnections(limit, new(atomic.Uint64), zap.New(core)), logs}
}

// open adds a connection of a client, and drops another one if needed.
func (s set) open(client byte) *conn {
	return s.addConn(&conn{TCPConn: &net.TCPConn{}, all: s.connections, group: group{client: netip.AddrFrom4([4]byte{10, 0, 0, client})}})
}

// isOpen reports whether a connection has not been dropped.
func (s set) isOpen(c *conn) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return c.element != nil
}

func TestConnectionsDropLongest(t *testing.T) {
	type step struct {
		client byte
		state  http.ConnState // after it is accepted: StateNew, StateActive, or StateIdle after a request
	}
	const a, b, c = 1, 2, 3
	const fresh, active, idle = http.StateNew, http.StateActive, http.StateIdle
	for _, test := range []struct {
		name    string
		open    []step // with the limit 4
		dropped int    // index in open
	}{
		{"longest idle", []step{{a, fresh}, {a, fresh}, {a, fresh}, {a, fresh}}, 0},
		{"idle after a request", []step{{a, fresh}, {a, idle}, {a, idle}, {a, idle}}, 0},
		{"request is handled", []step{{a, active}, {a, idle}, {a, idle}, {a, idle}}, 1},
		{"most are active", []step{{a, idle}, {a, active}, {a, active}, {a, active}}, 1},
		{"as many idle as active", []step{{a, active}, {a, idle}, {a, active}, {a, idle}}, 0},
		{"client with most", []step{{a, idle}, {b, idle}, {b, idle}, {c, idle}}, 1},
		{"client with most active", []step{{a, idle}, {b, active}, {b, active}, {c, active}}, 1},
		{"each client has one", []step{{c, idle}, {b, idle}, {a, idle}, {4, active}}, 0},
	} {
		t.Run(test.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s := newSet(len(test.open))
				var all []*conn
				for _, o := range test.open {
					c := s.open(o.client)
					for _, state := range []http.ConnState{active, idle}[:min(2, int(o.state-fresh))] {
						s.follow(c, state)
					}
					all = append(all, c)
					<-time.After(time.Second)
				}
				last := s.open(99)
				synctest.Wait()
				for i, c := range all {
					if s.isOpen(c) == (i == test.dropped) {
						t.Errorf("connection %d: open is %v, dropped should be %d", i, s.isOpen(c), test.dropped)
					}
				}
				if !s.isOpen(last) || s.dropped.Load() != 1 {
					t.Errorf("the last is open: %v; %d dropped", s.isOpen(last), s.dropped.Load())
				}
			})
		})
	}
}

// A client that opens connections without end keeps no other client from its connection.
func TestConnectionsAreFair(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newSet(64)
		others := []*conn{s.open(1), s.open(2), s.open(2)}
		s.follow(others[0], http.StateActive)
		for range 1000 {
			s.open(66)
		}
		for i, c := range others {
			if !s.isOpen(c) {
				t.Errorf("connection %d of another client is dropped", i)
			}
		}
		if s.connections.open != 64 || s.dropped.Load() != 1000-61 {
			t.Errorf("%d are open, %d dropped", s.connections.open, s.dropped.Load())
		}
	})
}

// A new connection is kept for the grace time, and others wait meanwhile.
func TestConnectionsHaveGraceTime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const limit, rounds = 16, 10
		s := newSet(limit)
		begin := time.Now()
		for i := range rounds * limit {
			s.open(1)
			if took := time.Since(begin); took != time.Duration(i/limit)*graceTime {
				t.Errorf("connection %d is open after %v", i, took)
			}
		}
		if s.dropped.Load() != (rounds-1)*limit {
			t.Errorf("%d dropped", s.dropped.Load())
		}
	})
}

// Clients whose requests follow each other without a pause do not extend the grace time.
func TestConnectionsAcceptBesideBusyClients(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const limit = 4
		s := newSet(limit)
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		var busy sync.WaitGroup
		for range limit {
			c := s.open(66)
			busy.Go(func() {
				for ctx.Err() == nil {
					s.follow(c, http.StateActive)
					<-time.After(graceTime / 4)
					s.follow(c, http.StateIdle)
					<-time.After(graceTime / 4)
				}
			})
		}
		begin := time.Now()
		s.open(1)
		if took := time.Since(begin); took > graceTime {
			t.Errorf("a connection is accepted after %v", took)
		}
		cancel()
		busy.Wait()
	})
}

func TestConnectionsLogOncePerInterval(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newSet(2)
		s.open(1)
		<-time.After(time.Nanosecond) // of two connections of the same time, either one can be dropped
		for range 3 {
			for range 100 {
				s.open(66)
			}
			<-time.After(dropLogInterval)
		}
		for s.dropLongest() != nil { // as if the process had no descriptor left
		}
		var got []string
		for _, e := range s.logs.All() {
			m := e.ContextMap()
			got = append(got, fmt.Sprint(m["dropped"], " ", m["client"], " ", m["clientConnections"]))
		}
		if want := "[1 10.0.0.1 1 99 10.0.0.66 2 100 10.0.0.66 2 100 10.0.0.66 2]"; fmt.Sprint(got) != want {
			t.Errorf("logged %v, want %s", got, want)
		}
	})
}

// What a server reports of a connection after its end changes nothing.
func TestConnectionsForgetClosed(t *testing.T) {
	s := newSet(2)
	closed, dropped := s.open(1), s.open(1)
	_ = closed.Close()
	<-s.dropLongest()
	for _, c := range []*conn{closed, dropped} {
		s.follow(c, http.StateIdle)
		s.follow(c, http.StateClosed)
		_ = c.Close()
	}
	if s.connections.open != 0 || len(s.groups) != 0 || s.dropLongest() != nil {
		t.Errorf("%d open connections in %d groups", s.connections.open, len(s.groups))
	}
}
