package plugin

import (
	"net"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	podsapi "k8s.io/kubelet/pkg/apis/podresources/v1"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/internal/kubelettest"
)

func TestHoldersOf(t *testing.T) {
	snap := snapshot(2)
	snap.Devices[0].Device.Minor, snap.Devices[1].Device.Minor = 1, 0 // not the index
	for gi := 1; gi < 3; gi++ {
		snap.Devices = append(snap.Devices, health.DeviceState{Device: health.Device{
			ID: health.DeviceID("MIG-" + id(gi)), Parent: "GPU-0", Kind: health.KindMIG, Index: 0, Minor: 1, GI: gi, MIGIndex: gi - 1,
		}})
	}
	slices.Reverse(snap.Devices) // in whichever order they come
	cfg := DefaultConfig()
	cfg.Resource = "example.com/card"
	off := cfg
	off.Enabled = false // another plugin serves that name
	for _, c := range []struct {
		resource, id string
		want         health.DeviceID // empty: not one of ours
	}{
		{gpu, "GPU-0", "GPU-0"},
		{gpu, "GPU-1::7", "GPU-1"},
		{gpu, "GPU-gone", "GPU-gone"},
		{"nvidia.com/mig-1g.10gb", "MIG-GPU-1", "MIG-GPU-1"},
		{"nvidia.com/mig-1g.10gb.shared", "MIG-GPU-2::0", "MIG-GPU-2"},
		{"other.com/anything", "GPU-0", "GPU-0"},
		{gpu, "0", "GPU-0"},
		{gpu, "1::3", "GPU-1"},
		{gpu, "7", ""},
		{gpu, "0:0", "MIG-GPU-1"}, // counted as Allocate counts them, by GPU instance
		{gpu, "0:1", "MIG-GPU-2"},
		{"nvidia.com/mig-1g.10gb.shared", "0:1::3", "MIG-GPU-2"},
		{gpu, "0:2", ""},
		{gpu, "1:0", ""},
		{gpu, "0:", ""},
		{gpu, ":1", ""},
		{gpu, "0:-1", ""},
		{gpu, "0:1:0", ""},
		{"intel.com/qat", "0:1", ""},
		{gpu, "nvidia0", "GPU-1"},
		{gpu, "nvidia1", "GPU-0"},
		{gpu, "nvidia1/vgpu3", "GPU-0"},
		{gpu, "nvidia1/gi2", "MIG-GPU-2"},
		{gpu, "nvidia1/gi1/vgpu0", "MIG-GPU-1"},
		{gpu, "nvidia0/gi1", ""},
		{gpu, "nvidia9", ""},
		{gpu, "nvidia99999999999999999999", ""},
		{gpu, "nvidia1/gi99999999999999999999", ""},
		{gpu, "nvidiactl", ""},
		{"example.com/card", "1", "GPU-1"}, // our own name, whatever it is
		{"intel.com/qat", "0", ""},
		{gpu, "", ""},
	} {
		resp := &podsapi.ListPodResourcesResponse{PodResources: []*podsapi.PodResources{{
			Namespace: "ns", Name: "pod", Containers: []*podsapi.ContainerResources{{Name: "c", Devices: []*podsapi.ContainerDevices{
				// Once for each NUMA node.
				{ResourceName: c.resource, DeviceIds: []string{c.id}}, {ResourceName: c.resource, DeviceIds: []string{c.id}},
			}}},
		}}}
		want := map[health.DeviceID][]Holder{}
		if c.want != "" {
			want[c.want] = []Holder{{"ns", "pod", "c", c.resource, c.id}}
		}
		for _, cfg := range []Config{cfg, off} {
			if got := holdersOf(resp, resolver(cfg, snap)); !reflect.DeepEqual(got, want) {
				t.Errorf("%s %q: %v, want %v", c.resource, c.id, got, want)
			}
		}
	}
	if got := holdersOf(nil, resolver(cfg, nil)); got == nil || len(got) != 0 {
		t.Errorf("of nothing: %v", got)
	}
	if _, ok := resolver(cfg, nil)(gpu, "0"); ok {
		t.Error("an index without a snapshot is a device")
	}
}

// holders waits for what the plugin says of who has what.
func (r *rig) holders(what string, ok func(Holders) bool) Holders {
	r.Helper()
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	for {
		h := r.p.Holders()
		if ok(h) {
			return h
		}
		select {
		case <-r.ctx.Done():
			r.Fatalf("%s: still %+v\nlog: %v", what, h, r.lines())
		case <-tick.C:
		}
	}
}

func has(device string, pods ...string) func(Holders) bool {
	return func(h Holders) bool {
		var names []string
		for _, holder := range h.By[health.DeviceID(device)] {
			names = append(names, holder.Pod)
		}
		return slices.Equal(names, pods)
	}
}

func TestHolders(t *testing.T) {
	r := newRig(t, snapshot(4))
	k := r.kubelet()
	if h := r.p.Holders(); h.Err == "" || h.By != nil || !h.At.IsZero() {
		t.Errorf("before Run: %+v", h)
	}
	r.run()
	r.wait(k, gpu, listed(4, 4))
	r.holders("empty", func(h Holders) bool { return h.Err == "" && h.By != nil && len(h.By) == 0 && !h.At.IsZero() })
	train := kubelettest.Container{Namespace: "ml", Pod: "train", Name: "torch"}
	a, err := k.AllocateTo(r.ctx, train, gpu, 1)
	if err != nil {
		t.Fatal(err)
	}
	held := a.Devices[0]
	h := r.holders("held", has(held, "train"))
	if want := (Holder{"ml", "train", "torch", gpu, held}); h.By[health.DeviceID(held)][0] != want {
		t.Errorf("%+v, want %+v", h.By, want)
	}

	// A new kubelet knows no pods for a moment; nobody has lost a device for that.
	before := r.p.Holders()
	k.Stop()
	k.SetFault(kubelettest.Fault{NoPods: true}) // not before: the old one would be believed
	if err := k.Restart(); err != nil {
		t.Fatal(err)
	}
	r.holders("a new answer", func(h Holders) bool { return h.At.After(before.At) })
	if h := r.p.Holders(); !has(held, "train")(h) && time.Since(before.At) < 5*r.p.timing.hurry {
		t.Errorf("forgotten at once: %+v", h)
	}
	// If that lasts, it is true.
	r.holders("none in the end", func(h Holders) bool { return h.Err == "" && len(h.By) == 0 })
	k.SetFault(kubelettest.Fault{})
	r.holders("held again", has(held, "train"))
	k.Free(gpu, held)
	r.holders("free", func(h Holders) bool { return len(h.By) == 0 })
}

func TestHoldersOfAKubeletThatIsAway(t *testing.T) {
	r := newRig(t, snapshot(2))
	k := r.kubelet()
	r.run()
	r.wait(k, gpu, listed(2, 2))
	if _, err := k.AllocateIDs(r.ctx, gpu, "GPU-1"); err != nil {
		t.Fatal(err)
	}
	r.holders("held", has("GPU-1", "pod-1"))
	k.Stop()
	h := r.holders("old, and says so", func(h Holders) bool { return h.Err != "" })
	if !has("GPU-1", "pod-1")(h) && time.Since(h.At) < r.p.timing.stale {
		t.Errorf("dropped at once: %+v", h)
	}
	if h = r.holders("dropped", func(h Holders) bool { return h.By == nil }); h.Err == "" || h.At.IsZero() {
		t.Errorf("%+v", h)
	}
	if err := os.RemoveAll(filepath.Join(r.root, "pod-resources")); err != nil {
		t.Fatal(err)
	}
	r.holders("no socket", func(h Holders) bool { return strings.Contains(h.Err, "pod-resources/kubelet.sock is not there") })
	if err := k.Restart(); err != nil {
		t.Fatal(err)
	}
	r.holders("back", func(h Holders) bool { return h.Err == "" && has("GPU-1", "pod-1")(h) })
}

func TestPodResourcesDenied(t *testing.T) {
	r := newRig(t, snapshot(2))
	k := r.kubelet()
	k.SetFault(kubelettest.Fault{ListError: "not for you", AllocatableError: "disabled by a feature gate"})
	r.run()
	r.wait(k, gpu, listed(2, 2))
	r.whole(func(s Status) bool { return strings.Contains(s.AuditErr, "disabled by a feature gate") })
	h := r.holders("denied", func(h Holders) bool { return strings.Contains(h.Err, "not for you") })
	if h.By != nil {
		t.Errorf("%+v", h)
	}
	r.logged("not for you")
	k.SetFault(kubelettest.Fault{AllocatableError: "disabled by a feature gate"})
	h = r.holders("allowed", func(h Holders) bool { return h.Err == "" })
	r.holders("asked three times", func(now Holders) bool { return now.At.Sub(h.At) > 3*r.p.timing.refresh })
	// Nothing is audited, and nothing is wrong with that.
	if s := r.status(isRegistered); s.Registrations != 1 || s.AuditMismatches != 0 {
		t.Errorf("%+v", s)
	}
	for line, want := range map[string]int{
		"the kubelet does not say who has which device; the last answer stands for a while": 1,
		"what the kubelet believes of our devices cannot be checked":                        1,
	} {
		if n := r.logs.FilterMessage(line).Len(); n != want {
			t.Errorf("%q was logged %d times, want %d: %v", line, n, want, r.lines())
		}
	}
	k.SetFault(kubelettest.Fault{})
	r.whole(func(s Status) bool { return s.AuditErr == "" })
}

// A kubelet that takes the question and never answers holds up nobody.
func TestPodResourcesHang(t *testing.T) {
	r := newRig(t, snapshot(2))
	k := r.kubelet()
	socket := filepath.Join(r.root, "pod-resources", "kubelet.sock")
	if err := os.Remove(socket); err != nil {
		t.Fatal(err)
	}
	l, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close() //nolint:errcheck // it is not needed any more
	r.run()
	conn, err := l.Accept() // asked
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close() //nolint:errcheck // it is not needed any more
	r.wait(k, gpu, listed(2, 2))
	if _, err := k.Allocate(r.ctx, gpu, 1); err != nil {
		t.Error(err)
	}
	r.snaps.Store(with(r.snaps.Load(), 0, health.Unhealthy))
	r.wait(k, gpu, listed(2, 1))
	r.stop() // fails if it takes long
}

func TestNoPodResources(t *testing.T) {
	r := newRig(t, snapshot(2))
	k := r.kubelet()
	if err := os.RemoveAll(filepath.Join(r.root, "pod-resources")); err != nil {
		t.Fatal(err)
	}
	r.run()
	r.wait(k, gpu, listed(2, 2))
	s := r.whole(func(s Status) bool { return strings.Contains(s.AuditErr, "is not there") })
	if s.Err != "" {
		t.Errorf("%+v", s)
	}
	r.status(isRegistered)
}
