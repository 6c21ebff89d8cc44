package node

import (
	"context"
	"errors"
	"io"
	"net"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
)

// Flood is what a client that does not behave sends on each of many connections. It never reads.
type Flood struct{ Name, Text string }

// Floods returns the kinds of floods.
func Floods() []Flood {
	const header = "GET /metrics HTTP/1.1\r\nHost: x\r\n"
	return []Flood{{"idle connections", ""}, {"incomplete headers", header}, {"unread scrapes", header + "\r\n"}}
}

// Connections are open connections.
type Connections []net.Conn

// Close closes the connections.
func (c Connections) Close() {
	for _, conn := range c {
		_ = conn.Close()
	}
}

// Flood opens a number of connections to the agent's web server and sends the text on each. It returns them also if the
// agent has dropped them meanwhile, and with an error. The caller must close them.
func (n *Node) Flood(ctx context.Context, f Flood, count int) (all Connections, err error) {
	const clients = 8
	dialer := net.Dialer{Timeout: 30 * time.Second, Control: func(_, _ string, c syscall.RawConn) error {
		return c.Control(func(fd uintptr) {
			_ = syscall.SetsockoptInt(int(fd), syscall.SOL_SOCKET, syscall.SO_RCVBUF, 4096) // or a page could fit into it
		})
	}}
	var (
		wg   sync.WaitGroup
		next atomic.Int64
		mu   sync.Mutex // guards all and err
	)
	for range clients {
		wg.Go(func() {
			for next.Add(1) <= int64(count) {
				conn, failed := dialer.DialContext(ctx, "tcp", strings.TrimPrefix(n.URL, "http://"))
				if failed != nil && !errors.Is(failed, syscall.ECONNRESET) { // the agent resets a connection to drop it
					mu.Lock()
					err = failed
					mu.Unlock()
					return
				}
				if failed != nil {
					continue
				}
				_, _ = io.WriteString(conn, f.Text) // it fails if the agent has dropped the connection
				mu.Lock()
				all = append(all, conn)
				mu.Unlock()
			}
		})
	}
	wg.Wait()
	return all, err
}
