package sim

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

// The bounds of the control socket. It is there for a person with a shell, not for traffic.
const (
	maxLine        = 4096 // bytes of an event
	maxConnections = 16
	idleTimeout    = time.Minute // for a whole line to arrive
	writeTimeout   = 10 * time.Second
	firstBackoff   = time.Second
	maxBackoff     = 30 * time.Second
)

// reply is what the control socket answers to each line.
type reply struct {
	OK    bool   `json:"ok"`
	Error string `json:"error,omitempty"`
}

// Run serves the control socket until ctx ends, then removes it and returns nil. If the socket cannot be
// had, that is logged once, and tried again. Without a socket in the configuration Run only waits.
func (s *Source) Run(ctx context.Context) error {
	if s.cfg.Control == "" {
		<-ctx.Done()
		return nil
	}
	var (
		log     = s.log.With(zap.String("socket", s.cfg.Control))
		backoff = firstBackoff
		last    string // the error that was logged
	)
	for {
		l, err := listenControl(ctx, s.cfg.Control)
		if err == nil {
			log.Info("control socket is open")
			backoff, last = firstBackoff, ""
			err = s.serve(ctx, l)
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
func (s *Source) serve(ctx context.Context, l net.Listener) error {
	ctx, cancel := context.WithCancel(ctx)
	var (
		wg   sync.WaitGroup
		busy = make(chan struct{}, maxConnections)
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
				s.converse(ctx, conn)
			})
		default:
			_ = answer(conn, fmt.Errorf("%d connections are open already; try again", maxConnections))
			_ = conn.Close()
		}
	}
}

// converse answers each line of one connection. A client that goes away is no error of ours.
func (s *Source) converse(ctx context.Context, conn net.Conn) {
	stop := context.AfterFunc(ctx, func() { _ = conn.Close() })
	defer func() {
		stop()
		_ = conn.Close()
	}()
	in := bufio.NewReaderSize(conn, maxLine)
	for {
		if conn.SetReadDeadline(time.Now().Add(idleTimeout)) != nil {
			return
		}
		text, readErr := in.ReadSlice('\n')
		switch {
		case errors.Is(readErr, bufio.ErrBufferFull):
			_ = answer(conn, fmt.Errorf("the line is longer than %d bytes", maxLine))
			return
		case readErr != nil && !errors.Is(readErr, io.EOF):
			return // half a line is no event
		}
		if line := strings.TrimSpace(string(text)); line != "" {
			e, err := ParseEvent(line)
			if err == nil {
				err = s.inject(e)
			}
			if answer(conn, err) != nil {
				return
			}
		}
		if readErr != nil {
			return
		}
	}
}

func answer(conn net.Conn, err error) error {
	r := reply{OK: err == nil}
	if err != nil {
		r.Error = strings.ReplaceAll(err.Error(), "\n", "; ")
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

// Send makes an event happen to the agent that listens on the socket. It returns the agent's line, and an
// error if nobody answers or the answer is a refusal, which says what would be right.
func Send(ctx context.Context, socket string, e Event) (string, error) {
	if e.At != 0 {
		return "", errors.New("at: belongs into a scenario; an event that is sent happens at once")
	}
	if err := joinFaults(e.faults()); err != nil {
		return "", err
	}
	line, err := json.Marshal(e)
	if err != nil {
		return "", err
	}
	conn, err := new(net.Dialer).DialContext(ctx, "unix", socket)
	switch {
	case err != nil && ctx.Err() != nil:
		return "", fmt.Errorf("no answer from %s: %w", socket, context.Cause(ctx))
	case err != nil:
		return "", fmt.Errorf("no agent takes events there (is source.sim.control set?): %w", err)
	}
	defer func() { _ = conn.Close() }()
	stop := context.AfterFunc(ctx, func() { _ = conn.Close() })
	defer stop()

	// A refusal of the connection itself comes without reading; the write may fail then, the answer is there.
	_, writeErr := conn.Write(append(line, '\n'))
	text, err := bufio.NewReader(io.LimitReader(conn, 16*maxLine)).ReadString('\n')
	if err != nil {
		if ctx.Err() != nil {
			err = context.Cause(ctx)
		}
		return "", fmt.Errorf("no answer from %s: %w", socket, errors.Join(writeErr, err))
	}
	text = strings.TrimSuffix(text, "\n")
	var r reply
	if err := json.Unmarshal([]byte(text), &r); err != nil {
		return text, fmt.Errorf("%s does not answer as an agent does: %w", socket, err)
	}
	if !r.OK {
		return text, errors.New(r.Error)
	}
	return text, nil
}
