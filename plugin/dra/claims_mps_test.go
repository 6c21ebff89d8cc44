package dra

import (
	"reflect"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	resourceapi "k8s.io/api/resource/v1"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/plugin"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/mps"
)

// awaitMPS waits until these MPS daemons are desired.
func (n *claimNode) awaitMPS(want ...mps.Spec) {
	n.t.Helper()
	root, control := mps.Root(n.cfg.Sharing.MPS.Root), n.cfg.Sharing.MPS.Control
	limit := time.After(10 * time.Second)
	for {
		desired, changed := n.mps.Watch()
		if desired != nil && slices.Equal(desired.Daemons, want) && desired.Root == root && desired.Control == control {
			return
		}
		select {
		case <-changed:
		case <-limit:
			n.t.Fatalf("got %+v, want %+v of %s by %s", desired, want, root, control)
		}
	}
}

// Each device that claims use by MPS has one daemon, with the limits of a whole device. The limits of shares are in the environment of
// containers.
func TestClaimsOrderMPSDaemons(t *testing.T) {
	n := newClaimNode(t, func(c *plugin.Config) {
		c.Sharing.Memory.Resource, c.Sharing.Memory.Devices, c.Sharing.Memory.Enforcement = "nvidia.com/gpu-memory", []string{"2"},
			plugin.EnforceMPS
	})
	small := withConfig(claim("small", result(mig0)), "FromClaim", opaque("MigDeviceConfig", `,"sharing":{"strategy":"MPS"}`))
	large := withConfig(claim("large", result("gpu-1")), "FromClaim", gpuConfigMPS)
	one, two := claim("one", result("gpu-2", share("s", gib))), claim("two", result("gpu-2", share("t", 2*gib)))
	other := claim("other", result("gpu-0"))
	for _, c := range []*resourceapi.ResourceClaim{small, one, two, large, other} {
		n.must(c)
	}
	gpu1 := mps.Spec{Device: "GPU-1", Kind: health.KindGPU, GPU: "GPU-1", Index: 1, ThreadPercentage: 50, PinnedMemory: 10 * gib}
	gpu2 := mps.Spec{Device: "GPU-2", Kind: health.KindGPU, GPU: "GPU-2", Index: 2, ThreadPercentage: 100}
	mig := mps.Spec{Device: "MIG-0", Kind: health.KindMIG, GPU: "GPU-3", Index: 3, ThreadPercentage: 100}
	n.awaitMPS(gpu1, gpu2, mig)
	if err := n.unprepare(one); err != nil {
		t.Fatal(err)
	}
	n.update(func(*health.Snapshot) { n.cfg.Sharing.MPS.Control = "/usr/bin/other-control" })
	n.awaitMPS(gpu1, gpu2, mig)
	n.update(func(*health.Snapshot) { n.cfg.Sharing.MPS.Root = "/other" })
	n.awaitMPS(gpu1, gpu2, mig)
	if err := n.unprepare(two); err != nil {
		t.Fatal(err)
	}
	n.awaitMPS(gpu1, mig)
	n.update(func(s *health.Snapshot) { // GPU-3 and its MIG devices are missing
		s.Devices = slices.DeleteFunc(s.Devices, func(d health.DeviceState) bool { return d.Device.Index == 3 })
	})
	n.awaitMPS(gpu1)
}

// A claim waits until its MPS daemon is ready with its limits; MPS may round them.
func TestPrepareAwaitsMPS(t *testing.T) {
	ready := func(threads float64, pinned uint64) *health.MPSDaemon {
		return &health.MPSDaemon{Ready: true, ThreadPercentage: threads, PinnedMemory: pinned}
	}
	unlimited := withConfig(claim("a", result("gpu-0")), "FromClaim", opaque("GpuConfig", `,"sharing":{"strategy":"MPS"}`))
	limited := withConfig(claim("a", result("gpu-0")), "FromClaim", gpuConfigMPS) // 50 percent, 10 GiB
	for name, c := range map[string]struct {
		claim  *resourceapi.ResourceClaim
		daemon *health.MPSDaemon
		reason string // empty: it is ready
	}{
		"none":     {limited, nil, "not examined yet"},
		"starting": {limited, &health.MPSDaemon{Reason: "it starts"}, "it starts"},
		"leaving": {
			limited, &health.MPSDaemon{Ready: true, Leaving: true, ThreadPercentage: 50, PinnedMemory: 10 * gib},
			"not ready",
		},
		"ready":                  {limited, ready(50, 10*gib), ""},
		"one percent more":       {limited, ready(51, 10*gib), ""},
		"two percent more":       {limited, ready(52, 10*gib), "its limits are not set yet"},
		"one percent less":       {limited, ready(49, 10*gib), ""},
		"two percent less":       {limited, ready(48, 10*gib), "its limits are not set yet"},
		"1 GiB more memory":      {limited, ready(50, 11*gib), ""},
		"more memory":            {limited, ready(50, 11*gib+1), "its limits are not set yet"},
		"no limit of threads":    {unlimited, ready(100, 0), ""},
		"a limit of threads":     {unlimited, ready(50, 0), "its limits are not set yet"},
		"a limit of memory only": {unlimited, ready(100, 80*gib), ""}, // of one before; the daemon's default is no limit of this claim
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			n := newClaimNode(t)
			n.prepare.timing.mps = 10 * time.Millisecond
			n.stopMPS()
			n.device("GPU-0", func(d *health.DeviceState) { d.MPS = c.daemon })
			if c.reason == "" {
				n.must(c.claim)
				return
			}
			n.refused(c.claim, reasonMPSNotReady, "device gpu-0", c.reason)
			if got := n.prepared(); len(got) != 1 { // its daemon continues to start
				t.Errorf("reserved %v", got)
			}
			n.prepare.timing.mps = 10 * time.Second
			answer := make(chan error, 1)
			go func() { answer <- n.call(c.claim).Err }()
			d := n.claims.Load().ByUID[c.claim.UID].Devices[0]
			n.device("GPU-0", func(s *health.DeviceState) { s.MPS = ready(float64(d.Threads), d.Pinned) })
			if err := <-answer; err != nil {
				t.Error(err)
			}
		})
	}
}

// A device that vanishes while its MPS daemon starts is the reason.
func TestPrepareAwaitsMPSOfMissingDevice(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newClaimNode(t)
		defer n.stop()
		n.stopMPS()
		begin, vanished := time.Now(), make(chan struct{})
		go func() {
			defer close(vanished)
			<-time.After(time.Second)
			n.update(func(s *health.Snapshot) { s.Devices = slices.Delete(s.Devices, 1, 2) })
		}()
		n.refused(withConfig(claim("a", result("gpu-1")), "FromClaim", gpuConfigMPS), reasonMPSNotReady, "device gpu-1", "the device is missing")
		if took := time.Since(begin); took > 45*time.Second { // then the kubelet's call ends
			t.Errorf("took %v", took)
		}
		<-vanished
	})
}

// The last device of a claim by MPS decides, also if it is missing.
func TestPrepareAwaitsAllMPSDaemons(t *testing.T) {
	n := newClaimNode(t)
	n.prepare.timing.mps = 10 * time.Millisecond
	n.stopMPS()
	n.device("GPU-0", func(d *health.DeviceState) { d.MPS = &health.MPSDaemon{Ready: true, ThreadPercentage: 50} })
	two := withConfig(claim("a", result("gpu-2", byRequest("plain")), result("gpu-0", byRequest("b")), result("gpu-1", byRequest("c"))),
		"FromClaim", gpuConfigMPS, "b", "c")
	n.refused(two, reasonMPSNotReady, "device gpu-1", "not examined yet", "mps-daemon must run")
	n.prepare.timing.mps = 10 * time.Second
	answer := make(chan error, 1)
	go func() { answer <- n.call(two).Err }()
	n.device("GPU-1", func(d *health.DeviceState) { d.MPS = &health.MPSDaemon{Ready: true, ThreadPercentage: 50} })
	if err := <-answer; err != nil {
		t.Fatal(err)
	}
	want := []bool{false, true, true}
	var got []bool
	for _, d := range n.claims.Load().ByUID["uid-a"].Devices {
		got = append(got, d.MPS)
	}
	if !reflect.DeepEqual(got, want) {
		t.Errorf("by MPS: %v, want %v", got, want)
	}
}
