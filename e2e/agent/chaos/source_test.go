package chaos

import (
	"context"
	"time"
)

// setSource changes the state of the source.
func (w *world) setSource(ctx context.Context, to string) error {
	if to == w.source || w.source != "up" && to != "up" {
		return nil // one fault at a time
	}
	was := w.source
	before, err := w.snapshot(ctx)
	if err != nil {
		return err
	}
	w.source, w.sessionClosing = to, false
	if w.attaching && to == "up" {
		w.engineDetached = false
	}
	w.measure()
	if err := w.Event(ctx, "{source: "+simSource(to)+"}"); err != nil {
		return err
	}
	switch {
	case w.detachPending: // a hung source can only recover
		return w.awaitDetached(ctx, before.Source.Measured)
	case (w.detached || w.engineDetached) && w.engine != nil: // the source is not used before an attach
		return w.await(ctx, scaled(stepTimeout), func(context.Context) error { return w.engine.checkRead() })
	case w.detached || w.engineDetached:
		return nil
	}
	if w.engine != nil && to != "up" {
		// The agent detects the fault by polling and would miss short ones. It confirms a blind source after three
		// seconds, or two polls after a connection.
		if to == "hung" {
			return w.awaitSource(ctx, scaled(stepTimeout), "gpu_node_agent_source_stalled", 1)
		}
		return w.awaitSource(ctx, scaled(stepTimeout)+5*time.Second, "gpu_node_agent_source_up", 0)
	}
	switch {
	case w.engine == nil && to != "up":
		return nil
	case w.engine == nil && was == "hung":
		return w.awaitSource(ctx, scaled(stepTimeout), "gpu_node_agent_source_up", 1)
	}
	// The backoff between connections doubles, so it may take longer than the other time limits.
	return w.awaitSource(ctx, 45*time.Second, "gpu_node_agent_source_up", 1)
}

// awaitSource waits for a value of one of the source's metrics.
func (w *world) awaitSource(ctx context.Context, d time.Duration, series string, want float64) error {
	return w.await(ctx, d, func(ctx context.Context) error {
		page, err := w.Metrics(ctx)
		if err != nil {
			return err
		}
		if v, ok := page.Value(series); !ok || v != want {
			return violated("source", "source %s, and %s is %v", w.source, series, v)
		}
		return nil
	})
}

// simSource returns the simulation's name of a source state.
func simSource(source string) string {
	return map[string]string{"dead": "down", "hung": "stalled", "blind": "blind", "up": "up"}[source]
}
