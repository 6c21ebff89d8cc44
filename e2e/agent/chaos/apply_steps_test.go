package chaos

import (
	"context"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/gpu-node-agent/gpu-node-agent/internal/kubelettest"
)

const resource = "nvidia.com/gpu"

// apply plays a step in the world and in the model. It returns an error if it could not play the step.
func (w *world) apply(ctx context.Context, s step) error {
	if (s.kind == "xid" || s.kind == "fatal") && !w.reportsXIDs(&w.gpu[s.gpu]) {
		return nil
	}
	if w.engine != nil && endsSession(s.kind) {
		if possible, err := w.readAll(ctx); err != nil || !possible {
			return err
		}
	}
	switch s.kind {
	case "xid", "flood", "fatal", "heal", "lost", "back", "remap", "mig":
		return w.applyGPU(ctx, s)
	case "dead", "hung", "blind", "up":
		return w.setSource(ctx, s.kind)
	case "reload":
		return w.reload(s.arg, false)
	case "reload-bad":
		return w.reload(s.arg, true)
	case "scrapes":
		return w.scrapeAtOnce(ctx)
	case "disk-full":
		if w.diskFull {
			return nil
		}
		w.diskFull, w.changesAtFull = true, w.changeCount()
		return w.disk.Fill()
	case "disk-free":
		if !w.diskFull {
			return nil
		}
		w.diskFull = false
		return w.disk.Free()
	case "agent-restart":
		return w.restart(ctx, s.arg)
	case "detach", "attach", "expire", "detach-often", "detach-refused", "detach-hung":
		return w.applyDriver(ctx, s)
	case "empty", "all-lost", "checks-down", "clock", "reconnect-often":
		return w.applySource(ctx, s)
	case "block-log":
		return w.blockLog(ctx)
	case "read-log":
		w.readLog()
		return nil
	case "state-removed", "state-foreign":
		return w.replaceState(ctx, s)
	case "second-agent":
		return w.secondAgent(ctx, s.arg)
	case calm:
		return w.revertFaults(ctx)
	}
	return w.applyKubelet(ctx, s)
}

// gpuEvent injects an event of a GPU.
func (w *world) gpuEvent(ctx context.Context, gpu int, format string, args ...any) error {
	return w.Event(ctx, fmt.Sprintf("{gpu: %d, ", gpu)+fmt.Sprintf(format, args...)+"}")
}

// applyGPU plays a fault of one GPU, or its end.
func (w *world) applyGPU(ctx context.Context, s step) error {
	g := &w.gpu[s.gpu]
	switch s.kind {
	case "xid":
		w.xid(s.gpu, s.arg, 1)
		return w.gpuEvent(ctx, s.gpu, "xid: %s", s.arg)
	case "flood":
		w.xid(s.gpu, s.arg, 10_000)
		return w.gpuEvent(ctx, s.gpu, "xid: %s, times: 10000", s.arg)
	case "fatal":
		return w.fatal(ctx, s)
	case "heal":
		if w.source != "up" || w.unmeasured || !g.xid48 {
			return nil
		}
		id, err := w.uuid(ctx, s.gpu)
		if err != nil {
			return err
		}
		g.change(func() { g.xid48 = false })
		return w.Clear(ctx, id, "xid-48")
	case "lost", "back":
		return w.lose(ctx, s)
	case "remap":
		if g.xid48 || g.xid48Pending {
			return nil
		}
		g.remapPending = s.arg == "true"
		return w.gpuEvent(ctx, s.gpu, "rowRemapPending: %s", s.arg)
	case "mig":
		if w.source != "up" || g.lost {
			return nil // a lost GPU cannot be partitioned
		}
		if g.mig != s.arg {
			if unused, err := w.awaitUnused(ctx); !unused || err != nil {
				return err
			}
		}
		g.mig = s.arg
		w.measure()
		return w.gpuEvent(ctx, s.gpu, "mig: %s", s.arg)
	}
	return fmt.Errorf("unknown step %v", s)
}

// fatal plays an XID that a reset or an operator clears.
func (w *world) fatal(ctx context.Context, s step) error {
	g := &w.gpu[s.gpu]
	if w.source != "up" && !w.knowsXIDs() || g.remapPending || !w.measuring() && (w.unmeasured || g.lossMeasured || g.lost) {
		return nil // whether this or a reset comes first is undefined
	}
	w.xid(s.gpu, "48", 1)
	if g.xid48Pending = true; w.knowsXIDs() {
		g.change(func() { g.xid48, g.xid48Pending = true, false })
	}
	return w.gpuEvent(ctx, s.gpu, "xid: 48")
}

// lose plays the loss of a GPU, or its return.
func (w *world) lose(ctx context.Context, s step) error {
	g := &w.gpu[s.gpu]
	if g.mig != g.migMeasured {
		return nil // the agent would have to guess the partitions
	}
	if w.engine != nil && w.unmeasured {
		return nil // DCGM has no UUID of a GPU that it loses before a first read: that GPU is missing, not lost
	}
	if s.kind == "lost" && w.present() == 1 && !g.lost {
		return nil // whether the agent takes this for the source's fault depends on when it lost the others
	}
	g.lost = s.kind == "lost"
	w.measure()
	return w.gpuEvent(ctx, s.gpu, "lost: %t", g.lost)
}

// applyKubelet plays a step between the kubelet and the plugin.
func (w *world) applyKubelet(ctx context.Context, s step) error {
	switch s.kind {
	case "thaw":
		w.kubeletFrozen = false
		return w.kubelet.thaw()
	case "freeze":
		w.kubeletFrozen = true
		return w.kubelet.freeze()
	case "close-streams":
		w.closeStreams()
		return nil
	case "second-stream", "slow-stream":
		return w.stream(ctx, s.kind == "slow-stream")
	case "wipe":
		return w.wipeSockets()
	}
	if w.kubeletFrozen {
		return nil // a frozen kubelet handles no commands or signals
	}
	var c command
	switch s.kind {
	case "kubelet-restart":
		c.Do, w.kubeletStopped = "restart", false
		w.registration.expectRegistration()
	case "kubelet-stop":
		c.Do, w.kubeletStopped = "stop", true
	case "kubelet-start":
		if !w.kubeletStopped {
			return nil
		}
		c.Do, w.kubeletStopped = "start", false
		w.registration.expectRegistration()
	case "kill-stream":
		c.Do, c.Resource = "drop", resource
		w.registration.streamClosed()
		if len(w.streams) > 0 {
			w.registration.pluginDropped() // the agent still has a listener: only its audit detects the loss
		}
	case "forget":
		c.Do, c.Resource = "forget", resource
		w.registration.pluginDropped()
	default:
		return fmt.Errorf("%v: unknown step", s)
	}
	_, err := w.kubelet.request(c)
	return err
}

// reload replaces the configuration and sends SIGHUP.
func (w *world) reload(which string, bad bool) error {
	i, err := strconv.Atoi(which)
	if err != nil {
		return err
	}
	if bad {
		err = w.Write(w.config() + badConfigs()[i])
	} else {
		w.configEnd = goodConfigs()[i]
		err = w.Write(w.config() + w.configEnd)
	}
	if err != nil {
		return err
	}
	w.configInvalid = bad
	return w.Signal(syscall.SIGHUP)
}

// wipeSockets removes all sockets except the kubelet's.
func (w *world) wipeSockets() error {
	all, err := filepath.Glob(filepath.Join(w.Dir, "device-plugins", "*"))
	if err != nil {
		return err
	}
	for _, path := range all {
		if filepath.Base(path) == "kubelet.sock" {
			continue
		}
		if err := os.RemoveAll(path); err != nil {
			return err
		}
	}
	w.registration.expectRegistration()
	return nil
}

// stream opens another ListAndWatch stream; slow does not read it.
func (w *world) stream(ctx context.Context, scaled bool) error {
	path := w.socket(resource)
	if path == "" || len(w.streams) >= 10 {
		return nil
	}
	c, err := kubelettest.Dial(path)
	if err != nil {
		return err
	}
	w.streams = append(w.streams, c)
	ctx = context.WithoutCancel(ctx)
	if scaled {
		return c.WatchWithoutReading(ctx)
	}
	go func() { _ = c.Devices(ctx, func([]kubelettest.Device) bool { return true }) }() // until closed
	return nil
}

func (w *world) closeStreams() {
	for _, c := range w.streams {
		c.Close()
	}
	w.streams = nil
}

// socket returns the path where a resource is served, or "".
func (w *world) socket(resource string) string {
	path := filepath.Join(w.Dir, "device-plugins", w.endpoint[resource])
	if _, err := os.Stat(path); w.endpoint[resource] == "" || err != nil {
		return ""
	}
	return path
}

// scrapeAtOnce scrapes with twenty concurrent clients.
func (w *world) scrapeAtOnce(ctx context.Context) error {
	const clients, each = 20, 10
	var wg sync.WaitGroup
	errs := make(chan error, clients)
	for range clients {
		wg.Go(func() {
			c := &http.Client{Transport: &http.Transport{}}
			defer c.CloseIdleConnections()
			for range each {
				if err := w.scrapeOnce(ctx, c); err != nil {
					errs <- err
					return
				}
			}
		})
	}
	wg.Wait()
	close(errs)
	return <-errs
}

// revertFaults reverts all faults.
func (w *world) revertFaults(ctx context.Context) error {
	// A kubelet with two registrations keeps both streams until it ends, and so does the agent.
	steps := []step{
		{kind: "read-log"},
		{kind: "clock", arg: "0"},
		{kind: "up"},
		{kind: "attach"},
		{kind: "thaw"},
		{kind: "kubelet-restart"},
		{kind: "disk-free"},
		{kind: "close-streams"},
		{kind: "reload", arg: "0"},
	}
	for i := range gpus {
		steps = append(steps, step{kind: "back", gpu: i}, step{kind: "remap", gpu: i, arg: "false"})
	}
	for i := range gpus {
		steps = append(steps, step{kind: "heal", gpu: i}, step{kind: "mig", gpu: i, arg: "off"})
	}
	for _, s := range steps {
		if err := w.apply(ctx, s); err != nil {
			return fmt.Errorf("%v: %w", s, err)
		}
		if err := w.check(ctx); err != nil {
			return fmt.Errorf("%v: %w", s, err)
		}
	}
	return w.checkLeaks(ctx)
}

const (
	allocationsListed = 2500 * time.Millisecond // until the kubelet has listed an allocation, or not; this one lists none
	settleTime        = 8 * time.Second         // until a new kubelet has read its pods
)

// awaitUnused waits until the agent knows that no pod has what these tests have allocated; it reports whether it knows. An operator
// partitions only GPUs that are not in use.
func (w *world) awaitUnused(ctx context.Context) (bool, error) {
	if w.kubeletFrozen {
		return false, nil
	}
	select {
	case <-time.After(allocationsListed):
	case <-ctx.Done():
	}
	for deadline := time.After(settleTime); ; { // of a kubelet that has just started
		if known, err := w.holdersKnown(ctx); known || err != nil {
			return known, err
		}
		select {
		case <-time.After(100 * time.Millisecond):
		case <-deadline:
			return false, nil
		case <-ctx.Done():
			return false, ctx.Err()
		}
	}
}

// uuid returns the UUID of a GPU.
func (w *world) uuid(ctx context.Context, gpu int) (string, error) {
	page, err := w.Metrics(ctx)
	if err != nil {
		return "", err
	}
	for _, s := range page {
		if s.Name == "gpu_node_agent_device_info" && s.Labels["gpu"] == strconv.Itoa(gpu) && strings.HasPrefix(s.Labels["UUID"], "GPU-") {
			return s.Labels["UUID"], nil
		}
	}
	return "", violated("devices", "GPU %d is not on /metrics", gpu)
}
