package binarytest

import (
	"fmt"
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
		if out, code := run(t, "status", "--config", n.Dir+"/config.yaml", "-o", output); code != 0 || !strings.Contains(out, "default/train") ||
			!strings.Contains(out, "pod-of-train") {
			t.Errorf("status -o %s: exit code %d:\n%s", output, code, out)
		}
	}
	n.awaitPage("/", 200, draDriver, "default/train", "pod-of-train")
	n.awaitPage("/readyz", 200)
	n.await("settled holders", func() bool { return n.snapshot().Kubelet.HoldersError == "" }) // a new kubelet has not read all its pods
	if out := n.command(1, "detach"); !strings.Contains(out, "default/pod-of-train") {
		t.Errorf("detach: %s", out)
	}
	// at another address, the agent is another driver
	for address, want := range map[string]string{"": "ok    DRA driver", "127.0.0.1:0": "fail  DRA driver"} {
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

// /readyz and doctor name what the API server lacks, and a container runtime that may ignore CDI.
func TestDRAFeaturesLacking(t *testing.T) {
	t.Parallel()
	n := newDRANode(t, kubelettest.V137)
	n.api.Lack(apiservertest.TaintsGate)
	n.setRuntime("containerd://1.7.27")
	n.write(n.config("dra"))
	n.run()
	n.awaitServing()
	n.awaitPage("/readyz", 200, "dra: the API server lacks "+apiservertest.TaintsGate, "containerd://1.7.27", "enable_cdi")
	n.awaitPage("/metrics", 200, `gpu_node_agent_cdi_runtime_info{cdi="depends"`, `version="containerd://1.7.27"`)
	n.wantDoctor(0, "warn  DRA driver", apiservertest.TaintsGate, "warn  CDI support", "containerd://1.7.27")
	n.write(strings.Replace(n.config("dra"), "cdi: {", "cdi: {runtime: supported, ", 1))
	n.awaitPage("/metrics", 200, `cdi="supported"`)
	n.wantDoctor(0, "ok    CDI support")
	if d := n.snapshot().DRA; strings.Contains(d.Warning, "containerd") {
		t.Errorf("warning %q", d.Warning)
	}
}

// On a container runtime that ignores CDI, known before the start, the agent publishes nothing and prepares nothing, and says why, until
// the runtime is upgraded.
func TestDRARuntimeIgnoresCDI(t *testing.T) {
	t.Parallel()
	n := newDRANode(t, kubelettest.V137)
	n.setRuntime("containerd://1.6.36")
	n.write(n.config("dra"))
	n.run()
	const reason = "the container runtime containerd://1.6.36 ignores CDI devices"
	n.awaitPage("/readyz", 503, "dra: "+reason)
	n.awaitPage("/metrics", 200, `gpu_node_agent_cdi_runtime_info{cdi="ignored"`, `version="containerd://1.6.36"`)
	n.await("registration", func() bool { return n.dra.Registered(draDriver) })
	if _, err := n.dra.Prepare(t.Context(), draDriver, n.claim("train", "gpu-3")); err == nil || !strings.Contains(err.Error(), reason) {
		t.Errorf("prepared with %v", err)
	}
	if out, _ := run(t, "status", "--config", n.Dir+"/config.yaml"); !strings.Contains(out, reason) {
		t.Errorf("status:\n%s", out)
	}
	n.wantDoctor(1, "fail  CDI support", reason)
	for _, r := range n.api.Requests() {
		if r.Resource == "resourceslices" && !r.DryRun && r.Verb == "create" {
			t.Errorf("published: %s", r)
		}
	}
	n.setRuntime("containerd://2.1.4")
	n.write(n.config("devicePlugin")) // the runtime is asked for again when it is needed again
	n.await("no driver", func() bool { return !n.dra.Registered(draDriver) })
	n.write(n.config("dra"))
	n.awaitServing()
	n.prepare(n.claim("other", "gpu-3"))
}

// With CDI names in the CRI alone, the device plugin offers nothing on such a runtime. NVIDIA's runtime may read annotations, so with them
// it warns. A Node that the agent may not read changes nothing.
func TestPluginRuntimeIgnoresCDI(t *testing.T) {
	t.Parallel()
	n := newDRANode(t, kubelettest.V137)
	n.setRuntime("containerd://1.6.36")
	config := func(list string) string { return n.config("devicePlugin", "deviceID: index, deviceList: ["+list+"]") }
	spec := `{"cdiVersion": "0.5.0", "kind": "nvidia.com/gpu", "devices": [`
	for i := range 8 {
		spec += strings.TrimPrefix(fmt.Sprintf(`, {"name": "%d"}`, i), map[bool]string{true: ", "}[i == 0])
	}
	if err := os.Mkdir(n.Dir+"/cdi", 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(n.Dir+"/cdi/nvidia.json", []byte(spec+"]}"), 0o600); err != nil {
		t.Fatal(err)
	}
	allocatable := func(want int) {
		t.Helper()
		n.await("allocatable GPUs", func() bool {
			r := n.kubelet.State().Resources["nvidia.com/gpu"]
			return r.Connected && r.Capacity() == 8 && r.Allocatable() == want
		})
	}
	const ignores = "the container runtime containerd://1.6.36 ignores CDI devices, and pods would run without their GPU"
	n.write(config("cdi-cri"))
	n.run()
	n.awaitPage("/readyz", 503, "plugin: "+ignores+"; upgrade")
	allocatable(0)
	n.wantDoctor(1, "fail  CDI support", ignores)
	n.write(config("cdi-annotations"))
	n.awaitPage("/readyz", 200, "plugin: "+ignores+", unless NVIDIA's container runtime")
	allocatable(8)
	n.wantDoctor(0, "warn  CDI support", ignores)
	n.write(config("cdi-cri"))
	n.awaitPage("/readyz", 503, ignores)

	n.kill()
	n.api.Deny("get nodes")
	n.run()
	n.awaitPage("/readyz", 200)
	allocatable(8)
	n.awaitPage("/metrics", 200, `gpu_node_agent_cdi_runtime_info{cdi="unknown"`)
	n.wantDoctor(0, "info  CDI support", "forbidden")
}

// setRuntime sets the container runtime that the kubelet reports.
func (n *draNode) setRuntime(version string) {
	node := &corev1.Node{}
	node.Name = draNodeName
	node.Status.NodeInfo.ContainerRuntimeVersion, node.Status.NodeInfo.KubeletVersion = version, "v1.37.0"
	n.api.Put(node)
}

// wantDoctor runs doctor on the node.
func (n *draNode) wantDoctor(code int, parts ...string) {
	n.t.Helper()
	doctor := exec.CommandContext(n.t.Context(), binary, "doctor", "--config", n.Dir+"/config.yaml")
	doctor.Env = append(os.Environ(), raceOptions, "NODE_NAME="+draNodeName)
	out, err := doctor.Output()
	for _, part := range parts {
		if doctor.ProcessState.ExitCode() != code || !strings.Contains(string(out), part) {
			n.t.Errorf("%v, want exit code %d and %q:\n%s", err, code, part, out)
		}
	}
}
