package agent

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"go.uber.org/zap"
)

// component runs as long as the process, and retries inside. If it returns early, even with a nil error, the agent stops.
type component struct {
	name  string
	run   func(context.Context) error
	after []string // the components that must stop before this one
}

const (
	// stopTimeout is how long all components together may take to stop. The kubelet kills a pod after 30 s, but a pod that
	// stops quickly is restarted sooner.
	stopTimeout = 4 * time.Second

	// orderTimeout is how long a component waits for the components in its after.
	orderTimeout = 3 * time.Second
)

var errReturnedEarly = errors.New("returned before the process stops")

// supervise runs the components until ctx ends or the first of them returns. Then it stops the others, all at once, except components that
// wait for others.
func supervise(ctx context.Context, log *zap.Logger, components ...component) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	type result struct {
		name string
		err  error
	}
	results := make(chan result, len(components))
	running := make(map[string]bool, len(components))
	stop := make(map[string]context.CancelFunc, len(components))
	for _, c := range components {
		componentCtx, stopComponent := context.WithCancel(context.WithoutCancel(ctx))
		defer stopComponent()
		running[c.name], stop[c.name] = true, stopComponent
		go func() { results <- result{c.name, c.run(componentCtx)} }()
	}
	// stopNext stops every component that waits for no other, or all.
	stopNext := func(all bool) {
		for _, c := range components {
			if all || !slices.ContainsFunc(c.after, func(name string) bool { return running[name] }) {
				stop[c.name]()
			}
		}
	}

	var failure error
	var orderTimer, stopTimer <-chan time.Time
	stopping := ctx.Done()
	for len(running) > 0 {
		select {
		case <-stopping:
			stopping, orderTimer, stopTimer = nil, time.After(orderTimeout), time.After(stopTimeout)
			stopNext(false)
		case r := <-results:
			delete(running, r.name)
			if ctx.Err() == nil {
				if r.err == nil {
					r.err = errReturnedEarly
				}
				failure = fmt.Errorf("%s: %w", r.name, r.err)
				cancel()
				continue
			}
			if r.err != nil {
				log.Warn("component failed while stopping", zap.String("component", r.name), zap.Error(r.err))
			}
			stopNext(false)
		case <-orderTimer:
			stopNext(true)
		case <-stopTimer:
			for name := range running {
				log.Warn("component did not stop in time; abandoning it", zap.String("component", name))
			}
			return failure
		}
	}
	return failure
}
