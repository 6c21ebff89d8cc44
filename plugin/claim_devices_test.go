package plugin

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/internal/kubelettest"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/offer"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/podresources"
)

// longSettle is a settle time that does not end during a test: endSettle ends it.
const longSettle = 10 * time.Minute

// endSettle makes the kubelet look old: its socket was made before the settle time.
func (h *harness) endSettle() {
	h.Helper()
	made := time.Now().Add(-2 * longSettle)
	if err := os.Chtimes(filepath.Join(h.root, "pod-resources", "kubelet.sock"), made, made); err != nil {
		h.Fatal(err)
	}
}

// claiming is a plugin that starts while a pod holds GPU-0 under another layout's ID, at a kubelet that is new and has not read its pods.
func claiming(t *testing.T) (*harness, *kubelettest.Kubelet) {
	first, k := startHarness(t, snapshot(2))
	first.allocate(k, "GPU-0")
	first.stop()
	k.SetFault(kubelettest.Fault{NoPods: true})
	first.restart(k)
	h := newHarnessIn(t, first.root, snapshot(2))
	h.p.timing.pods.Settle = longSettle
	h.p.pods = h.p.newPodResources()
	h.p.layouts.holders = &h.p.pods.Holders
	h.setConfig(sharedBy(2))
	h.run()
	return h, k
}

// Devices are offered only when a settled kubelet has said who holds them.
func TestClaimWaitsForHolders(t *testing.T) {
	t.Parallel()
	h, k := claiming(t)
	h.waitHolders(func(h podresources.Holders) bool { return h.Settling && h.By != nil })
	if s := h.waitPlugin(func(s Status) bool { return s.Err != "starting" }); len(s.Resources) > 0 ||
		!strings.Contains(s.Err, holdersUnknown) {
		t.Errorf("%+v before the kubelet has read its pods", s)
	}
	k.SetFault(kubelettest.Fault{})
	h.endSettle()
	h.waitResource(k, gpu, listed(4, 2))
	h.waitPlugin(func(s Status) bool {
		return len(s.Warnings) == 1 && strings.Contains(s.Warnings[0], "holds it as GPU-0 of nvidia.com/gpu")
	})
}

// A kubelet that does not tell who holds devices costs the node its devices for a moment only. The next kubelet is asked again.
func TestClaimWithoutHolders(t *testing.T) {
	t.Parallel()
	h := newHarness(t, snapshot(2))
	k := h.kubelet()
	k.SetFault(kubelettest.Fault{ListError: "denied"})
	h.run()
	h.waitResource(k, gpu, listed(2, 2))
	if h := h.p.Holders(); h.Unknown(time.Now()) == "" {
		t.Errorf("known: %+v", h)
	}
	k.SetFault(kubelettest.Fault{})
	h.waitHolders(holdersKnown)
	h.waitResource(k, gpu, listed(2, 2))
}

// While the devices are not claimed, no ID that nobody holds is offered: a kubelet that was away comes back with pods that are not known.
func TestClaimAgainAfterKubeletWithoutAnswer(t *testing.T) {
	t.Parallel()
	first, k := startHarness(t, snapshot(2))
	first.allocate(k, "GPU-0")
	first.stop()
	k.Stop()
	h := newHarnessIn(t, first.root, snapshot(2))
	h.p.timing.pods.Settle = longSettle
	h.p.pods = h.p.newPodResources()
	h.p.layouts.holders = &h.p.pods.Holders
	h.setConfig(sharedBy(2))
	h.run()
	h.waitHolders(func(r podresources.Holders) bool { return r.Err != "" && !r.Pending })
	k.SetFault(kubelettest.Fault{NoPods: true})
	h.restart(k)
	h.waitHolders(func(h podresources.Holders) bool { return h.Settling && h.Err == "" })
	if r := k.State().Resources[gpu]; slices.ContainsFunc(r.Devices,
		func(d kubelettest.Device) bool { return d.Healthy && strings.HasPrefix(d.ID, "GPU-0::") }) {
		t.Errorf("offered: %+v", r)
	}
	k.SetFault(kubelettest.Fault{})
	h.endSettle()
	h.waitResource(k, gpu, listed(4, 2))
}

// That the plugin serves is noted before its first registration, once. A disk that fails does not keep the devices from pods.
func TestNoteServing(t *testing.T) {
	t.Parallel()
	for name, failure := range map[string]error{"written": nil, "fails": errors.New("no space")} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			h := newHarness(t, snapshot(2))
			k := h.kubelet()
			var notes atomic.Int32
			h.p.SetNote(Note{Write: func(context.Context) error {
				if r := k.State().Resources[gpu]; r.Name != "" {
					t.Errorf("registered before: %+v", r)
				}
				notes.Add(1)
				return failure
			}})
			h.run()
			h.waitResource(k, gpu, listed(2, 2))
			h.setConfig(func(c *Config) { c.Resource = "example.com/gpu" })
			h.waitResource(k, "example.com/gpu", listed(2, 2))
			if n := notes.Load(); n != 1 {
				t.Errorf("noted %d times", n)
			}
			if n := len(h.warnings()); (n > 0) != (failure != nil) {
				t.Errorf("%d warnings: %v", n, h.logLines())
			}
		})
	}
}

// A prepared claim has its device from before the kubelet lists its container.
func TestPreparedClaimIsWithheld(t *testing.T) {
	cfg := configured(sharedBy(2))
	claims := offer.Claims{List: []offer.Claim{{
		UID: "c", Namespace: "ml", Name: "train",
		Parts: []offer.Part{{Name: "gpu-0", Device: "GPU-0"}},
	}}}
	l := newLayout(layoutInput{cfg: &cfg, snap: snapshot(2), facts: offer.Facts{Claims: claims}})
	if r := l.resources[0]; r.healthy() != 2 || r.Devices[0].countHealthy() != 0 {
		t.Errorf("%+v", r.Devices)
	}
	if texts := withheldTexts(l.withheld); len(texts) != 1 || !strings.Contains(texts[0], "claim ml/train has gpu-0") {
		t.Errorf("%q", texts)
	}
}

// An allocation counts from before its answer until the kubelet lists it, or lists its pods without it, as after an allocation that was
// refused.
func TestRecentAllocations(t *testing.T) {
	cfg, begin := configured(), time.Now()
	r := Layout(cfg, snapshot(2))[0]
	a := recentAllocations{settle: time.Second, maxAge: time.Minute}
	request := func(ids ...string) *pluginapi.AllocateRequest {
		return &pluginapi.AllocateRequest{ContainerRequests: []*pluginapi.ContainerAllocateRequest{{DevicesIds: ids}}}
	}
	a.add(r, request("GPU-1", "GPU-7"), begin)
	has := func(h podresources.Holders) bool { return len(a.holders(&h)["GPU-1"]) == 1 }
	answer := func(after time.Duration) podresources.Holders {
		at := begin.Add(after)
		return podresources.Holders{At: at, Asked: at, By: map[health.DeviceID][]podresources.Holder{}}
	}
	if !has(answer(0)) || !has(answer(time.Second)) {
		t.Error("forgotten before the kubelet can list it")
	}
	settling := answer(2 * time.Second)
	settling.Settling = true
	if !has(settling) {
		t.Error("forgotten at an answer of a new kubelet")
	}
	if got := a.holders(new(answer(0))); len(got) != 1 {
		t.Errorf("an unknown ID counts: %v", got)
	}
	if has(answer(1001 * time.Millisecond)) {
		t.Error("not forgotten")
	}
	a.add(r, request("GPU-1"), begin)
	if has(podresources.Holders{Err: "away", Asked: begin.Add(61 * time.Second)}) {
		t.Error("not forgotten without answers")
	}
}
