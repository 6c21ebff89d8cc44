package agent

import (
	"context"
	"fmt"
	"time"

	"go.uber.org/zap"
)

// part is something that runs as long as the process does. It retries inside: when it returns before it
// is asked to, that is a fault, even with a nil error.
type part struct {
	name string
	run  func(context.Context) error
}

// endWithin is how long the parts have to end, together. The kubelet kills after 30 s; a pod that ends at
// once is restarted sooner.
const endWithin = 4 * time.Second

// supervise runs the parts until ctx ends or the first of them returns, then ends the others, all at once.
func supervise(ctx context.Context, log *zap.Logger, parts ...part) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	type end struct {
		name string
		err  error
	}
	ended := make(chan end, len(parts))
	running := make(map[string]bool, len(parts))
	for _, p := range parts {
		running[p.name] = true
		go func() { ended <- end{p.name, p.run(ctx)} }()
	}

	var fault error
	var late <-chan time.Time
	asked := ctx.Done()
	for len(running) > 0 {
		select {
		case <-asked:
			asked, late = nil, time.After(endWithin)
		case e := <-ended:
			delete(running, e.name)
			if ctx.Err() == nil {
				fault = fmt.Errorf("%s ended: %w", e.name, orUnexpected(e.err))
				cancel()
			} else if e.err != nil {
				log.Warn("part did not end cleanly", zap.String("part", e.name), zap.Error(e.err))
			}
		case <-late:
			for name := range running {
				log.Warn("part does not end: left behind", zap.String("part", name))
			}
			return fault
		}
	}
	return fault
}

var errUnexpected = fmt.Errorf("it must run as long as the process does")

func orUnexpected(err error) error {
	if err == nil {
		return errUnexpected
	}
	return err
}
