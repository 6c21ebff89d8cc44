package sim

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"sync"

	"github.com/gpu-node-agent/gpu-node-agent/health/unixsock"
)

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
	return unixsock.Serve(ctx, s.cfg.Control, s.log, func(_ context.Context, line string) (any, error) {
		e, err := ParseEvent(line)
		if err != nil {
			return nil, err
		}
		return nil, s.inject(e)
	})
}

// Send sends an event to the agent that listens on the socket, and returns the line of its response. The error is unixsock.Call's, or says
// that the event is invalid.
func Send(ctx context.Context, socket string, e Event) (string, error) {
	if e.At != 0 {
		return "", errAt
	}
	if err := errors.Join(e.validate()...); err != nil {
		return "", err
	}
	text, err := unixsock.Call(ctx, socket, e)
	if op := new(net.OpError); errors.As(err, &op) && op.Op == "dial" {
		err = fmt.Errorf("no simulated source listens (is source.sim.control set?): %w", err)
	}
	return text, err
}
