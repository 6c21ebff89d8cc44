package chaos

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/gpu-node-agent/gpu-node-agent/internal/kubelettest"
)

// checkView waits until the kubelet has the agent's devices and can allocate them.
func (w *world) checkView(ctx context.Context, s snapshot) error {
	want := expected(s)
	if w.unmeasured {
		want = nil
	}
	w.registration.setResources(want)
	if w.kubeletFrozen || w.kubeletStopped {
		return w.checkAllocate(ctx, want)
	}
	err := w.await(ctx, w.patience+w.registration.extraTime(), func(ctx context.Context) error { return w.checkKubelet(ctx, want) })
	if err != nil {
		return err
	}
	if !w.unmeasured && eachHasHealthy(want) {
		w.registration.confirmed()
	}
	return w.checkAllocate(ctx, want)
}

// eachHasHealthy reports whether each resource has a healthy device. Without one, the kubelet has the same view of a plugin that it
// dropped.
func eachHasHealthy(want map[string]map[string]bool) bool {
	for _, devices := range want {
		if !slices.Contains(slices.Collect(maps.Values(devices)), true) {
			return false
		}
	}
	return true
}

// expected returns the health of each device that the kubelet must have, by resource.
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

// checkKubelet compares the kubelet's devices with the expected ones, and checks that it got no other changes.
func (w *world) checkKubelet(ctx context.Context, want map[string]map[string]bool) error {
	a, err := w.kubelet.request(command{Do: "state"})
	if err != nil {
		return err
	}
	has := map[string]map[string]bool{}
	for name, r := range a.Resources {
		w.endpoint[name] = r.Endpoint
		for _, d := range r.Devices {
			if d.Healthy && w.unmeasured {
				return violated("view", "kubelet may allocate %s before a measurement", d.ID)
			}
			if has[name] == nil {
				has[name] = map[string]bool{}
			}
			has[name][d.ID] = d.Healthy
		}
	}
	if w.unmeasured {
		return nil
	}
	for name := range w.orphans { // the kubelet keeps them without healthy devices for minutes
		if want[name] == nil && !slices.Contains(slices.Collect(maps.Values(has[name])), true) {
			delete(has, name)
		}
	}
	if !maps.EqualFunc(has, want, maps.Equal[map[string]bool]) {
		return violated("view", "kubelet has %s; the agent has %s", summarize(has), summarize(want))
	}
	for name := range want {
		if w.socket(name) == "" {
			return violated("view", "no socket of %s", name)
		}
	}
	s, err := w.snapshot(ctx)
	if err != nil {
		return err
	}
	for _, r := range s.Kubelet.Resources {
		if !r.Registered {
			return violated("view", "agent reports %s: %s", r.Name, r.Error)
		}
	}
	return w.checkFlips(s, a)
}

// checkFlips checks that a device's health changed for the kubelet no more often than its GPU's, since the agent's
// start.
func (w *world) checkFlips(s snapshot, a answer) error {
	for _, g := range s.GPUs {
		for _, d := range append([]device{g}, g.MIG...) {
			most := w.gpu[g.Index].changes - w.gpu[g.Index].changesBefore
			if n := a.Flips[d.UUID]; n > most {
				return violated("flaps", "%s of GPU %d changed %d times for the kubelet, want at most %d", d.UUID, g.Index, n, most)
			}
		}
	}
	return nil
}

// summarize summarizes a kubelet's devices.
func summarize(all map[string]map[string]bool) string {
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

// checkAllocate checks that a healthy device can always be allocated and an unhealthy one is refused.
func (w *world) checkAllocate(ctx context.Context, want map[string]map[string]bool) error {
	for name, devices := range want {
		path := w.socket(name)
		if path == "" {
			continue // it will return, which checkKubelet awaits
		}
		asked := map[bool]bool{}
		for id, healthy := range devices {
			if asked[healthy] {
				continue
			}
			asked[healthy] = true
			if err := w.allocate(ctx, path, id, healthy); err != nil && w.socket(name) != "" {
				return violated("allocate", "%s of %s, healthy %t: %v", id, name, healthy, err)
			}
		}
	}
	return nil
}

// allocate requests a device and returns an error for an unexpected response.
func (w *world) allocate(ctx context.Context, path, id string, healthy bool) error {
	ctx, cancel := context.WithTimeout(ctx, scaled(stepTimeout))
	defer cancel()
	c, err := kubelettest.Dial(path)
	if err != nil {
		return err
	}
	defer c.Close()
	_, err = c.Allocate(ctx, id)
	switch {
	case healthy:
		return err
	case err == nil:
		return errors.New("allocated")
	case strings.Contains(err.Error(), "FailedPrecondition") && strings.Contains(err.Error(), id): // gRPC's name of the code
		return nil
	}
	return err
}
