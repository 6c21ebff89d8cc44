package binarytest

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	quantity "k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/types"

	"github.com/gpu-node-agent/gpu-node-agent/internal/apiservertest"
	"github.com/gpu-node-agent/gpu-node-agent/internal/kubelettest"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/cdi"
)

const (
	draNodeName = "node1"
	draDriver   = "gpu.nvidia.com"
)

// draNode is an agent beside a kubelet with its DRA manager, and an API server.
type draNode struct {
	*process
	api        *apiservertest.Server
	kubelet    *kubelettest.Kubelet
	dra        *kubelettest.DRA
	kubeconfig string
}

// newDRANode returns a node whose agent does not run yet.
func newDRANode(t testing.TB, v kubelettest.Version) *draNode {
	t.Helper()
	n := &draNode{process: newProcess(t, simConfig), api: apiservertest.New(t, draNodeName)}
	n.kubeconfig = n.api.Kubeconfig(t)
	var err error
	if n.kubelet, err = kubelettest.StartVersion(n.Dir, v); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(n.kubelet.Stop)
	if n.dra, err = kubelettest.StartDRA(n.Dir, v); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(n.dra.Stop)
	return n
}

// startDRANode returns a node whose agent has published 8 GPUs and is registered.
func startDRANode(t testing.TB, v kubelettest.Version) *draNode {
	t.Helper()
	n := newDRANode(t, v)
	n.write(n.config("dra"))
	n.run()
	n.awaitServing()
	return n
}

// config returns a configuration for one of the APIs.
func (n *draNode) config(api string, plugin ...string) string {
	return fmt.Sprintf("%s\nplugin: {kubeletDir: DIR, api: %s, cdi: {dir: DIR/cdi}%s}\nhealth: {kubernetes: {kubeconfig: %s}}",
		simConfig, api, strings.Join(append([]string{""}, plugin...), ", "), n.kubeconfig)
}

func (n *draNode) run() { n.launch("NODE_NAME=" + draNodeName) }

// kill ends the agent as kill -9 does, and waits until the kubelet has noticed.
func (n *draNode) kill() {
	n.t.Helper()
	n.signal(syscall.SIGKILL)
	<-n.Exited()
	awaitLoss(n.t, n.kubelet)
}

// awaitServing waits until the kubelet has registered the driver, the API server has 8 GPUs, and the agent, which may be a new one, is
// ready: neither loses the driver or the GPUs when an agent is killed.
func (n *draNode) awaitServing() {
	n.t.Helper()
	n.awaitPage("/readyz", 200)
	n.await("registration and 8 devices", func() bool { return n.dra.Registered(draDriver) && len(n.devices()) == 8 })
}

// devices returns the published devices by name.
func (n *draNode) devices() map[string]resourceapi.Device {
	all := make(map[string]resourceapi.Device)
	for _, s := range n.api.Slices() {
		for _, d := range s.Spec.Devices {
			all[d.Name] = d
		}
	}
	return all
}

// taints returns the taints of a device as key:effect, sorted.
func (n *draNode) taints(device string) []string {
	taints := []string{}
	for _, t := range n.devices()[device].Taints {
		taints = append(taints, strings.TrimSuffix(t.Key+"="+t.Value, "=")+":"+string(t.Effect))
	}
	slices.Sort(taints)
	return taints
}

// claim makes a claim that the scheduler has allocated.
func (n *draNode) claim(name string, devices ...string) kubelettest.Claim {
	var results []resourceapi.DeviceRequestAllocationResult
	for _, d := range devices {
		results = append(results, resourceapi.DeviceRequestAllocationResult{Request: "gpus", Driver: draDriver, Pool: draNodeName, Device: d})
	}
	return n.putClaim(name, results)
}

// claimShare makes a claim that the scheduler has allocated a share of a device.
func (n *draNode) claimShare(name, device, memory string) kubelettest.Claim {
	return n.putClaim(name, []resourceapi.DeviceRequestAllocationResult{{
		Request: "gpus", Driver: draDriver, Pool: draNodeName, Device: device, ShareID: new(types.UID(shareOf(name))),
		ConsumedCapacity: map[resourceapi.QualifiedName]quantity.Quantity{"memory": quantity.MustParse(memory)},
	}})
}

func shareOf(claim string) string { return "share-of-" + claim }

func (n *draNode) putClaim(name string, results []resourceapi.DeviceRequestAllocationResult) kubelettest.Claim {
	c := new(resourceapi.ResourceClaim)
	c.Namespace, c.Name, c.UID = "default", name, types.UID(name+"-uid")
	c.Spec.Devices.Requests = []resourceapi.DeviceRequest{{Name: "gpus", Exactly: &resourceapi.ExactDeviceRequest{DeviceClassName: draDriver}}}
	c.Status.Allocation = &resourceapi.AllocationResult{Devices: resourceapi.DeviceAllocationResult{Results: results}}
	n.api.Put(c)
	return kubelettest.Claim{Namespace: "default", Name: name, UID: name + "-uid"}
}

// hold lists a claim under a pod of the same name.
func (n *draNode) hold(c kubelettest.Claim, devices ...string) (free func()) {
	to := kubelettest.Container{Namespace: c.Namespace, Pod: "pod-of-" + c.Name, Name: "main"}
	h := kubelettest.HeldClaim{Container: to, Claim: c.Name, Driver: draDriver, Pool: draNodeName}
	for _, d := range devices {
		h.Devices = append(h.Devices, kubelettest.HeldDevice{Name: d, CDI: []string{cdi.ClaimDeviceName(c.UID + "-" + d)}})
	}
	n.kubelet.HoldClaim(h)
	return func() { n.kubelet.FreeClaims(to) }
}

// prepare prepares a claim as often as the kubelet would.
func (n *draNode) prepare(c kubelettest.Claim) []kubelettest.PreparedDevice {
	n.t.Helper()
	var devices []kubelettest.PreparedDevice
	var err error
	timeout := time.After(awaitTimeout)
	for {
		if devices, err = n.dra.Prepare(n.t.Context(), draDriver, c); err == nil {
			return devices
		}
		select {
		case <-timeout:
			n.t.Fatalf("%s is not prepared: %v", c.Name, err)
		case <-time.After(50 * time.Millisecond):
		}
	}
}

func (n *draNode) unprepare(c kubelettest.Claim) {
	n.t.Helper()
	if err := n.dra.Unprepare(n.t.Context(), draDriver, c); err != nil {
		n.t.Fatal(err)
	}
}

// specs returns the files in the directory of CDI specs.
func (n *draNode) specs() []string {
	files, _ := filepath.Glob(filepath.Join(n.Dir, "cdi", "*"))
	return files
}

// A claim is prepared over the real sockets, on each kubelet, and ends without a trace.
func TestDRAPrepare(t *testing.T) {
	t.Parallel()
	for _, v := range kubelettest.Versions() {
		t.Run(string(v), func(t *testing.T) {
			t.Parallel()
			n := startDRANode(t, v)
			c := n.claim("train", "gpu-3", "gpu-4")
			devices := n.prepare(c)
			if len(devices) != 2 || devices[0].Name != "gpu-3" || devices[0].Pool != draNodeName || len(devices[0].CDI) == 0 {
				t.Fatalf("%v", devices)
			}
			spec := ""
			for _, f := range n.specs() {
				spec += readFile(f)
			}
			for _, d := range devices {
				uuid := *n.devices()[d.Name].Attributes["uuid"].StringValue
				if !strings.Contains(spec, uuid) {
					t.Errorf("no CDI spec has %s of %s: %s", uuid, d.Name, spec)
				}
			}
			other := n.claim("other", "gpu-3")
			if _, err := n.dra.Prepare(t.Context(), draDriver, other); err == nil {
				t.Error("a device was given to a second claim")
			}
			n.unprepare(c)
			n.unprepare(c)
			n.prepare(other)
			n.unprepare(other)
			if left := n.specs(); len(left) > 0 {
				t.Errorf("left over: %q", left)
			}
			n.await("health", func() bool {
				h, ok := n.dra.Health(draNodeName + "/gpu-3")
				return ok && h.Health == "HEALTHY"
			})
			n.stop()
			if len(n.devices()) != 8 {
				t.Error("the slices must stay when the agent stops")
			}
		})
	}
}

// A finding is a taint whose time survives kill -9; a source that is down adds none and removes none.
func TestDRATaints(t *testing.T) {
	t.Parallel()
	n := startDRANode(t, kubelettest.V137)
	n.sim("{gpu: 3, xid: 48}")
	n.sim("{gpu: 3, xid: 13}")
	want := []string{"gpu-node-agent/xid=48:NoSchedule"}
	tainted := func() bool { return slices.Equal(n.taints("gpu-3"), want) }
	n.await("the taint", tainted)
	n.await("the health with its reason", func() bool {
		h, ok := n.dra.Health(draNodeName + "/gpu-3")
		return ok && h.Health == "UNHEALTHY" && strings.Contains(h.Message, "(xid-48)")
	})
	since := n.devices()["gpu-3"].Taints[0].TimeAdded
	refused := n.claim("refused", "gpu-3")
	if _, err := n.dra.Prepare(t.Context(), draDriver, refused); err == nil || !strings.Contains(err.Error(), "xid-48") {
		t.Errorf("a claim of an unhealthy device: %v", err)
	}
	n.awaitState("xid-48")
	n.kill()
	n.run()
	n.awaitServing()
	n.sim("{source: down}")
	n.await("the source down", func() bool { return n.snapshot().Source.Status == "down" })
	n.api.WipeSlices(draNodeName) // as the kubelet does
	n.await("the slices again", func() bool { return len(n.devices()) == 8 })
	if !tainted() || !n.devices()["gpu-3"].Taints[0].TimeAdded.Equal(since) {
		t.Errorf("taints %v since %v, want %v since %v", n.taints("gpu-3"), n.devices()["gpu-3"].Taints[0].TimeAdded, want, since)
	}
	for name := range n.devices() {
		if taints := n.taints(name); name != "gpu-3" && len(taints) > 0 {
			t.Errorf("%s has %v while the source is down", name, taints)
		}
	}
	n.sim("{source: up}")
	n.command(0, "clear", "--gpu", "3")
	n.await("no taint", func() bool { return len(n.taints("gpu-3")) == 0 })
}

// Prepared claims survive kill -9, a restart of the kubelet, and the loss of the kubelet's directories.
func TestDRARestarts(t *testing.T) {
	t.Parallel()
	n := startDRANode(t, kubelettest.V137)
	c := n.claim("train", "gpu-0")
	first := n.prepare(c)
	n.kill()
	n.run()
	n.awaitServing()
	if again := n.prepare(c); !slices.Equal(again[0].CDI, first[0].CDI) {
		t.Errorf("prepared as %v, then as %v", first, again)
	}
	n.dra.Stop()
	if err := n.kubelet.Restart(); err != nil {
		t.Fatal(err)
	}
	n.api.WipeSlices(draNodeName)
	if err := n.dra.Start(); err != nil {
		t.Fatal(err)
	}
	n.awaitServing()
	if _, err := n.dra.Prepare(t.Context(), draDriver, n.claim("other", "gpu-0")); err == nil {
		t.Error("a device was given to a second claim after the restarts")
	}
	for _, dir := range []string{"plugins_registry", "plugins"} {
		if err := os.RemoveAll(filepath.Join(n.Dir, dir)); err != nil {
			t.Fatal(err)
		}
		n.await("the loss of "+dir, func() bool { return !n.dra.Registered(draDriver) || dir == "plugins" })
		if err := os.MkdirAll(filepath.Join(n.Dir, dir), 0o750); err != nil {
			t.Fatal(err)
		}
		n.await("the driver again after the loss of "+dir, func() bool {
			if _, err := os.Stat(filepath.Join(n.Dir, "plugins", draDriver, "dra.sock")); err != nil {
				return false // the old connection still answers
			}
			_, err := n.dra.Prepare(t.Context(), draDriver, c)
			return err == nil
		})
	}
	n.unprepare(c)
	n.prepare(kubelettest.Claim{Namespace: "default", Name: "other", UID: "other-uid"})
}

// Two pods have shares of the memory of one GPU: each has its own limit in its CDI spec, and both are seen on the GPU. A claim that
// does not fit is refused.
func TestDRAShares(t *testing.T) {
	t.Parallel()
	n := newDRANode(t, kubelettest.V137)
	n.write(n.config("dra", `sharing: {memory: {resource: nvidia.com/gpu-memory, unit: 1Gi, reserve: "0", devices: ["3"]}}`))
	n.run()
	n.awaitServing()
	for name, d := range n.devices() {
		if shared := d.AllowMultipleAllocations != nil && *d.AllowMultipleAllocations; shared != (name == "gpu-3") {
			t.Errorf("%s is shared: %v", name, shared)
		}
	}
	units := func(state string) float64 {
		return n.value("gpu_node_agent_share_units", "gpu", "3", "sharing", "memory", "state", state)
	}
	n.await("free memory", func() bool { return units("free") > 60 })
	total := units("total")
	var free func()
	for _, c := range []kubelettest.Claim{n.claimShare("chat", "gpu-3", "30Gi"), n.claimShare("embed", "gpu-3", "30Gi")} {
		devices := n.prepare(c)
		if len(devices) != 1 || devices[0].ShareID != shareOf(c.Name) {
			t.Fatalf("%+v", devices)
		}
		n.kubelet.HoldClaim(kubelettest.HeldClaim{
			Container: kubelettest.Container{Namespace: c.Namespace, Pod: c.Name, Name: "main"}, Claim: c.Name, Driver: draDriver, Pool: draNodeName,
			Devices: []kubelettest.HeldDevice{{Name: "gpu-3", ShareID: shareOf(c.Name)}},
		})
		free = func() {
			n.kubelet.FreeClaims(kubelettest.Container{Namespace: c.Namespace, Pod: c.Name, Name: "main"})
			n.await("the end of "+c.Name, func() bool { return n.dra.Unprepare(t.Context(), draDriver, c) == nil })
		}
		files := slices.DeleteFunc(n.specs(), func(f string) bool { return !strings.Contains(f, c.UID) })
		if len(files) != 1 || !strings.Contains(readFile(files[0]), "GPU_NODE_AGENT_MEMORY_LIMIT_MIB=30720") {
			t.Errorf("%q: %s", files, readFile(files[0]))
		}
	}
	if _, err := n.dra.Prepare(t.Context(), draDriver, n.claimShare("large", "gpu-3", "30Gi")); err == nil {
		t.Error("a claim got more memory than is free")
	}
	limit := func(pod string) float64 {
		return n.value("gpu_node_agent_container_memory_limit_bytes", "gpu", "3", "pod", pod, "enforcement", "none")
	}
	n.await("both pods and what they leave", func() bool {
		return n.countHolders("chat") == 1 && n.countHolders("embed") == 1 && limit("chat") == 30<<30 && limit("embed") == 30<<30 &&
			units("total") == total && units("free") == total-60 && units("largest") == total-60
	})
	n.kill()
	n.run()
	n.awaitServing()
	n.await("both pods after kill -9", func() bool { return limit("chat") == 30<<30 && limit("embed") == 30<<30 })
	free()
	n.await("the memory of the second pod", func() bool {
		return n.countHolders("embed") == 0 && limit("embed") < 0 && units("free") == total-30
	})
}

// A node changes to dra and back while pods of the other API hold devices: each change waits for them, says which they are, and continues
// after kill -9. The node is ready while it waits for nothing else. At no moment do both APIs offer devices.
func TestDRAHandover(t *testing.T) {
	t.Parallel()
	n := newDRANode(t, kubelettest.V137)
	n.write(n.config("devicePlugin"))
	n.run()
	n.awaitAllocatable(n.kubelet, 8)
	held := n.allocate(n.kubelet)
	if n.dra.Registered(draDriver) || len(n.api.Slices()) > 0 {
		t.Fatal("the driver serves with plugin.api devicePlugin")
	}

	n.reload(n.config("dra"))
	onlyHeld := func() bool {
		r := n.kubelet.State().Resources[resource]
		return r.Capacity() == 8 && r.Allocatable() == 1 && slices.Contains(r.Allocated, held.Devices[0])
	}
	n.await("only the held device to be healthy", onlyHeld)
	n.awaitPage("/readyz", 200, "dra: waiting for the device plugin", "default/"+held.Container.Pod)
	n.kubelet.SetFault(kubelettest.Fault{ListError: "no answer"})
	n.awaitPage("/readyz", 503, "no answer") // whether pods hold devices is unknown
	n.kubelet.SetFault(kubelettest.Fault{})
	n.awaitPage("/readyz", 200, "default/"+held.Container.Pod)
	waiting := n.value("gpu_node_agent_dra_handover_seconds")
	n.kill()
	n.run()
	n.await("the held device to be healthy after kill -9", onlyHeld)
	n.awaitPage("/readyz", 200, "default/"+held.Container.Pod)
	if seconds := n.value("gpu_node_agent_dra_handover_seconds"); waiting <= 0 || seconds <= waiting {
		t.Errorf("the handover lasts %v s, before kill -9 %v s", seconds, waiting)
	}
	n.reload(n.config("devicePlugin")) // nothing was handed over yet
	n.awaitAllocatable(n.kubelet, 8)
	n.awaitPage("/readyz", 200)
	n.reload(n.config("dra"))
	n.await("only the held device to be healthy", onlyHeld)
	if n.dra.Registered(draDriver) || len(n.api.Slices()) > 0 {
		t.Fatal("the driver serves while a pod holds a device of the plugin")
	}
	n.kubelet.Free(resource, held.Devices...)
	n.awaitServing()
	if r := n.kubelet.State().Resources[resource]; r.Allocatable() > 0 {
		t.Fatalf("both APIs offer devices: %+v", r)
	}
	n.awaitPage("/readyz", 200)

	c := n.claim("train", "gpu-5")
	devices := n.prepare(c)
	free := n.hold(c, "gpu-5")
	n.reload(n.config("devicePlugin"))
	n.await("no device in the slices", func() bool { return len(n.devices()) == 0 })
	n.awaitPage("/readyz", 200, "plugin: plugin.api has changed, and dynamic resource allocation still has the devices", "default/train",
		"pod-of-train")
	waiting = n.value("gpu_node_agent_dra_handover_seconds")
	n.kill()
	n.run()
	n.awaitPage("/readyz", 200, "default/train")
	if seconds := n.value("gpu_node_agent_dra_handover_seconds"); waiting <= 0 || seconds <= waiting {
		t.Errorf("the handover back lasts %v s, before kill -9 %v s", seconds, waiting)
	}
	n.await("the driver again", func() bool { return n.dra.Registered(draDriver) })
	if again := n.prepare(c); !slices.Equal(again[0].CDI, devices[0].CDI) {
		t.Errorf("prepared as %v, then as %v", devices, again)
	}
	if _, err := n.dra.Prepare(t.Context(), draDriver, n.claim("late", "gpu-6")); err == nil {
		t.Error("a new claim was prepared while the devices are being released")
	}
	if r := n.kubelet.State().Resources[resource]; r.Allocatable() > 0 {
		t.Fatalf("both APIs offer devices: %+v", r)
	}
	free()
	n.unprepare(c)
	n.awaitAllocatable(n.kubelet, 8)
	if slices := n.api.Slices(); len(slices) > 0 || n.dra.Registered(draDriver) {
		t.Errorf("the driver still serves: %d slices", len(slices))
	}
	n.awaitPage("/readyz", 200)
}

// Kill -9 at any moment of a prepare: the next process gives the same devices, and no other claim gets them.
func TestDRAKilledInPrepare(t *testing.T) {
	t.Parallel()
	n := startDRANode(t, kubelettest.V136)
	checkpoint := filepath.Join(n.Dir, "plugins", draDriver, "gpu-node-agent.json")
	c := n.claim("train", "gpu-1", "gpu-2")
	answer := make(chan struct{})
	go func() {
		defer close(answer)
		_, _ = n.dra.Prepare(t.Context(), draDriver, c)
	}()
	n.await("the claim in the checkpoint", func() bool { return strings.Contains(readFile(checkpoint), c.UID) })
	n.kill()
	<-answer
	n.run()
	n.awaitServing()
	if _, err := n.dra.Prepare(t.Context(), draDriver, n.claim("other", "gpu-2")); err == nil {
		t.Error("a device of a claim that was being prepared was given to another")
	}
	if devices := n.prepare(c); len(devices) != 2 {
		t.Errorf("%v", devices)
	}
	n.unprepare(c)
	if left := n.specs(); len(left) > 0 {
		t.Errorf("left over: %q", left)
	}
}

// Another driver of the same name is not disturbed; the agent names its socket, and serves when it has ended.
func TestDRAOtherDriver(t *testing.T) {
	t.Parallel()
	other := startDRANode(t, kubelettest.V137)
	n := newDRANode(t, kubelettest.V137)
	theirs := filepath.Join(other.Dir, "plugins_registry", draDriver+"-reg.sock")
	at := filepath.Join(n.Dir, "plugins_registry", draDriver+"-reg.sock")
	n.dra.Stop() // it would register the other agent's driver
	if err := os.Link(theirs, at); err != nil {
		t.Fatal(err)
	}
	n.write(n.config("dra"))
	n.run()
	n.awaitPage("/readyz", 503, at, fmt.Sprintf("PID %d", other.Pid()))
	if slices := n.api.Slices(); len(slices) > 0 {
		t.Error("published beside another driver of the same name")
	}
	if a, err := os.Stat(theirs); err != nil {
		t.Error(err)
	} else if b, err := os.Stat(at); err != nil || !os.SameFile(a, b) {
		t.Errorf("the other driver's socket was replaced: %v", err)
	}
	other.stop()
	if err := n.dra.Start(); err != nil {
		t.Fatal(err)
	}
	n.awaitServing()
	n.awaitPage("/readyz", 200)
}

// A second agent on the node, as while a pod that was deleted by force still ends, waits for the first, and then has its claims.
func TestDRATwoAgents(t *testing.T) {
	t.Parallel()
	first := startDRANode(t, kubelettest.V137)
	second := newProcess(t, simConfig)
	plugin, _ := strings.CutPrefix(first.config("dra"), simConfig)
	second.write(simConfig + strings.ReplaceAll(plugin, "DIR", first.Dir))
	second.launch("NODE_NAME=" + draNodeName)
	second.awaitPage("/readyz", 503, "another agent")
	c := first.claim("train", "gpu-1")
	devices := first.prepare(c)
	first.stop()
	second.awaitPage("/readyz", 200)
	if _, err := first.dra.Prepare(t.Context(), draDriver, first.claim("other", "gpu-1")); err == nil {
		t.Error("a device of a claim of the first agent was given to another claim")
	}
	if again := first.prepare(c); !slices.Equal(again[0].CDI, devices[0].CDI) {
		t.Errorf("prepared as %v, then as %v", devices, again)
	}
	first.unprepare(c)
}

// A checkpoint that nobody can read never ends the agent. It keeps devices from pods as long as its driver may have served last.
func TestDRAUnreadableFormerCheckpoint(t *testing.T) {
	t.Parallel()
	n := newDRANode(t, kubelettest.V137)
	const reason = "plugin.dra.driverName: expected gpu.former, got " + draDriver + ": claims may be prepared"
	file := filepath.Join(n.Dir, "plugins", "gpu.former", "gpu-node-agent.json")
	spoil := func() {
		if err := errors.Join(os.MkdirAll(filepath.Dir(file), 0o700), os.WriteFile(file, []byte("{"), 0o600)); err != nil {
			t.Fatal(err)
		}
	}
	spoil()
	for _, api := range []string{"devicePlugin", "dra"} {
		n.write(n.config(api))
		n.run()
		n.awaitPage("/readyz", 503, reason)
		n.awaitMetrics("gpu_node_agent_build_info")
		n.stop()
	}
	if n.dra.Registered(draDriver) {
		t.Error("it serves although claims may be prepared")
	}
	if err := os.Remove(file); err != nil {
		t.Fatal(err)
	}
	n.run()
	n.awaitServing()
	n.awaitLastGood("")
	n.stop()

	spoil() // now it is known that another driver has served since
	for _, config := range []string{n.config("dra"), n.config("dra") + "\nlog: {level: loud}"} {
		n.write(config)
		n.run()
		n.awaitServing()
		n.stop()
	}
}

// The driver gets another name only at a start without claims of the former one, which no other driver could end.
func TestDRADriverName(t *testing.T) {
	t.Parallel()
	const next = "gpu.example.com"
	n := startDRANode(t, kubelettest.V137)
	n.awaitLastGood("")
	c := n.claim("train", "gpu-0")
	first := n.prepare(c)
	renamed := n.config("dra", "dra: {driverName: "+next+"}")
	n.write(renamed)
	n.awaitPage("/readyz", 200, "plugin.dra.driverName: cannot change from "+draDriver+" to "+next, "it takes effect at a restart")

	for _, stop := range []func(){n.kill, n.stop} {
		stop()
		n.run()
		n.awaitLog("plugin.dra.driverName: expected " + draDriver + ", got " + next + ": 1 claim is prepared by the driver " + draDriver)
		n.awaitServing()
		n.awaitMetrics("gpu_node_agent_config_last_reload_successful 0")
		if again := n.prepare(c); !slices.Equal(again[0].CDI, first[0].CDI) {
			t.Errorf("prepared as %v, then as %v", first, again)
		}
	}
	n.unprepare(c)
	if left := n.specs(); slices.ContainsFunc(left, func(file string) bool { return strings.Contains(file, c.UID) }) {
		t.Errorf("the claim has ended, but not its spec: %q", left)
	}
	if n.dra.Registered(next) {
		t.Error("the name changed without a restart")
	}
	n.stop()
	n.api.WipeSlices(draNodeName) // as the kubelet does 30 seconds after it has lost the driver
	n.run()
	n.await("the next name", func() bool { return n.dra.Registered(next) && len(n.devices()) == 8 })
	n.awaitPage("/readyz", 200)
	n.awaitMetrics("gpu_node_agent_config_last_reload_successful 1")
}
