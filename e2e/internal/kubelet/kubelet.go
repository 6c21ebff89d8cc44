// Package kubelet is as much of a kubelet as a device plugin can see: the device manager on
// device-plugins/kubelet.sock and the pod resources API on pod-resources/kubelet.sock, both the real
// kubelet's own code, in a directory of the caller's choice. It needs no root, no container runtime and
// no cluster.
package kubelet

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	_ "unsafe" // go:linkname

	cadvisor "github.com/google/cadvisor/info/v1"
	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/klog/v2"
	"k8s.io/kubernetes/pkg/kubelet/cm/containermap"
	"k8s.io/kubernetes/pkg/kubelet/cm/devicemanager"
	"k8s.io/kubernetes/pkg/kubelet/cm/topologymanager"
	"k8s.io/kubernetes/pkg/kubelet/config"
)

// The exported NewManagerImpl always takes /var/lib/kubelet; this one, which it calls, takes any path.
// The empty assembly file beside this one lets the compiler accept a function without a body.
//
//go:linkname newManagerImpl k8s.io/kubernetes/pkg/kubelet/cm/devicemanager.newManagerImpl
func newManagerImpl(klog.Logger, string, []cadvisor.Node, topologymanager.Store) (*devicemanager.ManagerImpl, error)

// Kubelet is a running device manager with its pod resources API.
type Kubelet struct {
	manager *devicemanager.ManagerImpl
	api     *podResourcesAPI
}

// Start starts a kubelet on a directory, which stands for /var/lib/kubelet. As the real one does,
// it removes every socket in device-plugins and takes up the allocations in its checkpoint. The pods are
// those that are bound to the node; the kubelet frees the devices of any other.
func Start(dir string, pods func() []*v1.Pod) (*Kubelet, error) {
	log := klog.Background()
	socket := filepath.Join(dir, "device-plugins", "kubelet.sock")
	m, err := newManagerImpl(log, socket, nil, topologymanager.NewFakeManager())
	if err != nil {
		return nil, err
	}
	ready := config.NewSourcesReady(func(sets.Set[string]) bool { return true })
	if err := m.Start(log, pods, ready, containermap.NewContainerMap(), sets.New[string]()); err != nil {
		return nil, err
	}
	api, err := servePodResources(filepath.Join(dir, "pod-resources", "kubelet.sock"), m, pods)
	if err != nil {
		return nil, errors.Join(err, m.Stop(log))
	}
	return &Kubelet{manager: m, api: api}, nil
}

// Stop ends the kubelet. Its sockets go, its checkpoint stays.
func (k *Kubelet) Stop() error {
	k.api.stop()
	return k.manager.Stop(klog.Background())
}

// Count returns what the kubelet would write to the node's status: the capacity and the allocatable
// number of a resource.
func (k *Kubelet) Count(resource v1.ResourceName) (capacity, allocatable int) {
	all, usable, _ := k.manager.GetCapacity()
	c, a := all[resource], usable[resource]
	return int(c.Value()), int(a.Value())
}

// Usable returns how many devices the kubelet would give to pods, of all resources.
func (k *Kubelet) Usable() int {
	_, usable, _ := k.manager.GetCapacity()
	sum := 0
	for _, q := range usable {
		sum += int(q.Value())
	}
	return sum
}

// Healthy returns the devices that the kubelet would give to a pod, each with its NUMA nodes.
func (k *Kubelet) Healthy(resource v1.ResourceName) map[string][]int {
	healthy := make(map[string][]int)
	for id, device := range k.manager.GetAllocatableDevices()[string(resource)] {
		healthy[id] = nil
		for _, node := range device.GetTopology().GetNodes() {
			healthy[id] = append(healthy[id], int(node.ID))
		}
	}
	return healthy
}

// Admit gives a pod's only container its devices, as the kubelet does before it starts the container,
// and returns the environment that the container is started with.
func (k *Kubelet) Admit(ctx context.Context, pod *v1.Pod) (map[string]string, error) {
	container := &pod.Spec.Containers[0]
	if err := k.manager.Allocate(pod, container); err != nil {
		return nil, fmt.Errorf("pod %s is not admitted: %w", pod.Name, err)
	}
	options, err := k.manager.GetDeviceRunContainerOptions(ctx, pod, container)
	if err != nil {
		return nil, fmt.Errorf("pod %s does not start: %w", pod.Name, err)
	}
	env := make(map[string]string)
	for _, e := range options.Envs {
		env[e.Name] = e.Value
	}
	return env, nil
}

// PodDevices returns the health of each device that a pod has, as it comes to stand in the pod's
// allocatedResourcesStatus.
func (k *Kubelet) PodDevices(pod *v1.Pod, resource v1.ResourceName) map[string]v1.ResourceHealthStatus {
	status := &v1.PodStatus{ContainerStatuses: []v1.ContainerStatus{{Name: pod.Spec.Containers[0].Name}}}
	k.manager.UpdateAllocatedResourcesStatus(pod, status)
	devices := make(map[string]v1.ResourceHealthStatus)
	for _, r := range status.ContainerStatuses[0].AllocatedResourcesStatus {
		if r.Name != resource {
			continue
		}
		for _, device := range r.Resources {
			devices[string(device.ResourceID)] = device.Health
		}
	}
	return devices
}

// Disconnect closes the kubelet's connection to the plugin of a resource.
func (k *Kubelet) Disconnect(resource v1.ResourceName) {
	k.manager.GetWatcherHandler().DeRegisterPlugin(string(resource), "")
}

// Forget makes the kubelet take the plugin of a resource for stopped while the plugin's stream stays
// open. This is how its re-registration race can end (kubernetes#127803): the end of an old stream
// stops whatever plugin has the same resource by then.
func (k *Kubelet) Forget(resource v1.ResourceName) {
	k.manager.PluginDisconnected(klog.Background(), string(resource))
}
