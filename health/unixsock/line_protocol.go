package unixsock

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"strings"
	"sync"
	"time"

	"go.uber.org/zap"

	"github.com/gpu-node-agent/gpu-node-agent/health/backoff"
	"github.com/gpu-node-agent/gpu-node-agent/health/logonce"
)

// Limits of a server. It serves people at a shell, not traffic.
const (
	MaxRequest     = 4096 // bytes of a line, with its end
	MaxConnections = 16
	IdleTimeout    = time.Minute // between two complete lines
	maxResponse    = 1 << 20     // bytes
	slotTimeout    = time.Second // for a connection above MaxConnections
	writeTimeout   = 10 * time.Second
	minBackoff     = time.Second
	maxBackoff     = 30 * time.Second
)

// Errors that callers tell apart.
var (
	ErrNoResponse  = errors.New("no response")           // of Call: the server accepts connections and does not respond
	ErrProtocol    = errors.New("unexpected response")   // of Call: the server does not speak this protocol
	errTooLong     = errors.New("request line too long") // refused by the server
	errConnections = errors.New("too many connections")  // refused by the server
	errLost        = errors.New("the socket was removed or replaced")
)

// response is the JSON line that answers each request.
type response struct {
	OK     bool   `json:"ok"`
	Error  string `json:"error,omitempty"`
	Result any    `json:"result,omitempty"`
}

// Handler handles the request in one line. The response contains the result as JSON, or nothing if it is nil. ctx ends
// when Serve ends.
type Handler func(ctx context.Context, line string) (result any, err error)

// Serve listens on the socket at path and handles requests until ctx ends; then it removes the socket and returns nil.
// If it cannot listen, it logs the error once and keeps retrying. It notices the loss of the socket by polling, and listens again; open
// connections continue.
func Serve(ctx context.Context, path string, log *zap.Logger, handle Handler) error {
	log = log.With(zap.String("socket", path))
	retry := backoff.Backoff{Min: minBackoff, Max: maxBackoff}
	var logged logonce.State
	s := server{handle: handle, slots: make(chan struct{}, MaxConnections)}
	defer s.conns.Wait()
	for {
		l, err := Listen(ctx, path)
		if err == nil {
			log.Info("listening on control socket")
			logged.Clear()
			retry.Reset()
			err = s.accept(ctx, l)
		}
		if errors.Is(err, errLost) {
			log.Warn("control socket lost, listening again")
			continue
		}
		if ctx.Err() == nil && logged.ErrorChanged(err) {
			log.Error("cannot listen on control socket; retrying", zap.Error(err))
		}
		if !retry.Wait(ctx) {
			return nil
		}
	}
}

// server has the connections of Serve.
type server struct {
	handle Handler
	slots  chan struct{}
	conns  sync.WaitGroup
}

// accept accepts connections until ctx or the listener ends, or the socket is lost.
func (s *server) accept(ctx context.Context, l *Socket) error {
	accepting, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	defer func() { _ = l.Close() }()
	stop := context.AfterFunc(accepting, func() { _ = l.Close() })
	defer stop()
	s.conns.Go(func() {
		if l.awaitLoss(accepting) {
			cancel(errLost)
		}
	})
	for {
		conn, err := l.Accept()
		if err != nil {
			if cause := context.Cause(accepting); cause != nil {
				return cause
			}
			return fmt.Errorf("accept: %w", err)
		}
		select {
		case s.slots <- struct{}{}:
			s.conns.Go(func() {
				defer func() { <-s.slots }()
				serveConn(ctx, conn, s.handle)
			})
		// The server may not yet have noticed that a client closed its previous connection.
		case <-time.After(slotTimeout):
			_ = respond(conn, nil, fmt.Errorf("%w: limit is %d; retry later", errConnections, MaxConnections))
			_ = conn.Close()
		}
	}
}

// serveConn responds to each line of one connection until the client disconnects or is idle.
func serveConn(ctx context.Context, conn net.Conn, handle Handler) {
	stop := context.AfterFunc(ctx, func() { _ = conn.Close() })
	defer func() {
		stop()
		_ = conn.Close()
	}()
	in := bufio.NewReaderSize(conn, MaxRequest)
	for {
		if conn.SetReadDeadline(time.Now().Add(IdleTimeout)) != nil {
			return
		}
		text, readErr := in.ReadSlice('\n')
		switch {
		case errors.Is(readErr, bufio.ErrBufferFull):
			_ = respond(conn, nil, fmt.Errorf("%w: limit is %d bytes", errTooLong, MaxRequest))
			return
		case readErr != nil && !errors.Is(readErr, io.EOF):
			return // discards a partial line
		}
		if line := strings.TrimSpace(string(text)); line != "" {
			result, err := handle(ctx, line)
			if respond(conn, result, err) != nil {
				return
			}
		}
		if readErr != nil {
			return
		}
	}
}

func respond(conn net.Conn, result any, err error) error {
	r := response{OK: err == nil, Result: result}
	if err != nil {
		r.Error, r.Result = strings.ReplaceAll(err.Error(), "\n", "; "), nil
	}
	line, err := json.Marshal(r)
	if err != nil {
		return err
	}
	if err := conn.SetWriteDeadline(time.Now().Add(writeTimeout)); err != nil {
		return err
	}
	_, err = conn.Write(append(line, '\n'))
	return err
}

// Call sends a request, encoded as JSON, to the server at path and returns the line of its response. If the server refuses the request, the
// error has the server's text. Other errors are from dialing, ErrNoResponse or ErrProtocol.
func Call(ctx context.Context, path string, request any) (string, error) {
	line, err := json.Marshal(request)
	if err != nil {
		return "", err
	}
	conn, err := new(net.Dialer).DialContext(ctx, "unix", path)
	switch {
	case err != nil && ctx.Err() != nil:
		return "", fmt.Errorf("%s: %w: %w", path, ErrNoResponse, context.Cause(ctx))
	case err != nil:
		return "", err
	}
	defer func() { _ = conn.Close() }()
	stop := context.AfterFunc(ctx, func() { _ = conn.Close() })
	defer stop()

	// A server at its connection limit responds without reading, so the write may fail although a response follows.
	_, writeErr := conn.Write(append(line, '\n'))
	text, err := bufio.NewReader(io.LimitReader(conn, maxResponse)).ReadString('\n')
	if err != nil {
		if ctx.Err() != nil {
			err = context.Cause(ctx)
		}
		return "", fmt.Errorf("%s: %w: %w", path, ErrNoResponse, errors.Join(writeErr, err))
	}
	text = strings.TrimSuffix(text, "\n")
	var r response
	if err := json.Unmarshal([]byte(text), &r); err != nil {
		return text, fmt.Errorf("%s: %w: %w; does a gpu-node-agent listen there?", path, ErrProtocol, err)
	}
	if !r.OK {
		return text, errors.New(r.Error)
	}
	return text, nil
}
