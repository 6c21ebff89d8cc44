//go:build cluster

package cluster

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	v1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	corev1 "k8s.io/client-go/kubernetes/typed/core/v1"
	podresourcesapi "k8s.io/kubelet/pkg/apis/podresources/v1"
	"k8s.io/utils/ptr"
)

// podRef splits NAMESPACE/NAME. A name without a namespace is in default.
func podRef(ref string) (podsOf corev1.PodInterface, name string) {
	in, name, ok := strings.Cut(ref, "/")
	if !ok {
		in, name = "default", ref
	}
	return theCluster.client.CoreV1().Pods(in), name
}

// workloadPod returns a pod that requests a resource.
func workloadPod(name string, of v1.ResourceName, amount string) *v1.Pod {
	return &v1.Pod{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: v1.PodSpec{
		TerminationGracePeriodSeconds: ptr.To[int64](1),
		Containers: []v1.Container{{
			Name: "work", Image: workloadImage, ImagePullPolicy: v1.PullNever,
			Resources: v1.ResourceRequirements{Limits: v1.ResourceList{of: resource.MustParse(amount)}},
		}},
	}}
}

// startPod creates a pod that requests a resource, [NAMESPACE/]NAME.
func startPod(t *testing.T, ref string, of v1.ResourceName, amount string) {
	t.Helper()
	pods, name := podRef(ref)
	if _, err := pods.Create(t.Context(), workloadPod(name, of, amount), metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
}

func getPod(ctx context.Context, ref string) (*v1.Pod, error) {
	pods, name := podRef(ref)
	return pods.Get(ctx, name, metav1.GetOptions{})
}

// awaitRunning waits until a pod runs, and returns the devices that it printed.
func awaitRunning(t *testing.T, name string) (devices string) {
	t.Helper()
	eventually(t, "pod "+name+" runs", func(ctx context.Context) error {
		pod, err := getPod(ctx, name)
		if err != nil {
			return err
		}
		if pod.Status.Phase != v1.PodRunning {
			return fmt.Errorf("pod is %s: %s %v", pod.Status.Phase, pod.Status.Message, pod.Status.Conditions)
		}
		out, err := logsOf(ctx, name)
		if err != nil {
			return err
		}
		for line := range strings.Lines(out) {
			if value, ok := strings.CutPrefix(line, "NVIDIA_VISIBLE_DEVICES="); ok {
				devices = strings.TrimSpace(value)
				return nil
			}
		}
		return fmt.Errorf("no NVIDIA_VISIBLE_DEVICES:\n%s", out)
	})
	return devices
}

func logsOf(ctx context.Context, ref string) (string, error) {
	pods, name := podRef(ref)
	out, err := pods.GetLogs(name, &v1.PodLogOptions{}).DoRaw(ctx)
	return string(out), err
}

// containerOf returns a check that a pod still has its current container.
func containerOf(t *testing.T, name string) (check func()) {
	t.Helper()
	id := func() string {
		t.Helper()
		pod, err := getPod(t.Context(), name)
		if err != nil {
			t.Fatal(err)
		}
		return pod.Status.ContainerStatuses[0].ContainerID
	}
	previous := id()
	return func() {
		t.Helper()
		if id() != previous {
			t.Errorf("pod %s was restarted", name)
		}
	}
}

// awaitPending waits until the scheduler finds no room for a pod.
func awaitPending(t *testing.T, name, why string) {
	t.Helper()
	eventually(t, "pod "+name+" is pending: "+why, func(ctx context.Context) error {
		pod, err := getPod(ctx, name)
		if err != nil {
			return err
		}
		for _, c := range pod.Status.Conditions {
			if c.Type == v1.PodScheduled && c.Status == v1.ConditionFalse && strings.Contains(c.Message, why) {
				return nil
			}
		}
		return fmt.Errorf("pod is %s: %v", pod.Status.Phase, pod.Status.Conditions)
	})
}

// deletePods deletes pods and waits until they no longer exist.
func deletePods(t *testing.T, names ...string) {
	t.Helper()
	var errs []error
	for _, ref := range names {
		pods, name := podRef(ref)
		errs = append(errs, pods.Delete(t.Context(), name, metav1.DeleteOptions{}))
	}
	if err := errors.Join(errs...); err != nil {
		t.Fatal(err)
	}
	eventually(t, fmt.Sprintf("pods %v are deleted", names), func(ctx context.Context) error {
		for _, name := range names {
			if _, err := getPod(ctx, name); !apierrors.IsNotFound(err) {
				return fmt.Errorf("%s exists, or %w", name, err)
			}
		}
		return nil
	})
}

// podResources returns a client of the kubelet's pod resources API.
func podResources(t *testing.T) podresourcesapi.PodResourcesListerClient {
	t.Helper()
	conn, err := grpc.NewClient("unix:///var/lib/kubelet/pod-resources/kubelet.sock", grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close() })
	return podresourcesapi.NewPodResourcesListerClient(conn)
}

// awaitKubeletDevices waits until the kubelet itself has want allocatable devices of a resource. After the kubelet's restart the node's
// status is old for a while, and a registration does not imply a device list.
func awaitKubeletDevices(t *testing.T, of v1.ResourceName, want int) {
	t.Helper()
	client := podResources(t)
	eventually(t, fmt.Sprintf("kubelet has %d allocatable devices of %s", want, of), func(ctx context.Context) error {
		all, err := client.GetAllocatableResources(ctx, &podresourcesapi.AllocatableResourcesRequest{})
		if err != nil {
			return err
		}
		have := 0
		for _, d := range all.Devices {
			if d.ResourceName == string(of) {
				have += len(d.DeviceIds)
			}
		}
		if have != want {
			return fmt.Errorf("kubelet has %d", have)
		}
		return nil
	})
}

// awaitDeviceHealth waits for the health of the device in a pod's status.
func awaitDeviceHealth(t *testing.T, name, want string) {
	t.Helper()
	eventually(t, fmt.Sprintf("pod %s has a device that is %s", name, want), func(ctx context.Context) error {
		pod, err := getPod(ctx, name)
		if err != nil {
			return err
		}
		for _, c := range pod.Status.ContainerStatuses {
			for _, s := range c.AllocatedResourcesStatus {
				for _, r := range s.Resources {
					if s.Name == gpu && string(r.Health) == want {
						return nil
					}
				}
			}
		}
		return fmt.Errorf("status: %v", pod.Status.ContainerStatuses[0].AllocatedResourcesStatus)
	})
}
