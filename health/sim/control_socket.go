package sim

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"sync"

	"github.com/gpu-node-agent/gpu-node-agent/health/unixsock"
)

// eventsRoute is the request on the control socket. Its body is an event as in a scenario.
const eventsRoute = "POST /events"

// Run serves the control socket until ctx ends, then removes it and returns nil. If the configuration has no socket,
// it only plays the scenario, as it does beside the socket.
func (s *Source) Run(ctx context.Context) error {
	var playing sync.WaitGroup
	playing.Go(func() { s.play(ctx) })
	defer playing.Wait()
	if s.cfg.Control == "" {
		<-ctx.Done()
		return nil
	}
	_ = os.MkdirAll(filepath.Dir(s.cfg.Control), 0o750) // if it fails, Serve logs that it cannot listen
	return unixsock.Serve(ctx, s.cfg.Control, s.log, unixsock.Routes{eventsRoute: s.injectText})
}

// injectText applies the event that a request has as YAML.
func (s *Source) injectText(_ context.Context, body []byte) (any, error) {
	e, err := ParseEvent(string(body))
	if err == nil {
		err = s.inject(e)
	}
	if err != nil {
		return nil, unixsock.WithStatus(http.StatusBadRequest, err)
	}
	return nil, nil
}

// Send sends an event to the agent that listens on the socket. The error is unixsock.Call's, or says that the event is invalid.
func Send(ctx context.Context, socket string, e Event) error {
	if e.At != 0 {
		return errAt
	}
	if err := errors.Join(e.validate()...); err != nil {
		return err
	}
	err := unixsock.Call(ctx, socket, eventsRoute, e, nil)
	if op := new(net.OpError); errors.As(err, &op) && op.Op == "dial" {
		err = fmt.Errorf("no simulated source listens (is source.sim.control set?): %w", err)
	}
	return err
}
