//go:build cluster

package cluster

import (
	"context"
	"flag"
	"fmt"
	"maps"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
)

var (
	draClaims = flag.Int("dra-claims", 200, "how many claims TestDRA prepares, to find leaks")
	draOutage = flag.Duration("dra-outage", 15*time.Second, "how long TestDRA stops the API server")
)

// draValues are the values of TestDRA: six whole GPUs, and two whose memory is shared.
func draValues(more ...string) []string {
	return append([]string{
		`dra.enabled=true`,
		neverFlaps,
		`config.plugin.sharing.memory={"resource": "nvidia.com/gpu-memory", "unit": "1Gi", "devices": ["6", "7"]}`,
	}, more...)
}

const (
	neverFlaps   = `config.health.flap={"trips": 0}` // other tests have broken GPUs of this node
	servesDRA    = `config.plugin.api="dra"`
	servesPlugin = `config.plugin.api="devicePlugin"`
)

// TestDRA serves the node's devices by dynamic resource allocation, from the switch of a node that the device plugin serves to the switch
// back.
func TestDRA(t *testing.T) {
	step(t, "the device plugin serves a pod", func(t *testing.T) {
		upgrade(t, oldTag, draValues(`dra.enabled=false`)...)
		awaitAmounts(t, gpu, "6/6")
		startPod(t, "classic", gpu, "1")
		awaitRunning(t, "classic")
	})
	step(t, "the node waits for this pod before it changes to DRA, and is ready", func(t *testing.T) {
		keeps := containerOf(t, "classic")
		upgrade(t, oldTag, draValues(servesPlugin)...) // the mounts and rights
		agent := mustAgentPod(t)
		upgrade(t, oldTag, draValues(servesDRA)...)
		awaitHandover(t, "default/classic")
		checkSamePod(t, agent)
		replaceAgentPod(t)
		upgrade(t, oldTag, draValues(servesDRA)...) // the new pod becomes ready
		awaitHandover(t, "default/classic")
		awaitAmounts(t, gpu, "6/1") // the others are withheld
		startPod(t, "early", gpu, "1")
		awaitUnschedulable(t, "early")
		if published, err := nodeSlices(t.Context()); err != nil || len(published) > 0 {
			t.Errorf("slices while a pod holds a device of the device plugin: %v, %v", published, err)
		}
		keeps()
	})
	step(t, "then it publishes its devices, and a pod that requests nvidia.com/gpu runs", func(t *testing.T) {
		deletePods(t, "classic")
		awaitDevices(t, 8)
		awaitAmounts(t, gpu, "0/0")
		// The kubelet may try to give the freed device to the waiting pod: the device plugin refuses that.
		var pod *v1.Pod
		eventually(t, "the waiting pod runs or has failed", func(ctx context.Context) (err error) {
			if pod, err = getPod(ctx, "early"); err == nil && pod.Status.Phase == v1.PodPending {
				err = fmt.Errorf("it is pending: %v", pod.Status.Conditions)
			}
			return err
		})
		if pod.Status.Phase == v1.PodFailed {
			t.Logf("the waiting pod failed: %s: %s", pod.Status.Reason, pod.Status.Message)
			deletePods(t, "early")
			startPod(t, "early", gpu, "1")
		}
		awaitClaimed(t, "default", "early")
		awaitSeries(t, "gpu_node_agent_device_allocated{", `pod="early"`)
		deletePods(t, "early")
		awaitPrepared(t, 0)
	})
	step(t, "doctor finds nothing wrong", func(t *testing.T) { t.Log(inAgent(t, "doctor")) })
	step(t, "a claim chooses by attributes", checkAttributes)
	step(t, "each container has the devices of its requests", checkRequests)
	step(t, "a monitor sees all GPUs and takes none", checkAdminAccess)
	step(t, "the scheduler fits requests for memory onto GPUs", checkMemoryShares)
	step(t, "XID 79", checkFinding)
	step(t, "XID 48, then 13", func(t *testing.T) {
		inject(t, "{gpu: 3, xid: 48}")
		before := awaitTaints(t, "gpu-3", "gpu-node-agent/xid=48:NoSchedule")
		inject(t, "{gpu: 3, xid: 13}")
		awaitSeries(t, "gpu_node_agent_xid_errors_total{", `gpu="3"`, `xid="13"`)
		awaitSaved(t, "xid-48") // publishing does not wait for the disk
		killAgent(t)
		inject(t, "{gpu: 5, recoveryAction: reboot}") // the slices of before have no taint of this GPU
		awaitTaints(t, "gpu-5", "gpu-node-agent/recovery-action:NoSchedule")
		after := awaitTaints(t, "gpu-3", "gpu-node-agent/xid=48:NoSchedule")
		if !before.Taints[0].TimeAdded.Equal(after.Taints[0].TimeAdded) {
			t.Errorf("timeAdded is %v, was %v", after.Taints[0].TimeAdded, before.Taints[0].TimeAdded)
		}
		eventually(t, "the finding is cleared", func(ctx context.Context) error {
			_, err := tryInAgent(ctx, "clear", "--gpu", "3")
			return err
		})
		inject(t, "{gpu: 5, recoveryAction: none}")
		awaitTaints(t, "gpu-3")
		awaitTaints(t, "gpu-5")
	})
	step(t, "a kill of the agent between prepare and answer", checkKill)
	step(t, "a new version keeps the slices and the claims", checkRollout)
	step(t, "a restart of the kubelet", checkKubeletRestart)
	step(t, "a pod that is deleted by force while the kubelet is down", checkForceDelete)
	step(t, "an outage of the API server", checkOutage)
	step(t, fmt.Sprintf("%d claims leave nothing", *draClaims), checkLeaks)
	step(t, "two GPUs of one NVLink island", checkIsland)
	step(t, "MIG devices", checkMIG)
	step(t, "the node waits for pods with claims before it changes back", func(t *testing.T) {
		upgrade(t, oldTag, draValues(servesDRA)...)
		awaitDevices(t, 8)
		startClaimPod(t, "default", "late", claim(request(gpuClass), ""))
		awaitClaimed(t, "default", "late")
		keeps := containerOf(t, "late")
		agent := mustAgentPod(t)
		upgrade(t, oldTag, draValues(servesPlugin)...)
		awaitHandover(t, "default/late")
		checkSamePod(t, agent)
		awaitDevices(t, 0)
		startClaimPod(t, "default", "refused", claim(request(gpuClass), ""))
		awaitUnschedulable(t, "refused")
		awaitKubeletDevices(t, gpu, 0)
		keeps()
	})
	step(t, "then the device plugin serves again", func(t *testing.T) {
		deletePods(t, "late", "refused")
		awaitAmounts(t, gpu, "6/6")
		eventually(t, "no slices", func(ctx context.Context) error {
			published, err := nodeSlices(ctx)
			if err == nil && len(published) > 0 {
				err = fmt.Errorf("%d slices", len(published))
			}
			return err
		})
		startPod(t, "classic", gpu, "1")
		if device := awaitRunning(t, "classic"); !strings.HasPrefix(device, "GPU-") {
			t.Errorf("pod sees %q", device)
		}
		deletePods(t, "classic")
	})
	step(t, "helm uninstall", uninstall)
}

// awaitHandover waits until the agent says that a pod delays the change of the API. The agent is ready.
func awaitHandover(t *testing.T, pod string) {
	t.Helper()
	awaitReadyz(t, "ok\n", pod)
}

func checkAttributes(t *testing.T) {
	const uuid = `device.attributes["gpu.nvidia.com"].uuid == %q`
	devices, err := publishedDevices(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	startClaimPod(t, "default", "by-uuid", claim(request(gpuClass, fmt.Sprintf(uuid, stringAttribute(devices["gpu-5"], "uuid"))), ""))
	startClaimPod(t, "default", "by-model", claim(request(gpuClass, `device.attributes["gpu.nvidia.com"].architecture == "Hopper"`,
		`device.attributes["gpu.nvidia.com"].cudaComputeCapability.compareTo(semver("9.0.0")) >= 0`,
		`device.capacity["gpu.nvidia.com"].memory.compareTo(quantity("70Gi")) >= 0`), ""))
	startClaimPod(t, "default", "none", claim(request(gpuClass, `device.attributes["gpu.nvidia.com"].architecture == "Volta"`), ""))
	if got := awaitClaimed(t, "default", "by-uuid"); !slices.Equal(got, []string{"gpu-5"}) {
		t.Errorf("by UUID: %v", got)
	}
	if got := awaitClaimed(t, "default", "by-model"); len(got) != 1 {
		t.Errorf("by model: %v", got)
	}
	awaitUnschedulable(t, "none")
	deletePods(t, "by-uuid", "by-model", "none")
}

// checkRequests starts a pod with two containers, each of which uses one of two requests of a claim.
func checkRequests(t *testing.T) {
	a, b := request(gpuClass), request(gpuClass)
	template, err := theCluster.client.ResourceV1().ResourceClaimTemplates("default").Create(t.Context(), &resourceapi.ResourceClaimTemplate{
		ObjectMeta: metav1.ObjectMeta{Name: "two"},
		Spec: resourceapi.ResourceClaimTemplateSpec{Spec: resourceapi.ResourceClaimSpec{
			Devices: resourceapi.DeviceClaim{Requests: []resourceapi.DeviceRequest{
				{Name: "first", Exactly: &a}, {Name: "second", Exactly: &b},
			}},
		}},
	}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	pod := &v1.Pod{ObjectMeta: metav1.ObjectMeta{Name: "two"}, Spec: v1.PodSpec{
		TerminationGracePeriodSeconds: ptr.To[int64](1),
		ResourceClaims:                []v1.PodResourceClaim{{Name: "gpus", ResourceClaimTemplateName: &template.Name}},
	}}
	for _, name := range []string{"first", "second", "neither"} {
		c := v1.Container{Name: name, Image: workloadImage, ImagePullPolicy: v1.PullNever}
		if name != "neither" {
			c.Resources.Claims = []v1.ResourceClaim{{Name: "gpus", Request: name}}
		}
		pod.Spec.Containers = append(pod.Spec.Containers, c)
	}
	if _, err := theCluster.client.CoreV1().Pods("default").Create(t.Context(), pod, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	eventually(t, "each container has its device", func(ctx context.Context) error {
		pod, err := getPod(ctx, "two")
		if err != nil {
			return err
		}
		claims, err := claimsOf(ctx, pod)
		if err != nil {
			return err
		}
		if claims[0].Status.Allocation == nil {
			return fmt.Errorf("pod is %s, its claim is not allocated", pod.Status.Phase)
		}
		published, err := publishedDevices(ctx)
		if err != nil {
			return err
		}
		want := map[string]map[string]string{"neither": {}}
		for _, r := range claims[0].Status.Allocation.Devices.Results {
			want[r.Request] = map[string]string{deviceVariable(r.Device): stringAttribute(published[r.Device], "uuid")}
		}
		for container, want := range want {
			out, err := theCluster.client.CoreV1().Pods("default").GetLogs("two", &v1.PodLogOptions{Container: container}).DoRaw(ctx)
			if err != nil {
				return err
			}
			if have := deviceVariables(string(out)); !maps.Equal(have, want) || !strings.Contains(string(out), "PATH=") {
				return fmt.Errorf("container %s has %v, want %v", container, have, want)
			}
		}
		return nil
	})
	deletePods(t, "two")
}

// checkAdminAccess runs a monitor beside a pod that holds a GPU, and checks that its end changes nothing for the other.
func checkAdminAccess(t *testing.T) {
	const monitors = "monitors"
	namespaces := theCluster.client.CoreV1().Namespaces()
	if _, err := namespaces.Create(t.Context(), &v1.Namespace{ObjectMeta: metav1.ObjectMeta{
		Name: monitors, Labels: map[string]string{resourceapi.DRAAdminNamespaceLabelKey: "true"},
	}}, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the namespace has a service account", func(ctx context.Context) error {
		_, err := theCluster.client.CoreV1().ServiceAccounts(monitors).Get(ctx, "default", metav1.GetOptions{})
		return err
	})
	startClaimPod(t, "default", "holder", claim(request(gpuClass), ""))
	held := awaitClaimed(t, "default", "holder")
	all := request(gpuClass)
	all.AllocationMode, all.AdminAccess = resourceapi.DeviceAllocationModeAll, new(true)
	all.Tolerations = []resourceapi.DeviceToleration{{Operator: resourceapi.DeviceTolerationOpExists}}
	startClaimPod(t, monitors, "monitor", claim(all, ""))
	if seen := awaitClaimed(t, monitors, "monitor"); len(seen) != 8 {
		t.Errorf("the monitor sees %v", seen)
	}
	// and one stays free, so that a monitor's GPUs are not taken
	startClaimPod(t, "default", "beside", claim(several(6, request(gpuClass)), ""))
	if got := awaitClaimed(t, "default", "beside"); slices.Contains(got, held[0]) {
		t.Errorf("two pods have %v", held)
	}
	if err := theCluster.client.CoreV1().Pods(monitors).Delete(t.Context(), "monitor", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	awaitPrepared(t, 2)
	deletePods(t, "holder", "beside")
	if err := namespaces.Delete(t.Context(), monitors, metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	awaitPrepared(t, 0)
}

// checkMemoryShares fills two GPUs of 78 GiB with shares of 30 GiB: two on each.
func checkMemoryShares(t *testing.T) {
	pods := []string{"share-0", "share-1", "share-2", "share-3"}
	for _, name := range pods {
		startClaimPod(t, "default", name, claim(share("30Gi"), ""))
	}
	on := make(map[string]int)
	for _, name := range pods {
		for _, device := range awaitClaimed(t, "default", name) {
			on[device]++
		}
	}
	if want := map[string]int{"gpu-6": 2, "gpu-7": 2}; !maps.Equal(on, want) {
		t.Errorf("shares by GPU: %v, want %v", on, want)
	}
	startClaimPod(t, "default", "too-large", claim(share("30Gi"), ""))
	startClaimPod(t, "default", "fits", claim(share("10Gi"), ""))
	startClaimPod(t, "default", "whole", claim(several(7, request(gpuClass)), "")) // a claim without a share takes no part of a GPU
	awaitClaimed(t, "default", "fits")
	awaitUnschedulable(t, "too-large", "whole")
	for name, want := range map[string]string{"share-0": "30720", "fits": "10240"} {
		out, err := theCluster.client.CoreV1().Pods("default").GetLogs(name, &v1.PodLogOptions{}).DoRaw(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		if !strings.Contains(string(out), "GPU_NODE_AGENT_MEMORY_LIMIT_MIB="+want+"\n") {
			t.Errorf("pod %s lacks the limit of %s MiB:\n%s", name, want, out)
		}
	}
	awaitSeries(t, "gpu_node_agent_device_allocated{", `pod="share-0"`)
	awaitSeries(t, "gpu_node_agent_device_allocated{", `pod="share-3"`)
	deletePods(t, "share-0", "share-1", "share-2", "share-3")
	awaitClaimed(t, "default", "too-large")
	deletePods(t, "too-large", "fits", "whole")
	awaitPrepared(t, 0)
}

// checkFinding makes a GPU that a pod holds unhealthy: taint, pod status, no new pod, recovery.
func checkFinding(t *testing.T) {
	startClaimPod(t, "default", "one", claim(request(gpuClass), ""))
	device := awaitClaimed(t, "default", "one")[0]
	keeps := containerOf(t, "one")
	awaitClaimHealth(t, "one", v1.ResourceHealthStatusHealthy, "")
	index := strings.TrimPrefix(device, "gpu-")
	agent := mustAgentPod(t)
	took := awaitChange(t, func() { injectOnNode(t, agent, "{gpu: %s, xid: 79}", index) }, func(d resourceapi.Device) bool {
		return d.Name == device && slices.Equal(taintsOf(d), []string{"gpu-node-agent/xid=79:NoSchedule"})
	})
	t.Logf("taint in the API %.2fs after the XID", took.Seconds())
	awaitClaimHealth(t, "one", v1.ResourceHealthStatusUnhealthy, "xid-79")
	devices, err := publishedDevices(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	startClaimPod(t, "default", "next",
		claim(request(gpuClass, fmt.Sprintf(`device.attributes["gpu.nvidia.com"].uuid == %q`, stringAttribute(devices[device], "uuid"))), ""))
	awaitUnschedulable(t, "next")
	keeps()
	deletePods(t, "one")
	inject(t, "{gpu: %s, lost: true}", index)
	awaitSeries(t, "gpu_node_agent_device_finding{", fmt.Sprintf(`gpu=%q`, index), `cause="lost"`)
	awaitTaints(t, device, "gpu-node-agent/lost:NoSchedule", "gpu-node-agent/xid=79:NoSchedule")
	inject(t, "{gpu: %s, lost: false}", index)
	awaitTaints(t, device)
	awaitClaimed(t, "default", "next")
	awaitClaimHealth(t, "next", v1.ResourceHealthStatusHealthy, "")
	deletePods(t, "next")
}

// checkKill kills the agent as soon as its checkpoint has a claim. The kubelet calls again.
func checkKill(t *testing.T) {
	const name = "killed"
	awaitPrepared(t, 0)
	agent := mustAgentPod(t)
	pid := pidOf(t, agent.Status.ContainerStatuses[0])
	startPodWithClaims(t, name, claim(several(4, request(gpuClass)), ""), claim(several(4, request(gpuClass)), ""))
	for begin := time.Now(); ; {
		if claims, err := checkpointClaims(); err == nil && len(claims) > 0 {
			break
		}
		if time.Since(begin) > patience {
			t.Fatal("no claim in the checkpoint")
		}
	}
	if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	if err := theCluster.client.CoreV1().Pods(namespace).Delete(t.Context(), agent.Name,
		metav1.DeleteOptions{GracePeriodSeconds: ptr.To[int64](0)}); err != nil {
		t.Fatal(err)
	}
	if got := awaitClaimed(t, "default", name); len(got) != 8 {
		t.Errorf("pod %s has %v", name, got)
	}
	if err := preparedOnNode(2); err != nil {
		t.Error(err)
	}
	events, err := theCluster.client.CoreV1().Events("default").List(t.Context(),
		metav1.ListOptions{FieldSelector: "involvedObject.name=" + name + ",type=" + v1.EventTypeWarning})
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range events.Items {
		t.Logf("%s: %s", e.Reason, e.Message)
	}
	deletePods(t, name)
	awaitPrepared(t, 0)
}

// checkRollout replaces the agent by another version while a pod holds GPUs.
func checkRollout(t *testing.T) {
	startClaimPod(t, "default", "stays", claim(several(2, request(gpuClass)), ""))
	awaitClaimed(t, "default", "stays")
	keeps := containerOf(t, "stays")
	before, err := nodeSlices(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	for _, tag := range []string{newTag, oldTag} {
		upgrade(t, tag, draValues(servesDRA)...)
		awaitSeries(t, "gpu_node_agent_build_info{", `version="`+tag+`"`)
		awaitSeries(t, "gpu_node_agent_device_allocated{", `pod="stays"`)
		awaitClaimHealth(t, "stays", v1.ResourceHealthStatusHealthy, "")
	}
	after, err := nodeSlices(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if len(after) != len(before) || after[0].UID != before[0].UID {
		t.Errorf("the slices are %v, were %v", after, before)
	}
	if err := preparedOnNode(1); err != nil {
		t.Error(err)
	}
	keeps()
}

// checkKubeletRestart restarts the kubelet beside pod stays. At its start it deletes all slices of the node.
func checkKubeletRestart(t *testing.T) {
	keeps := containerOf(t, "stays")
	agent := mustAgentPod(t)
	before, err := nodeSlices(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	replaceKubelet(t)
	eventually(t, "the kubelet deletes the slices", func(ctx context.Context) error {
		after, err := nodeSlices(ctx)
		if err == nil && len(after) > 0 && after[0].UID == before[0].UID {
			err = fmt.Errorf("slice %s is still there", before[0].Name)
		}
		return err
	})
	awaitDevices(t, 8)
	awaitClaimHealth(t, "stays", v1.ResourceHealthStatusHealthy, "")
	startClaimPod(t, "default", "after", claim(several(6, request(gpuClass)), ""))
	awaitClaimed(t, "default", "after")
	checkSamePod(t, agent)
	keeps()
	deletePods(t, "after", "stays")
	awaitPrepared(t, 0)
}

// checkForceDelete deletes a pod by force while the kubelet is down, and gives its GPUs to another pod: the kubelet prepares the claim of
// the new pod before it ends the old one.
func checkForceDelete(t *testing.T) {
	startClaimPod(t, "default", "old", claim(several(8, request(gpuClass)), ""))
	awaitClaimed(t, "default", "old")
	stopKubelet()
	forceDelete(t, "old")
	startClaimPod(t, "default", "new", claim(several(8, request(gpuClass)), ""))
	eventually(t, "pod new is scheduled", func(ctx context.Context) error {
		pod, err := getPod(ctx, "new")
		if err == nil && pod.Spec.NodeName == "" {
			err = fmt.Errorf("pod is %s: %v", pod.Status.Phase, pod.Status.Conditions)
		}
		return err
	})
	startKubelet(t)
	awaitClaimed(t, "default", "new")
	deletePods(t, "new")
	awaitPrepared(t, 0)
}

// checkOutage stops the API server. meanwhile a GPU fails.
func checkOutage(t *testing.T) {
	startClaimPod(t, "default", "stays", claim(request(gpuClass), ""))
	awaitClaimed(t, "default", "stays")
	keeps := containerOf(t, "stays")
	agent := mustAgentPod(t)
	theCluster.api.Kill()
	injectOnNode(t, agent, "{gpu: 2, xid: 79}")
	select {
	case <-time.After(*draOutage):
	case <-t.Context().Done():
	}
	if err := theCluster.startAPIServer(); err != nil {
		t.Fatal(err)
	}
	begin := time.Now()
	awaitTaints(t, "gpu-2", "gpu-node-agent/xid=79:NoSchedule")
	t.Logf("taint in the API %.1fs after the API server was back", time.Since(begin).Seconds())
	checkSamePod(t, agent)
	keeps()
	inject(t, "{gpu: 2, lost: true}")
	awaitSeries(t, "gpu_node_agent_device_finding{", `gpu="2"`, `cause="lost"`)
	inject(t, "{gpu: 2, lost: false}")
	awaitTaints(t, "gpu-2")
	awaitReconnected(t)
	deletePods(t, "stays")
	awaitPrepared(t, 0)
}

// awaitReconnected waits until the controllers, the scheduler and the kubelet watch the API server again: they start a pod with a claim and
// end it. After an outage of seconds each of their watches waits for up to a minute, and as long again if the API server was not ready
// then.
func awaitReconnected(t *testing.T) {
	t.Helper()
	const name, bound = "reconnected", 5 * time.Minute
	startClaimPod(t, "default", name, claim(request(gpuClass), ""))
	eventuallyWithin(t, bound, "a new pod runs after the outage", func(ctx context.Context) error {
		pod, err := getPod(ctx, name)
		if err == nil && pod.Status.Phase != v1.PodRunning {
			err = fmt.Errorf("pod is %s: %s %v", pod.Status.Phase, pod.Status.Message, pod.Status.Conditions)
		}
		return err
	})
	deletePods(t, name)
}

// checkLeaks prepares and unprepares claims of shares, many at once.
func checkLeaks(t *testing.T) {
	const atOnce, maxAnonymous = 50, 30 // MiB
	pid := pidOf(t, mustAgentPod(t).Status.ContainerStatuses[0])
	before := anonymousMemory(t, pid)
	claims := slices.Repeat([]resourceapi.DeviceClaim{claim(share("1Gi"), "")}, atOnce)
	for range max(1, *draClaims/atOnce) {
		startPodWithClaims(t, "many", claims...)
		if got := awaitClaimed(t, "default", "many"); len(got) != atOnce {
			t.Fatalf("%d devices", len(got))
		}
		if err := preparedOnNode(atOnce); err != nil {
			t.Error(err)
		}
		deletePods(t, "many")
		awaitPrepared(t, 0)
	}
	after := anonymousMemory(t, pid)
	t.Logf("RssAnon %.1f MiB, before %.1f MiB", after, before)
	if after > maxAnonymous {
		t.Errorf("RssAnon is %.1f MiB, want at most %d", after, maxAnonymous)
	}
}

// checkIsland requests two GPUs with one value of the island on a node with two GPUs with NVLink and two without.
func checkIsland(t *testing.T) {
	const island = "gpu-node-agent/nvlinkIsland"
	upgrade(t, oldTag, `dra.enabled=true`, servesDRA, `config.source.sim.profile="mixed-4"`)
	awaitDevices(t, 4)
	devices, err := publishedDevices(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	for name, want := range map[string]string{
		"gpu-0": stringAttribute(devices["gpu-0"], "uuid"),
		"gpu-1": stringAttribute(devices["gpu-0"], "uuid"), "gpu-2": "", "gpu-3": "",
	} {
		if got := stringAttribute(devices[name], island); got != want {
			t.Errorf("%s is in the island %q, want %q", name, got, want)
		}
	}
	startClaimPod(t, "default", "first", claim(request(gpuClass), ""))
	awaitClaimed(t, "default", "first")
	startClaimPod(t, "default", "pair", claim(several(2, request(gpuClass)), island))
	awaitUnschedulable(t, "pair")
	startClaimPod(t, "default", "any-two", claim(several(2, request(gpuClass, `device.attributes["gpu.nvidia.com"].architecture != "Hopper"`)),
		""))
	awaitClaimed(t, "default", "any-two")
	deletePods(t, "first")
	if got := awaitClaimed(t, "default", "pair"); !slices.Equal(got, []string{"gpu-0", "gpu-1"}) {
		t.Errorf("the pair is %v", got)
	}
	deletePods(t, "pair", "any-two")
}

// checkMIG requests MIG devices by profile.
func checkMIG(t *testing.T) {
	const profile = `device.attributes["gpu.nvidia.com"].profile == %q`
	upgrade(t, oldTag, `dra.enabled=true`, neverFlaps, servesDRA, `config.source.sim.profile="h100-8-mig"`)
	awaitDevices(t, 8+6*7+2*4)
	startPodWithClaims(t, "parts", claim(several(2, request(migClass, fmt.Sprintf(profile, "3g.40gb"))), ""),
		claim(several(3, request(migClass, fmt.Sprintf(profile, "1g.10gb"))), "gpu.nvidia.com/parentUUID"))
	if got := awaitClaimed(t, "default", "parts"); len(got) != 5 {
		t.Errorf("pod has %v", got)
	}
	startClaimPod(t, "default", "third", claim(request(migClass, fmt.Sprintf(profile, "3g.40gb")), ""))
	startClaimPod(t, "default", "parent", claim(request(gpuClass), "")) // a GPU in MIG mode has no devices of its own to give
	awaitUnschedulable(t, "third", "parent")
	inject(t, "{gpu: 0, xid: 79}")
	devices := make(map[string]resourceapi.Device)
	eventually(t, "the GPU and its parts have the taint", func(ctx context.Context) (err error) {
		devices, err = publishedDevices(ctx)
		tainted := 0
		for _, d := range devices {
			if slices.Contains(taintsOf(d), "gpu-node-agent/xid=79:NoSchedule") {
				tainted++
			}
		}
		if err == nil && tainted != 8 {
			err = fmt.Errorf("%d devices have it, want 8", tainted)
		}
		return err
	})
	deletePods(t, "parts", "third", "parent")
	if err := theCluster.client.ResourceV1().ResourceClaimTemplates("default").DeleteCollection(t.Context(), metav1.DeleteOptions{},
		metav1.ListOptions{}); err != nil && !apierrors.IsNotFound(err) {
		t.Fatal(err)
	}
}
