package chaos

import (
	"context"
	"fmt"
	"net/http"
	"strings"
)

// checkDriver checks that nothing is measured and detached is reported exactly while the driver is detached.
func (w *world) checkDriver(ctx context.Context) error {
	page, err := w.Metrics(ctx)
	if err != nil {
		return err
	}
	for _, s := range page {
		if s.Name == "gpu_node_agent_health_transitions_total" && s.Labels["state"] == "unhealthy" {
			for i, g := range w.gpu {
				if s.Labels["gpu"] == fmt.Sprint(i) && int(s.Value) > g.failures {
					return violated("transitions", "%v: %v transitions to unhealthy, want at most %d", s.Labels, s.Value, g.failures)
				}
			}
		}
	}
	s, err := w.snapshot(ctx)
	if err != nil {
		return err
	}
	away := w.detached && !w.detachPending
	reported, ok := page.Value("gpu_node_agent_source_detached")
	if !ok || away != (reported == 1) || away != (s.Source.Status == "detached") {
		return violated("detach", "driver detached: %t; source %s, source_detached %v", away, s.Source.Status, reported)
	}
	if !away {
		return nil
	}
	if !s.Source.Measured.Equal(w.measuredAt) {
		return violated("detach", "driver detached, and measured at %v", s.Source.Measured)
	}
	if w.engine != nil {
		if connected, _, _, err := w.engine.readState(); err != nil || connected {
			return violated("detach", "driver detached, and the agent is connected to DCGM; %v", err)
		}
	}
	status, text, err := w.Get(ctx, "/readyz")
	if err == nil && (status != http.StatusServiceUnavailable || !strings.Contains(string(text), "detached")) {
		err = violated("detach", "driver detached, and /readyz responds %d: %s", status, text)
	}
	return err
}

// reportsXIDs reports whether the XIDs of a GPU reach the agent.
func (w *world) reportsXIDs(g *gpu) bool {
	switch {
	case w.engine == nil:
		return true
	case g.lost, w.detached && !w.detachPending, w.engineDetached, w.sessionClosing:
		return false // DCGM reports no XIDs of a GPU that it lost, or without a driver
	}
	return w.engine.host || w.source == "up" // an engine that ends while hung loses them
}

// endsSession reports whether a step makes the agent close its session with DCGM.
func endsSession(kind string) bool {
	return kind == "reload" || kind == "attach" || kind == "expire" || kind == "reconnect-often" || strings.HasPrefix(kind, "detach")
}

// readAll waits until the agent has read all XIDs, because DCGM drops them with the last watch. It reports whether the
// agent can have: a hung call may or may not deliver the pending ones.
func (w *world) readAll(ctx context.Context) (bool, error) {
	switch {
	case w.measuring():
		return true, w.await(ctx, w.patience, w.checkXIDs)
	case w.source != "hung":
		return true, nil
	case w.hasPendingXIDs():
		return false, nil
	}
	w.sessionClosing = true
	return true, nil
}
