package kubelettest

import (
	"context"
	"errors"
	"io"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
)

// Client calls a plugin as the kubelet does. It is independent of any kubelet.
type Client struct {
	api  pluginapi.DevicePluginClient
	conn *grpc.ClientConn
}

// Dial returns a client of the plugin that listens on a socket. It connects with the first call.
func Dial(socket string) (*Client, error) {
	conn, err := grpc.NewClient("unix:"+socket, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return nil, err
	}
	return &Client{pluginapi.NewDevicePluginClient(conn), conn}, nil
}

// Close ends all open calls and streams. It may be called more than once.
func (c *Client) Close() { _ = c.conn.Close() } // fails only if it is closed already

// Devices opens a ListAndWatch stream and calls receive with every list until receive returns false or the stream ends.
func (c *Client) Devices(ctx context.Context, receive func([]Device) bool) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stream, err := c.api.ListAndWatch(ctx, &pluginapi.Empty{})
	if err != nil {
		return err
	}
	for {
		resp, err := stream.Recv()
		switch {
		case errors.Is(err, io.EOF):
			return nil
		case err != nil:
			return err
		case !receive(devicesOf(resp)):
			return nil
		}
	}
}

// Allocate allocates devices for one container.
func (c *Client) Allocate(ctx context.Context, ids ...string) (*pluginapi.ContainerAllocateResponse, error) {
	resp, err := c.api.Allocate(ctx, &pluginapi.AllocateRequest{
		ContainerRequests: []*pluginapi.ContainerAllocateRequest{{DevicesIds: ids}},
	})
	if err != nil {
		return nil, err
	}
	return single(resp.GetContainerResponses())
}

// PreferredAllocation returns the n devices that the plugin prefers among the available ones for one container.
func (c *Client) PreferredAllocation(ctx context.Context, available []string, n int) ([]string, error) {
	resp, err := c.api.GetPreferredAllocation(ctx, &pluginapi.PreferredAllocationRequest{
		ContainerRequests: []*pluginapi.ContainerPreferredAllocationRequest{{
			AvailableDeviceIDs: available,
			AllocationSize:     int32(min(n, 1<<30)),
		}},
	})
	if err != nil {
		return nil, err
	}
	r, err := single(resp.GetContainerResponses())
	return r.GetDeviceIDs(), err // a nil response has no devices
}

var errContainerCount = errors.New("plugin did not respond for exactly one container")

// single returns the only element of a response for one container.
func single[T any](responses []*T) (*T, error) {
	if len(responses) != 1 {
		return nil, errContainerCount
	}
	return responses[0], nil
}

// WatchWithoutReading opens a ListAndWatch stream and does not read it until Close, like a stalled kubelet.
func (c *Client) WatchWithoutReading(ctx context.Context) error {
	_, err := c.api.ListAndWatch(ctx, &pluginapi.Empty{})
	return err
}

func devicesOf(resp *pluginapi.ListAndWatchResponse) []Device {
	var devices []Device
	for _, d := range resp.GetDevices() {
		device := Device{ID: d.GetID(), Healthy: d.GetHealth() == pluginapi.Healthy}
		for _, n := range d.GetTopology().GetNodes() {
			device.NUMA = append(device.NUMA, int(n.GetID()))
		}
		devices = append(devices, device)
	}
	return devices
}
