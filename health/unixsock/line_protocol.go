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
)

// The bounds of a socket. It is there for a person with a shell, not for traffic.
const (
	MaxRequest        = 4096 // bytes of a question
	MaxConnections = 16
	IdleTimeout    = time.Minute // for a whole line to arrive
	maxReply       = 1 << 20     // bytes
	patience       = time.Second // of a connection too many
	writeTimeout   = 10 * time.Second
	firstBackoff   = time.Second
	maxBackoff     = 30 * time.Second
)

// reply is what is answered to each line.
type reply struct {
	OK     bool   `json:"ok"`
	Error  string `json:"error,omitempty"`
	Result any    `json:"result,omitempty"`
}

// Handler answers a line. The result is shown as JSON, nil as none. If it waits for something, it ends with ctx, which
// ends when the socket is no longer served.
type Handler func(ctx context.Context, line string) (result any, err error)

// Serve serves a socket that only our user can connect to until ctx ends, then removes it and returns nil.
// If the socket cannot be had, that is logged once, and tried again.
func Serve(ctx context.Context, path string, log *zap.Logger, handle Handler) error {
	log = log.With(zap.String("socket", path))
	backoff := firstBackoff
	var last string // the error that was logged
	for {
		l, err := Listen(ctx, path)
		if err == nil {
			log.Info("control socket is open")
			backoff, last = firstBackoff, ""
			err = serve(ctx, l, handle)
		}
		if ctx.Err() == nil && err.Error() != last {
			last = err.Error()
			log.Error("control socket is not open; trying again", zap.Error(err))
		}
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(backoff):
		}
		backoff = min(2*backoff, maxBackoff)
	}
}

// serve takes connections until ctx or the listener ends, and returns when all of them have ended.
func serve(ctx context.Context, l net.Listener, handle Handler) error {
	ctx, cancel := context.WithCancel(ctx)
	var (
		wg   sync.WaitGroup
		busy = make(chan struct{}, MaxConnections)
	)
	defer wg.Wait()
	defer cancel() // ends the connections, if it was the listener that failed
	stop := context.AfterFunc(ctx, func() { _ = l.Close() })
	defer func() {
		if stop() {
			_ = l.Close()
		}
	}()

	for {
		conn, err := l.Accept()
		if err != nil {
			return fmt.Errorf("accepting a connection: %w", err)
		}
		select {
		case busy <- struct{}{}:
			wg.Go(func() {
				defer func() { <-busy }()
				converse(ctx, conn, handle)
			})
		// A client that asks again has closed its last connection before we have seen that: there is a moment to wait.
		case <-time.After(patience):
			_ = answer(conn, nil, fmt.Errorf("%d connections are open already; try again", MaxConnections))
			_ = conn.Close()
		}
	}
}

// converse answers each line of one connection. A client that goes away is no error of ours.
func converse(ctx context.Context, conn net.Conn, handle Handler) {
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
			_ = answer(conn, nil, fmt.Errorf("the line is longer than %d bytes", MaxRequest))
			return
		case readErr != nil && !errors.Is(readErr, io.EOF):
			return // half a line is no question
		}
		if line := strings.TrimSpace(string(text)); line != "" {
			result, err := handle(ctx, line)
			if answer(conn, result, err) != nil {
				return
			}
		}
		if readErr != nil {
			return
		}
	}
}

func answer(conn net.Conn, result any, err error) error {
	r := reply{OK: err == nil, Result: result}
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

// Call puts a question, written as JSON, to the agent that listens on the socket. It returns the agent's
// line, and an error if nobody answers or the answer is a refusal, which says what would be right.
func Call(ctx context.Context, path string, question any) (string, error) {
	line, err := json.Marshal(question)
	if err != nil {
		return "", err
	}
	conn, err := new(net.Dialer).DialContext(ctx, "unix", path)
	switch {
	case err != nil && ctx.Err() != nil:
		return "", fmt.Errorf("no answer from %s: %w", path, context.Cause(ctx))
	case err != nil:
		return "", err
	}
	defer func() { _ = conn.Close() }()
	stop := context.AfterFunc(ctx, func() { _ = conn.Close() })
	defer stop()

	// A refusal of the connection itself comes without reading; the write may fail then, the answer is there.
	_, writeErr := conn.Write(append(line, '\n'))
	text, err := bufio.NewReader(io.LimitReader(conn, maxReply)).ReadString('\n')
	if err != nil {
		if ctx.Err() != nil {
			err = context.Cause(ctx)
		}
		return "", fmt.Errorf("no answer from %s: %w", path, errors.Join(writeErr, err))
	}
	text = strings.TrimSuffix(text, "\n")
	var r reply
	if err := json.Unmarshal([]byte(text), &r); err != nil {
		return text, fmt.Errorf("%s does not answer as an agent does: %w", path, err)
	}
	if !r.OK {
		return text, errors.New(r.Error)
	}
	return text, nil
}
