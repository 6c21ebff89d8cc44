package binarytest

import (
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"

	"github.com/gpu-node-agent/gpu-node-agent/agent/status"
	"github.com/gpu-node-agent/gpu-node-agent/internal/apiservertest"
	"github.com/gpu-node-agent/gpu-node-agent/internal/kubelettest"
)

// status, detach and doctor show a claim with its pod.
func TestDRAViews(t *testing.T) {
	t.Parallel()
	n := startDRANode(t, kubelettest.V137)
	c := n.claim("train", "gpu-3", "gpu-4")
	n.prepare(c)
	free := n.hold(c, "gpu-3", "gpu-4")
	pods := []status.Pod{{Namespace: "default", Pod: "pod-of-train"}}
	n.await("the claim with its pod", func() bool {
		d := n.snapshot().DRA
		return d != nil && d.Registered && d.Error == "" && !d.Behind && d.Devices == 8 && d.Driver == draDriver && len(d.Claims) == 1 &&
			slices.Equal(d.Claims[0].Pods, pods) && slices.Equal(d.Claims[0].Devices, []string{"gpu-3", "gpu-4"})
	})
	holders := n.snapshot().GPUs[3].Holders
	if len(holders) != 1 || holders[0].Claim == nil || holders[0].Claim.Name != "train" {
		t.Errorf("GPU 3 is held by %+v", holders)
	}
	for _, output := range []string{"table", "wide"} {
		if out, code := run(t, "status", "--config", n.Dir+"/config.yaml", "-o", output); code != 0 || !strings.Contains(out, "default/train") || !strings.Contains(out, "pod-of-train") {
			t.Errorf("status -o %s: exit code %d:\n%s", output, code, out)
		}
	}
	n.awaitPage("/", 200, draDriver, "default/train", "pod-of-train")
	n.awaitPage("/readyz", 200)
	n.await("settled holders", func() bool { return n.snapshot().Kubelet.HoldersError == "" }) // a new kubelet has not read all its pods
	if out := n.command(1, "detach"); !strings.Contains(out, "default/pod-of-train") {
		t.Errorf("detach: %s", out)
	}
	for address, want := range map[string]string{"": "ok    DRA driver", "127.0.0.1:0": "fail  DRA driver"} { // at another address, the agent is another driver
		args := []string{"doctor", "--config", n.Dir + "/config.yaml"}
		if address != "" {
			args = append(args, "--metrics.listen", address)
		}
		out, code := run(t, args...)
		if !strings.Contains(out, want) || !strings.Contains(out, "ok    DRA directories") || (code == 0) != (address == "") {
			t.Errorf("doctor at %q: exit code %d, want %q:\n%s", address, code, want, out)
		}
	}
	free()
	n.unprepare(c)
	n.await("no claim", func() bool { return len(n.snapshot().DRA.Claims) == 0 })
}

// /readyz and doctor name what the API server lacks, and doctor a container runtime that ignores CDI.
func TestDRAFeaturesLacking(t *testing.T) {
	t.Parallel()
	n := newDRANode(t, kubelettest.V137)
	n.api.Lack(apiservertest.TaintsGate)
	old := &corev1.Node{}
	old.Name = draNodeName
	old.Status.NodeInfo.ContainerRuntimeVersion = "containerd://1.6.38"
	n.api.Put(old)
	n.write(n.config("dra"))
	n.run()
	n.awaitServing()
	n.awaitPage("/readyz", 200, "dra: the API server lacks "+apiservertest.TaintsGate)
	doctor := exec.CommandContext(t.Context(), binary, "doctor", "--config", n.Dir+"/config.yaml")
	doctor.Env = append(os.Environ(), raceOptions, "NODE_NAME="+draNodeName)
	out, err := doctor.Output()
	for _, want := range []string{"warn  DRA driver", apiservertest.TaintsGate, "fail  CDI support", "containerd://1.6.38"} {
		if err == nil || !strings.Contains(string(out), want) {
			t.Errorf("%v, want %q:\n%s", err, want, out)
		}
	}
}
