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

// checkView waits until the kubelet has what the agent shows, and can get it.
func (w *world) checkView(ctx context.Context, s snapshot) error {
	want := expected(s)
	if w.unseen {
		want = nil
	}
	w.registration.serves(want)
	if w.frozen || w.absent {
		return w.checkAllocate(ctx, want)
	}
	err := w.await(ctx, w.patience+w.registration.extra(), func(ctx context.Context) error { return w.checkKubelet(ctx, want) })
	if err != nil {
		return err
	}
	if !w.unseen {
		w.registration.done()
	}
	return w.checkAllocate(ctx, want)
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

// checkKubelet compares what the kubelet knows with what it must, and that nothing has changed there that did not change.
func (w *world) checkKubelet(ctx context.Context, want map[string]map[string]bool) error {
	a, err := w.kubelet.ask(command{Do: "state"})
	if err != nil {
		return err
	}
	has := map[string]map[string]bool{}
	for name, r := range a.Resources {
		w.endpoint[name] = r.Endpoint
		for _, d := range r.Devices {
			if d.Healthy && w.unseen {
				return violated("view", "the kubelet may give out %s, and the agent has not seen any GPU yet", d.ID)
			}
			if has[name] == nil {
				has[name] = map[string]bool{}
			}
			has[name][d.ID] = d.Healthy
		}
	}
	if w.unseen {
		return nil
	}
	for name := range w.orphans { // the kubelet keeps them for minutes, and gives none out
		if want[name] == nil && !slices.Contains(slices.Collect(maps.Values(has[name])), true) {
			delete(has, name)
		}
	}
	if !maps.EqualFunc(has, want, maps.Equal[map[string]bool]) {
		return violated("view", "the kubelet has %s; the agent shows %s", brief(has), brief(want))
	}
	for name := range want {
		if w.socket(name) == "" {
			return violated("view", "the socket of %s is not there", name)
		}
	}
	s, err := w.snapshot(ctx)
	if err != nil {
		return err
	}
	for _, r := range s.Kubelet.Resources {
		if !r.Registered {
			return violated("view", "the agent says of %s: %s", r.Name, r.Error)
		}
	}
	return w.checkFlips(s, a)
}

// checkFlips: a device has not changed for the kubelet more often than its GPU has, since this agent has started.
func (w *world) checkFlips(s snapshot, a answer) error {
	for _, g := range s.GPUs {
		for _, d := range append([]device{g}, g.MIG...) {
			most := w.gpu[g.Index].changes - w.gpu[g.Index].before
			if n := a.Flips[d.UUID]; n > most {
				return violated("flaps", "%s of GPU %d has changed %d times for the kubelet, and %d times in truth", d.UUID, g.Index, n, most)
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

// checkAllocate: whatever happens, a healthy device can be had, and another is refused.
func (w *world) checkAllocate(ctx context.Context, want map[string]map[string]bool) error {
	for name, devices := range want {
		path := w.socket(name)
		if path == "" {
			continue // on its way back; that it comes is seen by the kubelet
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

// allocate asks for a device, and returns an error if the answer is not what it is to be.
func (w *world) allocate(ctx context.Context, path, id string, healthy bool) error {
	ctx, cancel := context.WithTimeout(ctx, slow(within))
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
		return errors.New("it was given out")
	case strings.Contains(err.Error(), "FailedPrecondition") && strings.Contains(err.Error(), id): // gRPC's name of the code
		return nil
	}
	return err
}
