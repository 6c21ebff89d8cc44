//go:build !kubelet1.37

package kubelet

import (
	"context"

	v1 "k8s.io/api/core/v1"
	"k8s.io/klog/v2"
	api "k8s.io/kubelet/pkg/apis/podresources/v1"
	"k8s.io/kubernetes/pkg/kubelet/cm/devicemanager"
	"k8s.io/kubernetes/pkg/kubelet/cm/topologymanager"
)

func topologyManager(klog.Logger) topologymanager.Store { return topologymanager.NewFakeManager() }

func (m manager) capacity() (capacity, allocatable v1.ResourceList) {
	capacity, allocatable, _ = m.GetCapacity()
	return capacity, allocatable
}

func (m manager) allocatableDevices() devicemanager.ResourceDeviceInstances {
	return m.GetAllocatableDevices()
}

func (m manager) allocate(_ context.Context, pod *v1.Pod, container *v1.Container) error {
	return m.Allocate(pod, container)
}

func (m manager) updateStatus(pod *v1.Pod, status *v1.PodStatus) {
	m.UpdateAllocatedResourcesStatus(pod, status)
}

// deregister closes the connection to the resource's only plugin, whatever its socket.
func (m manager) deregister(resource, socket string) {
	m.GetWatcherHandler().DeRegisterPlugin(resource, socket)
}

func (m manager) pluginDisconnected(resource, _ string) {
	m.PluginDisconnected(klog.Background(), resource)
}

func (d nodeDevices) GetAllocatableDevices() []*api.ContainerDevices {
	return containerDevices(d.allocatableDevices())
}

func (nothing) GetCPUs(string, string) []int64                  { return nil }
func (nothing) GetMemory(string, string) []*api.ContainerMemory { return nil }
func (nothing) GetAllocatableMemory() []*api.ContainerMemory    { return nil }

func (c podClaims) GetDynamicResources(pod *v1.Pod, _ *v1.Container) []*api.DynamicResource {
	return c.of(pod)
}
