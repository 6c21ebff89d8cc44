package chaos

import (
	"context"
	"fmt"
	"syscall"
	"time"
)

// outageDuration returns how long the source has no GPU: for one or two readings, or longer. After ten seconds the agent
// accepts that.
func outageDuration(how string) time.Duration {
	return map[string]time.Duration{"short": 1500 * time.Millisecond, "long": 6 * time.Second}[how]
}

// applySource plays a step of the source that causes no error.
func (w *world) applySource(ctx context.Context, s step) error {
	switch s.kind {
	case "clock":
		if w.engine == nil || s.arg == w.clock {
			return nil
		}
		w.clock = s.arg
		return w.engine.write("clock " + s.arg + "\n")
	case "empty", "all-lost":
		if !w.measuring() || w.unmeasured || w.present() < 2 || w.lostLately() {
			return nil
		}
		return w.takeGPUs(ctx, s.kind, outageDuration(s.arg))
	case "checks-down":
		if !w.measuring() || w.unmeasured {
			return nil
		}
		return w.failChecks(ctx)
	case "reconnect-often":
		if !w.measuring() || w.unmeasured || w.engine == nil {
			return nil
		}
		return w.reconnect(ctx, 30)
	}
	return fmt.Errorf("%v: unknown step", s)
}

// takeGPUs makes the source list no GPU, or lose all of them, for a while. Meanwhile the source is down, all findings stay, and no
// GPU is missing or lost.
func (w *world) takeGPUs(ctx context.Context, kind string, duration time.Duration) error {
	if err := w.await(ctx, w.patience, w.checkXIDs); err != nil {
		return err // XIDs not read yet cannot be read now
	}
	begin := time.Now()
	if err := w.hideGPUs(ctx, kind); err != nil {
		return err
	}
	if w.engine == nil || kind == "all-lost" || duration > 5*time.Second { // the agent asks DCGM for its list twice, seconds apart
		if err := w.awaitSource(ctx, scaled(stepTimeout)+3*time.Second, "gpu_node_agent_source_up", 0); err != nil {
			return err
		}
	}
	err := hold(ctx, duration-time.Since(begin), func() error {
		s, err := w.snapshot(ctx)
		if err == nil {
			err = w.checkDevices(s)
		}
		return err
	})
	if err != nil {
		return fmt.Errorf("%v after %s: %w", time.Since(begin).Round(time.Millisecond), kind, err)
	}
	if err := w.showGPUs(ctx); err != nil {
		return err
	}
	return w.awaitSource(ctx, scaled(stepTimeout)+3*time.Second, "gpu_node_agent_source_up", 1)
}

// failChecks makes DCGM's health checks fail for a while. The source stays up, and no device changes.
func (w *world) failChecks(ctx context.Context) error {
	for _, s := range []struct {
		source string
		up     float64
	}{{"checksDown", 0}, {"up", 1}} {
		send := func() error { return w.Event(ctx, "{source: "+s.source+"}") }
		if w.engine != nil {
			send = func() error { return w.engine.write(s.source + "\n") }
		}
		if err := send(); err != nil {
			return err
		}
		// The agent tries again after five seconds.
		if err := w.awaitSource(ctx, scaled(stepTimeout)+6*time.Second, "gpu_node_agent_source_checks_up", s.up); err != nil {
			return err
		}
		err := hold(ctx, time.Second, func() error {
			state, err := w.snapshot(ctx)
			if err == nil && state.Source.Status != "up" {
				err = violated("source", "source %s, with health checks at %v", state.Source.Status, s.up)
			}
			if err == nil {
				err = w.checkDevices(state)
			}
			return err
		})
		if err != nil {
			return fmt.Errorf("health checks at %v: %w", s.up, err)
		}
	}
	return nil
}

func (w *world) hideGPUs(ctx context.Context, kind string) error {
	if w.engine == nil {
		return w.Event(ctx, "{source: "+map[string]string{"empty": "empty", "all-lost": "lost"}[kind]+"}")
	}
	if kind == "empty" {
		return w.engine.write("empty\n")
	}
	lines := ""
	for i := range w.gpu {
		lines += status(i, true)
	}
	return w.engine.write(lines)
}

func (w *world) showGPUs(ctx context.Context) error {
	if w.engine == nil {
		return w.Event(ctx, "{source: up}")
	}
	lines := "listed\n"
	for i, g := range w.gpu {
		lines += status(i, g.lost)
	}
	return w.engine.write(lines)
}

// reconnect makes the agent open many sessions by switching between configurations with different fields.
func (w *world) reconnect(ctx context.Context, times int) error {
	for n := range times {
		page, err := w.Metrics(ctx)
		if err != nil {
			return err
		}
		before, _ := page.Value("gpu_node_agent_source_reconnects_total")
		next := goodConfigs()[1+n%2]
		if next == w.configEnd {
			continue
		}
		w.configEnd, w.configInvalid = next, false
		if err := w.Write(w.config() + w.configEnd); err != nil {
			return err
		}
		if err := w.Signal(syscall.SIGHUP); err != nil {
			return err
		}
		err = w.await(ctx, scaled(stepTimeout)+time.Second, func(ctx context.Context) error {
			page, err := w.Metrics(ctx)
			if err != nil {
				return err
			}
			up, _ := page.Value("gpu_node_agent_source_up")
			if now, _ := page.Value("gpu_node_agent_source_reconnects_total"); now <= before || up != 1 {
				return violated("reconnect", "reload %d: %v reconnections, was %v; source_up is %v", n, now, before, up)
			}
			return nil
		})
		if err != nil {
			return err
		}
	}
	return nil
}
