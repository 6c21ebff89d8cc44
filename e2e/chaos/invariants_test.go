package chaos

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"net/http"
	"strconv"
	"time"

	"github.com/gpu-node-agent/gpu-node-agent/plugin/kubelettest"
)

const (
	// within is how long anything may take to be as it should, on a machine that does nothing else.
	within = 2 * time.Second

	// settles is how long the agent waits before each registration, so that the kubelet does not lose it, and until
	// it looks.
	settles = 1500 * time.Millisecond

	// restful is for how long a registration must have stood for its end not to count as one of many.
	restful = 6 * time.Second

	// auditing is how long the agent may need to find out that the kubelet has dropped it behind an open stream.
	auditing = 20 * time.Second
)

// snapshot is what is needed of /api/v1/snapshot.
type snapshot struct {
	GPUs   []device `json:"gpus"`
	Memory struct {
		Error string `json:"error"`
	} `json:"memory"`
	Config struct {
		OK bool `json:"ok"`
	} `json:"config"`
}

type device struct {
	UUID    string   `json:"uuid"`
	Index   int      `json:"index"`
	Profile string   `json:"profile"`
	State   string   `json:"state"`
	MIGMode bool     `json:"migMode"`
	MIG     []device `json:"mig"`
}

func (w *world) snapshot(ctx context.Context) (s snapshot, err error) {
	status, text, err := w.Get(ctx, "/api/v1/snapshot")
	if err != nil {
		return s, err
	}
	if status != http.StatusOK {
		return s, fmt.Errorf("/api/v1/snapshot: status %d", status)
	}
	return s, json.Unmarshal(text, &s)
}

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
		return w.checkDevices(s)
	})
	if err != nil {
		return err
	}
	if err := w.await(ctx, w.patience, w.checkXIDs); err != nil {
		return err
	}
	if !w.frozen && !w.absent {
		wait := w.patience + slow(settles)
		if w.unrest > 0 {
			wait += min(32*time.Second, time.Second<<w.unrest)
		}
		err = w.await(ctx, max(wait, w.audited()), func(context.Context) error { return w.checkKubelet(s) })
		if err != nil {
			return err
		}
		w.registeredAt, w.forgot = time.Now(), false
	}
	if err := w.checkAllocate(ctx, s); err != nil {
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
	return w.checkGrowth(ctx)
}

// checkDevices compares what the agent shows with what must be.
func (w *world) checkDevices(s snapshot) error {
	if len(s.GPUs) != gpus {
		return violated("devices", "%d GPUs, not %d", len(s.GPUs), gpus)
	}
	if s.Config.OK == w.badly {
		return violated("reload", "the configuration is good: %t, and the agent says %t", !w.badly, s.Config.OK)
	}
	if w.full && w.changed() > w.atFull && s.Memory.Error == "" {
		return violated("memory", "the disk is full, and nothing is said of it")
	}
	for _, d := range s.GPUs {
		g := w.gpu[d.Index]
		if len(d.MIG) != devices(g.mig) {
			return violated("devices", "GPU %d has %d MIG devices; it is partitioned as %s", d.Index, len(d.MIG), g.mig)
		}
		for _, d := range append([]device{d}, d.MIG...) {
			if sick := d.State == "unhealthy"; sick != g.sick() {
				return violated("health", "%s of GPU %d is %s; lost %t, XID 48 %t", d.UUID, d.Index, d.State, g.lost, g.fatal)
			}
		}
	}
	return nil
}

// checkXIDs: none is lost, and none is counted twice.
func (w *world) checkXIDs(ctx context.Context) error {
	page, err := w.Metrics(ctx)
	if err != nil {
		return err
	}
	counted := make([]map[string]int, gpus)
	for i := range counted {
		counted[i] = map[string]int{}
	}
	for _, s := range page {
		if s.Name == "gpu_node_agent_xid_errors_total" && s.Value > 0 {
			i, err := strconv.Atoi(s.Labels["gpu"])
			if err != nil || i < 0 || i >= gpus {
				return violated("xids", "%+v", s)
			}
			counted[i][s.Labels["xid"]] += int(s.Value)
		}
	}
	for i := range counted {
		want := w.counted(i)
		if w.source == "up" && !maps.Equal(counted[i], want) {
			return violated("xids", "GPU %d has counted %v; there were %v", i, counted[i], want)
		}
		for code, n := range counted[i] {
			if n > want[code] {
				return violated("xids", "GPU %d has counted %d of %s; there were %d", i, n, code, want[code])
			}
		}
	}
	return nil
}

// expected is what the kubelet must know, by resource and device.
func expected(s snapshot) map[string]map[string]bool {
	all := map[string]map[string]bool{}
	add := func(resource string, d device) {
		if all[resource] == nil {
			all[resource] = map[string]bool{}
		}
		all[resource][d.UUID] = d.State != "unhealthy"
	}
	for _, g := range s.GPUs {
		if !g.MIGMode {
			add(resource, g)
		}
		for _, m := range g.MIG {
			add("nvidia.com/mig-"+m.Profile, m)
		}
	}
	return all
}

// checkKubelet compares what the kubelet knows with what the agent shows, and that nothing has changed there that did
// not change.
func (w *world) checkKubelet(s snapshot) error {
	a, err := w.kubelet.ask(command{Do: "state"})
	if err != nil {
		return err
	}
	has := map[string]map[string]bool{}
	for name, r := range a.Resources {
		w.endpoint[name] = r.Endpoint
		for _, d := range r.Devices {
			if has[name] == nil {
				has[name] = map[string]bool{}
			}
			has[name][d.ID] = d.Healthy
		}
	}
	want := expected(s)
	if !maps.EqualFunc(has, want, maps.Equal[map[string]bool]) {
		return violated("view", "the kubelet has %s; the agent shows %s", brief(has), brief(want))
	}
	for name := range want {
		if w.socket(name) == "" {
			return violated("view", "the socket of %s is not there", name)
		}
	}
	return w.checkFlips(s, a)
}

// checkFlips: a device has not changed for the kubelet more often than its GPU has.
func (w *world) checkFlips(s snapshot, a answer) error {
	for _, g := range s.GPUs {
		for _, d := range append([]device{g}, g.MIG...) {
			if n := a.Flips[d.UUID]; n > w.gpu[g.Index].changes {
				return violated("flaps", "%s of GPU %d has changed %d times for the kubelet, and %d times in truth", d.UUID, g.Index, n, w.gpu[g.Index].changes)
			}
		}
	}
	return nil
}

// brief writes what a kubelet has so that a person can see the difference.
func brief(all map[string]map[string]bool) string {
	out := map[string]string{}
	for name, devices := range all {
		healthy := 0
		for _, ok := range devices {
			if ok {
				healthy++
			}
		}
		out[name] = fmt.Sprintf("%d healthy of %d", healthy, len(devices))
	}
	return fmt.Sprint(out)
}

// checkAllocate: whatever happens, a healthy device can be had.
func (w *world) checkAllocate(ctx context.Context, s snapshot) error {
	for name, devices := range expected(s) {
		path := w.socket(name)
		if path == "" {
			continue // on its way back; that it comes is seen by the kubelet
		}
		for id, healthy := range devices {
			if !healthy {
				continue
			}
			ctx, cancel := context.WithTimeout(ctx, slow(within))
			defer cancel()
			c, err := kubelettest.Dial(path)
			if err != nil {
				return err
			}
			defer c.Close()
			if _, err := c.Allocate(ctx, id); err != nil && w.socket(name) != "" {
				return violated("allocate", "%s of %s: %v", id, name, err)
			}
			return nil
		}
	}
	return nil
}

// slow is how long something may take that takes d on a machine that does nothing else.
func slow(d time.Duration) time.Duration { return time.Duration(float64(d) * *slack) }

// short is the world in a few words.
func (w *world) short() string {
	out := w.source
	if w.frozen {
		out += " frozen"
	}
	if w.absent {
		out += " no-kubelet"
	}
	if w.full {
		out += " disk-full"
	}
	if w.badly {
		out += " bad-config"
	}
	for i, g := range w.gpu {
		if g.lost {
			out += fmt.Sprintf(" lost:%d", i)
		}
		if g.fatal {
			out += fmt.Sprintf(" xid48:%d", i)
		}
		if g.mig != "off" {
			out += fmt.Sprintf(" %s:%d", g.mig, i)
		}
	}
	return out
}

// audited is how long to wait for a kubelet that may have forgotten the plugin.
func (w *world) audited() time.Duration {
	if w.forgot {
		return slow(auditing << min(w.forgets, 3)) // its pause doubles
	}
	return 0
}
