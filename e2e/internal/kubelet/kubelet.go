// Package kubelet runs the kubelet's own device manager (device-plugins/kubelet.sock) and pod resources API
// (pod-resources/kubelet.sock) in a directory. It needs no root, container runtime or cluster.
package kubelet

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	_ "unsafe" // go:linkname

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/klog/v2"
	podsapi "k8s.io/kubelet/pkg/apis/podresources/v1"
	"k8s.io/kubernetes/pkg/kubelet/cm/containermap"
	"k8s.io/kubernetes/pkg/kubelet/cm/devicemanager"
	"k8s.io/kubernetes/pkg/kubelet/cm/topologymanager"
	"k8s.io/kubernetes/pkg/kubelet/config"
)

// The exported NewManagerImpl always uses /var/lib/kubelet; this function, which it calls, accepts any path. The empty
// assembly file in this package allows a function without a body. The third parameter is a slice of cadvisor's nodes, whose
// package differs between releases; it is always nil here.
//
//go:linkname newManagerImpl k8s.io/kubernetes/pkg/kubelet/cm/devicemanager.newManagerImpl
func newManagerImpl(klog.Logger, string, []struct{}, topologymanager.Store) (*devicemanager.ManagerImpl, error)

// manager is the kubelet's device manager. The methods whose parameters differ between releases of Kubernetes are in
// release_*.go.
type manager struct{ *devicemanager.ManagerImpl }

// Kubelet is a running device manager with its pod resources API.
type Kubelet struct {
	manager manager
	api     *podResourcesAPI
}

// Pods are the pods of a node, as the kubelet knows them.
type Pods struct {
	Bound func() []*v1.Pod // to the node; the kubelet frees the devices of all others
	// in the pod resources API: a new kubelet reads its pods one by one. nil: the pods of Bound
	Listed func() []*v1.Pod
	Claims func(pod *v1.Pod) []*podsapi.DynamicResource // of the pod's only container; nil: none
}

// Start is StartWith for pods without claims.
func Start(dir string, pods func() []*v1.Pod) (*Kubelet, error) {
	return StartWith(dir, Pods{Bound: pods})
}

// StartWith starts a kubelet in a directory, which stands for /var/lib/kubelet. Like the real kubelet, it removes every
// socket in device-plugins and restores the allocations in its checkpoint.
func StartWith(dir string, pods Pods) (*Kubelet, error) {
	if pods.Listed == nil {
		pods.Listed = pods.Bound
	}
	log := klog.Background()
	socket := filepath.Join(dir, "device-plugins", "kubelet.sock")
	impl, err := newManagerImpl(log, socket, nil, topologyManager(log))
	if err != nil {
		return nil, err
	}
	m := manager{impl}
	ready := config.NewSourcesReady(func(sets.Set[string]) bool { return true })
	if err := m.Start(log, pods.Bound, ready, containermap.NewContainerMap(), sets.New[string]()); err != nil {
		return nil, err
	}
	api, err := servePodResources(filepath.Join(dir, "pod-resources", "kubelet.sock"), m, pods)
	if err != nil {
		return nil, errors.Join(err, m.Stop(log))
	}
	return &Kubelet{manager: m, api: api}, nil
}

// Stop stops the kubelet. It removes the sockets and keeps the checkpoint.
func (k *Kubelet) Stop() error {
	k.api.stop()
	return k.manager.Stop(klog.Background())
}

// Resources returns the names of the resources that the kubelet knows.
func (k *Kubelet) Resources() (names []string) {
	all, _ := k.manager.capacity()
	for name := range all {
		names = append(names, string(name))
	}
	return names
}

// Allocated returns the IDs of the devices of a pod's only container, by resource.
func (k *Kubelet) Allocated(pod *v1.Pod) map[string][]string {
	ids := make(map[string][]string)
	for resource, devices := range k.manager.GetDevices(string(pod.UID), pod.Spec.Containers[0].Name) {
		for id := range devices {
			ids[resource] = append(ids[resource], id)
		}
	}
	return ids
}

// Count returns the capacity and allocatable count of a resource, as the kubelet would write them to the node's status.
func (k *Kubelet) Count(resource v1.ResourceName) (capacity, allocatable int) {
	all, usable := k.manager.capacity()
	c, a := all[resource], usable[resource]
	return int(c.Value()), int(a.Value())
}

// Usable returns the number of allocatable devices of all resources.
func (k *Kubelet) Usable() int {
	_, usable := k.manager.capacity()
	sum := 0
	for _, q := range usable {
		sum += int(q.Value())
	}
	return sum
}

// Healthy returns the allocatable devices of a resource with their NUMA nodes.
func (k *Kubelet) Healthy(resource v1.ResourceName) map[string][]int {
	healthy := make(map[string][]int)
	for id, device := range k.manager.allocatableDevices()[string(resource)] {
		healthy[id] = nil
		for _, node := range device.GetTopology().GetNodes() {
			healthy[id] = append(healthy[id], int(node.ID))
		}
	}
	return healthy
}

// Admit allocates the devices of a pod's only container, as the kubelet does before it starts the container, and
// returns the container's environment.
func (k *Kubelet) Admit(ctx context.Context, pod *v1.Pod) (map[string]string, error) {
	container := &pod.Spec.Containers[0]
	if err := k.manager.allocate(ctx, pod, container); err != nil {
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

// PodDevices returns the health of each device of a pod, as in the pod's allocatedResourcesStatus.
func (k *Kubelet) PodDevices(pod *v1.Pod, resource v1.ResourceName) map[string]v1.ResourceHealthStatus {
	status := &v1.PodStatus{ContainerStatuses: []v1.ContainerStatus{{Name: pod.Spec.Containers[0].Name}}}
	k.manager.updateStatus(pod, status)
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

// Disconnect closes the kubelet's connection to a resource's plugin at a socket.
func (k *Kubelet) Disconnect(resource v1.ResourceName, socket string) {
	k.manager.deregister(string(resource), socket)
}

// Forget makes the kubelet consider a resource's plugin at a socket stopped while the plugin's stream stays open. The
// re-registration race of kubelet 1.36 can end this way (kubernetes#127803): the end of an old stream stops the current
// plugin of the resource.
func (k *Kubelet) Forget(resource v1.ResourceName, socket string) {
	k.manager.pluginDisconnected(string(resource), socket)
}
