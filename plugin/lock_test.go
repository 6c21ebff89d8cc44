package plugin

import (
	"context"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/zap"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/internal/kubelettest"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/nodelock"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/offer"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/podresources"
)

// lock gives the plugin a lock of the node that no process holds yet. end releases it, as the end of the process.
func (h *harness) lock(pod string) (l *nodelock.Lock, end func()) {
	l = nodelock.New(nodelock.Holder{Pod: pod, PID: 1}, zap.NewNop())
	h.p.SetLock(l)
	ctx, cancel := context.WithCancel(h.ctx)
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		_ = l.Run(ctx)
	}()
	end = sync.OnceFunc(func() {
		cancel()
		<-ended
		l.Close()
	})
	h.Cleanup(end)
	return l, end
}

// Of two agents on a node, the second serves when the first has ended. It takes no devices from the pods of the first.
func TestPluginAwaitsLock(t *testing.T) {
	t.Parallel()
	first := newHarness(t, snapshot(2))
	k := first.kubelet()
	first.setConfig(sharedBy(2))
	lock, endFirst := first.lock("first")
	first.run()
	first.waitPlugin(func(s Status) bool {
		return strings.Contains(s.Err, "about to acquire the lock") && len(s.Resources) == 0
	})
	lock.Request(first.root)
	first.waitResource(k, gpu, listed(4, 4))

	second := newHarnessIn(t, first.root, snapshot(2))
	second.setConfig(sharedBy(2))
	second.p.timing.settle = 300 * time.Millisecond
	next, _ := second.lock("second")
	next.Request(first.root)
	second.run()
	waits := func(s Status) bool { return strings.Contains(s.Err, "another agent serves this node: first") }
	if s := second.waitPlugin(waits); len(s.Resources) > 0 || s.Off || len(second.p.Shares()) > 0 {
		t.Errorf("%+v, shares %+v", s, second.p.Shares())
	}
	if r := second.p.PluginReleased().Load(); r == nil || r.Released || !strings.Contains(r.Reason, "another agent") {
		t.Errorf("released: %+v", r)
	}
	// The kubelet's devices belong to the first agent, not to another plugin.
	poll(second, "the kubelet's devices", second.p.pods.Allocatable.Load, func(a *podresources.Allocatable) bool {
		return a != nil && len(a.IDs[gpu]) == 4
	})
	if others := second.p.OtherPlugins(); len(others) > 0 {
		t.Errorf("other plugins: %v", others)
	}
	first.allocate(k, "GPU-0::0")

	first.stop()
	first.waitResource(k, gpu, disconnected)
	if !waits(second.p.Status()) { // the process still holds the lock
		t.Errorf("%+v", second.p.Status())
	}
	endFirst()
	second.waitResource(k, gpu, listed(4, 4))
	second.waitHolders(heldBy("GPU-0", "pod-1"))
	if shares := second.p.Shares(); len(shares) != 2 {
		t.Errorf("shares %+v", shares)
	}
}

// registerWithoutQueries is register for a plugin that asks the kubelet only for a reason, such as an allocation. When it returns, there is
// none.
func (h *harness) registerWithoutQueries() *kubelettest.Kubelet {
	h.Helper()
	h.p.timing.pods.Refresh, h.p.timing.pods.MaxAge = time.Minute, time.Hour
	h.p.pods = h.p.newPodResources()
	h.p.layouts.holders = &h.p.pods.Holders
	k := h.kubelet()
	h.run()
	poll(h, "registration", func() Status { h.p.RefreshHolders(); return h.p.Status() },
		func(s Status) bool { return len(s.Resources) == 1 && isRegistered(s.Resources[0]) })
	h.waitStatus(func(s ResourceStatus) bool { return s.Audited })
	return k
}

// The device of a prepared claim is not offered, also before the kubelet lists the claim's container, and the holders have its container.
func TestPluginFollowsClaims(t *testing.T) {
	t.Parallel()
	h := newHarness(t, snapshot(2))
	prepared := &health.Latest[offer.Claims]{}
	claim := offer.Claims{List: []offer.Claim{{
		UID: "c", Namespace: "ml", Name: "train",
		Parts: []offer.Part{{Name: "gpu-1", Device: "GPU-1"}},
	}}}
	h.p.SetClaims(func(namespace, name string, c podresources.ClaimRef) (health.DeviceID, bool, bool) {
		return "GPU-1", false, namespace == "ml" && name == "gpu-1" && c.Name == "train"
	}, prepared)
	k := h.registerWithoutQueries()
	if f := h.p.Facts(h.p.Holders()); len(f.Claims.List) != 0 || f.NoPlugin {
		t.Errorf("%+v", f)
	}
	for _, missing := range []bool{true, false} {
		h.p.SetNote(Note{Missing: func() bool { return missing }})
		if f := h.p.Facts(h.p.Holders()); f.NoPlugin != missing {
			t.Errorf("note missing %v: %+v", missing, f)
		}
	}
	prepared.Store(&claim)
	h.waitResource(k, gpu, listed(2, 1))
	h.waitPlugin(func(s Status) bool { return len(s.Warnings) == 1 && strings.Contains(s.Warnings[0], "claim ml/train") })
	if f := h.p.Facts(h.p.Holders()); len(f.Claims.List) != 1 || f.Now.IsZero() {
		t.Errorf("%+v", f)
	}
	pod := kubelettest.Container{Namespace: "ml", Pod: "one", Name: "main"}
	k.HoldClaim(kubelettest.HeldClaim{
		Container: pod, Claim: "train", Driver: "gpu.nvidia.com", Pool: "node",
		Devices: []kubelettest.HeldDevice{{Name: "gpu-1"}},
	})
	h.p.RefreshHolders()
	h.waitHolders(heldBy("GPU-1", "one"))
	prepared.Store(&offer.Claims{})
	h.waitPlugin(func(s Status) bool { return len(s.Warnings) == 1 && strings.Contains(s.Warnings[0], "ml/one") })
	k.FreeClaims(pod)
	h.p.RefreshHolders()
	h.waitResource(k, gpu, listed(2, 2))
}

func TestPluginKnowsUnschedulable(t *testing.T) {
	t.Parallel()
	h := newHarness(t, snapshot(2))
	if texts, known := h.p.Unschedulable(); known || len(texts) > 0 {
		t.Errorf("before the start: %q, %v", texts, known)
	}
	k := h.register()
	h.allocate(k, "GPU-0")
	h.waitHolders(heldBy("GPU-0", "pod-1"))
	if texts, known := h.p.Unschedulable(); !known || len(texts) > 0 {
		t.Errorf("all healthy: %q, %v", texts, known)
	}
	h.setHealth(0, health.Unhealthy)
	if texts, known := h.p.Unschedulable(); !known || len(texts) != 1 ||
		!strings.HasPrefix(texts[0], "1 free nvidia.com/gpu cannot be scheduled") {
		t.Errorf("one unhealthy: %q, %v", texts, known)
	}
	if s := h.waitStatus(isRegistered); s.Unschedulable == nil || s.Unschedulable.Devices != 1 {
		t.Errorf("%+v", s)
	}
}

// A caller can ask for an answer of the kubelet that is newer than its question.
func TestPluginAsksHolders(t *testing.T) {
	t.Parallel()
	h := newHarness(t, snapshot(2))
	k := h.registerWithoutQueries()
	h.allocate(k, "GPU-1") // is followed without a question
	h.waitHolders(heldBy("GPU-1", "pod-1"))
	if _, err := k.AllocateIDs(h.ctx, gpu, "GPU-0"); err != nil {
		t.Fatal(err)
	}
	if holders := h.p.AskHolders(h.ctx, shortTimeout*10); !heldBy("GPU-0", "pod-2")(holders) {
		t.Errorf("%+v", holders)
	}
	if latest := h.p.LatestHolders().Load(); !heldBy("GPU-0", "pod-2")(*latest) {
		t.Errorf("%+v", latest)
	}
}
