package mpstest

import (
	"bufio"
	"encoding/json"
	"fmt"
	"maps"
	"net"
	"path/filepath"
	"strconv"
	"sync"
)

// What a CUDA program gets from MPS (cudaError_enum in cuda.h).
const (
	ConnectionFailed = 805 // CUDA_ERROR_MPS_CONNECTION_FAILED: no daemon
	RPCFailure       = 806 // CUDA_ERROR_MPS_RPC_FAILURE: the daemon or the server ended in the middle
	ServerNotReady   = 807 // CUDA_ERROR_MPS_SERVER_NOT_READY: the server is in FAULT, or shuts down
	MaxClients       = 808 // CUDA_ERROR_MPS_MAX_CLIENTS_REACHED
	ClientTerminated = 810 // CUDA_ERROR_MPS_CLIENT_TERMINATED
)

// Error is how MPS fails a client.
type Error int

func (e Error) Error() string { return "MPS error " + strconv.Itoa(int(e)) }

// ClientRequest is a client's first message, to the daemon and to the server. Its format is the stand-in's: CUDA's is not public.
type ClientRequest struct {
	UID     *int              `json:"uid,omitempty"` // nil: the peer's
	PID     int               `json:"pid,omitempty"` // 0: the peer's
	Env     map[string]string `json:"env,omitempty"`
	Command string            `json:"command,omitempty"`
}

// Limits are in force for a client.
type Limits struct {
	ThreadPercentage float64           `json:"threadPercentage"`
	PinnedMemory     map[string]uint64 `json:"pinnedMemory,omitempty"` // bytes by device; none: no limit
}

// Clone returns a copy that shares nothing.
func (l Limits) Clone() Limits {
	l.PinnedMemory = maps.Clone(l.PinnedMemory)
	return l
}

// Reply is the answer to a ClientRequest, and the last message of a client's end.
type Reply struct {
	Error  Error  `json:"error,omitempty"`
	Server int    `json:"server,omitempty"` // PID, from the daemon
	Limits Limits `json:"limits,omitzero"`  // from the server
}

// ServerSocket returns the path of the socket of a stand-in server.
func ServerSocket(pipeDir string, pid int) string {
	return filepath.Join(pipeDir, "s"+strconv.Itoa(pid))
}

// Client is a CUDA program that uses a device through MPS.
type Client struct {
	Limits Limits
	Server int // PID

	conn *net.UnixConn
	done chan struct{}
	end  Error
	once sync.Once
}

// Connect starts using the device of a pipe directory, as CUDA does when a program starts. It waits while the daemon serves another
// user. Its error is an Error.
func Connect(pipeDir string, req ClientRequest) (*Client, error) {
	conn, err := dial(filepath.Join(pipeDir, "control"))
	if err != nil {
		return nil, Error(ConnectionFailed)
	}
	reply, err := exchange(conn, bufio.NewReader(conn), req)
	_ = conn.Close()
	if err != nil {
		return nil, err
	}
	c := &Client{Server: reply.Server, done: make(chan struct{})}
	if c.conn, err = dial(ServerSocket(pipeDir, c.Server)); err != nil {
		return nil, Error(RPCFailure)
	}
	r := bufio.NewReader(c.conn)
	if reply, err = exchange(c.conn, r, req); err != nil {
		_ = c.conn.Close()
		return nil, err
	}
	c.Limits = reply.Limits
	go func() {
		defer close(c.done)
		if reply, err := receive(r); err != nil {
			c.end = RPCFailure
		} else {
			c.end = reply.Error
		}
	}()
	return c, nil
}

func dial(path string) (*net.UnixConn, error) {
	return net.DialUnix("unix", nil, &net.UnixAddr{Name: path, Net: "unix"})
}

func exchange(conn net.Conn, r *bufio.Reader, req ClientRequest) (Reply, error) {
	if err := json.NewEncoder(conn).Encode(req); err != nil {
		return Reply{}, Error(RPCFailure)
	}
	reply, err := receive(r)
	if err == nil && reply.Error != 0 {
		err = reply.Error
	}
	return reply, err
}

func receive(r *bufio.Reader) (reply Reply, err error) {
	line, err := r.ReadBytes('\n')
	if err == nil {
		err = json.Unmarshal(line, &reply)
	}
	if err != nil {
		return Reply{}, Error(RPCFailure)
	}
	return reply, nil
}

// Done is closed when MPS has failed the client, which then still has to Close, as a CUDA program has to exit.
func (c *Client) Done() <-chan struct{} { return c.done }

// Err returns how MPS failed the client, after Done.
func (c *Client) Err() error {
	<-c.done
	if c.end == 0 {
		return nil
	}
	return c.end
}

// Close ends the client.
func (c *Client) Close() {
	c.once.Do(func() { _ = c.conn.Close() })
	<-c.done
}

// String describes a client in failures of tests.
func (c *Client) String() string {
	return fmt.Sprintf("client of server %d with %+v", c.Server, c.Limits)
}
