package chaos

import (
	"context"
	"maps"
	"net/http"
	"strconv"
	"time"

	"github.com/gpu-node-agent/gpu-node-agent/health"
)

// stepTimeout is the time limit of everything on an idle machine, except registrations with the kubelet: see registration.
const stepTimeout = 2 * time.Second

// scaled scales a duration by -slack.
func scaled(d time.Duration) time.Duration { return time.Duration(float64(d) * *slack) }

// check waits for every invariant that holds after any step.
func (w *world) check(ctx context.Context) error {
	if status, _, err := w.Get(ctx, "/livez"); err != nil || status != http.StatusOK {
		return violated("life", "/livez: status %d, %v", status, err)
	}
	var s snapshot
	err := w.await(ctx, w.patience, func(ctx context.Context) (err error) {
		if s, err = w.snapshot(ctx); err != nil {
			return err
		}
		if s.Config.OK == w.configInvalid {
			return violated("reload", "valid configuration: %t, reported: %t", !w.configInvalid, s.Config.OK)
		}
		return w.checkDevices(s)
	})
	if err != nil {
		return err
	}
	if err := w.await(ctx, w.patience, w.checkXIDs); err != nil {
		return err
	}
	if err := w.checkView(ctx, s); err != nil {
		return err
	}
	w.mu.Lock()
	err = w.scrapeErr
	w.mu.Unlock()
	if err != nil {
		return err
	}
	if w.log.raced() {
		return violated("race", "see the log")
	}
	if err := w.checkDriver(ctx); err != nil {
		return err
	}
	return w.checkGrowth(ctx)
}

// checkDevices compares the agent's devices with the model.
func (w *world) checkDevices(s snapshot) error {
	switch {
	case w.diskFull && w.disk.Mounted && s.Memory.Error != "":
		return violated("memory", "disk is full, and the spare file has no space: %s", s.Memory.Error)
	case w.diskFull && !w.disk.Mounted && w.changeCount() > w.changesAtFull && s.Memory.Error == "":
		return violated("memory", "the directory is missing, and no error is reported")
	}
	if w.unmeasured { // only saved findings are possible
		for _, d := range s.GPUs {
			for cause := range d.causes() {
				if !w.savedCauses[d.Index][cause] {
					return violated("findings", "GPU %d has %s before a measurement; saved were %v", d.Index, cause, w.savedCauses[d.Index])
				}
			}
		}
		return nil
	}
	if len(s.GPUs) != gpus {
		return violated("devices", "%d GPUs, want %d", len(s.GPUs), gpus)
	}
	for _, d := range s.GPUs {
		g := w.gpu[d.Index]
		if len(d.MIG) != devices(g.migMeasured) {
			return violated("devices", "GPU %d has %d MIG devices; its partitions are %s", d.Index, len(d.MIG), g.migMeasured)
		}
		if has := d.causes(); has["xid-48"] != g.xid48 || has[health.CauseLost] != g.lossMeasured || has[health.CauseReleased] != g.released ||
			has[health.CauseMissing] {
			return violated("health", "GPU %d has %v; lost %t, XID 48 %t, detached %t", d.Index, has, g.lossMeasured, g.xid48, g.released)
		}
		for _, d := range append([]device{d}, d.MIG...) {
			if withheld := d.State == "unhealthy"; withheld != g.withheld() {
				return violated("health", "%s of GPU %d is %s; lost %t, XID 48 %t, detached %t", d.UUID, d.Index, d.State, g.lossMeasured, g.xid48,
					g.released)
			}
		}
	}
	return nil
}

// checkXIDs checks that no XID is lost or counted twice.
func (w *world) checkXIDs(ctx context.Context) error {
	counted, err := w.countedXIDs(ctx)
	if err != nil {
		return err
	}
	for i := range counted {
		want := w.counted(i)
		if w.knowsXIDs() && !maps.Equal(counted[i], want) {
			return violated("xids", "GPU %d: counted %v, want %v", i, counted[i], want)
		}
		if w.events && w.unmeasured { // events of restored devices count before a measurement
			for code, n := range w.gpu[i].pendingXIDs {
				want[code] += n
			}
		}
		for code, n := range counted[i] {
			if n > want[code] {
				return violated("xids", "GPU %d: counted %d of %s, want at most %d", i, n, code, want[code])
			}
		}
	}
	return nil
}

// countedXIDs returns the XIDs that the agent counted, by GPU.
func (w *world) countedXIDs(ctx context.Context) ([]map[string]int, error) {
	page, err := w.Metrics(ctx)
	if err != nil {
		return nil, err
	}
	counted := make([]map[string]int, gpus)
	for i := range counted {
		counted[i] = map[string]int{}
	}
	for _, s := range page {
		if s.Name == "gpu_node_agent_xid_errors_total" && s.Value > 0 {
			if w.unmeasured && !w.events {
				return nil, violated("xids", "%+v before a measurement", s)
			}
			i, err := strconv.Atoi(s.Labels["gpu"])
			if err != nil || i < 0 || i >= gpus {
				return nil, violated("xids", "%+v", s)
			}
			counted[i][s.Labels["xid"]] += int(s.Value)
		}
	}
	return counted, nil
}
