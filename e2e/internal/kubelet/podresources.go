package kubelet

import (
	"context"
	"errors"
	"io/fs"
	"net"
	"os"
	"path/filepath"

	"google.golang.org/grpc"
	v1 "k8s.io/api/core/v1"
	api "k8s.io/kubelet/pkg/apis/podresources/v1"
	"k8s.io/kubernetes/pkg/kubelet/apis/podresources"
	"k8s.io/kubernetes/pkg/kubelet/cm/devicemanager"
)

// podResourcesAPI is the kubelet's own server of the pod resources API.
type podResourcesAPI struct {
	server *grpc.Server
	done   chan struct{}
}

func servePodResources(socket string, m manager, pods Pods) (*podResourcesAPI, error) {
	if err := os.MkdirAll(filepath.Dir(socket), 0o750); err != nil {
		return nil, err
	}
	// A killed kubelet leaves its socket, and the next kubelet replaces it.
	if err := os.Remove(socket); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	ctx := context.Background() // stop ends it
	l, err := new(net.ListenConfig).Listen(ctx, "unix", socket)
	if err != nil {
		return nil, err
	}
	a := &podResourcesAPI{server: grpc.NewServer(), done: make(chan struct{})}
	api.RegisterPodResourcesListerServer(a.server, podresources.NewV1PodResourcesServer(ctx,
		podresources.PodResourcesProviders{
			Pods:             nodePods(pods.Listed),
			Devices:          nodeDevices{m},
			Cpus:             nothing{},
			Memory:           nothing{},
			DynamicResources: podClaims(pods.Claims),
		}))
	go func() {
		defer close(a.done)
		_ = a.server.Serve(l) // ends at stop
	}()
	return a, nil
}

func (a *podResourcesAPI) stop() {
	a.server.Stop()
	<-a.done
}

type nodePods func() []*v1.Pod

func (p nodePods) GetActivePods() []*v1.Pod { return p() }
func (p nodePods) GetPods() []*v1.Pod       { return p() }

func (p nodePods) GetPodByName(namespace, name string) (*v1.Pod, bool) {
	for _, pod := range p() {
		if pod.Namespace == namespace && pod.Name == name {
			return pod, true
		}
	}
	return nil, false
}

// nodeDevices converts the device manager's results for the API, as the kubelet's container manager does.
type nodeDevices struct{ manager }

func (d nodeDevices) GetDevices(podUID, container string) []*api.ContainerDevices {
	return containerDevices(d.ManagerImpl.GetDevices(podUID, container))
}

// containerDevices returns one entry per device and NUMA node. Like the kubelet, it omits devices whose topology has no
// node.
func containerDevices(resources devicemanager.ResourceDeviceInstances) []*api.ContainerDevices {
	var out []*api.ContainerDevices
	for resource, devices := range resources {
		for id, device := range devices {
			entry := func(topology *api.TopologyInfo) {
				out = append(out, &api.ContainerDevices{ResourceName: resource, DeviceIds: []string{id}, Topology: topology})
			}
			if device.GetTopology() == nil {
				entry(nil)
				continue
			}
			for _, node := range device.GetTopology().GetNodes() {
				entry(&api.TopologyInfo{Nodes: []*api.NUMANode{{ID: node.GetID()}}})
			}
		}
	}
	return out
}

// podClaims stands for the manager of claims.
type podClaims func(*v1.Pod) []*api.DynamicResource

func (c podClaims) of(pod *v1.Pod) []*api.DynamicResource {
	if c == nil {
		return nil
	}
	return c(pod)
}

// nothing stands for the managers of CPUs and memory, which this kubelet does not have.
type nothing struct{}

func (nothing) GetAllocatableCPUs() []int64 { return nil }
