package plugin

import (
	"net"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/internal/kubelettest"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/podresources"
)

func TestHoldersFollowKubelet(t *testing.T) {
	t.Parallel()
	h := newHarness(t, snapshot(4))
	k := h.kubelet()
	if holders := h.p.Holders(); holders.Err == "" || holders.By != nil || !holders.At.IsZero() {
		t.Errorf("before Run: %+v", holders)
	}
	h.run()
	h.waitResource(k, gpu, listed(4, 4))
	h.waitHolders(func(h podresources.Holders) bool {
		return h.Err == "" && h.By != nil && len(h.By) == 0 && !h.At.IsZero()
	})
	train := kubelettest.Container{Namespace: "ml", Pod: "train", Name: "torch"}
	a, err := k.AllocateTo(h.ctx, train, gpu, 1)
	if err != nil {
		t.Fatal(err)
	}
	held := a.Devices[0]
	holders := h.waitHolders(heldBy(held, "train"))
	if want := (podresources.Holder{
		Namespace: "ml", Pod: "train", Container: "torch", Resource: gpu,
		DeviceID: held,
	}); holders.By[health.DeviceID(held)][0] != want {
		t.Errorf("%+v, want %+v", holders.By, want)
	}

	// A new kubelet lists no pods for a moment, which removes no holder.
	before := h.p.Holders()
	k.Stop()
	k.SetFault(kubelettest.Fault{NoPods: true}) // not before: the client would trust the old kubelet
	h.restart(k)
	h.waitHolders(func(h podresources.Holders) bool { return h.At.After(before.At) })
	if now := h.p.Holders(); !heldBy(held, "train")(now) && time.Since(before.At) < h.p.timing.pods.Settle {
		t.Errorf("holder removed at once: %+v", now)
	}
	// After the settle time the answer counts.
	h.waitHolders(func(h podresources.Holders) bool { return h.Err == "" && len(h.By) == 0 })
	k.SetFault(kubelettest.Fault{})
	h.waitHolders(heldBy(held, "train"))
	k.Free(gpu, held)
	h.waitHolders(func(h podresources.Holders) bool { return len(h.By) == 0 })
}

func TestHoldersExpireWithoutKubelet(t *testing.T) {
	t.Parallel()
	h, k := startHarness(t, snapshot(2))
	h.allocate(k, "GPU-1")
	h.waitHolders(heldBy("GPU-1", "pod-1"))
	k.Stop()
	holders := h.waitHolders(func(h podresources.Holders) bool { return h.Err != "" })
	if !heldBy("GPU-1", "pod-1")(holders) && time.Since(holders.At) < h.p.timing.pods.MaxAge {
		t.Errorf("removed at once: %+v", holders)
	}
	if holders = h.waitHolders(func(h podresources.Holders) bool { return h.By == nil }); holders.Err == "" || holders.At.IsZero() {
		t.Errorf("%+v", holders)
	}
	h.remove(filepath.Join(h.root, "pod-resources"))
	h.waitHolders(func(h podresources.Holders) bool { return strings.Contains(h.Err, "pod-resources/kubelet.sock") })
	h.restart(k)
	h.waitHolders(func(h podresources.Holders) bool { return h.Err == "" && heldBy("GPU-1", "pod-1")(h) })
}

func TestPodResourcesDenied(t *testing.T) {
	t.Parallel()
	h := newHarness(t, snapshot(2))
	k := h.kubelet()
	k.SetFault(kubelettest.Fault{ListError: "permission denied", AllocatableError: "disabled by a feature gate"})
	h.run()
	h.waitResource(k, gpu, listed(2, 2))
	h.waitPlugin(func(s Status) bool { return strings.Contains(s.AuditErr, "disabled by a feature gate") })
	if denied := h.waitHolders(func(h podresources.Holders) bool { return strings.Contains(h.Err, "permission denied") }); denied.By != nil {
		t.Errorf("%+v", denied)
	}
	poll(h, "warnings", func() int { return len(h.warnings()) }, func(n int) bool { return n == 1 })
	k.SetFault(kubelettest.Fault{AllocatableError: "disabled by a feature gate"})
	h.waitHolders(holdersKnown)
	poll(h, "a warning for each call", func() int { return len(h.warnings()) }, func(n int) bool { return n == 2 })
	allowed := h.p.Holders()
	h.waitHolders(func(now podresources.Holders) bool { return now.At.Sub(allowed.At) > 3*h.p.timing.pods.Refresh })
	if s := h.waitStatus(isRegistered); s.Registrations != 1 || s.AuditMismatches != 0 {
		t.Errorf("without an audit: %+v", s)
	}
	if n := len(h.warnings()); n != 2 {
		t.Errorf("%d warnings: %v", n, h.logLines())
	}
	k.SetFault(kubelettest.Fault{})
	h.waitPlugin(func(s Status) bool { return s.AuditErr == "" })
}

// A pod-resources API that does not answer delays nothing else.
func TestPodResourcesHang(t *testing.T) {
	h := newHarness(t, snapshot(2))
	h.p.timing.endTimeout = shortTimeout // the registration must not wait for the answer
	k := h.kubelet()
	socket := filepath.Join(h.root, "pod-resources", "kubelet.sock")
	h.remove(socket)
	l, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close() //nolint:errcheck // not needed any more
	h.run()
	conn, err := l.Accept() // the query
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close() //nolint:errcheck // not needed any more
	h.waitResource(k, gpu, listed(2, 2))
	if _, err := k.Allocate(h.ctx, gpu, 1); err != nil {
		t.Error(err)
	}
	h.setHealth(0, health.Unhealthy)
	h.waitResource(k, gpu, listed(2, 1))
	h.stop() // fails if it takes long
}

func TestPluginWithoutPodResources(t *testing.T) {
	h := newHarness(t, snapshot(2))
	k := h.kubelet()
	h.remove(filepath.Join(h.root, "pod-resources"))
	h.run()
	h.waitResource(k, gpu, listed(2, 2))
	if s := h.waitPlugin(func(s Status) bool { return strings.Contains(s.AuditErr, "kubelet.sock") }); s.Err != "" {
		t.Errorf("%+v", s)
	}
	h.waitStatus(isRegistered)
}
