package sim

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"

	"github.com/gpu-node-agent/gpu-node-agent/health/unixsock"
)

// Run serves the control socket until ctx ends, then removes it and returns nil. Without a socket in the
// configuration it only waits.
func (s *Source) Run(ctx context.Context) error {
	if s.cfg.Control == "" {
		<-ctx.Done()
		return nil
	}
	// Where nothing can be made, listening fails, says so and is tried again.
	_ = os.MkdirAll(filepath.Dir(s.cfg.Control), 0o750)
	return unixsock.Serve(ctx, s.cfg.Control, s.log, func(_ context.Context, line string) (any, error) {
		e, err := ParseEvent(line)
		if err != nil {
			return nil, err
		}
		return nil, s.inject(e)
	})
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
	text, err := unixsock.Call(ctx, socket, e)
	if op := new(net.OpError); errors.As(err, &op) && op.Op == "dial" {
		err = fmt.Errorf("no agent takes events there (is source.sim.control set?): %w", err)
	}
	return text, err
}
