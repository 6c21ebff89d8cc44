//go:build cluster

package cluster

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
)

const (
	draDriver  = "gpu.nvidia.com"
	gpuClass   = draDriver
	migClass   = "mig.nvidia.com"
	draDir     = "/var/lib/kubelet/plugins/" + draDriver
	checkpoint = draDir + "/gpu-node-agent.json"
	claimSpecs = "/var/run/cdi/k8s.gpu-node-agent-claim*"
	simSocket  = "/run/gpu-node-agent/sim.sock" // of the agent
)

// request is a request for one device of a class.
func request(class string, selectors ...string) resourceapi.ExactDeviceRequest {
	r := resourceapi.ExactDeviceRequest{DeviceClassName: class}
	for _, s := range selectors {
		r.Selectors = append(r.Selectors, resourceapi.DeviceSelector{CEL: &resourceapi.CELDeviceSelector{Expression: s}})
	}
	return r
}

// share is a request for memory of a shared GPU.
func share(memory string) resourceapi.ExactDeviceRequest {
	r := request(gpuClass, "device.allowMultipleAllocations")
	r.Capacity = &resourceapi.CapacityRequirements{Requests: map[resourceapi.QualifiedName]resource.Quantity{
		"memory": resource.MustParse(memory),
	}}
	return r
}

// several is a request for some devices.
func several(n int64, r resourceapi.ExactDeviceRequest) resourceapi.ExactDeviceRequest {
	r.AllocationMode, r.Count = resourceapi.DeviceAllocationModeExactCount, n
	return r
}

// claim is a claim with one request. Its devices have equal values of an attribute unless that is "".
func claim(r resourceapi.ExactDeviceRequest, matchAttribute string) resourceapi.DeviceClaim {
	c := resourceapi.DeviceClaim{Requests: []resourceapi.DeviceRequest{{Name: "gpu", Exactly: &r}}}
	if matchAttribute != "" {
		c.Constraints = []resourceapi.DeviceConstraint{{
			Requests:       []string{"gpu"},
			MatchAttribute: new(resourceapi.FullyQualifiedName(matchAttribute)),
		}}
	}
	return c
}

// startClaimPod creates a pod with a container that uses claims of templates. A pod of several claims needs startPodWithClaims.
func startClaimPod(t *testing.T, namespace, name string, claims ...resourceapi.DeviceClaim) {
	t.Helper()
	var of []v1.PodResourceClaim
	for _, c := range claims {
		template, err := theCluster.client.ResourceV1().ResourceClaimTemplates(namespace).Create(t.Context(), &resourceapi.ResourceClaimTemplate{
			ObjectMeta: metav1.ObjectMeta{GenerateName: name + "-"},
			Spec:       resourceapi.ResourceClaimTemplateSpec{Spec: resourceapi.ResourceClaimSpec{Devices: c}},
		}, metav1.CreateOptions{})
		if err != nil {
			t.Fatal(err)
		}
		of = append(of, v1.PodResourceClaim{ResourceClaimTemplateName: &template.Name})
	}
	startPodOfClaims(t, namespace, name, of)
}

// startPodWithClaims creates claims, and a pod with a container that uses them. The end of the test deletes the claims. The claims are of
// no templates, because the controller manager of Kubernetes 1.36 can forget which claims of several templates a pod has: see
// https://github.com/kubernetes/kubernetes/issues/138407.
func startPodWithClaims(t *testing.T, name string, claims ...resourceapi.DeviceClaim) {
	t.Helper()
	api := theCluster.client.ResourceV1().ResourceClaims("default")
	var of []v1.PodResourceClaim
	for _, c := range claims {
		created, err := api.Create(t.Context(), &resourceapi.ResourceClaim{
			ObjectMeta: metav1.ObjectMeta{GenerateName: name + "-"}, Spec: resourceapi.ResourceClaimSpec{Devices: c},
		}, metav1.CreateOptions{})
		if err != nil {
			t.Fatal(err)
		}
		ctx := context.WithoutCancel(t.Context())
		t.Cleanup(func() {
			if err := api.Delete(ctx, created.Name, metav1.DeleteOptions{}); err != nil {
				t.Error(err)
			}
		})
		of = append(of, v1.PodResourceClaim{ResourceClaimName: &created.Name})
	}
	startPodOfClaims(t, "default", name, of)
}

func startPodOfClaims(t *testing.T, namespace, name string, claims []v1.PodResourceClaim) {
	t.Helper()
	pod := &v1.Pod{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: v1.PodSpec{
		TerminationGracePeriodSeconds: ptr.To[int64](1),
		Containers:                    []v1.Container{{Name: "work", Image: workloadImage, ImagePullPolicy: v1.PullNever}},
	}}
	for i, c := range claims {
		c.Name = fmt.Sprintf("claim-%d", i)
		pod.Spec.ResourceClaims = append(pod.Spec.ResourceClaims, c)
		pod.Spec.Containers[0].Resources.Claims = append(pod.Spec.Containers[0].Resources.Claims, v1.ResourceClaim{Name: c.Name})
	}
	if _, err := theCluster.client.CoreV1().Pods(namespace).Create(t.Context(), pod, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
}

// claimsOf returns the claims of a pod.
func claimsOf(ctx context.Context, pod *v1.Pod) ([]resourceapi.ResourceClaim, error) {
	var names []string
	for _, c := range pod.Spec.ResourceClaims {
		if c.ResourceClaimName != nil {
			names = append(names, *c.ResourceClaimName)
		}
	}
	for _, s := range pod.Status.ResourceClaimStatuses {
		if s.ResourceClaimName != nil {
			names = append(names, *s.ResourceClaimName)
		}
	}
	if s := pod.Status.ExtendedResourceClaimStatus; s != nil {
		names = append(names, s.ResourceClaimName)
	}
	if len(names) == 0 {
		return nil, fmt.Errorf("pod %s has no claims", pod.Name)
	}
	var claims []resourceapi.ResourceClaim
	for _, name := range names {
		c, err := theCluster.client.ResourceV1().ResourceClaims(pod.Namespace).Get(ctx, name, metav1.GetOptions{})
		if err != nil {
			return nil, err
		}
		claims = append(claims, *c)
	}
	return claims, nil
}

// awaitClaimed waits until a pod runs with the devices of its claims, and returns their names. Its container must have what the driver adds
// for these devices, and no other.
func awaitClaimed(t *testing.T, namespace, name string) (devices []string) {
	t.Helper()
	eventually(t, "pod "+name+" runs with its devices", func(ctx context.Context) error {
		pod, err := theCluster.client.CoreV1().Pods(namespace).Get(ctx, name, metav1.GetOptions{})
		if err != nil {
			return err
		}
		if pod.Status.Phase != v1.PodRunning {
			return fmt.Errorf("pod is %s: %s %v", pod.Status.Phase, pod.Status.Message, pod.Status.Conditions)
		}
		out, err := theCluster.client.CoreV1().Pods(namespace).GetLogs(name, &v1.PodLogOptions{}).DoRaw(ctx)
		if err != nil {
			return err
		}
		if !strings.Contains(string(out), "PATH=") {
			return errors.New("the container has printed nothing")
		}
		claims, err := claimsOf(ctx, pod)
		if err != nil {
			return err
		}
		published, err := publishedDevices(ctx)
		if err != nil {
			return err
		}
		want := make(map[string]string)
		devices = nil
		for _, c := range claims {
			for _, r := range c.Status.Allocation.Devices.Results {
				devices = append(devices, r.Device)
				want[deviceVariable(r.Device)] = stringAttribute(published[r.Device], "uuid")
			}
		}
		if have := deviceVariables(string(out)); !maps.Equal(have, want) {
			return fmt.Errorf("the container has %v, want %v", have, want)
		}
		return nil
	})
	slices.Sort(devices)
	return devices
}

// deviceVariable is the environment variable of a device in containers.
func deviceVariable(device string) string {
	return "GPU_NODE_AGENT_DEVICE_" + strings.ToUpper(strings.ReplaceAll(device, "-", "_"))
}

// deviceVariables returns the variables of devices in an environment.
func deviceVariables(env string) map[string]string {
	have := make(map[string]string)
	for line := range strings.Lines(env) {
		if name, value, ok := strings.Cut(strings.TrimSpace(line), "="); ok && strings.HasPrefix(name, deviceVariable("")) {
			have[name] = value
		}
	}
	return have
}

// nodeSlices returns the node's ResourceSlices of the driver.
func nodeSlices(ctx context.Context) ([]resourceapi.ResourceSlice, error) {
	list, err := theCluster.client.ResourceV1().ResourceSlices().List(ctx, metav1.ListOptions{
		FieldSelector: resourceapi.ResourceSliceSelectorDriver + "=" + draDriver + "," + resourceapi.ResourceSliceSelectorNodeName + "=" +
			nodeName,
	})
	if err != nil {
		return nil, err
	}
	return list.Items, nil
}

// publishedDevices returns the devices of the node's ResourceSlices.
func publishedDevices(ctx context.Context) (map[string]resourceapi.Device, error) {
	published, err := nodeSlices(ctx)
	devices := make(map[string]resourceapi.Device)
	for _, s := range published {
		for _, d := range s.Spec.Devices {
			devices[d.Name] = d
		}
	}
	return devices, err
}

func stringAttribute(d resourceapi.Device, name resourceapi.QualifiedName) string {
	return ptr.Deref(d.Attributes[name].StringValue, "")
}

// awaitDevices waits until the node publishes so many devices.
func awaitDevices(t *testing.T, want int) {
	t.Helper()
	eventually(t, fmt.Sprintf("the node publishes %d devices", want), func(ctx context.Context) error {
		devices, err := publishedDevices(ctx)
		if err == nil && len(devices) != want {
			err = fmt.Errorf("it publishes %v", slices.Sorted(maps.Keys(devices)))
		}
		return err
	})
}

// awaitSaved waits until the agent's state file has a text.
func awaitSaved(t *testing.T, text string) {
	t.Helper()
	eventually(t, text+" is saved", func(context.Context) error {
		saved, err := os.ReadFile(stateDir + "/state.sim.json")
		if err == nil && !strings.Contains(string(saved), text) {
			err = fmt.Errorf("the state file has no %s:\n%s", text, saved)
		}
		return err
	})
}

// taintsOf returns the taints of a device as KEY:EFFECT.
func taintsOf(d resourceapi.Device) []string {
	var taints []string
	for _, t := range d.Taints {
		taints = append(taints, strings.TrimSuffix(t.Key+"="+t.Value, "=")+":"+string(t.Effect))
	}
	slices.Sort(taints)
	return taints
}

// awaitTaints waits until a device has exactly these taints.
func awaitTaints(t *testing.T, device string, want ...string) resourceapi.Device {
	t.Helper()
	var d resourceapi.Device
	eventually(t, fmt.Sprintf("%s has the taints %v", device, want), func(ctx context.Context) error {
		devices, err := publishedDevices(ctx)
		if err != nil {
			return err
		}
		d = devices[device]
		if have := taintsOf(d); d.Name == "" || !slices.Equal(have, want) {
			return fmt.Errorf("device %q has %v", d.Name, have)
		}
		return nil
	})
	return d
}

// awaitUnschedulable waits until the scheduler has tried to place a pod and did not.
func awaitUnschedulable(t *testing.T, names ...string) {
	t.Helper()
	for _, name := range names {
		awaitPending(t, name, "")
	}
}

// injectOnNode injects an event without the API server.
func injectOnNode(t *testing.T, pod *v1.Pod, format string, args ...any) {
	t.Helper()
	socket := fmt.Sprintf("/proc/%d/root%s", pidOf(t, pod.Status.ContainerStatuses[0]), simSocket)
	out, err := exec.CommandContext(t.Context(), theCluster.file("gpu-node-agent-"+oldTag), "sim", "--socket", socket,
		fmt.Sprintf(format, args...)).CombinedOutput()
	if err != nil {
		t.Fatalf("%v: %s", err, out)
	}
}

// awaitClaimHealth waits for the health of a device in the status of a pod that names a claim, and for its message.
func awaitClaimHealth(t *testing.T, name string, want v1.ResourceHealthStatus, message string) {
	t.Helper()
	eventually(t, fmt.Sprintf("pod %s has a device that is %s: %s", name, want, message), func(ctx context.Context) error {
		pod, err := getPod(ctx, name)
		if err != nil {
			return err
		}
		var seen []string
		for _, s := range pod.Status.ContainerStatuses[0].AllocatedResourcesStatus {
			for _, r := range s.Resources {
				if r.Health == want && strings.HasPrefix(string(s.Name), "claim:") && strings.Contains(ptr.Deref(r.Message, ""), message) {
					return nil
				}
				seen = append(seen, fmt.Sprintf("%s %s %s: %s", s.Name, r.ResourceID, r.Health, ptr.Deref(r.Message, "")))
			}
		}
		return fmt.Errorf("status: %q", seen)
	})
}

// preparedOnNode returns an error unless the checkpoint and the CDI specs have exactly so many claims.
func preparedOnNode(want int) error {
	specs, err := filepath.Glob(claimSpecs)
	if err != nil {
		return err
	}
	claims, err := checkpointClaims()
	if err == nil && (len(specs) != want || len(claims) != want) {
		err = fmt.Errorf("%d CDI specs and the claims %v, want %d", len(specs), claims, want)
	}
	return err
}

func awaitPrepared(t *testing.T, want int) {
	t.Helper()
	eventually(t, fmt.Sprintf("%d claims are prepared", want), func(context.Context) error { return preparedOnNode(want) })
}

// forceDelete deletes a pod without waiting for the kubelet.
func forceDelete(t *testing.T, name string) {
	t.Helper()
	if err := theCluster.client.CoreV1().Pods("default").Delete(t.Context(), name,
		metav1.DeleteOptions{GracePeriodSeconds: ptr.To[int64](0)}); err != nil {
		t.Fatal(err)
	}
	eventually(t, "pod "+name+" is gone", func(ctx context.Context) error {
		if _, err := getPod(ctx, name); !apierrors.IsNotFound(err) {
			return fmt.Errorf("it exists, or %w", err)
		}
		return nil
	})
}

// anonymousMemory returns the RssAnon of a process in MiB.
func anonymousMemory(t *testing.T, pid int) float64 {
	t.Helper()
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(text)) {
		var kib float64
		if n, _ := fmt.Sscanf(line, "RssAnon: %f kB", &kib); n == 1 {
			return kib / 1024
		}
	}
	t.Fatalf("no RssAnon in:\n%s", text)
	return 0
}

// awaitChange watches the node's slices until one has what is wanted, and returns how long that took since do.
func awaitChange(t *testing.T, do func(), wanted func(resourceapi.Device) bool) time.Duration {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	watch, err := theCluster.watcher.ResourceV1().ResourceSlices().Watch(ctx, metav1.ListOptions{})
	if err != nil {
		t.Fatal(err)
	}
	defer watch.Stop()
	begin := time.Now()
	do()
	for e := range watch.ResultChan() {
		if s, ok := e.Object.(*resourceapi.ResourceSlice); ok && slices.ContainsFunc(s.Spec.Devices, wanted) {
			return time.Since(begin)
		}
	}
	t.Fatal("no slice has it")
	return 0
}

// checkpointClaims returns the UIDs of the claims in the driver's checkpoint.
func checkpointClaims() ([]string, error) {
	text, err := os.ReadFile(checkpoint)
	if err != nil {
		return nil, err
	}
	var file struct {
		Claims map[string]any `json:"claims"`
	}
	if err := json.Unmarshal(text, &file); err != nil {
		return nil, err
	}
	return slices.Sorted(maps.Keys(file.Claims)), nil
}
