package unixsock

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"go.uber.org/zap"

	"github.com/gpu-node-agent/gpu-node-agent/health/backoff"
	"github.com/gpu-node-agent/gpu-node-agent/health/logonce"
)

// Limits of a server. It serves people at a shell, not traffic: further connections wait. The time to answer is not limited.
const (
	MaxConnections = 16
	MaxBody        = 4 << 10          // bytes of a request's body, unless a BodyLimit says more
	maxHeader      = 4 << 10          // bytes of a request's header, to which net/http adds 4 KiB
	requestTimeout = time.Minute      // for a client to send its request
	writeTimeout   = 10 * time.Second // for a client to read the response
	minBackoff     = time.Second
	maxBackoff     = 30 * time.Second
)

// product identifies a server in its responses.
const product = "gpu-node-agent"

var errLost = errors.New("the socket was removed or replaced")

// Routes answer the requests of a socket, by method and path, such as "POST /clear".
type Routes map[string]Route

// BodyLimit is the limit of the bodies of a route's requests.
type BodyLimit struct {
	Route string
	Bytes int64
}

// Route answers a request with a body of at most MaxBody, or of its BodyLimit. The response has the result as JSON, or no content if it is
// nil. An error becomes a text, with the code of WithStatus or else 500. ctx ends when Serve ends: what a client has requested goes on if
// it disconnects. Peer tells who has sent it.
type Route func(ctx context.Context, body []byte) (result any, err error)

// JSON returns a route for requests whose body is a JSON object. No body is an empty object.
func JSON[Request, Result any](answer func(context.Context, Request) (Result, error)) Route {
	return func(ctx context.Context, body []byte) (any, error) {
		var req Request
		dec := json.NewDecoder(bytes.NewReader(body))
		dec.DisallowUnknownFields()
		err := dec.Decode(&req)
		if err == nil && len(bytes.TrimSpace(body[dec.InputOffset():])) > 0 {
			err = errors.New("expected one JSON object")
		}
		if err != nil && len(body) > 0 {
			return nil, WithStatus(http.StatusBadRequest, fmt.Errorf("request body: %w", err))
		}
		return answer(ctx, req)
	}
}

// StatusError is an error with the status code of the response that reports it.
type StatusError struct {
	Code int
	Err  error
}

func (e *StatusError) Error() string { return e.Err.Error() }
func (e *StatusError) Unwrap() error { return e.Err }

// WithStatus returns an error that a response reports with a status code.
func WithStatus(code int, err error) error { return &StatusError{code, err} }

// Serve listens on the socket at path and answers requests until ctx ends; then it removes the socket, waits for the answers that it has
// begun, and returns nil. If it cannot listen, it logs the error once and keeps retrying. It notices the loss of the socket by polling, and
// listens again; open connections continue.
func Serve(ctx context.Context, path string, log *zap.Logger, routes Routes, limits ...BodyLimit) error {
	log = log.With(zap.String("socket", path))
	retry := backoff.Backoff{Min: minBackoff, Max: maxBackoff}
	var logged logonce.State
	s := newServer(ctx, log, routes, limits...)
	defer s.close()
	for {
		l, err := Listen(ctx, path)
		if err == nil {
			log.Info("listening on control socket")
			logged.Clear()
			retry.Reset()
			err = s.acceptAll(ctx, l)
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

// server answers the requests of all listeners of Serve.
type server struct {
	http      http.Server
	limits    []BodyLimit
	slots     chan struct{} // of connections
	answering sync.RWMutex  // is read-locked while a request is answered
}

func newServer(ctx context.Context, log *zap.Logger, routes Routes, limits ...BodyLimit) *server {
	s := &server{slots: make(chan struct{}, MaxConnections), limits: limits}
	s.http = http.Server{
		Handler:     http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { s.handle(ctx, routes, w, r) }),
		ReadTimeout: requestTimeout, MaxHeaderBytes: maxHeader, DisableGeneralOptionsHandler: true, ErrorLog: zap.NewStdLog(log),
		ConnContext: func(ctx context.Context, conn net.Conn) context.Context {
			return context.WithValue(ctx, peerKey{}, PeerPID(conn))
		},
		ConnState: func(_ net.Conn, state http.ConnState) {
			if state == http.StateClosed {
				<-s.slots
			}
		},
	}
	s.http.SetKeepAlivesEnabled(false) // an idle connection would take a slot
	return s
}

// close waits for the requests that are being answered, and closes the connections.
func (s *server) close() {
	s.answering.Lock()
	_ = s.http.Close()
}

// acceptAll accepts connections until ctx or the listener ends, or the socket is lost.
func (s *server) acceptAll(ctx context.Context, l *Socket) error {
	accepting, cancel := context.WithCancelCause(ctx)
	stop := context.AfterFunc(accepting, func() { _ = l.Close() })
	defer stop()
	var watch sync.WaitGroup
	watch.Go(func() {
		if l.awaitLoss(accepting) {
			cancel(errLost)
		}
	})
	defer watch.Wait()
	defer cancel(nil)
	err := s.http.Serve(&limitedListener{l, accepting.Done(), s.slots})
	if cause := context.Cause(accepting); cause != nil {
		return cause
	}
	return err
}

// limitedListener accepts a connection when there is a slot for it.
type limitedListener struct {
	net.Listener
	ended <-chan struct{}
	slots chan struct{}
}

func (l *limitedListener) Accept() (net.Conn, error) {
	select {
	case l.slots <- struct{}{}:
	case <-l.ended:
		return nil, net.ErrClosed
	}
	conn, err := l.Listener.Accept()
	if err != nil {
		<-l.slots
		return nil, fmt.Errorf("accept: %w", err) // wrapped, or net/http would retry some errors and log each attempt
	}
	return conn, nil
}

func (s *server) handle(ctx context.Context, routes Routes, w http.ResponseWriter, r *http.Request) {
	route, body, err := s.receive(routes, r)
	if err != nil {
		respond(w, nil, err)
		return
	}
	if !s.answering.TryRLock() { // Serve ends
		respond(w, nil, WithStatus(http.StatusServiceUnavailable, errors.New("shutting down")))
		return
	}
	defer s.answering.RUnlock()
	var result any
	// net/http would recover from a panic of this goroutine, and the process go on with what the route left half done.
	var answer sync.WaitGroup
	ctx = context.WithValue(ctx, peerKey{}, r.Context().Value(peerKey{}))
	answer.Go(func() { result, err = route(ctx, body) })
	answer.Wait()
	if err != nil && ctx.Err() != nil {
		err = WithStatus(http.StatusServiceUnavailable, fmt.Errorf("shutting down: %w", err))
	}
	respond(w, result, err)
}

// receive returns the route and the body of a request.
func (s *server) receive(routes Routes, r *http.Request) (Route, []byte, error) {
	if r.Header["Origin"] != nil {
		return nil, nil, WithStatus(http.StatusForbidden, errors.New("refusing a web page's request: it has the header Origin"))
	}
	request := r.Method + " " + r.URL.Path
	route := routes[request]
	if route == nil {
		return nil, nil, WithStatus(http.StatusNotFound, fmt.Errorf("expected %s, got %q",
			strings.Join(slices.Sorted(maps.Keys(routes)), ", "), request))
	}
	limit := int64(MaxBody)
	for _, l := range s.limits {
		if l.Route == request {
			limit = l.Bytes
		}
	}
	body, err := io.ReadAll(io.LimitReader(r.Body, limit+1))
	switch {
	case err != nil:
		err = WithStatus(http.StatusBadRequest, fmt.Errorf("request body: %w", err))
	case int64(len(body)) > limit:
		err = WithStatus(http.StatusRequestEntityTooLarge, fmt.Errorf("request body too long: limit is %d bytes", limit))
	}
	return route, body, err
}

// respond sends the whole response, since Serve may end and close the connection next.
func respond(w http.ResponseWriter, result any, err error) {
	code, contentType, body := http.StatusOK, "application/json", []byte(nil)
	if err == nil && result != nil {
		body, err = json.Marshal(result)
	}
	switch {
	case err != nil:
		code, contentType, body = http.StatusInternalServerError, "text/plain; charset=utf-8", []byte(strings.ReplaceAll(err.Error(), "\n", "; "))
		if e, ok := errors.AsType[*StatusError](err); ok {
			code = e.Code
		}
	case result == nil:
		code = http.StatusNoContent
	}
	w.Header().Set("Server", product)
	if body != nil {
		body = append(body, '\n')
		w.Header().Set("Content-Type", contentType)
		w.Header().Set("Content-Length", strconv.Itoa(len(body)))
	}
	c := http.NewResponseController(w)
	_ = c.SetWriteDeadline(time.Now().Add(writeTimeout))
	w.WriteHeader(code)
	_, _ = w.Write(body)
	_ = c.Flush()
}
