package plugin

import (
	"errors"
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
	"github.com/gpu-node-agent/gpu-node-agent/plugin/deviceid"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/offer"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/podresources"
)

const migResource = "nvidia.com/mig-1g.10gb"

// holdersOf returns holders, each given as "RESOURCE ID".
func holdersOf(snap *health.Snapshot, cfg Config, holders ...string) map[health.DeviceID][]podresources.Holder {
	by := make(map[health.DeviceID][]podresources.Holder)
	resolve := newResolver(cfg, snap)
	for i, h := range holders {
		resource, id, _ := strings.Cut(h, " ")
		if device, ok := resolve(resource, id); ok {
			by[device] = append(by[device], podresources.Holder{
				Namespace: "ml", Pod: fmt.Sprint("pod-", i), Container: "c", Resource: resource,
				DeviceID: id,
			})
		}
	}
	return by
}

func TestWithhold(t *testing.T) {
	const one = "1g.10gb 1g.10gb"
	single := func(c *Config) { c.MIGStrategy = MIGSingle }
	mixed := func(c *Config) { c.MIGStrategy = MIGMixed }
	rename := func(c *Config) { sharedBy(2)(c); c.Sharing.TimeSlicing.RenameByDefault = true }
	for _, c := range []struct {
		name    string
		change  func(*Config)
		snap    *health.Snapshot
		holders []string
		want    []string // withheld IDs
	}{
		{"no holders", sharedBy(2), snapshot(2), nil, nil},
		{"whole before, shared now", sharedBy(2), snapshot(2), []string{"nvidia.com/gpu GPU-0"}, []string{"GPU-0::0", "GPU-0::1"}},
		{
			"shared before, whole now", func(*Config) {}, snapshot(2),
			[]string{"nvidia.com/gpu GPU-1::0", "nvidia.com/gpu GPU-1::3"},
			[]string{"GPU-1"},
		},
		{"fewer replicas", sharedBy(2), snapshot(2), []string{"nvidia.com/gpu GPU-1::3"}, []string{"GPU-1::0", "GPU-1::1"}},
		{"more replicas", sharedBy(3), snapshot(2), []string{"nvidia.com/gpu GPU-1::1"}, nil},
		{"unchanged", sharedBy(2), snapshot(2), []string{"nvidia.com/gpu GPU-1::1", "nvidia.com/gpu GPU-0::0"}, nil},
		{
			"held ID of the layout", sharedBy(3), snapshot(2),
			[]string{"nvidia.com/gpu GPU-0", "nvidia.com/gpu GPU-0::1"},
			[]string{"GPU-0::0", "GPU-0::2"},
		},
		{"renamed", rename, snapshot(2), []string{"nvidia.com/gpu GPU-0"}, []string{"GPU-0::0", "GPU-0::1"}},
		{"renamed with equal IDs", rename, snapshot(2), []string{"nvidia.com/gpu GPU-0::1"}, []string{"GPU-0::0", "GPU-0::1"}},
		{"IDs of another plugin", func(*Config) {}, snapshot(2), []string{"nvidia.com/gpu nvidia1"}, []string{"GPU-1"}},
		{"single before, mixed now", mixed, partitioned(one, one), []string{"nvidia.com/gpu MIG-0-1"}, []string{"MIG-0-1"}},
		{"none before, mixed now", mixed, partitioned(one, one), []string{"nvidia.com/gpu GPU-0"}, []string{"MIG-0-0", "MIG-0-1"}},
		{"mixed before, none now", func(*Config) {}, partitioned(one, one), []string{migResource + " MIG-1-0"}, []string{"GPU-1"}},
		{"single, unchanged", single, partitioned(one, one), []string{"nvidia.com/gpu MIG-1-0"}, nil},
		{"removed device", sharedBy(2), snapshot(2), []string{"nvidia.com/gpu GPU-7"}, nil},
		{"empty layout", func(c *Config) { c.Include = []string{"7"} }, snapshot(2), []string{"nvidia.com/gpu GPU-0::1"}, nil},
	} {
		cfg := configured(c.change)
		l := newLayout(layoutInput{cfg: &cfg, snap: c.snap, facts: factsOf(holdersOf(c.snap, cfg, c.holders...))})
		var got, listed, devices []string
		for _, r := range l.resources {
			for i, u := range unitsOf(r) {
				if u.withheldFor() != "" {
					got = append(got, u.text())
				}
				if m := r.message()[i]; m.Health != pluginapi.Healthy {
					listed = append(listed, m.ID)
				}
			}
		}
		if !slices.Equal(got, c.want) || !slices.Equal(listed, c.want) {
			t.Errorf("%s: withheld %v, listed unhealthy %v, want %v", c.name, got, listed, c.want)
		}
		for _, w := range l.withheld {
			devices = append(devices, string(w.device.ID))
			if !strings.Contains(w.reason, "ml/pod-0 (c)") || !strings.Contains(w.reason, strings.Fields(c.holders[0])[1]) {
				t.Errorf("%s: %s names no holder", c.name, w.reason)
			}
		}
		for _, id := range c.want {
			if !slices.Contains(devices, string(deviceid.Parse(id).Device())) {
				t.Errorf("%s: %s is not in %v", c.name, id, devices)
			}
		}
	}
}

// The texts of status and log have one entry for each GPU.
func TestWithheldTextsAreByGPU(t *testing.T) {
	cfg, snap := configured(func(c *Config) { c.MIGStrategy = MIGMixed }), partitioned("1g.10gb 1g.10gb 1g.10gb", "1g.10gb", "1g.10gb 2g.20gb")
	l := newLayout(layoutInput{
		cfg: &cfg, snap: snap,
		facts: factsOf(holdersOf(snap, cfg, "nvidia.com/gpu GPU-0", "nvidia.com/gpu GPU-1", "nvidia.com/gpu GPU-2")),
	})
	var got []string
	for _, text := range withheldTexts(l.withheld) {
		which, _, _ := strings.Cut(text, " not offered")
		got = append(got, which)
	}
	want := []string{
		migResource + ": 3 MIG devices of GPU 0 are", migResource + ": MIG-1-0 (GPU 1) is", migResource + ": MIG-2-0 (GPU 2) is",
		"nvidia.com/mig-2g.20gb: MIG-2-1 (GPU 2) is",
	}
	if !slices.Equal(got, want) {
		t.Errorf("%q, want %q", got, want)
	}
}

// A text and a log line about MIG devices of a GPU that several pods hold name each pod.
func TestWithheldMIGDevicesNameAllPods(t *testing.T) {
	t.Parallel()
	h, snap := newHarness(t, nil), partitioned("1g.10gb 1g.10gb 1g.10gb")
	cfg := configured(func(c *Config) {
		c.MIGStrategy = MIGMixed
		c.Sharing.TimeSlicing.Resources = []SharedResource{{Name: migResource, Replicas: 2}}
	})
	l := newLayout(layoutInput{
		cfg: &cfg, snap: snap,
		facts: factsOf(holdersOf(snap, cfg, migResource+" MIG-0-0", migResource+" MIG-0-2", migResource+" MIG-0-2::1")),
	})
	texts := withheldTexts(l.withheld)
	if len(texts) != 1 || !strings.Contains(texts[0], "2 MIG devices of GPU 0") || !strings.Contains(texts[0], "ml/pod-0 and ml/pod-1") {
		t.Errorf("%q", texts)
	}
	h.p.logWithheld(&layout{}, &l)
	h.waitLog(msgWithheld, "ids:3", 1) // all but MIG-0-2::1, which is in the layout
	h.waitLog(msgWithheld, "ml/pod-0 and ml/pod-1", 1)
}

// A device that is unhealthy and withheld is refused as unhealthy.
func TestAllocateRefusesWithheldDevice(t *testing.T) {
	cfg, snap := configured(sharedBy(2)), with(snapshot(2), 0, health.Unhealthy)
	l := newLayout(layoutInput{cfg: &cfg, snap: snap, facts: factsOf(holdersOf(snap, cfg, "nvidia.com/gpu GPU-0", "nvidia.com/gpu GPU-1"))})
	for id, want := range map[string]string{"GPU-0::1": reasonUnhealthyDevice, "GPU-1::0": reasonWithheldDevice} {
		_, err := testAllocation(cfg, nil).allocate(t.Context(), findResource(l.resources, gpu), request([]string{id}))
		if r, ok := errors.AsType[*refusal](err); !ok || r.reason != want || r.device != id || status.Code(err) != codes.FailedPrecondition {
			t.Errorf("%s: %v, want %s", id, err, want)
		}
	}
}

// New holders change the list without a new snapshot.
func TestListAndWatchFollowsHolders(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		cfg := configured(sharedBy(2))
		s := newServerOf(gpu, &cfg, snapshot(2))
		w := watch(t, s, 10)
		synctest.Wait()
		for _, c := range []struct {
			by   map[health.DeviceID][]podresources.Holder
			want [][]string // unhealthy IDs of each message
		}{
			{nil, [][]string{nil}},
			{holdersOf(snapshot(2), cfg, "nvidia.com/gpu GPU-1"), [][]string{{"GPU-1::0", "GPU-1::1"}}},
			{holdersOf(snapshot(2), cfg, "nvidia.com/gpu GPU-1"), nil},
			{holdersOf(snapshot(2), cfg, "nvidia.com/gpu GPU-1", "nvidia.com/gpu GPU-0::0"), nil},
			{holdersOf(snapshot(2), cfg, "nvidia.com/gpu GPU-0::0"), [][]string{nil}},
		} {
			s.layouts.holders.Store(&podresources.Holders{At: time.Now(), By: c.by})
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

// Sharing changes while three of four GPUs are held: new pods get the free GPU, then each GPU that becomes free.
func TestSharingChangeWhileHeld(t *testing.T) {
	t.Parallel()
	h, k := startHarness(t, snapshot(4))
	for i := range 3 {
		h.allocate(k, id(i))
	}
	h.waitHolders(func(h podresources.Holders) bool { return len(h.By) == 3 })
	h.setConfig(sharedBy(2))
	h.waitResource(k, gpu, listed(8, 2))
	// The manager may skip a layout, so the test waits for each.
	waitWithheld := func(gpus ...int) {
		t.Helper()
		h.waitPlugin(func(s Status) bool {
			return slices.EqualFunc(s.Warnings, gpus, func(w string, i int) bool { return strings.HasPrefix(w, "nvidia.com/gpu: "+id(i)+" ") })
		})
	}
	waitWithheld(0, 1, 2)
	allocate := func(want string) {
		t.Helper()
		if a, err := k.Allocate(h.ctx, gpu, 1); err != nil || a.Devices[0] != want {
			t.Fatalf("%+v, %v, want %s", a, err, want)
		}
	}
	allocate("GPU-3::0")
	// The kubelet sends the text of a refusal, with the holder, to the user.
	if _, err := k.AllocateIDs(h.ctx, gpu, "GPU-1::0"); status.Code(err) != codes.FailedPrecondition ||
		!strings.Contains(err.Error(), "default/pod-2 (main)") {
		t.Errorf("allocated a withheld device: %v", err)
	}
	k.Free(gpu, id(1))
	h.waitResource(k, gpu, listed(8, 4))
	waitWithheld(0, 2)
	allocate("GPU-1::0")

	// Back to whole GPUs: the holders of replicas keep them, and their GPUs are withheld.
	h.setConfig(func(c *Config) { c.Sharing = SharingConfig{} })
	waitWithheld(1, 3)
	h.waitResource(k, gpu, listed(4, 2)) // GPU-0 and GPU-2, which are held whole
	if _, err := k.Allocate(h.ctx, gpu, 1); err == nil {
		t.Error("a shared GPU was allocated whole")
	}
	k.Free(gpu, "GPU-3::0")
	h.waitResource(k, gpu, listed(4, 3))
	waitWithheld(1)
	allocate(id(3))
	h.waitLog(msgWithheld, "", 5)
	h.waitLog(msgWithheld, "ids:2", 3) // the two replicas of each
	h.waitLog(msgOffered, "", 3)
	h.waitLog(msgOffered, "ids:2", 2) // the replicas of GPU-1; GPU-0 and GPU-2 in one line
	h.waitLog(msgUnhealthy, "", 0)
}

// While the holders are unknown, all devices are offered.
func TestWithholdNeedsHolders(t *testing.T) {
	h := newHarness(t, snapshot(2))
	k := h.kubelet()
	k.SetFault(kubelettest.Fault{ListError: "denied"})
	h.run()
	h.waitResource(k, gpu, listed(2, 2))
	h.allocate(k, id(0))
	h.setConfig(sharedBy(2))
	h.waitResource(k, gpu, listed(4, 4))
	k.SetFault(kubelettest.Fault{})
	h.waitResource(k, gpu, listed(4, 2))
}

// While the node changes to another API, the device of a running pod stays healthy, and no waiting pod gets it when that one ends.
func TestReleasedDeviceIsHealthyForItsPodOnly(t *testing.T) {
	cfg, snap := DefaultConfig(), snapshot(2)
	l := newLayout(layoutInput{cfg: &cfg, snap: snap, facts: offer.Facts{
		Releasing: releasingReason,
		Holders:   podresources.Holders{By: holdersOf(snap, cfg, "nvidia.com/gpu GPU-1")},
	}})
	r := findResource(l.resources, gpu)
	for i, healthy := range []bool{false, true} {
		id := r.Devices[i].id(0)
		if got := r.Devices[i].healthy(0); got != healthy {
			t.Errorf("%s: healthy %v, want %v", id, got, healthy)
		}
		_, err := allocation{cfg: &cfg}.grants(r, []string{id})
		if got := refusalReason(err); got != reasonWithheldDevice {
			t.Errorf("%s: refused for %q, want %q", id, got, reasonWithheldDevice)
		}
	}
}

// A device that a pod holds by a claim is withheld as a whole, with its shares. It costs the resource no capacity.
func TestWithholdClaimed(t *testing.T) {
	snap := snapshot(2)
	for name, change := range map[string]func(*Config){"whole": func(*Config) {}, "shared": sharedBy(2)} {
		cfg := configured(change)
		claimed := podresources.Holder{
			Namespace: "ml", Pod: "train", DeviceID: "gpu-0",
			Claim: podresources.ClaimRef{Name: "c", Driver: "gpu.nvidia.com"},
		}
		r := newLayout(layoutInput{
			cfg: &cfg, snap: snap,
			facts: factsOf(map[health.DeviceID][]podresources.Holder{"GPU-0": {claimed}}),
		}).resources[0]
		for _, u := range unitsOf(r) {
			first := u.State.Device.ID == "GPU-0"
			if u.isHealthy() == first || first && !strings.Contains(u.withheldFor(), "claim c") {
				t.Errorf("%s: %s healthy %v, %q", name, u.State.Device.ID, u.isHealthy(), u.withheldFor())
			}
			if u.share != nil && (u.largest() > 0) == first {
				t.Errorf("%s: %s serves %d", name, u.State.Device.ID, u.largest())
			}
		}
		if r.Unschedulable == nil || r.Unschedulable.Devices != 0 {
			t.Errorf("%s: %+v", name, r.Unschedulable)
		}
	}
}

// factsOf returns facts with these holders.
func factsOf(by map[health.DeviceID][]podresources.Holder) offer.Facts {
	return offer.Facts{Holders: podresources.Holders{By: by}}
}

// withheldFor returns why a unit is not offered although its device works; empty if it is.
func (u unit) withheldFor() string {
	if !u.usable() || u.isHealthy() {
		return ""
	}
	return u.offer.Reason()
}
