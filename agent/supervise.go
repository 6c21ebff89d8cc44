package agent

import (
	"context"
	"fmt"
	"slices"
	"time"

	"go.uber.org/zap"
)

// part is something that runs as long as the process does. It retries inside: when it returns before it
// is asked to, that is a fault, even with a nil error.
type part struct {
	name  string
	run   func(context.Context) error
	after []string // the parts that must have ended before this one is asked to
}

const (
	// endWithin is how long the parts have to end, together. The kubelet kills after 30 s; a pod that ends at
	// once is restarted sooner.
	endWithin = 4 * time.Second

	// orderWithin is how long a part waits for those that it comes after.
	orderWithin = 3 * time.Second
)

// supervise runs the parts until ctx ends or the first of them returns, then ends the others: all at once, but for
// those that come after others.
func supervise(ctx context.Context, log *zap.Logger, parts ...part) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	type end struct {
		name string
		err  error
	}
	ended := make(chan end, len(parts))
	running := make(map[string]bool, len(parts))
	stop := make(map[string]context.CancelFunc, len(parts))
	for _, p := range parts {
		own, stopOne := context.WithCancel(context.WithoutCancel(ctx))
		defer stopOne()
		running[p.name], stop[p.name] = true, stopOne
		go func() { ended <- end{p.name, p.run(own)} }()
	}
	// stopNext asks every part to end that waits for none, or all.
	stopNext := func(all bool) {
		for _, p := range parts {
			if all || !slices.ContainsFunc(p.after, func(name string) bool { return running[name] }) {
				stop[p.name]()
			}
		}
	}

	var fault error
	var hurry, late <-chan time.Time
	asked := ctx.Done()
	for len(running) > 0 {
		select {
		case <-asked:
			asked, hurry, late = nil, time.After(orderWithin), time.After(endWithin)
			stopNext(false)
		case e := <-ended:
			delete(running, e.name)
			if ctx.Err() == nil {
				fault = fmt.Errorf("%s ended: %w", e.name, orUnexpected(e.err))
				cancel()
				continue
			}
			if e.err != nil {
				log.Warn("part did not end cleanly", zap.String("part", e.name), zap.Error(e.err))
			}
			stopNext(false)
		case <-hurry:
			stopNext(true)
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
