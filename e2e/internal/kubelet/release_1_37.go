//go:build kubelet1.37

package kubelet

import (
	"context"

	v1 "k8s.io/api/core/v1"
	"k8s.io/klog/v2"
	api "k8s.io/kubelet/pkg/apis/podresources/v1"
	"k8s.io/kubernetes/pkg/kubelet/cm/devicemanager"
	"k8s.io/kubernetes/pkg/kubelet/cm/topologymanager"
	"k8s.io/kubernetes/pkg/kubelet/lifecycle"
)

func topologyManager(log klog.Logger) topologymanager.Store {
	return topologymanager.NewFakeManager(log)
}

func (m manager) capacity() (capacity, allocatable v1.ResourceList) {
	capacity, allocatable, _ = m.GetCapacity(klog.Background())
	return capacity, allocatable
}

func (m manager) allocatableDevices() devicemanager.ResourceDeviceInstances {
	return m.GetAllocatableDevices(klog.Background())
}

func (m manager) allocate(ctx context.Context, pod *v1.Pod, container *v1.Container) error {
	return m.Allocate(ctx, pod, container, lifecycle.AddOperation)
}

func (m manager) updateStatus(pod *v1.Pod, status *v1.PodStatus) {
	m.UpdateAllocatedResourcesStatus(klog.Background(), pod, status)
}

func (m manager) deregister(resource, socket string) {
	m.GetWatcherHandler().DeRegisterPlugin(context.Background(), resource, socket)
}

func (m manager) pluginDisconnected(resource, socket string) {
	m.PluginDisconnected(klog.Background(), resource, socket)
}

func (d nodeDevices) GetAllocatableDevices(klog.Logger) []*api.ContainerDevices {
	return containerDevices(d.allocatableDevices())
}

func (nothing) GetCPUs(*v1.Pod, *v1.Container) []int64                               { return nil }
func (nothing) GetPodCPUs(string) []int64                                            { return nil }
func (nothing) GetMemory(klog.Logger, *v1.Pod, *v1.Container) []*api.ContainerMemory { return nil }
func (nothing) GetPodMemory(klog.Logger, string) []*api.ContainerMemory              { return nil }
func (nothing) GetAllocatableMemory(klog.Logger) []*api.ContainerMemory              { return nil }

func (c podClaims) GetDynamicResources(_ klog.Logger, pod *v1.Pod, _ *v1.Container) []*api.DynamicResource {
	return c.of(pod)
}
