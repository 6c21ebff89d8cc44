package chaos

import (
	"context"
	"time"
)

// turn has the source become something.
func (w *world) turn(ctx context.Context, to string) error {
	if to == w.source || w.source != "up" && to != "up" {
		return nil // one trouble at a time
	}
	was := w.source
	before, err := w.snapshot(ctx)
	if err != nil {
		return err
	}
	w.source, w.closing = to, false
	if w.attaching && to == "up" {
		w.gone = false
	}
	w.look()
	if err := w.Event(ctx, "{source: "+sourceWord(to)+"}"); err != nil {
		return err
	}
	switch {
	case w.stuck: // one cannot become anything but up
		return w.awaitLetGo(ctx, before.Source.Measured)
	case (w.away || w.gone) && w.engine != nil: // nobody looks, until somebody attaches
		return w.await(ctx, slow(within), func(context.Context) error { return w.engine.obeyed() })
	case w.away || w.gone:
		return nil
	}
	if w.engine != nil && to != "up" {
		// The agent finds out by asking, and would miss most of it; of a blind one it is sure after three seconds, or two
		// measurements more if it had just connected.
		if to == "hung" {
			return w.awaitSource(ctx, slow(within), "gpu_node_agent_source_stalled", 1)
		}
		return w.awaitSource(ctx, slow(within)+5*time.Second, "gpu_node_agent_source_up", 0)
	}
	switch {
	case w.engine == nil && to != "up":
		return nil
	case w.engine == nil && was == "hung":
		return w.awaitSource(ctx, slow(within), "gpu_node_agent_source_up", 1)
	}
	// It is opened again with a pause that doubles, and that is none of the promises here.
	return w.awaitSource(ctx, 45*time.Second, "gpu_node_agent_source_up", 1)
}

// awaitSource waits until a series about the source has a value.
func (w *world) awaitSource(ctx context.Context, d time.Duration, series string, want float64) error {
	return w.await(ctx, d, func(ctx context.Context) error {
		page, err := w.Metrics(ctx)
		if err != nil {
			return err
		}
		if v, ok := page.Value(series); !ok || v != want {
			return violated("source", "it is %s, and %s is %v", w.source, series, v)
		}
		return nil
	})
}

// sourceWord is how the simulated source calls it.
func sourceWord(source string) string {
	return map[string]string{"dead": "down", "hung": "stalled", "blind": "blind", "up": "up"}[source]
}
