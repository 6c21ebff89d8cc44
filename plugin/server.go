package plugin

import (
	"cmp"
	"context"
	"sync/atomic"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
)

// server answers the kubelet for one resource. It owns no device state: every call is a view of the
// newest layout.
type server struct {
	pluginapi.UnimplementedDevicePluginServer

	name      string // of the resource
	layouts   *layouts
	gave      func()        // told of every allocation
	stopping  chan struct{} // closed when the server ends
	withdrawn atomic.Bool   // set before that, if the kubelet is to have no devices afterwards
	streams   streams
	counts    counts
	prefers   wirings
}

func newServer(name string, l *layouts) *server {
	return &server{
		name: name, layouts: l, gave: func() {},
		stopping: make(chan struct{}),
		streams:  streams{changed: make(chan struct{}, 1), dropped: make(chan struct{})},
		counts:   counts{refused: map[string]uint64{}},
	}
}

// options are the same at registration and when asked: the kubelet uses either.
func options() *pluginapi.DevicePluginOptions {
	return &pluginapi.DevicePluginOptions{GetPreferredAllocationAvailable: true}
}

// resource returns the resource as it is now; without devices if the layout no longer has it.
func (s *server) resource() Resource { return find(s.layouts.newest().Resources, s.name) }

// GetDevicePluginOptions tells the kubelet which calls are worth making.
func (s *server) GetDevicePluginOptions(context.Context, *pluginapi.Empty) (*pluginapi.DevicePluginOptions, error) {
	return options(), nil
}

// ListAndWatch sends the whole list at once, and again whenever a device, its health or its NUMA nodes have changed, or
// a holder of before a change of the layout has ended: the kubelet writes a checkpoint to disk for every message. Streams know nothing of each
// other, so a slow one skips lists and holds nobody up. The last message of a server that withdraws is an
// empty list; it comes before the end of the stream, so that the kubelet cannot see that first.
func (s *server) ListAndWatch(_ *pluginapi.Empty, stream grpc.ServerStreamingServer[pluginapi.ListAndWatchResponse]) error {
	leave, dropped := s.streams.enter()
	defer leave()
	var sent []*pluginapi.Device
	send := func(list []*pluginapi.Device) error {
		if err := stream.Send(&pluginapi.ListAndWatchResponse{Devices: list}); err != nil {
			return err
		}
		sent = list
		s.streams.told()
		return nil
	}
	for first := true; ; first = false {
		// Watched before they are read by resource, so no change can fall between.
		changed := s.layouts.watch()
		if list := s.resource().message(); first || !sameMessage(sent, list) {
			if err := send(list); err != nil {
				return err
			}
		}
		select {
		case <-stream.Context().Done():
			return status.FromContextError(stream.Context().Err()).Err()
		case <-dropped:
			return status.Error(codes.Unavailable, "gpu-node-agent registers "+s.name+" again")
		case <-s.stopping:
			if s.withdrawn.Load() && len(sent) > 0 {
				if err := send(nil); err != nil {
					return err
				}
			}
			return status.Error(codes.Unavailable, "gpu-node-agent no longer serves "+s.name)
		case <-changed.cfg:
		case <-changed.snap:
		case <-changed.holders:
		}
	}
}

// stop ends every stream. With withdraw the kubelet is told first that there are no devices any more.
func (s *server) stop(withdraw bool) {
	s.withdrawn.Store(withdraw)
	close(s.stopping)
}

// Allocate tells the kubelet what a container needs to reach its devices; see allocate.
func (s *server) Allocate(_ context.Context, req *pluginapi.AllocateRequest) (*pluginapi.AllocateResponse, error) {
	now := s.layouts.newest()
	resp, err := allocate(termsHere(cmp.Or(now.cfg, &Config{})), find(now.Resources, s.name), req)
	if err != nil {
		s.counts.refuse(err)
		return nil, err
	}
	s.counts.allocate(len(resp.ContainerResponses))
	s.gave()
	return resp, nil
}

// GetPreferredAllocation never returns an error; see prefer.
func (s *server) GetPreferredAllocation(_ context.Context, req *pluginapi.PreferredAllocationRequest) (*pluginapi.PreferredAllocationResponse, error) {
	now := s.layouts.newest()
	r, policy := find(now.Resources, s.name), cmp.Or(now.cfg, &Config{}).AllocationPolicy
	t := s.prefers.get(r)
	resp := &pluginapi.PreferredAllocationResponse{}
	for _, c := range req.GetContainerRequests() {
		resp.ContainerResponses = append(resp.ContainerResponses, &pluginapi.ContainerPreferredAllocationResponse{
			DeviceIDs: prefer(t, r, policy, c.GetAvailableDeviceIDs(), c.GetMustIncludeDeviceIDs(), int(c.GetAllocationSize())),
		})
	}
	return resp, nil
}

// PreStartContainer does nothing: the options do not ask for it.
func (s *server) PreStartContainer(context.Context, *pluginapi.PreStartContainerRequest) (*pluginapi.PreStartContainerResponse, error) {
	return &pluginapi.PreStartContainerResponse{}, nil
}
