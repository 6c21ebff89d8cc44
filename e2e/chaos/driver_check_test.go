package chaos

import (
	"context"
	"fmt"
	"net/http"
	"strings"
)

// checkDriver: while the driver is let go of, nothing is measured, and it is said that it is so; otherwise not.
func (w *world) checkDriver(ctx context.Context) error {
	page, err := w.Metrics(ctx)
	if err != nil {
		return err
	}
	for _, s := range page {
		if s.Name == "gpu_node_agent_health_transitions_total" && s.Labels["state"] == "unhealthy" {
			for i, g := range w.gpu {
				if s.Labels["gpu"] == fmt.Sprint(i) && int(s.Value) > g.falls {
					return violated("transitions", "%v has become unhealthy %v times; it was %d", s.Labels, s.Value, g.falls)
				}
			}
		}
	}
	s, err := w.snapshot(ctx)
	if err != nil {
		return err
	}
	away := w.away && !w.stuck
	told, ok := page.Value("gpu_node_agent_source_detached")
	if !ok || away != (told == 1) || away != (s.Source.Status == "detached") {
		return violated("detach", "the driver is let go of: %t; the source is %s, source_detached %v", away, s.Source.Status, told)
	}
	if !away {
		return nil
	}
	if !s.Source.Measured.Equal(w.measuredAt) {
		return violated("detach", "the driver is let go of, and it was measured at %v", s.Source.Measured)
	}
	if w.engine != nil {
		if connected, _, _, err := w.engine.is(); err != nil || connected {
			return violated("detach", "the driver is let go of, and the agent is connected to DCGM; %v", err)
		}
	}
	status, text, err := w.Get(ctx, "/readyz")
	if err == nil && (status != http.StatusServiceUnavailable || !strings.Contains(string(text), "detached")) {
		err = violated("detach", "the driver is let go of, and /readyz says %d: %s", status, text)
	}
	return err
}

// hears tells whether anybody hears of a GPU's XIDs.
func (w *world) hears(g *gpu) bool {
	switch {
	case w.engine == nil:
		return true
	case g.lost, w.away && !w.stuck, w.gone, w.closing:
		return false // DCGM does not tell XIDs of a GPU that it has lost, nor without a driver
	}
	return w.engine.host || w.source == "up" // an engine that ends while it hangs forgets them
}

// endsSession tells whether the agent ends its session with DCGM in order for a step.
func endsSession(kind string) bool {
	return kind == "reload" || kind == "attach" || kind == "expire" || kind == "reconnect-often" || strings.HasPrefix(kind, "detach")
}

// readAll waits until the agent has read all XIDs, for DCGM forgets them with the last watch, and tells whether it can
// have: whether a call that hangs brings those that wait is DCGM's.
func (w *world) readAll(ctx context.Context) (bool, error) {
	switch {
	case w.measured():
		return true, w.await(ctx, w.patience, w.checkXIDs)
	case w.source != "hung":
		return true, nil
	case w.waits():
		return false, nil
	}
	w.closing = true
	return true, nil
}
