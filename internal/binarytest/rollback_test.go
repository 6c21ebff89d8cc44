package binarytest

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"

	"github.com/gpu-node-agent/gpu-node-agent/internal/kubelettest"
)

// view makes a directory with parts of the kubelet's directory, as a pod with these mounts sees it.
func (n *draNode) view(parts ...string) (dir string) {
	n.t.Helper()
	dir = filepath.Join(n.Dir, "view")
	for _, part := range parts {
		if err := os.MkdirAll(filepath.Join(n.Dir, part), 0o750); err != nil {
			n.t.Fatal(err)
		}
		if err := os.MkdirAll(filepath.Dir(filepath.Join(dir, part)), 0o750); err != nil {
			n.t.Fatal(err)
		}
		if err := os.Symlink(filepath.Join(n.Dir, part), filepath.Join(dir, part)); err != nil {
			n.t.Fatal(err)
		}
	}
	return dir
}

// A release with DRA, rolled back to one without its mounts, and DRA again: the devices that pods have got from the device plugin meanwhile
// are tainted and given to no claim, and the free ones are published. They are free when the pods have ended.
func TestDRAAfterRollback(t *testing.T) {
	t.Parallel()
	n := startDRANode(t, kubelettest.V137)
	n.stop()
	n.write(strings.ReplaceAll(n.config("devicePlugin"), "kubeletDir: DIR", "kubeletDir: "+n.view("device-plugins", "pod-resources")))
	n.run()
	n.awaitAllocatable(n.kubelet, 8)
	a, err := n.kubelet.Allocate(t.Context(), resource, 3)
	if err != nil {
		t.Fatal(err)
	}
	n.stop()
	n.api.WipeSlices(draNodeName) // as the kubelet does 30 seconds after it has lost the driver

	n.write(n.config("dra"))
	n.run()
	n.await("slices with the held devices", func() bool { return n.dra.Registered(draDriver) && len(n.devices()) == 8 })
	var held, free []string
	for name, d := range n.devices() {
		isHeld := slices.Contains(a.Devices, *d.Attributes["uuid"].StringValue)
		if taints := n.taints(name); isHeld != slices.Equal(taints, []string{"gpu-node-agent/withheld:NoSchedule"}) {
			t.Errorf("%s, held %v, has the taints %v", name, isHeld, taints)
		}
		if isHeld {
			held = append(held, name)
		} else {
			free = append(free, name)
		}
	}
	if len(held) != 3 {
		t.Fatalf("held: %v", held)
	}
	pod := a.Container.Namespace + "/" + a.Container.Pod
	n.awaitPage("/readyz", 200, "is not offered to new claims: "+pod) // a warning
	refused := n.claim("refused", held[0])
	if _, err := n.dra.Prepare(t.Context(), draDriver, refused); err == nil || !strings.Contains(err.Error(), pod) {
		t.Errorf("a claim for a device of a pod: %v", err)
	}
	n.prepare(n.claim("fits", free[0]))
	n.kubelet.Free(resource, a.Devices...)
	n.await("no taint", func() bool { return len(n.taints(held[0])) == 0 })
	n.prepare(refused)
}

// A release with DRA, rolled back to one without its mounts while a pod has a claim: the agent names the pod that cannot end, and the cure,
// and with the cure it ends.
func TestDRARollbackNamesClaims(t *testing.T) {
	t.Parallel()
	n := startDRANode(t, kubelettest.V137)
	c := n.claim("train", "gpu-5")
	n.prepare(c)
	free := n.hold(c, "gpu-5")
	n.stop()
	without := strings.ReplaceAll(n.config("devicePlugin"), "kubeletDir: DIR", "kubeletDir: "+n.view("device-plugins", "pod-resources"))
	n.write(strings.ReplaceAll(without, "{kubeconfig:", "{enabled: true, kubeconfig:"))
	n.run()
	const cure = "--set dra.enabled=true --set config.plugin.api=devicePlugin"
	n.awaitPage("/readyz", 200, "dra: this agent has no driver "+draDriver, "default/pod-of-train", cure)
	if text, _ := run(t, "status", "--config", n.Dir+"/config.yaml"); !strings.Contains(strings.Join(strings.Fields(text), " "), cure) {
		t.Errorf("status does not name the cure:\n%s", text)
	}
	n.await("the event", func() bool {
		return slices.ContainsFunc(n.api.Events(), func(e corev1.Event) bool {
			return e.Reason == "GPUClaimsWithoutDriver" && e.InvolvedObject.Name == draNodeName &&
				strings.Contains(e.Message, "default/pod-of-train")
		})
	})
	n.stop()

	n.write(n.config("devicePlugin"))
	n.run()
	n.awaitPage("/readyz", 200, "default/train", "pod-of-train")
	if _, text := n.get("/readyz"); strings.Contains(text, cure) {
		t.Errorf("/readyz names the cure although it is in force: %s", text)
	}
	free()
	n.unprepare(c)
	n.awaitAllocatable(n.kubelet, 8)
	n.await("no note of the claim", func() bool { _, text := n.get("/readyz"); return text == "ok\n" })
}

// Claims of another driver of the same name, such as NVIDIA's, are its own.
func TestDRAForeignClaims(t *testing.T) {
	t.Parallel()
	n := newDRANode(t, kubelettest.V137)
	n.kubelet.HoldClaim(kubelettest.HeldClaim{
		Container: kubelettest.Container{Namespace: "default", Pod: "other", Name: "main"}, Claim: "other", Driver: draDriver, Pool: draNodeName,
		Devices: []kubelettest.HeldDevice{{Name: "gpu-1", CDI: []string{"k8s.gpu.nvidia.com/claim=1-gpu-1"}}},
	})
	n.write(n.config("devicePlugin"))
	n.run()
	n.await("the foreign claim", func() bool { return n.countHolders("other") == 1 })
	if _, text := n.get("/readyz"); strings.Contains(text, "no driver") {
		t.Errorf("/readyz: %s", text)
	}
}

// Without the kubelet's pod resources claims are prepared as long as no device plugin has served since the boot.
func TestDRAWithoutPodResources(t *testing.T) {
	t.Parallel()
	n := newDRANode(t, kubelettest.V137)
	n.kubelet.SetFault(kubelettest.Fault{ListError: "denied"})
	n.write(n.config("dra"))
	n.run()
	n.awaitServing()
	first := n.claim("first", "gpu-0")
	n.prepare(first)
	n.unprepare(first)
	n.stop()

	n.kubelet.SetFault(kubelettest.Fault{})
	n.write(n.config("devicePlugin"))
	n.run()
	n.awaitAllocatable(n.kubelet, 8)
	if text := readFile(n.nodeFile()); !strings.Contains(text, `"devicePlugin":true`) {
		t.Errorf("the state file does not say that the device plugin serves: %s", text)
	}
	n.reload(n.config("dra"))
	n.awaitServing()
	n.stop()

	n.kubelet.SetFault(kubelettest.Fault{ListError: "denied"})
	n.run()
	n.awaitPage("/readyz", 503, "unknown which pods hold devices", "denied")
	n.await("the registration", func() bool { return n.dra.Registered(draDriver) })
	next := n.claim("next", "gpu-1")
	n.await("the refusal", func() bool { // the first ones may be that the driver has no devices yet
		_, err := n.dra.Prepare(t.Context(), draDriver, next)
		if err == nil {
			t.Fatal("a claim is prepared")
		}
		return strings.Contains(err.Error(), "unknown which pods hold devices")
	})
	n.kubelet.SetFault(kubelettest.Fault{})
	n.awaitServing()
	n.prepare(next)
}
