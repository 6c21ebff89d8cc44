package kubelettest

import (
	"context"
	"errors"
	"net"
	"path/filepath"
	"sync"
	"time"

	"google.golang.org/grpc"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
)

// NVIDIA is a stand-in for NVIDIA's device plugin. All its streams take health events from one unbuffered channel, and an event reaches
// only the stream that takes it, also if that is not the kubelet's (NVIDIA/k8s-device-plugin v0.20.0, internal/plugin/server.go).
type NVIDIA struct {
	pluginapi.UnimplementedDevicePluginServer

	ids    []string
	events chan string
	stop   chan struct{}
	server *grpc.Server
	ended  chan struct{}

	mu        sync.Mutex // guards the fields below
	streams   int        // that were ever opened
	allocates int
}

// StartNVIDIA serves devices at the socket that NVIDIA's plugin has for nvidia.com/gpu, and registers them under a resource. The caller
// must call Stop.
func StartNVIDIA(ctx context.Context, dir, resource string, ids ...string) (*NVIDIA, error) {
	const socket = "nvidia-gpu.sock"
	p := &NVIDIA{
		ids: ids, events: make(chan string), stop: make(chan struct{}), server: grpc.NewServer(grpc.WaitForHandlers(true)),
		ended: make(chan struct{}),
	}
	l, err := new(net.ListenConfig).Listen(ctx, "unix", filepath.Join(dir, "device-plugins", socket))
	if err != nil {
		return nil, err
	}
	pluginapi.RegisterDevicePluginServer(p.server, p)
	go func() { defer close(p.ended); _ = p.server.Serve(l) }()
	conn, err := dialUnix(filepath.Join(dir, "device-plugins", "kubelet.sock"))
	if err == nil {
		_, err = pluginapi.NewRegistrationClient(conn).Register(ctx,
			&pluginapi.RegisterRequest{Version: pluginapi.Version, Endpoint: socket, ResourceName: resource})
		err = errors.Join(err, conn.Close())
	}
	if err != nil {
		p.Stop()
		return nil, err
	}
	return p, nil
}

// Stop ends the plugin.
func (p *NVIDIA) Stop() {
	close(p.stop)
	p.server.Stop()
	<-p.ended
}

// Fail makes a device unhealthy. It returns an error if no stream takes the event in time.
func (p *NVIDIA) Fail(id string) error {
	select {
	case p.events <- id:
		return nil
	case <-time.After(10 * time.Second):
		return errors.New("no stream takes the event")
	}
}

// Calls returns how many streams were opened, and how many Allocate calls there were.
func (p *NVIDIA) Calls() (streams, allocates int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.streams, p.allocates
}

// GetDevicePluginOptions has no options.
func (p *NVIDIA) GetDevicePluginOptions(context.Context, *pluginapi.Empty) (*pluginapi.DevicePluginOptions, error) {
	return &pluginapi.DevicePluginOptions{}, nil
}

// ListAndWatch sends all devices, and again with each event that it takes.
func (p *NVIDIA) ListAndWatch(_ *pluginapi.Empty, stream grpc.ServerStreamingServer[pluginapi.ListAndWatchResponse]) error {
	p.mu.Lock()
	p.streams++
	p.mu.Unlock()
	var list []*pluginapi.Device
	for _, id := range p.ids {
		list = append(list, &pluginapi.Device{ID: id, Health: pluginapi.Healthy})
	}
	for {
		if err := stream.Send(&pluginapi.ListAndWatchResponse{Devices: list}); err != nil {
			return nil //nolint:nilerr // as the original
		}
		var id string
		select { // the original ignores the end of the stream
		case <-p.stop:
			return nil
		case id = <-p.events:
		}
		for _, d := range list {
			if d.GetID() == id {
				d.Health = pluginapi.Unhealthy
			}
		}
	}
}

// Allocate gives nothing.
func (p *NVIDIA) Allocate(_ context.Context, req *pluginapi.AllocateRequest) (*pluginapi.AllocateResponse, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.allocates++
	resp := &pluginapi.AllocateResponse{}
	for range req.GetContainerRequests() {
		resp.ContainerResponses = append(resp.ContainerResponses, &pluginapi.ContainerAllocateResponse{})
	}
	return resp, nil
}
