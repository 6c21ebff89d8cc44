package plugin

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/internal/kubelettest"
)

const oneSlice = "nvidia.com/mig-1g.10gb"

func sharedBy(n int) func(*Config) {
	return func(c *Config) { c.Sharing.TimeSlicing.Resources = []SharedResource{{Name: gpu, Replicas: n}} }
}

// holding returns holders, each as "RESOURCE ID".
func holding(snap *health.Snapshot, cfg Config, holders ...string) map[health.DeviceID][]Holder {
	by := make(map[health.DeviceID][]Holder)
	resolve := resolver(cfg, snap)
	for i, h := range holders {
		resource, id, _ := strings.Cut(h, " ")
		if device, ok := resolve(resource, id); ok {
			by[device] = append(by[device], Holder{"ml", fmt.Sprint("pod-", i), "c", resource, id})
		}
	}
	return by
}

func TestWithhold(t *testing.T) {
	one := []string{"1g.10gb", "1g.10gb"}
	single := func(c *Config) { c.MIGStrategy = MIGSingle }
	mixed := func(c *Config) { c.MIGStrategy = MIGMixed }
	rename := func(c *Config) { sharedBy(2)(c); c.Sharing.TimeSlicing.RenameByDefault = true }
	for _, c := range []struct {
		name    string
		change  func(*Config)
		snap    *health.Snapshot
		holders []string
		want    []string // the ids that are not offered
	}{
		{"nobody", sharedBy(2), snapshot(2), nil, nil},
		{"whole, now shared", sharedBy(2), snapshot(2), []string{"nvidia.com/gpu GPU-0"}, []string{"GPU-0::0", "GPU-0::1"}},
		{"shared, now whole", func(*Config) {}, snapshot(2), []string{"nvidia.com/gpu GPU-1::0", "nvidia.com/gpu GPU-1::3"}, []string{"GPU-1"}},
		{"fewer shares", sharedBy(2), snapshot(2), []string{"nvidia.com/gpu GPU-1::3"}, []string{"GPU-1::0", "GPU-1::1"}},
		{"more shares", sharedBy(3), snapshot(2), []string{"nvidia.com/gpu GPU-1::1"}, nil},
		{"as it is", sharedBy(2), snapshot(2), []string{"nvidia.com/gpu GPU-1::1", "nvidia.com/gpu GPU-0::0"}, nil},
		{"an id of the layout stays with its pod", sharedBy(3), snapshot(2), []string{"nvidia.com/gpu GPU-0", "nvidia.com/gpu GPU-0::1"}, []string{"GPU-0::0", "GPU-0::2"}},
		{"another name", rename, snapshot(2), []string{"nvidia.com/gpu GPU-0"}, []string{"GPU-0::0", "GPU-0::1"}},
		{"the same ids under another name", rename, snapshot(2), []string{"nvidia.com/gpu GPU-0::1"}, []string{"GPU-0::0", "GPU-0::1"}},
		{"ids of another plugin", func(*Config) {}, snapshot(2), []string{"nvidia.com/gpu nvidia1"}, []string{"GPU-1"}},
		{"MIG, was single", mixed, partitioned(one, one), []string{"nvidia.com/gpu MIG-0-1"}, []string{"MIG-0-1"}},
		{"MIG, was none", mixed, partitioned(one, one), []string{"nvidia.com/gpu GPU-0"}, []string{"MIG-0-0", "MIG-0-1"}},
		{"none, was MIG", func(*Config) {}, partitioned(one, one), []string{oneSlice + " MIG-1-0"}, []string{"GPU-1"}},
		{"single, as it is", single, partitioned(one, one), []string{"nvidia.com/gpu MIG-1-0"}, nil},
		{"a device that is not there any more", sharedBy(2), snapshot(2), []string{"nvidia.com/gpu GPU-7"}, nil},
		{"nothing in the layout", func(c *Config) { c.Include = []string{"7"} }, snapshot(2), []string{"nvidia.com/gpu GPU-0::1"}, nil},
	} {
		cfg := configured(c.change)
		a := arrange(layoutInput{cfg: &cfg, snap: c.snap, holders: holding(c.snap, cfg, c.holders...)})
		var got, listed, devices []string
		for _, r := range a.Resources {
			for i, d := range r.Devices {
				if d.withheld != "" {
					got = append(got, d.ID)
				}
				if m := r.message()[i]; m.Health != pluginapi.Healthy {
					listed = append(listed, m.ID)
				}
			}
		}
		if !slices.Equal(got, c.want) || !slices.Equal(listed, c.want) {
			t.Errorf("%s: %v is withheld, the kubelet hears of %v; want %v", c.name, got, listed, c.want)
		}
		for _, w := range a.Withheld {
			devices = append(devices, string(w.Device))
			if !strings.Contains(w.text(), "ml/pod-0 (c) holds it as "+strings.Fields(c.holders[0])[1]) {
				t.Errorf("%s: %s", c.name, w.text())
			}
		}
		for _, id := range c.want {
			if !slices.Contains(devices, string(deviceOf(id))) {
				t.Errorf("%s: nothing is said of %s: %v", c.name, id, devices)
			}
		}
	}
}

// A device that breaks while it is withheld is unhealthy for its own reason.
func TestWithheldAndUnhealthy(t *testing.T) {
	cfg, snap := configured(sharedBy(2)), with(snapshot(2), 0, health.Unhealthy)
	a := arrange(layoutInput{cfg: &cfg, snap: snap, holders: holding(snap, cfg, "nvidia.com/gpu GPU-0", "nvidia.com/gpu GPU-1")})
	for id, want := range map[string]string{"GPU-0::1": reasonUnhealthyDevice, "GPU-1::0": reasonWithheldDevice} {
		_, err := allocate(testTerms(cfg, nil), find(a.Resources, gpu), ask([]string{id}))
		s := serverOf(gpu, nil, nil)
		s.counts.refuse(err)
		if _, by := s.counts.read(); by[want] != 1 || status.Code(err) != codes.FailedPrecondition {
			t.Errorf("%s: %v, want %s", id, err, want)
		}
	}
}

// The kubelet asks before it has heard that a GPU is withheld.
func TestPreferUnheld(t *testing.T) {
	cfg, snap := configured(sharedBy(2)), with(snapshot(4), 3, health.Degraded)
	for _, policy := range []string{AllocationDistributed, AllocationPacked} {
		a := arrange(layoutInput{cfg: &cfg, snap: snap, holders: holding(snap, cfg, "nvidia.com/gpu GPU-0", "nvidia.com/gpu GPU-1", "nvidia.com/gpu GPU-2")})
		r := find(a.Resources, gpu)
		if got := prefer(newWiring(r), r, policy, all(r), nil, 1); !slices.Equal(got, []string{"GPU-3::0"}) {
			t.Errorf("%s: %v", policy, got)
		}
		if got := prefer(newWiring(r), r, policy, all(r), nil, 3); !slices.Equal(got, []string{"GPU-2::0", "GPU-3::0", "GPU-3::1"}) {
			t.Errorf("%s: %v", policy, got)
		}
	}
}

// A new answer of the kubelet reaches the stream without any news of the devices.
func TestListAndWatchFollowsHolders(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newTestServer(snapshot(2))
		cfg := configured(sharedBy(2))
		s.layouts.cfg.Store(&cfg)
		w := watch(t, s, 10)
		synctest.Wait()
		for _, c := range []struct {
			by   map[health.DeviceID][]Holder
			want [][]string // of each message the unhealthy ids
		}{
			{nil, [][]string{nil}},
			{holding(snapshot(2), cfg, "nvidia.com/gpu GPU-1"), [][]string{{"GPU-1::0", "GPU-1::1"}}},
			{holding(snapshot(2), cfg, "nvidia.com/gpu GPU-1"), nil},
			{holding(snapshot(2), cfg, "nvidia.com/gpu GPU-1", "nvidia.com/gpu GPU-0::0"), nil},
			{holding(snapshot(2), cfg, "nvidia.com/gpu GPU-0::0"), [][]string{nil}},
		} {
			s.layouts.holders.Store(&Holders{At: time.Now(), By: c.by})
			synctest.Wait()
			var got [][]string
			for _, list := range w.received() {
				got = append(got, unhealthy(list))
			}
			if !slices.EqualFunc(got, c.want, slices.Equal) {
				t.Errorf("%v: %v, want %v", c.by, got, c.want)
			}
		}
		w.cancel()
		if err := <-w.ended; status.Code(err) != codes.Canceled {
			t.Error(err)
		}
	})
}

// Sharing is changed while three of four GPUs are held: new pods come to the free one, then to those that become free.
func TestSharingChangesAtRunTime(t *testing.T) {
	r := newRig(t, snapshot(4))
	k := r.kubelet()
	r.run()
	r.wait(k, gpu, listed(4, 4))
	for i := range 3 {
		if _, err := k.AllocateIDs(r.ctx, gpu, id(i)); err != nil {
			t.Fatal(err)
		}
	}
	r.holders("three", func(h Holders) bool { return len(h.By) == 3 })
	r.set(sharedBy(2))
	r.wait(k, gpu, listed(8, 2))
	// The manager logs a layout before it publishes its warnings, and may skip one that nobody waits for.
	withheld := func(gpus ...int) {
		t.Helper()
		r.whole(func(s Status) bool {
			return slices.EqualFunc(s.Warnings, gpus, func(w string, i int) bool { return strings.HasPrefix(w, "nvidia.com/gpu: "+id(i)+" ") })
		})
	}
	withheld(0, 1, 2)
	pod := func() string {
		t.Helper()
		a, err := k.Allocate(r.ctx, gpu, 1)
		if err != nil {
			t.Fatal(err)
		}
		return a.Devices[0]
	}
	if got := pod(); got != "GPU-3::0" {
		t.Errorf("the first pod has %s", got)
	}
	if _, err := k.AllocateIDs(r.ctx, gpu, "GPU-1::0"); status.Code(err) != codes.FailedPrecondition ||
		!strings.Contains(status.Convert(err).Message(), "GPU-1::0 is not offered to new pods: default/pod-2 (main) holds it as GPU-1 of nvidia.com/gpu") {
		t.Errorf("a held one: %v", err)
	}
	k.Free(gpu, id(1))
	r.wait(k, gpu, listed(8, 4))
	withheld(0, 2)
	if got := pod(); got != "GPU-1::0" {
		t.Errorf("the second pod has %s", got)
	}

	// Back again: what holds a share keeps it, and the GPU is not handed out whole.
	r.set(func(c *Config) { c.Sharing = SharingConfig{} })
	withheld(1, 3)
	r.wait(k, gpu, listed(4, 2)) // GPU-0 and GPU-2, which are held whole
	if _, err := k.Allocate(r.ctx, gpu, 1); err == nil {
		t.Error("a shared GPU was handed out whole")
	}
	k.Free(gpu, "GPU-3::0")
	r.wait(k, gpu, listed(4, 3))
	withheld(1)
	if got := pod(); got != id(3) {
		t.Errorf("the third pod has %s", got)
	}
	for line, want := range map[string]int{"device is not offered to new pods": 5, "device is unhealthy for the kubelet": 0} {
		if n := r.logs.FilterMessage(line).Len(); n != want {
			t.Errorf("%q was logged %d times, want %d: %v", line, n, want, r.lines())
		}
	}
	again := r.logs.FilterMessage("device is offered to new pods again").All()
	if len(again) != 4 || again[0].ContextMap()["device"] != id(1) {
		t.Errorf("offered again: %v", again)
	}
}

// Without pod-resources nothing is known, and all is offered as if nobody had anything.
func TestWithholdNeedsHolders(t *testing.T) {
	r := newRig(t, snapshot(2))
	k := r.kubelet()
	k.SetFault(kubelettest.Fault{ListError: "not for you"})
	r.run()
	r.wait(k, gpu, listed(2, 2))
	if _, err := k.AllocateIDs(r.ctx, gpu, id(0)); err != nil {
		t.Fatal(err)
	}
	r.set(sharedBy(2))
	r.wait(k, gpu, listed(4, 4))
	k.SetFault(kubelettest.Fault{})
	r.wait(k, gpu, listed(4, 2))
}
