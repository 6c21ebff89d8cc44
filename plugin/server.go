package plugin

import (
	"cmp"
	"context"
	"os"
	"sync/atomic"
	"time"

	"github.com/google/uuid"
	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
	"go.uber.org/zap/zapgrpc"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/grpclog"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/status"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"github.com/gpu-node-agent/gpu-node-agent/plugin/prefer"
)

// server answers the kubelet for one resource. It has no device state: every call reads the newest layout.
type server struct {
	pluginapi.UnimplementedDevicePluginServer

	name      string // of the resource
	layouts   *layoutCache
	allocated func(*pluginapi.AllocateRequest) // called after every allocation
	refusals  *refusalLog
	stopping  chan struct{} // closed when the server stops
	withdraw  atomic.Bool   // set before, if the kubelet is to remove the devices
	streams   streams
	counts    allocationCounts
	allocator prefer.Allocator
}

func newServer(name string, l *layoutCache, log *zap.Logger) *server {
	return &server{
		name: name, layouts: l, allocated: func(*pluginapi.AllocateRequest) {},
		stopping: make(chan struct{}),
		streams:  streams{changed: make(chan struct{}, 1), dropped: make(chan struct{})},
		counts:   allocationCounts{refused: map[string]uint64{}},
		refusals: newRefusalLog(log.With(zap.String("resource", name))),
	}
}

// options are sent at registration and on request: the kubelet uses either.
func options() *pluginapi.DevicePluginOptions {
	return &pluginapi.DevicePluginOptions{GetPreferredAllocationAvailable: true}
}

// resource returns the resource of the newest layout. It has no devices if the layout lacks it.
func (s *server) resource() Resource { return findResource(s.layouts.current().resources, s.name) }

// GetDevicePluginOptions tells the kubelet which optional calls to make.
func (s *server) GetDevicePluginOptions(context.Context, *pluginapi.Empty) (*pluginapi.DevicePluginOptions, error) {
	return options(), nil
}

// ListAndWatch sends the list at once, and again only when an ID, its health or its NUMA nodes changed: the kubelet
// writes a checkpoint to disk for every message. Streams are independent, so a slow one skips lists and delays no other.
// The last message of a server that withdraws is an empty list. It precedes the end of the stream, so that the kubelet
// cannot see the end first.
func (s *server) ListAndWatch(_ *pluginapi.Empty, stream grpc.ServerStreamingServer[pluginapi.ListAndWatchResponse]) error {
	leave, dropped := s.streams.enter()
	defer leave()
	var sent []*pluginapi.Device
	send := func(list []*pluginapi.Device) error {
		if err := stream.Send(&pluginapi.ListAndWatchResponse{Devices: list}); err != nil {
			return err
		}
		sent = list
		s.streams.noteSent()
		return nil
	}
	changed := s.layouts.wake(stream.Context())
	for first := true; ; first = false {
		if list := s.resource().message(); first || !sameMessage(sent, list) {
			if err := send(list); err != nil {
				return err
			}
		}
		select {
		case <-stream.Context().Done():
			return status.FromContextError(stream.Context().Err()).Err()
		case <-dropped:
			return status.Error(codes.Unavailable, "gpu-node-agent is registering "+s.name+" again")
		case <-s.stopping:
			if s.withdraw.Load() && len(sent) > 0 {
				if err := send(nil); err != nil {
					return err
				}
			}
			return status.Error(codes.Unavailable, "gpu-node-agent no longer serves "+s.name)
		case <-changed:
		}
	}
}

// stop ends every stream. With withdraw, each stream sends an empty list first.
func (s *server) stop(withdraw bool) {
	s.withdraw.Store(withdraw)
	close(s.stopping)
}

// Allocate tells the kubelet what a container needs to use its devices; see allocation.
func (s *server) Allocate(ctx context.Context, req *pluginapi.AllocateRequest) (*pluginapi.AllocateResponse, error) {
	s.layouts.recent.add(s.resource(), req, time.Now())
	now := s.layouts.current()
	cfg := cmp.Or(now.cfg, &Config{})
	a := allocation{cfg: cfg, absent: now.absent, host: cfg.Host(os.DirFS("/")), uuid: uuid.NewString}
	resp, err := a.allocate(ctx, findResource(now.resources, s.name), req)
	if err != nil {
		s.counts.refuse(err)
		s.refusals.add(req, err)
		return nil, err
	}
	s.counts.allocate(len(resp.ContainerResponses))
	s.allocated(req)
	return resp, nil
}

// GetPreferredAllocation returns no error to a kubelet, which asks for one container and waits for the answer: an error would
// make it refuse the pod. See package prefer.
func (s *server) GetPreferredAllocation(ctx context.Context,
	req *pluginapi.PreferredAllocationRequest,
) (*pluginapi.PreferredAllocationResponse, error) {
	if n := len(req.GetContainerRequests()); n > maxContainers {
		return nil, status.Error(codes.ResourceExhausted, tooManyContainers(s.name, n))
	}
	now := s.layouts.current()
	devices, bestFit := findResource(now.resources, s.name).preferDevices()
	packed := cmp.Or(now.cfg, &Config{}).AllocationPolicy == AllocationPacked
	resp := &pluginapi.PreferredAllocationResponse{}
	for _, c := range req.GetContainerRequests() {
		if err := ctx.Err(); err != nil {
			return nil, status.FromContextError(err).Err()
		}
		ids := s.allocator.Choose(devices, prefer.Request{
			Available: c.GetAvailableDeviceIDs(), Required: c.GetMustIncludeDeviceIDs(), Size: int(c.GetAllocationSize()), Packed: packed,
			BestFit: bestFit,
		})
		resp.ContainerResponses = append(resp.ContainerResponses, &pluginapi.ContainerPreferredAllocationResponse{DeviceIDs: ids})
	}
	return resp, nil
}

// preferDevices returns the devices as package prefer takes them, and whether single units are chosen by best fit. Units of memory are,
// because a spread of small requests would leave no room for a large one.
func (r Resource) preferDevices() (devices []prefer.Device, bestFit bool) {
	devices = make([]prefer.Device, len(r.Devices))
	for i, d := range r.Devices {
		devices[i] = prefer.Device{
			State: d.State, Form: d.form(), Units: d.units(), Withheld: d.countHealthy() < d.units(), Alone: d.alone(),
		}
		bestFit = bestFit || d.share != nil && d.share.kind == SharingMemory
	}
	return devices, bestFit
}

// PreStartContainer does nothing: the options do not request it.
func (s *server) PreStartContainer(context.Context, *pluginapi.PreStartContainerRequest) (*pluginapi.PreStartContainerResponse, error) {
	return &pluginapi.PreStartContainerResponse{}, nil
}

// The limits of one connection to a resource's socket. Only root can connect, so the limits protect against faulty
// programs: the kubelet must get its lists whatever another client does. The kubelet has one connection, with one
// ListAndWatch for its lifetime and one other call at a time.
const (
	maxStreams      = 32              // concurrent calls; more wait in the client
	maxRequestBytes = 4 << 20         // the kubelet's own limit of a list; it requests only listed devices
	maxContainers   = 1000            // in one call; the kubelet sends one. Their answer is far larger than the request
	maxHeaderBytes  = 16 << 10        // the kubelet sends some 200 bytes
	maxIdle         = 2 * time.Minute // without a call; ListAndWatch is one
	bufferBytes     = 4 << 10         // each way; a list of 16 GPUs has 1 KiB
)

// serverOptions returns the options of the gRPC server of a resource. By default gRPC also ends connections that ping
// more often than every five minutes, and stops reading from connections that do not read.
func serverOptions(handshake time.Duration) []grpc.ServerOption {
	return []grpc.ServerOption{
		grpc.WaitForHandlers(true),
		grpc.MaxConcurrentStreams(maxStreams),
		grpc.MaxRecvMsgSize(maxRequestBytes),
		grpc.MaxHeaderListSize(maxHeaderBytes),
		grpc.ConnectionTimeout(handshake),
		grpc.KeepaliveParams(keepalive.ServerParameters{MaxConnectionIdle: maxIdle}),
		grpc.ReadBufferSize(bufferBytes), grpc.WriteBufferSize(bufferBytes),
	}
}

// CaptureGRPCLog sends the errors that gRPC logs to log; by default gRPC writes them to standard error. Call it once,
// before New: gRPC does not guard its logger.
func CaptureGRPCLog(log *zap.Logger) {
	grpclog.SetLoggerV2(zapgrpc.NewLogger(log.WithOptions(zap.IncreaseLevel(zapcore.ErrorLevel))))
}
